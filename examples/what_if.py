"""What if? One walk through tiny-world, forked three ways at the same moment, as a contact sheet.

    python examples/what_if.py [--past 4] [--future 6] [--out what-if.png]

A fork costs no copy of what the world remembers: all three branches start from the very same keys and values, and the same
keys are held in all of them. Only the prompt differs. One row a branch; left of the gap is the past that they share.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools

import numpy as np
from PIL import Image

from realtime_omni import ControlInput, SessionEvent, SessionManager

BRANCHES = ("sandstone ruins in a desert", "a city street at night", None)
"""Prompts; None goes on as before."""
GAP = 12


def step(event_id: int, prompt: str | None = None) -> SessionEvent:
    """Forward, with a turn every third block, right and left by turns."""
    turn = {2: ["l"], 5: ["j"]}.get(event_id % 6, [])
    held = ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": ["w", *turn]})
    return SessionEvent(event_id, prompt=prompt, controls=(held,))


async def what_if(past: int, future: int, seed: int) -> np.ndarray:
    """uint8 [branches, past + future, H, W, 3]: the last frame of every chunk."""
    async with SessionManager.from_recipe("tiny-world") as manager:
        session = await manager.create_session(prompt="a snowy valley", seed=seed)
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
    """One row a branch, a white gap where they part."""
    rows, columns, height, width, _ = frames.shape
    sheet = np.full((rows * height, columns * width + GAP, 3), 255, np.uint8)
    for row, column in itertools.product(range(rows), range(columns)):
        left = column * width + (GAP if column >= past else 0)
        sheet[row * height : (row + 1) * height, left : left + width] = frames[row, column]
    return Image.fromarray(sheet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--past", type=int, default=4)
    parser.add_argument("--future", type=int, default=6)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", default="what-if.png")
    args = parser.parse_args()
    contact_sheet(asyncio.run(what_if(args.past, args.future, args.seed)), args.past).save(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
