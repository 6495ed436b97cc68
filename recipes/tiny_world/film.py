"""Ten walks of two minutes that begin in all six places: a film of their end, and a sheet of pictures.

    python -m recipes.tiny_world.film [--film docs/images/tiny-world-walks.mp4] [--sheet recipes/tiny_world/results/walks.jpg]

Owns: which walks are shown and how they are laid out. The walks are `evaluate`'s, of the player that turns where its
picture is plain, on held-out maps of their own; nothing is chosen after it was seen.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

from recipes.tiny_world.classifier import load_classifier
from recipes.tiny_world.evaluate import WEIGHTS, LongRuns, contact_sheet, load_net, long_run_scores, watched_model
from recipes.tiny_world.rollout import ReferencePlay
from recipes.tiny_world.simulator import Simulator

FPS = 8
WALKS, COLUMNS = 10, 5
WALK_FRAMES = 120 * FPS
FILM_FRAMES = 24 * FPS
SEED = 1  # the first of which ten walks begin in all six places
PICTURES = 12  # of a walk on the sheet


def walks(frames: int, weights: Path, device: str) -> tuple[Tensor, dict]:
    """The walks [WALKS, frames, 3, H, W] in [-1, 1], and what the collapse test says of them."""
    net = load_net(weights, device)
    per = net.config.frames_per_block
    runs = LongRuns.draw(Simulator(net.config.image_size, device), WALKS, frames, SEED, per)
    with torch.inference_mode():
        shown, keys = watched_model(runs, ReferencePlay(net, WALKS, SEED), per)
        scores = long_run_scores(shown, keys, runs.place, runs.expected, load_classifier(device))
    return shown, scores


def mosaic(walks_BFCHW: Tensor) -> np.ndarray:
    """uint8 [F, rows * H, COLUMNS * W, 3]: the walks side by side."""
    pictures = ((walks_BFCHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).cpu()
    rows = pictures.unflatten(0, (-1, COLUMNS))  # [rows, columns, F, C, H, W]
    return rows.permute(2, 0, 4, 1, 5, 3).flatten(3, 4).flatten(1, 2).numpy()


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
    parser.add_argument("--film", type=Path, default=Path("docs/images/tiny-world-walks.mp4"))
    parser.add_argument("--sheet", type=Path, default=Path("recipes/tiny_world/results/walks.jpg"))
    parser.add_argument("--frames", type=int, default=WALK_FRAMES, help="of a walk; the film shows the last 24 seconds")
    parser.add_argument("--crf", type=int, default=36, help="x264's quality; more is smaller")
    args = parser.parse_args(argv)
    shown, scores = walks(args.frames, args.weights, args.device)
    print(scores)
    write_film(mosaic(shown[:, -FILM_FRAMES:]), args.film, args.crf)
    at = torch.linspace(2, shown.shape[1] - 1, PICTURES).long()
    contact_sheet(shown[:, at], args.sheet)


if __name__ == "__main__":
    main()
