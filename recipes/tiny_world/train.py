"""Train tiny-world: stage A teacher-forced, stage B on its own pictures; then export.

    torchrun --nproc-per-node 2 -m recipes.tiny_world.train --state /tmp/state --out out [--weights model.safetensors]

Owns: the process group, the schedule (by seconds, not steps: the machine is rented by time),
checkpoints and the log. Every rank draws its own clips; gradients are averaged. A checkpoint is
written each two minutes and at the end of a stage; started again with the same --state the run
goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet
from recipes.tiny_world.candidates import Bench
from recipes.tiny_world.data import ClipPool
from recipes.tiny_world.evaluate import CLIP_PLAYER, contact_sheet, sharpness_of_places
from recipes.tiny_world.losses import Discriminator
from recipes.tiny_world.optimizer import make_optimizers
from recipes.tiny_world.rollout import CachedPass
from recipes.tiny_world.simulator import Player, Simulator
from recipes.tiny_world.student import Bank, Student
from recipes.tiny_world.teacher import TeacherPass, dense_attend, flex_attend, teacher_loss

EMA_A, EMA_B = 0.999, 0.999
WARMUP_STEPS = 200
SHIPPED = {"window_frames": 75, "layer_windows": (75, 9, 9, 9, 9, 9, 75, 75), "dense_frames": 9}
"""What each layer sees (DECISIONS 71): a full turn, the far part of it by the last frames of its blocks."""
DECAY_FROM = 0.5  # of a stage's time: constant before, linear to a twentieth after
BLEND = 0.5  # of the exported weights between stage A and stage B: B's firmness in long runs without its speckles
STANDING = Player(standing=1.0, one_way=0.5, turning=0.8, looking=0.08, switch=0.01)
PLAYERS = (Player(), CLIP_PLAYER, STANDING, Player(), CLIP_PLAYER, STANDING, Player(heed=0.03, forward=0.75))
"""Two in seven wander, two play as the evaluation does (on other maps), two turn on the spot, one stays in front of walls."""
TEACHER_EVERY = 4  # in stage B one step in so many is a stage A step, the anchor


class Team:
    """This process among its peers (one per GPU); alone without torchrun."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def average(self, parameters: list[Tensor]) -> None:
        """Average the gradients over the peers."""
        if self.size == 1:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= self.size
        parts = flat.split([g.numel() for g in grads])
        torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads, strict=True)])

    def agree(self, value: float) -> float:
        """Rank 0's value, on every rank: decisions by the clock must be the same everywhere."""
        if self.size == 1:
            return value
        cell = torch.tensor([value], device=self.device, dtype=torch.float64)
        dist.broadcast(cell, 0)
        return cell.item()


class Run:
    """A training run's state: network, its average, progress in seconds, log."""

    def __init__(self, args: argparse.Namespace, team: Team) -> None:
        self.args, self.team = args, team
        config = NetworkConfig.load(args.config) if args.config else NetworkConfig(**SHIPPED)
        self.config = tiny_config() if args.tiny else config
        torch.manual_seed(args.seed)
        self.net = TinyWorldNet(self.config).to(team.device)
        self.began = time.monotonic()
        if args.weights:
            self.net.load_state_dict({name: value.float() for name, value in load_file(args.weights).items()})
        self.ema = {name: value.detach().clone() for name, value in self.net.state_dict().items()}
        self.state = Path(args.state)
        self.out = Path(args.out)
        self.stage, self.spent = "a", 0.0
        self.rows: list[tuple] = []
        self.saved_at = time.monotonic()
        for folder in (self.state, self.out):
            folder.mkdir(parents=True, exist_ok=True)

    def left(self, kept_back: float = 0.0) -> float:
        """Seconds until --stop-at-s, less `kept_back`."""
        return self.args.stop_at_s - (time.monotonic() - self.began) - kept_back

    def update_average(self, decay: float, steps: int) -> None:
        decay = min(decay, (1 + steps) / (10 + steps))
        now = self.net.state_dict()
        torch._foreach_lerp_(list(self.ema.values()), [now[name] for name in self.ema], 1 - decay)

    def note(self, stage: str, steps: int, spent: float, **values: Tensor | float) -> None:
        numbers = {name: float(value) for name, value in values.items()}
        if self.team.rank == 0:
            self.rows += [(stage, steps, round(spent, 1), name, f"{number:.6f}") for name, number in numbers.items()]
            told = " ".join(f"{name} {number:.5f}" for name, number in numbers.items())
            print(f"[{stage}] step {steps} {spent:.0f} s {told}", flush=True)

    def save(self, optimizers: list[torch.optim.Optimizer], steps: int, spent: float, done: bool = False) -> None:
        self.saved_at = time.monotonic()
        if self.team.rank:
            return
        everything = {
            "net": self.net.state_dict(),
            "ema": self.ema,
            "stage": self.stage,
            "spent": spent,
            "steps": steps,
            "optimizers": [o.state_dict() for o in optimizers],
            "rows": self.rows,
            "done": done,
        }
        torch.save(everything, self.state / "checkpoint.part")
        os.replace(self.state / "checkpoint.part", self.state / "checkpoint.pt")
        part = "" if done else f"_{spent:.0f}s"
        export(self.ema, self.out / f"model_{self.stage}{part}.safetensors")
        (self.out / "config.json").write_text(self.config.to_json(), encoding="utf-8")
        with (self.out / "loss.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("stage", "step", "seconds", "name", "value"), *self.rows])

    def load(self) -> dict | None:
        path = self.state / "checkpoint.pt"
        if not path.exists():
            return None
        kept = torch.load(path, map_location=self.team.device, weights_only=True)
        self.net.load_state_dict(kept["net"])
        self.ema = kept["ema"]
        self.stage, self.spent, self.rows = kept["stage"], kept["spent"], kept["rows"]
        return kept


def tiny_config() -> NetworkConfig:
    """A few thousand parameters, to try the code on a CPU."""
    return NetworkConfig(
        image_size=32,
        patch=8,
        width=64,
        layers=2,
        heads=1,
        mlp_width=64,
        refine_channels=8,
        detail_channels=8,
        window_frames=12,
    )


def export(weights: dict[str, Tensor], path: Path) -> None:
    """float16 safetensors."""
    part = path.with_suffix(".part")
    save_file({name: value.detach().half().cpu().contiguous() for name, value in weights.items()}, str(part))
    os.replace(part, path)


def set_lr(
    optimizers: list[torch.optim.Optimizer], steps: int, progress: float, decay_from: float = DECAY_FROM
) -> None:
    rise = min(1.0, (steps + 1) / WARMUP_STEPS)
    fall = min(1.0, max(0.0, 1 - progress) / (1 - decay_from)) * 0.95 + 0.05
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * rise * fall


def teacher_model(run: Run, blocks: int) -> nn.Module:
    device, compiled = run.team.device, run.args.compile
    attend = flex_attend(run.config, blocks, device) if compiled else dense_attend(run.config, blocks, device)
    model = TeacherPass(run.net, attend)
    return torch.compile(model, dynamic=False) if compiled else model


def apply(run: Run, optimizers: list[torch.optim.Optimizer]) -> None:
    parameters = list(run.net.parameters())
    run.team.average(parameters)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def zero_grad(run: Run) -> None:
    for parameter in run.net.parameters():
        parameter.grad = None


def teacher_step(run: Run, model: nn.Module, pool: ClipPool) -> dict[str, Tensor]:
    """Gradients of one stage A batch, added to .grad; its loss and errors."""
    index = pool.pick(run.args.batch)
    with torch.autocast(run.team.device.type, torch.bfloat16, enabled=run.team.device.type == "cuda"):
        loss, found = teacher_loss(model, *pool.clips(index), run.config, pool.where(index))
    loss.backward()
    return {"loss": loss.detach()} | found


def stage_a(run: Run, pool: ClipPool, model: nn.Module, kept: dict | None) -> None:
    optimizers = make_optimizers(run.net, run.args.muon_lr, run.args.adam_lr)
    steps = 0
    if kept is not None and not kept["done"]:
        for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        steps = kept["steps"]
    teacher_step(run, model, pool)  # compiles; its gradient is dropped, its time not counted
    zero_grad(run)
    began, spent = time.monotonic() - run.spent, run.spent
    whole = run.team.agree(min(run.args.seconds_a, spent + run.left()))
    while spent < whole:
        set_lr(optimizers, steps, spent / whole)
        told = teacher_step(run, model, pool)
        apply(run, optimizers)
        run.update_average(EMA_A, steps)
        steps += 1
        if steps % 20 == 0:
            spent = run.team.agree(time.monotonic() - began)
        if steps % 100 == 0:
            run.note("a", steps, spent, **told)
        if time.monotonic() - run.saved_at > 120:
            run.save(optimizers, steps, spent)
    run.save(optimizers, steps, spent, done=True)


def make_student(run: Run, pool: ClipPool, expected: Tensor) -> Student:
    judge = Discriminator(run.config).to(run.team.device, memory_format=torch.channels_last)
    if run.args.judge:
        judge.load_state_dict({name: value.float() for name, value in load_file(run.args.judge).items()})
    if run.team.size > 1:
        for value in judge.state_dict().values():
            dist.broadcast(value, 0)
    judge_optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-4, betas=(0.0, 0.99), weight_decay=0.0)
    cached = CachedPass(run.net)
    cached = torch.compile(cached, dynamic=False) if run.args.compile else cached
    bank = Bank.fresh(run.config, pool, run.args.rows, expected)
    return Student(run.config, cached, judge, judge_optimizer, pool, bank)


def rehearse(run: Run, student: Student) -> None:
    """One step of each kind, its gradients dropped: stage B must not fail, or compile, ten minutes from now."""
    for two_steps in (True, False) if run.args.two_steps else (False,):
        student.step(two_steps, 1.0, run.team.average)
    zero_grad(run)


def stage_b(run: Run, pool: ClipPool, model: nn.Module, student: Student, bench: Bench) -> None:
    """Starts from the average of stage A; saved weights only, a stage B begun again starts over."""
    run.net.load_state_dict(run.ema)
    teacher = {name: value.clone() for name, value in run.ema.items()}
    run.stage = "b"
    student.bank = Bank.fresh(run.config, pool, run.args.rows, student.bank.expected)
    optimizers = make_optimizers(run.net, run.args.muon_lr * run.args.fine, run.args.adam_lr * 2 * run.args.fine)
    choose = torch.Generator().manual_seed(run.args.seed)
    alone, rise = (50, 150) if run.args.judge else (200, 400)  # steps before the judge pulls, and until it does in full
    began, spent, steps = time.monotonic(), 0.0, 0
    whole = run.team.agree(min(run.args.seconds_b, run.left(run.args.compare_s)))
    while spent < whole:
        set_lr(optimizers, steps, spent / whole, run.args.decay_from)
        strength = min(1.0, max(0.0, (steps - alone) / rise))
        two_steps = torch.rand((), generator=choose).item() < run.args.two_steps
        told = student.step(two_steps, strength, run.team.average)
        if steps % TEACHER_EVERY == 0:
            told |= {f"teacher_{name}": value for name, value in teacher_step(run, model, pool).items()}
        apply(run, optimizers)
        run.update_average(EMA_B, steps)
        steps += 1
        if steps % 20 == 1:
            spent = run.team.agree(time.monotonic() - began)
        if steps % 100 == 1:
            run.note("b", steps, spent, **told)
        if time.monotonic() - run.saved_at > 120:
            run.save(optimizers, steps, spent)
            export(student.judge.state_dict(), run.out / "judge.safetensors")
            run.note("check", steps, spent, **clip_numbers(bench.clips(run.ema)), **bench.turns(run.ema))
    run.save(optimizers, steps, spent, done=True)
    export(student.judge.state_dict(), run.out / "judge.safetensors")
    if run.team.rank == 0:
        blend = {name: torch.lerp(teacher[name], value, BLEND) for name, value in run.ema.items()}
        export(blend, run.out / "model.safetensors")
        compare_ends(run, bench, {"start": teacher, "end": run.ema, "blend": blend})


def clip_numbers(scores: dict) -> dict[str, float]:
    found = {f"psnr_{frame}": value for frame, value in scores["psnr_db"].items()}
    return found | {f"sharp_{frame}": value for frame, value in scores["sharpness_ratio"].items()}


def compare_ends(run: Run, bench: Bench, found: dict[str, dict[str, Tensor]]) -> None:
    """Clips of all, then walks of the end and of the blend, and pictures of them, while --stop-at-s allows."""
    scores = {name: bench.clips(weights) | bench.turns(weights) for name, weights in found.items()}
    print(json.dumps(scores), flush=True)
    took = 0.0
    for name in ("end", "blend"):
        if run.left() < took:
            break
        began = time.monotonic()
        walks, seen = bench.walks(found[name])
        scores[name] |= walks
        print(name, json.dumps(walks), flush=True)
        at = torch.linspace(0, seen.shape[1] - 1, 12).long()
        contact_sheet(seen[:12, at].cpu(), run.out / f"walks_{name}.webp")
        took = time.monotonic() - began
        (run.out / "compared.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_world.train")
    parser.add_argument("--state", default="/tmp/tiny_world", help="checkpoints, on a local disk")
    parser.add_argument("--out", default="out", help="weights, configuration and losses")
    parser.add_argument("--weights", help="weights to go on from; default: new ones")
    parser.add_argument("--config", type=Path, help="the network's configuration (JSON); default: what ships")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds-a", type=float, default=440)
    parser.add_argument("--seconds-b", type=float, default=260)
    parser.add_argument("--batch", type=int, default=20, help="clips a step and GPU in stage A")
    parser.add_argument("--rows", type=int, default=64, help="rolling rows a GPU in stage B")
    parser.add_argument("--pool", type=int, default=12000, help="clips kept a GPU")
    parser.add_argument("--pool-seconds", type=float, default=50)
    parser.add_argument("--frames", type=int, default=90, help="frames of a clip")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    parser.add_argument("--two-steps", type=float, default=0.0, help="share of stage B steps with two sampler steps")
    parser.add_argument("--fine", type=float, default=0.1, help="stage B's step size against stage A's")
    parser.add_argument("--decay-from", type=float, default=DECAY_FROM, help="of stage B's time: full steps before")
    parser.add_argument("--judge", help="a discriminator to go on from; default: a new one")
    parser.add_argument("--stop-at-s", type=float, default=math.inf, help="seconds after the start when all must end")
    parser.add_argument("--compare-s", type=float, default=0.0, help="of these, kept for the comparison at the end")
    parser.add_argument("--walk-frames", type=int, default=450)
    parser.add_argument("--tiny", action="store_true", help="a toy size, to try the code")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args(argv)
    torch.set_float32_matmul_precision("high")
    team = Team()
    run = Run(args, team)
    simulator = Simulator(run.config.image_size, team.device, compiled=args.compile)
    pool = ClipPool(
        simulator,
        args.pool,
        args.frames,
        args.pool_seconds,
        args.seed * 1000 + team.rank,
        min(2048, args.pool),
        PLAYERS,
    )
    print(f"rank {team.rank}: {pool.count} clips in {pool.seconds:.1f} s", flush=True)
    kept = run.load()
    torch.manual_seed(args.seed + team.rank)
    model = teacher_model(run, args.frames // run.config.frames_per_block)
    student = make_student(run, pool, sharpness_of_places(simulator))
    rehearse(run, student)
    bench = Bench(simulator, student.cached, run.net, args.rows, args.walk_frames)
    print(f"rank {team.rank}: rehearsed", flush=True)
    if run.stage == "a" and not (kept and kept["done"]):
        stage_a(run, pool, model, kept)
    if run.stage == "a" or not (kept and kept["done"]):
        stage_b(run, pool, model, student, bench)
    if team.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
