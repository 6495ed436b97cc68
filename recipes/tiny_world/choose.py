"""Which weights of a finished training ship: a stage's, a moment's, a mean or a blend; then the full evaluation of the best.

    python -m recipes.tiny_world.choose --trained out --out chosen [--limit-s 400]

Owns: the order of the candidates and the files of the result: model.safetensors, config.json,
results.json, clips.webp and walks_<candidate>.webp. Clips are compared for all, walks for the
three that clips favour (`candidates.Bench`); the best is evaluated in full (`evaluate`).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet
from recipes.tiny_world.candidates import Bench, blends, goodness
from recipes.tiny_world.evaluate import contact_sheet, evaluate, save_sheets
from recipes.tiny_world.rollout import CachedPass
from recipes.tiny_world.simulator import Simulator
from recipes.tiny_world.train import export

SHARES = (0.5, 0.75)  # of the way from stage A to stage B
MEANS = (2, 3)  # so many of the last moments of stage B: sharper than each
WALKED = 3  # candidates whose walks are measured


def candidates(trained: Path, device: torch.device) -> dict[str, dict[str, torch.Tensor]]:
    """Every ``*.safetensors`` of the training, and blends of its two stages where both ended."""
    found = {
        path.stem: {name: value.float().to(device) for name, value in load_file(path).items()}
        for path in sorted(trained.glob("model_[ab]*.safetensors"))
    }
    late = [found[name] for name in sorted(found, key=moment) if name.startswith("model_b")]
    found |= {f"mean_{count}": mean(late[-count:]) for count in MEANS if count <= len(late)}
    if {"model_a", "model_b"} <= found.keys():
        found |= blends(found["model_a"], found["model_b"], SHARES)
    return found


def moment(name: str) -> float:
    """Seconds of its stage at which ``model_b_120s`` was written; the end of it has none."""
    seconds = name.rpartition("_")[2].removesuffix("s")
    return float(seconds) if seconds.isdecimal() else math.inf


def mean(weights: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([one[name] for one in weights]).mean(0) for name in weights[0]}


def compare(bench: Bench, found: dict, sheets: Path) -> tuple[dict, list[str]]:
    """(scores by candidate, the walked ones best first); a picture of each one's watched walks goes to `sheets`."""
    scores = {name: bench.clips(weights) | bench.turns(weights) for name, weights in found.items()}
    for name, values in scores.items():
        print(name, round(goodness(values), 3), json.dumps(values), flush=True)
    best = sorted(scores, key=lambda name: goodness(scores[name]), reverse=True)[:WALKED]
    for name in best:
        walks, seen = bench.walks(found[name])
        scores[name] |= walks
        print(name, round(goodness(scores[name]), 3), json.dumps(walks), flush=True)
        at = torch.linspace(0, seen.shape[1] - 1, 12).long()
        contact_sheet(seen[:12, at].cpu(), sheets / f"walks_{name}.webp")
    return scores, sorted(best, key=lambda name: goodness(scores[name]), reverse=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_world.choose")
    parser.add_argument("--trained", type=Path, required=True, help="--out of the training")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--walk-frames", type=int, default=450)
    parser.add_argument(
        "--limit-s", type=float, default=400, help="without time for it the full evaluation is left out"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args(argv)
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(args.trained / "config.json", args.out)
    config = NetworkConfig.load(args.out / "config.json")
    net = TinyWorldNet(config).to(device)
    cached: nn.Module = torch.compile(CachedPass(net), dynamic=False) if args.compile else CachedPass(net)
    simulator = Simulator(config.image_size, device, compiled=args.compile)
    bench = Bench(simulator, cached, net, args.rows, args.walk_frames)
    found = candidates(args.trained, device)
    scores, order = compare(bench, found, args.out)
    result: dict = {"candidates": scores, "order": order}
    for name, file in zip(order, ("model", "second"), strict=False):
        export(found[name], args.out / f"{file}.safetensors")
    (args.out / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    result["simulator"] = bench.simulator_walks()
    print("simulator", json.dumps(result["simulator"]), flush=True)
    torch.set_float32_matmul_precision("highest")
    for name, file in zip(order, ("model", "second"), strict=False):
        if time.monotonic() - began > args.limit_s:
            print("no time for the full evaluation of", name, flush=True)
            break
        keep: dict = {}
        first = file == "model"
        result[f"evaluated_{file}"] = evaluate(
            args.quick, str(device), 0, args.out, f"{file}.safetensors", keep=keep, simulator_runs=first
        )
        print(name, json.dumps(result[f"evaluated_{file}"]), flush=True)
        save_sheets(keep, args.out, file, "webp")
        (args.out / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
