"""What if? One walk through tiny-world, forked three ways at the same moment, as a contact sheet.

    python examples/what_if.py [--past 4] [--future 6] [--out what-if.png]

A fork costs no copy of what the world remembers: all three branches start from the very same keys and values, and the same
keys are held in all of them. Only the prompt differs. One row a branch, one picture a chunk (its last frame); left of the
lines is the past that they share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from realtime_omni import ControlInput, SessionEvent, SessionManager
from realtime_omni.errors import ArgumentError

PROMPT = "a snowy valley"
BRANCHES = ("sandstone ruins in a desert", "a city street at night", None)
"""Prompts; None goes on as before."""
GAP, FORK, CAPTION, FONT = 2, 90, 26, 15
"""Pixels: between pictures, the width of the lines at the fork, the height of a caption, the size of its letters."""
INK, PAPER = "#333333", "white"


def step(event_id: int, prompt: str | None = None) -> SessionEvent:
    """Forward, with a turn every third block, right and left by turns."""
    turn = {2: ["l"], 5: ["j"]}.get(event_id % 6, [])
    held = ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": ["w", *turn]})
    return SessionEvent(event_id, prompt=prompt, controls=(held,))


async def what_if(past: int, future: int, seed: int) -> np.ndarray:
    """uint8 [branches, past + future, H, W, 3]: the last frame of every chunk."""
    async with SessionManager.from_recipe("tiny-world") as manager:
        session = await manager.create_session(prompt=PROMPT, seed=seed)
        shared = [await seen(session, step(index)) for index in range(past)]
        branches = [await session.fork() for _ in BRANCHES]
        rows = []
        for branch, prompt in zip(branches, BRANCHES, strict=True):
            print(f"branch {branch.id} from chunk {branch.chunk_index}: {prompt or 'as before'}")
            prompts = itertools.chain([prompt], itertools.repeat(None))
            rows.append([await seen(branch, step(past + i, next(prompts))) for i in range(future)])
        return np.array([shared + row for row in rows])


async def seen(session, event: SessionEvent) -> np.ndarray:
    """The last frame of the next chunk, uint8 [H, W, 3]."""
    await session.accept_event(event)
    chunk = await session.next_chunk()
    return chunk.artifacts["frames"].data[-1].transpose(1, 2, 0)


def contact_sheet(frames: np.ndarray, past: int) -> Image.Image:
    """The shared past once, in the middle; lines to one row for each branch, captioned with what it was told."""
    rows, columns, height, width, _ = frames.shape
    step_x, step_y, parted = width + GAP, CAPTION + height + GAP, past * (width + GAP) + FORK
    sheet = Image.new("RGB", (parted + (columns - past) * step_x, rows * step_y), PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(FONT)
    middle = (rows - 1) * step_y // 2
    for column in range(past):
        sheet.paste(Image.fromarray(frames[0, column]), (column * step_x, middle + CAPTION))
    draw.text((GAP, middle + 2), f'one session: "{PROMPT}"', INK, font)
    end = past * step_x - GAP
    draw.text((end, middle + step_y), f"chunks 0 to {past - 1}, then fork()", INK, font, anchor="ra")
    for row, prompt in enumerate(BRANCHES):
        top = row * step_y
        for column in range(past, columns):
            left = parted + (column - past) * step_x
            sheet.paste(Image.fromarray(frames[row, column]), (left, top + CAPTION))
        said = f'told at chunk {past}: "{prompt}"' if prompt else "told nothing new"
        draw.text((parted + GAP, top + 2), f"fork {row + 1}, {said}", INK, font)
        draw.line((end + 6, middle + CAPTION + height // 2, parted - 6, top + CAPTION + height // 2), INK, 2)
    return sheet


def picture_path(text: str) -> str:
    """A type for argparse: where a picture can be written."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".jpg", ".webp") or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: a .png, .jpg or .webp in a folder that can be written to")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--past", type=int, default=4)
    parser.add_argument("--future", type=int, default=6)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=picture_path, default="what-if.png")
    args = parser.parse_args()
    if args.past < 1 or args.future < 1:
        parser.error("--past, --future: 1 or more")
    try:
        frames = asyncio.run(what_if(args.past, args.future, args.seed))
    except ArgumentError as error:  # a seed that is none
        parser.error(f"--{error}")
    contact_sheet(frames, args.past).save(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
