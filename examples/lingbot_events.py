"""Runs a file of events through LingBot-World in this process, and keeps the latents of every chunk and what is known of it.

    python examples/lingbot_events.py events.jsonl --set options.checkpoint=./lingbot-world-v2 [--out walk] [--image start.png]

One line of the file is one block::

    {"event_id": 0, "prompt": "a street in the rain", "frames": [["w"], ["w"], ["w", "l"]]}
    {"event_id": 1, "frames": [["w"], [], []]}

``frames`` are the keys of each latent frame; of ``prompt`` and ``frames`` one must be there. The whole file is checked before a
weight is read. For chunk n it writes ``chunk-n.safetensors`` (``latents``, float32 [frames, channels, h, w]) and
``chunk-n.json``, and in the end ``summary.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from realtime_omni import ControlInput, SessionEvent, SessionManager
from realtime_omni.errors import ArgumentError, ConfigError

KEYS = "lingbot.camera_actions.v1"
MAX_LINE = 1 << 20
"""Characters."""


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One block's event. A prompt that is given is not blank."""

    event_id: Annotated[int, Meta(ge=0)]
    prompt: Annotated[str, Meta(pattern=r"\S")] | None = None
    frames: list[list[str]] | None = None


def read_events(path: Path, frames_per_block: int) -> list[SessionEvent]:
    """Raises SystemExit that names the file's line and what is wrong with it."""
    events: list[SessionEvent] = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                events.append(read_event(text, frames_per_block))
                if len(events) > 1 and events[-1].event_id <= events[-2].event_id:
                    raise ValueError(f"event_id {events[-1].event_id} does not rise")
            except ValueError as error:
                raise SystemExit(f"{path.name}:{number}: {error}") from None
    if not events:
        raise SystemExit(f"{path.name}: no event in it")
    return events


def read_event(text: str, frames_per_block: int) -> SessionEvent:
    """Raises ValueError."""
    if len(text) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} characters")
    try:
        line = msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(str(error)) from None
    if line.prompt is None and line.frames is None:
        raise ValueError("neither prompt nor frames")
    if line.frames is not None and len(line.frames) != frames_per_block:
        raise ValueError(f"frames must be {frames_per_block} lists of keys, not {len(line.frames)}")
    script = {"mode": "script", "frames": line.frames}
    controls = () if line.frames is None else (ControlInput("camera", KEYS, script),)
    return SessionEvent(line.event_id, prompt=line.prompt, controls=controls)


async def run(manager: SessionManager, events: list[SessionEvent], out: Path, **session: Any) -> dict[str, Any]:
    """Write every chunk's two files to .`out``; the summary. ``session``: for ``create_session`` (prompt, seed, image)."""
    async with manager:
        world = await manager.create_session(outputs=("latents",), **session)
        rows = [await step(world, event, out) for event in events]
        await world.close()
    latencies = [row["latency_seconds"] for row in rows]
    summary = {
        "chunks": len(rows),
        "frames": sum(row["frames"] for row in rows),
        "first_latency_seconds": latencies[0],
        "median_latency_seconds": float(np.median(latencies)),
        "finite": all(row["finite"] for row in rows),
    }
    keep(out, "summary", summary)
    return summary


async def step(world: Any, event: SessionEvent, out: Path) -> dict[str, Any]:
    started = time.monotonic()
    await world.accept_event(event)
    chunk = await world.next_chunk()
    latency = time.monotonic() - started
    latents = chunk.artifacts["latents"].data
    row = {
        "chunk_index": chunk.chunk_index,
        "applied_event_ids": list(chunk.metadata.applied_event_ids),
        "prompt": chunk.prompt,
        "first_frame": chunk.first_frame,
        "frames": chunk.frames,
        "latency_seconds": round(latency, 6),
        "shape": list(latents.shape),
        "dtype": str(latents.dtype),
        "finite": bool(np.isfinite(latents).all()),
    }
    keep(out, f"chunk-{chunk.chunk_index:04}", row, latents)
    print(f"chunk {row['chunk_index']}: events {row['applied_event_ids']}, {row['shape']}, {latency:.3f} s")
    return row


def keep(out: Path, name: str, row: dict[str, Any], latents: np.ndarray | None = None) -> None:
    from safetensors.numpy import save_file

    (out / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
    if latents is not None:
        save_file({"latents": np.ascontiguousarray(latents)}, out / f"{name}.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("events", type=Path)
    parser.add_argument("--out", type=Path, default=Path("lingbot-events"))
    parser.add_argument("--model", default="lingbot-world", help="a recipe, or a model that takes the same keys")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change the recipe")
    parser.add_argument("--prompt", help="in force until an event changes it; default: the model's")
    parser.add_argument("--image", type=Path, help="what the world starts from")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    try:
        manager = SessionManager.from_recipe(args.model, args.set)
        events = read_events(args.events, int(manager.config.options.get("frames_per_block", 3)))
        args.out.mkdir(parents=True, exist_ok=True)
        image = None if args.image is None else picture(args.image)
        print(asyncio.run(run(manager, events, args.out, prompt=args.prompt, seed=args.seed, image=image)))
    except (ConfigError, ArgumentError, OSError) as error:  # what is not there or cannot be read, a bad seed
        parser.error(str(error))


def picture(path: Path) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
