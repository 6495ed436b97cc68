"""A picture of episodes: a robot a row, time to the right; above the camera over the table, below the one on the wrist.

python -m recipes.tiny_policy.sheet episodes.webp [--model out/model] [--tasks 0 1 4 7] [--seed 3]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from realtime_omni.rtc.modes import Mode
from recipes.tiny_policy.evaluate import Ask, expert_policy, load, network_policy, nothing_left
from recipes.tiny_policy.pictures import pictures
from recipes.tiny_policy.policy import Request
from recipes.tiny_policy.shape import EXECUTED, HORIZON
from recipes.tiny_policy.table import ACTION_DIM, INSTRUCTIONS, Scene, new_scenes, step

GAP, CAPTION = 4, 16  # pixels between pictures, and for the words above a robot


def episode_frames(scene: Scene, ask: Ask, generator: torch.Generator, columns: int, every: int, size: int) -> Tensor:
    """uint8 [B, columns, 2, 3, S, S], a column each ``every`` ticks."""
    shown, chunk = [], torch.zeros(0)
    for tick in range(columns * every):
        if tick % EXECUTED == 0:
            noise = torch.randn(len(scene), HORIZON, ACTION_DIM, generator=generator)
            chunk = ask(Request(scene, nothing_left(len(scene), scene.task.device), 0, noise))
        if tick % every == 0:
            shown.append(pictures(scene, size))
        scene = step(scene, chunk[:, tick % EXECUTED])
    return torch.stack(shown, dim=1)


def sheet(frames: Tensor, captions: Sequence[str]) -> Image.Image:
    """Pictures [B, columns, 2, 3, S, S] on white, a caption above each robot's."""
    rows, columns, cameras, _, size, _ = frames.shape
    height, pitch = CAPTION + cameras * (size + GAP) + GAP, size + GAP
    canvas = torch.full((rows * height, columns * pitch, 3), 255, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            for camera in range(cameras):
                top, left = row * height + CAPTION + camera * pitch, column * pitch
                canvas[top : top + size, left : left + size] = frames[row, column, camera].permute(1, 2, 0)
    image = Image.fromarray(canvas.numpy())
    draw = ImageDraw.Draw(image)
    for row, caption in enumerate(captions):
        draw.text((GAP, row * height), caption, fill="black", font_size=12)
    return image.quantize(64, dither=Image.Dither.NONE)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_policy.sheet", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the expert")
    parser.add_argument("--tasks", type=int, nargs="+", default=[0, 1, 4, 7])
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--every", type=int, default=6, help="ticks between two pictures")
    parser.add_argument("--size", type=int, default=128, help="pixels a side")
    args = parser.parse_args(argv)
    generator = torch.Generator().manual_seed(args.seed)
    scene = new_scenes(len(args.tasks), generator, torch.tensor(args.tasks))
    ask = expert_policy
    if args.model is not None:
        network, statistics = load(args.model, torch.device("cpu"))
        ask = network_policy(network, statistics, Mode.NONE)
    frames = episode_frames(scene, ask, generator, args.columns, args.every, args.size)
    sheet(frames, [INSTRUCTIONS[task] for task in args.tasks]).save(args.file, lossless=True, quality=100, method=6)


if __name__ == "__main__":
    main()
