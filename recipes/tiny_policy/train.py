"""Train tiny-policy: flow matching on the expert's chunks, then also in the scenes that the policy itself gets into.

    torchrun --nproc-per-node 2 -m recipes.tiny_policy.train --state /tmp/state --out out --seconds 540

Owns: the schedule (by seconds, not steps: the machine is rented by time), checkpoints and the log. Every rank has robots of
its own; gradients are averaged. A checkpoint is written each two minutes; started again with the same --state the run goes
on where it was, towards the new --seconds. ``out/model`` is always a folder that loads.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.pi0.network import Pi0Network
from realtime_omni.rtc.modes import Mode
from realtime_omni.rtc.rules import TrainedPrefix
from recipes.tiny_policy import checkpoint, results
from recipes.tiny_policy.data import Collector, Observed, Pool
from recipes.tiny_policy.evaluate import Conditions, compared, measure, network_policy
from recipes.tiny_policy.pictures import pictures
from recipes.tiny_policy.policy import FlowLoss, Statistics, chunks, inputs_of, look
from recipes.tiny_policy.shape import HORIZON, SHIPPED, TRY, network_config
from recipes.tiny_policy.table import ACTION_DIM, TASKS, state_of
from recipes.tiny_world.optimizer import Muon
from recipes.tiny_world.train import Team, set_lr

EMA = 0.9995
DAGGER_SHARE = 0.5  # of new episodes, once the policy leads
WATCHED_DELAY = 4
LARGEST_LED = 2048  # rows of one call of the policy while robots are led


class Run:
    """A training run's state: network, its average, statistics, progress in seconds, log."""

    def __init__(self, args: argparse.Namespace, team: Team) -> None:
        self.args, self.team = args, team
        self.geometry = TRY if args.tiny else SHIPPED
        torch.manual_seed(args.seed)
        self.net = Pi0Network(network_config(self.geometry)).to(team.device)
        initialise(self.net)
        self.ema = {name: value.detach().clone() for name, value in self.net.named_parameters()}
        self.led_by = Pi0Network(network_config(self.geometry)).to(team.device).requires_grad_(False).eval()
        self.statistics: Statistics | None = None
        self.spent, self.steps = 0.0, 0
        self.rows: list[tuple[int, float, str, str]] = []
        self.saved_after = 0.0
        self.state, self.out = Path(args.state), Path(args.out)
        for folder in (self.state, self.out):
            folder.mkdir(parents=True, exist_ok=True)
        self.optimizers = make_optimizers(self.net, args.muon_lr, args.adam_lr)

    def note(self, **values: float) -> None:
        if self.team.rank:
            return
        self.rows += [(self.steps, round(self.spent, 1), name, f"{value:.6f}") for name, value in values.items()]
        told = " ".join(f"{name} {value:.5f}" for name, value in values.items())
        print(f"step {self.steps} {self.spent:.0f} s {told}", flush=True)

    def save(self) -> None:
        self.saved_after = self.spent
        if self.team.rank or self.statistics is None:
            return
        kept = {
            "net": self.net.state_dict(),
            "ema": self.ema,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "statistics": list(self.statistics.tensors()),
            "spent": self.spent,
            "steps": self.steps,
            "rows": self.rows,
        }
        torch.save(kept, self.state / "checkpoint.part")
        os.replace(self.state / "checkpoint.part", self.state / "checkpoint.pt")
        checkpoint.write(self.out / "model", self.ema, self.statistics, self.geometry)
        if self.args.results:
            results.pack(self.out / "model", Path(self.args.results) / "model.tar")
        with (self.out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("step", "seconds", "name", "value"), *self.rows])

    def load(self) -> None:
        path = self.state / "checkpoint.pt"
        if not path.exists():
            return
        kept = torch.load(path, map_location=self.team.device, weights_only=True)
        self.net.load_state_dict(kept["net"])
        self.ema = kept["ema"]
        for optimizer, state in zip(self.optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.statistics = Statistics(*kept["statistics"])
        self.spent, self.steps, self.rows = kept["spent"], kept["steps"], kept["rows"]
        self.saved_after = self.spent

    def average(self) -> None:
        decay = min(EMA, (1 + self.steps) / (10 + self.steps))
        now = dict(self.net.named_parameters())
        torch._foreach_lerp_(list(self.ema.values()), [now[name].detach() for name in self.ema], 1 - decay)

    @torch.no_grad()
    def act(self, seen: Observed) -> Tensor:
        """Chunks of the averaged weights, in robot units: the policy as it will be shipped."""
        assert self.statistics is not None
        parts = []
        for first in range(0, len(seen.given), LARGEST_LED):
            rows = slice(first, first + LARGEST_LED)
            scene, left = seen.scene[rows], self.statistics.model_actions(seen.left[rows])
            inputs = inputs_of(scene, look(scene, self.geometry.vision.image_size), self.statistics)
            noise = torch.randn(len(scene), HORIZON, ACTION_DIM, device=self.team.device)
            rule = TrainedPrefix(functional.pad(left, (0, 0, 0, HORIZON - left.shape[1])), seen.given[rows])
            with autocast(self.team.device):
                parts.append(chunks(self.led_by, inputs, noise, rule))
        return self.statistics.robot_actions(torch.cat(parts).float())

    @torch.no_grad()
    def watch(self) -> None:
        """How the averaged weights do on a few held-out episodes: success at no delay and at one, distance to the expert."""
        if self.team.rank or self.statistics is None or not self.args.watched:
            return
        self.refresh_leader()
        for delay, rtc in ((0, Mode.NONE), (WATCHED_DELAY, Mode.TRAINED)):
            squares: list[Tensor] = []
            here = network_policy(self.led_by, self.statistics, rtc)
            asked = Conditions(episodes=self.args.watched, delay=delay, tasks=tuple(self.args.tasks))
            told = measure(self.led_by, self.statistics, asked, ask=compared(here, delay, squares))
            off = torch.cat(squares).mean().sqrt()
            self.note(**{f"success_delay_{delay}": told["success_rate"], f"off_m_s_delay_{delay}": float(off)})

    def refresh_leader(self) -> None:
        self.led_by.load_state_dict(self.ema)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def initialise(net: nn.Module) -> None:
    """Matrices at 1 / sqrt(fan in), the last at zero: the first velocities are 0. Words and places small."""
    for name, parameter in net.named_parameters():
        if name.startswith("action_out"):
            nn.init.zeros_(parameter)
        elif "words" in name or "position" in name:
            nn.init.normal_(parameter, std=0.02)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)


def make_optimizers(net: Pi0Network, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon on the matrices of the three towers' layers, AdamW on the rest."""
    towers = (net.vision.layers, net.language, net.expert)
    # The language tower's last layer gives keys and values alone; what comes after them is never used and has no gradient.
    unused = {id(p) for p in _after_keys(net.language[-1])}
    matrices = [p for tower in towers for p in tower.parameters() if p.ndim == 2 and id(p) not in unused]
    taken = {id(p) for p in matrices} | unused
    rest = [p for p in net.parameters() if id(p) not in taken]
    adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=rest[0].is_cuda)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, muon_lr), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def _after_keys(layer: nn.Module) -> list[nn.Parameter]:
    used = ("attn_norm", "k.", "v.")
    return [p for name, p in layer.named_parameters() if not name.startswith(used)]


def fill(run: Run, collector: Collector, pool: Pool) -> None:
    """Rounds of every robot with the expert, and the statistics from them."""
    for _ in range(run.args.first_rounds):
        pool.add(collector.gather())
    if run.statistics is None:
        seen = pool.batch(min(pool.count, 100_000))
        run.statistics = Statistics.of(state_of(seen.scene), seen.free)
    if run.team.size > 1:
        for value in run.statistics.tensors():
            dist.broadcast(value, 0)


def train(run: Run, collector: Collector, pool: Pool) -> None:
    args, statistics = run.args, run.statistics
    assert statistics is not None
    loss_of: nn.Module = FlowLoss(run.net, args.draws)
    paint = pictures
    if args.compile:
        loss_of, paint = torch.compile(loss_of), torch.compile(pictures, dynamic=False)
    size = run.geometry.vision.image_size

    def gradients() -> Tensor:
        seen = pool.batch(args.batch)
        actions, given = seen.chosen(args.continued, args.told)
        inputs = inputs_of(seen.scene, paint(seen.scene, size), statistics)
        with autocast(run.team.device):
            loss: Tensor = loss_of(inputs, statistics.model_actions(actions), given)
        loss.backward()
        return loss.detach()

    try:
        gradients()  # compiles; its gradient is dropped, its time not counted
    except RuntimeError as error:  # every failure of the compiler is one
        if not args.compile:
            raise
        print(f"not compiled: {error}", flush=True)
        loss_of, paint = FlowLoss(run.net, args.draws), pictures
        gradients()
    run.net.zero_grad(set_to_none=True)
    began = time.monotonic() - run.spent
    until = min(args.seconds, run.spent + args.call_seconds)
    last = run.steps + args.call_steps
    while run.spent < until and run.steps < last:
        progress = run.spent / args.seconds
        leads = progress > args.dagger_from
        if run.steps % args.gather_every == 0:
            if leads:
                run.refresh_leader()
            pool.add(collector.gather(run.act if leads else None, DAGGER_SHARE))
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=True)
        set_lr(run.optimizers, run.steps, progress)
        loss = gradients()
        parameters = list(run.net.parameters())
        run.team.average(parameters)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in run.optimizers:
            optimizer.step()
        run.average()
        run.steps += 1
        if run.steps % args.agree_every == 0:
            run.spent = run.team.agree(time.monotonic() - began)
            if run.spent - run.saved_after > args.save_every_s:
                run.save()
                run.watch()
        if run.steps % args.note_every == 0:
            run.note(loss=float(loss), norm=float(norm), leads=float(leads))
    run.save()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_policy.train")
    parser.add_argument("--state", default="/tmp/tiny_policy", help="checkpoints, on a local disk")
    parser.add_argument("--out", default="out", help="the model's folder and the losses")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=540, help="of training, those of earlier calls included")
    parser.add_argument(
        "--call-seconds", type=float, default=float("inf"), help="stop after these; go on in another call"
    )
    parser.add_argument("--call-steps", type=int, default=10**9, help="or after so many steps")
    parser.add_argument("--tasks", type=int, nargs="+", default=list(range(len(TASKS))), help="default: all of them")
    parser.add_argument("--batch", type=int, default=1024, help="scenes a step and GPU")
    parser.add_argument("--draws", type=int, default=4, help="flow times per scene")
    parser.add_argument("--continued", type=float, default=0.5, help="share of chunks that continue decided actions")
    parser.add_argument("--told", type=float, default=0.65, help="share of those that are given these actions")
    parser.add_argument("--robots", type=int, default=8192, help="robots a GPU")
    parser.add_argument("--pool", type=int, default=524288, help="labelled scenes kept a GPU")
    parser.add_argument("--first-rounds", type=int, default=20, help="rounds of the robots before the first step")
    parser.add_argument("--gather-every", type=int, default=32, help="steps between two rounds of the robots")
    parser.add_argument(
        "--dagger-from", type=float, default=0.35, help="share of the time before the policy leads robots"
    )
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    parser.add_argument("--note-every", type=int, default=100)
    parser.add_argument("--agree-every", type=int, default=20)
    parser.add_argument("--save-every-s", type=float, default=120.0, help="seconds between two checkpoints")
    parser.add_argument("--watched", type=int, default=180, help="episodes at each checkpoint, 0 for none")
    parser.add_argument("--results", help="measure at the end, and write everything there")
    parser.add_argument("--episodes", type=int, default=100 * len(TASKS), help="of each of these measurements")
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the code")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("high")
    team = Team()
    run = Run(args, team)
    run.load()
    generator = torch.Generator(device=team.device).manual_seed(args.seed * 1000 + team.rank + run.steps)
    collector, pool = Collector(args.robots, generator, args.tasks), Pool(args.pool, generator)
    began = time.monotonic()
    fill(run, collector, pool)
    torch.manual_seed(args.seed * 1000 + team.rank + run.steps)
    print(
        json.dumps({"rank": team.rank, "scenes": pool.count, "fill_s": round(time.monotonic() - began, 1)}), flush=True
    )
    train(run, collector, pool)
    if args.results and not team.rank:
        results.write(run.out / "model", Path(args.results), args.episodes, tuple(args.tasks), team.device)
    if team.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
