"""Ten walks of two minutes: a contact sheet of them, and a film of their ends.

    python -m recipes.tiny_world.film [--out docs/images/tiny-world-walks.mp4] [--sheet recipes/tiny_world/results/walks.webp]

Owns: how the walks are laid out. They are the halves of the five long runs by random keys that `evaluate` judges, so nothing
is chosen after it was seen.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

from recipes.tiny_world.evaluate import WEIGHTS, LongRuns, contact_sheet, load_net
from recipes.tiny_world.rollout import reference_rollout
from recipes.tiny_world.simulator import Simulator

FPS = 8
RUNS, SEED = 5, 0  # as in `evaluate`
RUN_FRAMES = 2000
FILM_FRAMES = 20 * FPS
SHEET_COLUMNS = 12


def long_runs(frames: int, weights: Path, device: str) -> Tensor:
    """[RUNS, frames in whole blocks, 3, H, W] in [-1, 1]."""
    net = load_net(weights, device)
    runs = LongRuns.draw(Simulator(net.config.image_size, device), RUNS, frames, SEED, net.config.frames_per_block)
    return reference_rollout(net)(runs.start, runs.keys, runs.place, SEED)


def halves(runs_BFCHW: Tensor) -> Tensor:
    """[2 * B, F // 2, 3, H, W]: the first halves, then the second ones."""
    half = runs_BFCHW.shape[1] // 2
    return torch.cat((runs_BFCHW[:, :half], runs_BFCHW[:, half : 2 * half]))


def mosaic(halves_BFCHW: Tensor) -> np.ndarray:
    """uint8 [F, rows * H, RUNS * W, 3]: the walks side by side, their second halves below their first."""
    pictures = ((halves_BFCHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
    rows = pictures.unflatten(0, (-1, RUNS))  # [rows, columns, F, C, H, W]
    return rows.permute(2, 0, 4, 1, 5, 3).flatten(3, 4).flatten(1, 2).numpy()


def sheet(halves_BFCHW: Tensor) -> Tensor:
    """[walks, SHEET_COLUMNS, 3, H, W]: pictures in even steps through each walk; a run's halves stand one below the other."""
    walks = halves_BFCHW.unflatten(0, (2, RUNS)).transpose(0, 1).flatten(0, 1)
    every = walks.shape[1] // SHEET_COLUMNS
    return walks[:, every // 2 :: every][:, :SHEET_COLUMNS]


def write_film(frames_FHWC: np.ndarray, path: Path, crf: int) -> None:
    """H.264 in mp4 that browsers begin to play while they load it."""
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS))
        stream.height, stream.width, stream.pix_fmt = *frames_FHWC.shape[1:3], "yuv420p"
        stream.options = {"crf": str(crf), "preset": "veryslow"}
        for frame in frames_FHWC:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.tiny_world.film")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--out", type=Path, default=Path("docs/images/tiny-world-walks.mp4"))
    parser.add_argument("--frames", type=int, default=RUN_FRAMES, help="of a run, two walks")
    parser.add_argument("--sheet", type=Path, default=Path("recipes/tiny_world/results/walks.webp"))
    parser.add_argument("--crf", type=int, default=38, help="x264's quality; more is smaller")
    args = parser.parse_args(argv)
    shown = halves(long_runs(args.frames, args.weights, args.device))
    contact_sheet(sheet(shown), args.sheet)
    write_film(mosaic(shown[:, -FILM_FRAMES:]), args.out, args.crf)


if __name__ == "__main__":
    main()
