"""Everything the page reports of a checkpoint: every condition over paired episodes, the picture, the folder in one file.

    python -m recipes.tiny_policy.results out/model results [--episodes 900]

Owns: which conditions are reported, and the files: ``results.json``, ``episodes.webp``, ``model.tar``.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from realtime_omni.rtc.modes import Mode
from recipes.tiny_policy import sheet
from recipes.tiny_policy.evaluate import DEFAULT, Conditions, load, measure
from recipes.tiny_policy.table import TASKS

DELAYS = (4, 7)  # a quarter of the horizon, and nearly half
JOINED = (Mode.NONE, Mode.AUTO, Mode.TRAINED)


def conditions(episodes: int, tasks: tuple[int, ...]) -> list[Conditions]:
    """All runs, of the same scenes and noise: what is asked for, the controls, and each delay joined in every way."""
    plain = Conditions(episodes=episodes, tasks=tasks)
    controls = [replace(plain, instruction="shuffled"), replace(plain, cameras="blank")]
    late = [replace(plain, delay=delay, rtc=rtc) for delay in DELAYS for rtc in JOINED]
    return [plain, *controls, *late]


def write(folder: Path, out: Path, episodes: int, tasks: tuple[int, ...], device: torch.device) -> list[dict[str, Any]]:
    """All reports of the checkpoint in ``folder``; the file grows with each, so that a run cut short keeps what it had."""
    pack(folder, out / "model.tar")
    network, statistics = load(folder, device)
    told: list[dict[str, Any]] = []
    for asked in conditions(episodes, tasks):
        told.append(measure(network, statistics, asked))
        (out / "results.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        print(line(told[-1]), flush=True)
    sheet.main(
        [str(out / "episodes.webp"), "--model", str(folder), "--tasks", *map(str, tasks[:: 1 + len(tasks) // 5])]
    )
    return told


def pack(folder: Path, file: Path) -> None:
    """The folder's files as an archive, whole or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    with tarfile.open(part, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=f"model/{path.name}")
    part.replace(file)


def line(told: dict[str, Any]) -> str:
    """One report in a line of the log."""
    c = told["conditions"]
    low, high = told["interval_95"]
    return (
        f"delay {c['delay']} {c['rtc']} words {c['instruction']} cameras {c['cameras']}: {told['success_rate']:.3f}"
        f" ({low:.3f} to {high:.3f}) of {told['episodes']}, jump {told['action_jump_p99']}"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_policy.results", description=__doc__)
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--episodes", type=int, default=100 * len(TASKS), help="of each run")
    parser.add_argument("--tasks", type=int, nargs="+", default=DEFAULT.tasks)
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write(args.folder, args.out, args.episodes, tuple(args.tasks), device)


if __name__ == "__main__":
    main()
