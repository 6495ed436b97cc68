"""Walk through tiny-world in process and save what was seen as a contact sheet.

    python examples/walk.py [--prompt "a snowy valley"] [--chunks 16] [--out walk.png]

The loop that a researcher writes: accept an event, ask for the next chunk, look at the frames.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from realtime_omni import ControlInput, SessionEvent, SessionManager
from realtime_omni.errors import ArgumentError


def keys_for(chunk: int) -> list[str]:
    """Forward, a turn to the right every third block."""
    return ["w", "l"] if chunk % 3 == 2 else ["w"]


async def walk(prompt: str, chunks: int, seed: int) -> np.ndarray:
    """uint8 [chunks, H, W, 3]: the last frame of every chunk."""
    seen = []
    async with SessionManager.from_recipe("tiny-world") as manager:
        session = await manager.create_session(prompt=prompt, seed=seed)
        for index in range(chunks):
            held = ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": keys_for(index)})
            await session.accept_event(SessionEvent(index, controls=(held,)))
            chunk = await session.next_chunk()
            frames_TCHW = chunk.artifacts["frames"].data
            seen.append(frames_TCHW[-1].transpose(1, 2, 0))
            print(
                f"chunk {chunk.chunk_index}: {chunk.timings.tick_ms:.0f} ms, events {chunk.metadata.applied_event_ids}"
            )
        await session.close()
    return np.stack(seen)


def contact_sheet(frames: np.ndarray, columns: int = 4) -> Image.Image:
    """Frames in reading order."""
    count, height, width, _ = frames.shape
    rows = -(-count // columns)
    sheet = np.zeros((rows * height, columns * width, 3), np.uint8)
    for i, frame in enumerate(frames):
        top, left = i // columns * height, i % columns * width
        sheet[top : top + height, left : left + width] = frame
    return Image.fromarray(sheet)


def picture_path(text: str) -> str:
    """A type for argparse: where a picture can be written."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".jpg", ".webp") or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: a .png, .jpg or .webp in a folder that can be written to")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="a snowy valley")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=picture_path, default="walk.png")
    args = parser.parse_args()
    if args.chunks < 1:
        parser.error("--chunks: 1 or more")
    try:
        frames = asyncio.run(walk(args.prompt, args.chunks, args.seed))
    except ArgumentError as error:  # a seed or a prompt that is none
        parser.error(f"--{error}")
    contact_sheet(frames).save(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
