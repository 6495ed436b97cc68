"""Saves sessions on one device and goes on with them on the other. Prints one JSON line.

    PYTHONPATH=. python recipes/gpu/snapshot_check.py [--models tiny-world null] [--chunks 6] [--device cuda]

Per model, in float32 with TF32 off: a session is saved on the CPU and restored on the device, and the other way round. The
first chunk that follows is compared with that of the session that was never moved: float tensors of the model's state within
1e-5 of their largest value, pictures within one level (a difference of 1e-5 can round to the other side). Later chunks are
reported and not judged: a world that feeds on its own pictures makes small differences larger. On the device itself the
restored session must repeat the saved one bit for bit, in every chunk. Also: the bytes by owner against
``torch.cuda.memory_allocated``. Exit status 0: everything was within tolerance.
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
from realtime_omni.engine.accounting import storages
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.inline import InlineEngine

TOLERANCE = 1e-5
LEVELS = 1
ROUNDING = 511
"""Bytes that CUDA's allocator may add to one allocation: it hands out multiples of 512."""


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


def following(engine: InlineEngine, chunks: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """The state's float tensors after the first chunk, and the artifacts of all chunks."""
    names = tuple(a.name for a in engine.runner.spec.artifacts)
    state: dict[str, np.ndarray] = {}
    out = []
    for number in range(chunks):
        artifacts = engine.next("a", outputs=names).artifacts
        if number == 0:
            packed = engine.runner.model.pack(engine.state_of("a")).tensors
            state = {n: t.float().cpu().numpy() for n, t in packed.items() if t.is_floating_point()}
        out.append({n: np.asarray(torch.as_tensor(a.data).float().cpu()) for n, a in artifacts.items()})
    return state, out


def worst(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> dict[str, float]:
    return {n: float(np.abs(one[n] - two[n]).max(initial=0)) for n in one}


def check(model: str, source: str, target: str, chunks: int) -> dict[str, Any]:
    """Saved on ``source``, restored on ``target``; the session that stays is the reference."""
    stays = walked(config_for(model, source), chunks)
    data = stays.snapshot("a").to_bytes()
    moved = InlineEngine(None, config_for(model, target))
    moved.restore(Snapshot.from_bytes(data))
    (state, got), (wanted_state, wanted) = following(moved, chunks), following(stays, chunks)
    exact = source == target
    allowed = {
        n: 0.0 if exact else TOLERANCE * max(float(np.abs(t).max(initial=0)), 1.0) for n, t in wanted_state.items()
    }
    for artifact in stays.runner.spec.artifacts:
        allowed[artifact.name] = 0.0 if exact else TOLERANCE if artifact.representation == "latent" else float(LEVELS)
    differences = [worst(a, b) for a, b in zip(got, wanted, strict=True)]
    first = {**worst(state, wanted_state), **differences[0]}
    judged = [first, *differences[1:]] if exact else [first]
    return {
        "model": model,
        "from": source,
        "to": target,
        "bytes": len(data),
        "first": first,
        "last": differences[-1],
        "allowed": allowed,
        "ok": all(found[name] <= allowed[name] for found in judged for name in found),
    }


def check_bytes(model: str, device: str, chunks: int) -> dict[str, Any]:
    """Bytes by owner, less what the model keeps on the host, against what CUDA's allocator has handed out for all of it."""
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    engine = walked(config_for(model, device), chunks)
    engine.cycle(2)
    gc.collect()
    allocated = torch.cuda.memory_allocated(device) - before
    held = storages(engine.runner)
    on_host = sum(size for place, size in storages(engine.runner.model).items() if place < 0)
    counted = engine.runner.memory().total - on_host
    rounding = ROUNDING * sum(place >= 0 for place in held)
    return {
        "model": model,
        "counted": counted,
        "on_host": on_host,
        "allocated": allocated,
        "rounding": rounding,
        "ok": abs(counted - allocated) <= 0.01 * allocated + rounding,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["null", "tiny-world"])
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
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
