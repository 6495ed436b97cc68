"""Stage C: fine-tune weights that exist, on one GPU, for one sampler step; then choose and evaluate.

    CUDA_VISIBLE_DEVICES=1 python -m recipes.tiny_world.finetune --weights model.safetensors --seconds 1300 --out out

Owns: the schedule by seconds (compiling, drawing and the evaluation at the end included), the
checks on held-out clips, the averages kept at each check, and the files of the result. `--out`
holds at most six files: model.safetensors (the latest average, at the end the best candidate),
second.safetensors, results.json, loss.csv, clips.png and walks.png.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet
from recipes.tiny_world.candidates import Bench, blends, goodness
from recipes.tiny_world.data import ClipPool
from recipes.tiny_world.evaluate import (
    contact_sheet,
    evaluate,
    gradient_energy,
    save_sheets,
    sharpness_of_places,
)
from recipes.tiny_world.losses import Discriminator
from recipes.tiny_world.optimizer import make_optimizers
from recipes.tiny_world.own_context import Balance, LateStudent, Play, draw_given, late_sharpness, own_context_loss
from recipes.tiny_world.rollout import CachedPass
from recipes.tiny_world.simulator import Simulator
from recipes.tiny_world.student import Bank
from recipes.tiny_world.teacher import TeacherPass, dense_attend, flex_attend
from recipes.tiny_world.train import PLAYERS, export, tiny_config

EMA = 0.999
WARMUP_STEPS = 100
STEADY = 0.35  # of the training time at full step size; then linear to a fiftieth
MAX_LIFE = 160


class Tuning:
    """The state of a run: network, its average, where it began, log and averages kept at the checks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        weights = Path(args.weights)
        self.config = tiny_config() if args.tiny else NetworkConfig.load(weights.parent / "config.json")
        torch.manual_seed(args.seed)
        self.net = TinyWorldNet(self.config).to(self.device)
        if not args.tiny:
            self.net.load_state_dict({name: value.float() for name, value in load_file(args.weights).items()})
        self.parameters = list(self.net.parameters())
        self.start = [p.detach().clone() for p in self.parameters]
        self.first = self.copy()
        self.ema = self.copy()
        self.kept: dict[str, dict[str, Tensor]] = {}
        self.rows: list[tuple] = []
        self.out, self.state = Path(args.out), Path(args.state)
        for folder in (self.out, self.state):
            folder.mkdir(parents=True, exist_ok=True)

    def copy(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.net.state_dict().items()}

    def left(self) -> float:
        """Seconds until training must end."""
        return self.args.seconds - self.args.eval_seconds - (time.monotonic() - self.began)

    def told(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.0f} s] {text}", flush=True)

    def note(self, stage: str, steps: int, **values: Tensor | float) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        at = round(time.monotonic() - self.began, 1)
        self.rows += [(stage, steps, at, name, f"{number:.6f}") for name, number in numbers.items()]
        self.told(f"{stage} step {steps} " + " ".join(f"{name} {number:.4f}" for name, number in numbers.items()))

    def distance(self) -> float:
        """Of the network's parameters from the start's, Euclidean."""
        apart = torch._foreach_sub([p.detach() for p in self.parameters], self.start)
        return float(torch.stack(torch._foreach_norm(apart)).norm())

    def update(self, optimizers: list[torch.optim.Optimizer], steps: int, scale: float) -> None:
        """One optimizer step at `scale` of the step size, the pull to the start, the average."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.parameters, self.start, self.args.pull * scale)
            decay = min(EMA, (1 + steps) / (10 + steps))
            now = self.net.state_dict()
            torch._foreach_lerp_(list(self.ema.values()), [now[name] for name in self.ema], 1 - decay)

    def save(self) -> None:
        export(self.ema, self.out / "model.safetensors")
        with (self.out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("stage", "step", "seconds", "name", "value"), *self.rows])

    def write(self, result: dict) -> None:
        (self.out / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


@dataclasses.dataclass
class Parts:
    """What a run trains with."""

    pool: ClipPool
    model: nn.Module
    play: Play
    late: LateStudent
    bench: Bench
    expected: Tensor
    balance: Balance = dataclasses.field(default_factory=Balance)


def build(run: Tuning, simulator: Simulator) -> Parts:
    args, config, device = run.args, run.config, run.device
    pool = ClipPool(
        simulator, args.pool, args.frames, args.pool_seconds, args.seed * 1000, min(2048, args.pool), PLAYERS
    )
    run.told(f"{pool.count} clips in {pool.seconds:.1f} s")
    blocks = args.frames // config.frames_per_block
    model: nn.Module = TeacherPass(
        run.net, flex_attend(config, blocks, device) if args.compile else dense_attend(config, blocks, device)
    )
    cached: nn.Module = CachedPass(run.net)
    if args.compile:
        model, cached = torch.compile(model, dynamic=False), torch.compile(cached, dynamic=False)
    judge = Discriminator(config).to(device, memory_format=torch.channels_last)
    judge_optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-4, betas=(0.0, 0.99), weight_decay=0.0)
    expected = sharpness_of_places(simulator)
    bank = Bank.fresh(config, pool, args.rows, expected, MAX_LIFE)
    late = LateStudent(config, cached, judge, judge_optimizer, pool, bank)
    bench = Bench(simulator, cached, run.net, args.rows, args.walk_frames)
    return Parts(pool, model, Play(cached, config, args.rows, device), late, bench, expected)


def cycle(run: Tuning, parts: Parts, strength: float, update) -> dict[str, Tensor | float]:
    """Play `rows` clips, then train on them `batch` at a time; the judge's step joins the first batch's."""
    args, told = run.args, {}
    truth, keys, place = parts.pool.batch(args.rows)
    given = draw_given(args.rows, truth.shape[1] // run.config.frames_per_block, run.device)
    played = parts.play.clip(truth, keys, place, given)
    for first in range(0, args.rows, args.batch):
        part = slice(first, first + args.batch)
        with torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda"):
            loss, squared = own_context_loss(
                parts.model,
                truth[part],
                played[part],
                keys[part],
                place[part],
                given[part],
                run.config.frames_per_block,
                parts.balance.detail,
            )
        loss.backward()
        told |= {"loss": loss.detach(), "own_mse": squared}
        if first == 0:
            told |= parts.late.judge_only(strength * parts.balance.push, lambda parameters: None)
        update()
    return told


def train(run: Tuning, parts: Parts) -> int:
    """Until `run.left()` is used up; returns the optimizer steps."""
    args, steps, checked = run.args, 0, time.monotonic()
    optimizers = make_optimizers(run.net, args.muon_lr, args.adam_lr)
    check(run, parts, steps)
    began, whole = time.monotonic(), run.left()

    def update() -> None:
        nonlocal steps
        progress = (time.monotonic() - began) / whole
        rise, fall = min(1.0, (steps + 1) / WARMUP_STEPS), min(1.0, (1 - progress) / (1 - STEADY))
        run.update(optimizers, steps, rise * max(0.02, fall))
        steps += 1

    while run.left() > 0:
        spent = time.monotonic() - began
        strength = min(1.0, max(0.0, (spent - args.judge_alone) / max(1.0, args.judge_alone)))
        told = cycle(run, parts, strength, update)
        if steps // (args.rows // args.batch) % args.note_every == 1:
            run.note("c", steps, strength=strength, **told)
        if time.monotonic() - checked > args.check_seconds:
            checked = time.monotonic()
            check(run, parts, steps)
    check(run, parts, steps)
    return steps


def check(run: Tuning, parts: Parts, steps: int) -> None:
    """The average on held-out clips; it is kept as a candidate and written to `--out`."""
    scores = parts.bench.clips(run.ema)
    sharpness, plain = late_sharpness(parts.late, gradient_energy(parts.late.bank.last), parts.expected)
    numbers = {f"psnr_{frame}": value for frame, value in scores["psnr_db"].items()}
    numbers |= {f"sharp_{frame}": value for frame, value in scores["sharpness_ratio"].items()}
    parts.balance.steer(scores["sharpness_ratio"]["12"], scores["sharpness_ratio"]["48"])
    numbers |= {"detail": parts.balance.detail, "push": parts.balance.push}
    run.note(
        "check", steps, **numbers, goodness=goodness(scores), distance=run.distance(), late_sharp=sharpness, plain=plain
    )
    run.kept[f"step_{steps}"] = {name: value.clone() for name, value in run.ema.items()}
    run.save()


def choose(run: Tuning, bench: Bench, steps: int) -> tuple[dict, list[str]]:
    """(scores of every candidate, the best first without the start): clips for all, walks for those that clips favour.

    A candidate is written to `--state`. Without time for walks, clips decide alone.
    """
    last = run.kept.pop(f"step_{steps}", run.ema)
    run.kept.pop("step_0", None)
    candidates = {"start": run.first, "last": last, **run.kept, **blends(run.first, last, (0.25, 0.5, 0.75))}
    scores = {name: bench.clips(weights) for name, weights in candidates.items()}
    by_clips = sorted(scores, key=lambda name: goodness(scores[name]), reverse=True)
    for name in dict.fromkeys(["last", *by_clips[:4], "start"]):
        if run.left() + run.args.eval_seconds / 2 < 0:
            run.told("no time for the walks of " + name)
            continue
        walks, seen = bench.walks(candidates[name])
        scores[name] |= walks
        at = torch.linspace(0, seen.shape[1] - 1, 12).long()
        contact_sheet(seen[:12, at].cpu(), run.state / f"walks_{name}.png")
    for name in by_clips:
        scores[name]["goodness"] = goodness(scores[name])
        run.told(f"{name}: {json.dumps(scores[name])}")
    order = sorted(by_clips, key=lambda name: ("walks" in scores[name], scores[name]["goodness"]), reverse=True)
    order.remove("start")
    for name in order:
        export(candidates[name], run.state / f"{name}.safetensors")
    return scores, order


def conclude(run: Tuning, bench: Bench, steps: int) -> None:
    """Choose, evaluate the best two in full with one step, and leave the result's six files in `--out`."""
    scores, order = choose(run, bench, steps)
    result: dict = {"steps": steps, "arguments": vars(run.args), "distance": run.distance(), "candidates": scores}
    run.told(f"best first: {order}")
    for name, target in zip(order, ("model", "second"), strict=False):
        shutil.copy(run.state / f"{name}.safetensors", run.out / f"{target}.safetensors")
    if "walks" in scores[order[0]]:
        shutil.copy(run.state / f"walks_{order[0]}.png", run.out / "walks.png")
        result["simulator"] = bench.simulator_walks()
        run.told(f"simulator: {json.dumps(result['simulator'])}")
    run.write(result)
    config = dataclasses.replace(run.config, sampler_steps=1)
    (run.state / "config.json").write_text(config.to_json(), encoding="utf-8")
    torch.set_float32_matmul_precision("highest")
    result["evaluated"], took = {}, 0.0
    for name in order[:2]:
        if run.left() + run.args.eval_seconds < took:
            run.told("no time for the full evaluation of " + name)
            break
        began, keep = time.monotonic(), {}
        found = evaluate(
            run.args.quick,
            str(run.device),
            0,
            run.state,
            f"{name}.safetensors",
            steps=1,
            keep=keep,
            simulator_runs=False,
        )
        took = time.monotonic() - began
        result["evaluated"][name] = found
        run.told(f"evaluated {name} in {took:.0f} s: {json.dumps(found)}")
        run.write(result)
        if name == order[0]:
            save_sheets(keep, run.state, "best")
            shutil.copy(run.state / "clips_best.png", run.out / "clips.png")
    run.told("done")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_world.finetune")
    parser.add_argument("--weights", required=True, help="model.safetensors with config.json beside it")
    parser.add_argument("--seconds", type=float, default=1300, help="of everything, from start to end")
    parser.add_argument("--eval-seconds", type=float, default=240, help="kept for the evaluation at the end")
    parser.add_argument("--state", default="/tmp/tw", help="candidates, on a local disk")
    parser.add_argument("--out", default="out")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--rows", type=int, default=192, help="clips played at once, and rolling rows of the judge")
    parser.add_argument("--batch", type=int, default=64, help="clips a step; a divisor of --rows")
    parser.add_argument("--pool", type=int, default=36000)
    parser.add_argument("--pool-seconds", type=float, default=60)
    parser.add_argument("--frames", type=int, default=30, help="frames of a clip")
    parser.add_argument("--muon-lr", type=float, default=0.002)
    parser.add_argument("--adam-lr", type=float, default=2e-4)
    parser.add_argument("--pull", type=float, default=1e-4, help="of the way back to the start, each step")
    parser.add_argument(
        "--judge-alone", type=float, default=75, help="seconds before the judge pulls; then as many to rise"
    )
    parser.add_argument("--check-seconds", type=float, default=110)
    parser.add_argument("--note-every", type=int, default=30, help="cycles between lines of the log")
    parser.add_argument("--walk-frames", type=int, default=450, help="of the walks candidates are compared by")
    parser.add_argument("--tiny", action="store_true", help="a toy size with fresh weights, to try the code")
    parser.add_argument("--quick", action="store_true", help="the quick evaluation at the end")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args(argv)
    if args.rows % args.batch:
        parser.error("--batch must divide --rows")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_float32_matmul_precision("high")
    run = Tuning(args)
    simulator = Simulator(run.config.image_size, run.device, compiled=args.compile)
    parts = build(run, simulator)
    run.told("built")
    cycle(run, parts, 1.0, lambda: run.net.zero_grad(set_to_none=True))  # compiles; gradients dropped
    run.told(f"rehearsed; {run.left():.0f} s of training follow")
    steps = train(run, parts)
    bench = parts.bench
    del parts
    conclude(run, bench, steps)


if __name__ == "__main__":
    main()
