"""Saves sessions on one device and goes on with them on the other. Prints one JSON line.

    PYTHONPATH=. python recipes/gpu/snapshot_check.py [--models tiny-world null] [--chunks 6] [--device cuda]

Per model, in float32: a session is saved on the CPU and restored on the device, and the other way round; the chunks that
follow are compared with those of the session that was never moved (largest difference of a picture in 0..1, allowed 1e-5
before rounding to levels, so 1 level after it). On the device itself the restored session must repeat the saved one bit for
bit. Also: the bytes by owner against ``torch.cuda.memory_allocated``. Exit status 0: everything was within tolerance.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from typing import Any

import numpy as np
import torch

from realtime_omni.config import Config, load
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.inline import InlineEngine

LATENT_TOLERANCE = 1e-5
LEVELS = 1
"""A picture is rounded to 256 levels: a difference of 1e-5 can move a value across the border to the next one."""


def config_for(model: str, device: str) -> Config:
    changes = ["kv.requested_sessions=2", "session.max_sessions=2", "kv.memory_bytes=1073741824"]
    return load(model, {}, [*changes, f"device={device}", "dtype=float32"])


def walked(config: Config, chunks: int) -> InlineEngine:
    engine = InlineEngine(None, config)
    engine.create("a", seed=3)
    engine.accept("a", 0, prompt=engine.runner.spec.prompts[-1])
    for _ in range(chunks):
        engine.next("a")
    return engine


def following(engine: InlineEngine, chunks: int) -> list[dict[str, np.ndarray]]:
    names = tuple(a.name for a in engine.runner.spec.artifacts)
    out = []
    for _ in range(chunks):
        artifacts = engine.next("a", outputs=names).artifacts
        out.append({n: np.asarray(torch.as_tensor(a.data).float().cpu()) for n, a in artifacts.items()})
    return out


def worst(one: list[dict[str, np.ndarray]], two: list[dict[str, np.ndarray]]) -> dict[str, float]:
    return {n: max(float(np.abs(a[n] - b[n]).max()) for a, b in zip(one, two, strict=True)) for n in one[0]}


def check(model: str, source: str, target: str, chunks: int) -> dict[str, Any]:
    """Saved on ``source``, restored on ``target``; the session that stays is the reference."""
    stays = walked(config_for(model, source), chunks)
    data = stays.snapshot("a").to_bytes()
    moved = InlineEngine(None, config_for(model, target))
    moved.restore(Snapshot.from_bytes(data))
    difference = worst(following(moved, chunks), following(stays, chunks))
    exact = source == target
    limits = {
        a.name: 0.0 if exact else LATENT_TOLERANCE if a.representation == "latent" else float(LEVELS)
        for a in stays.runner.spec.artifacts
    }
    return {
        "model": model,
        "from": source,
        "to": target,
        "bytes": len(data),
        "difference": difference,
        "allowed": limits,
        "ok": all(difference[name] <= limits[name] for name in difference),
    }


def check_bytes(model: str, device: str, chunks: int) -> dict[str, Any]:
    """Bytes by owner against what CUDA's allocator says has been handed out since before the model was loaded."""
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    engine = walked(config_for(model, device), chunks)
    engine.cycle(2)
    gc.collect()
    allocated = torch.cuda.memory_allocated(device) - before
    counted = engine.runner.memory().total
    off = abs(counted - allocated) / max(allocated, 1)
    return {"model": model, "counted": counted, "allocated": allocated, "off": off, "ok": off <= 0.01}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["null", "tiny-world"])
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    pairs = [("cpu", options.device), (options.device, "cpu"), (options.device, options.device)]
    moves = [check(model, *pair, options.chunks) for model in options.models for pair in pairs]
    on_device = options.device.startswith("cuda")
    accounts = [check_bytes(model, options.device, options.chunks) for model in options.models] if on_device else []
    conditions = {"torch": torch.__version__, "python": platform.python_version(), "device": options.device}
    if on_device:
        conditions["name"] = torch.cuda.get_device_name(options.device)
    ok = all(found["ok"] for found in (*moves, *accounts))
    print(json.dumps({"conditions": conditions, "moves": moves, "bytes": accounts, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
