"""Checks paged attention on a CUDA machine against a float64 oracle, and times it. Prints one JSON line.

    PYTHONPATH=. python recipes/gpu/attention_check.py [--limit-s 150]        (wheels in ./wheels are used if present)

Parts, each on its own so that one failure hides no other: SDPA and FlashInfer (FA2, FA3 where it imports) on small
shapes that cross sink and window with pages that do not divide a frame; then one LingBot-sized layer (1,560 tokens a
frame, pages of 16, blocks of 3 frames, 40 heads of 128, 15 frames of history, bf16) with errors on sampled queries
and the time of one probe. FlashInfer compiles its kernels on first use (FA2 about 30 s, FA3 about 100 s); a watchdog
prints what is known and leaves in time. Exit status 0: everything that could run was within tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any


def install_wheels(folder: Path) -> None:
    """A machine without a network: take the packages that lie in ``folder`` (nothing happens when there is none)."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        return
    target = tempfile.mkdtemp(prefix="wheels-")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        target,
    ]
    subprocess.run([*command, *map(str, wheels)], check=False, timeout=60)
    sys.path.insert(0, target)


# ruff: noqa: E402  (wheels and the checkout must be importable before anything of them is imported)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
install_wheels(Path("wheels"))

import torch
from torch import Tensor

from realtime_omni.kv.attention.flashinfer import FlashInferBackend, probe
from realtime_omni.kv.attention.plan import AttentionBackend, RowPlan
from realtime_omni.kv.attention.sdpa import SdpaBackend
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage

DEVICE = "cuda"
# Relative to the largest output: bf16 keeps 8 bits, and the float32 kernels sum in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1.5e-2}
report: dict[str, Any] = {"parts": {}}
started = time.monotonic()


def oracle(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Plain softmax attention in float64 on the CPU; q [T, h, d], keys and values lists of [n, h, d]."""
    q64 = q.double().cpu().transpose(0, 1)
    k64 = torch.cat([k.double().cpu() for k in keys]).transpose(0, 1)
    v64 = torch.cat([v.double().cpu() for v in values]).transpose(0, 1)
    scores = (q64 @ k64.transpose(1, 2)) / q.shape[-1] ** 0.5
    out: Tensor = scores.softmax(-1) @ v64
    return out.transpose(0, 1)


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest wanted magnitude."""
    return float((got.double().cpu() - want).abs().max() / want.abs().max())


def small(backend: AttentionBackend, dtype: torch.dtype, tokens: int, heads: int = 2, extra: int = 0) -> float:
    """Two sessions out of step, nine blocks each past sink and window; the worst error of probes and clean passes."""
    spec = KVSpec(
        num_layers=2,
        num_kv_heads=heads,
        head_dim=128,
        tokens_per_frame=tokens,
        frames_per_block=2,
        window_frames=5,
        sink_frames=1,
        page_tokens=16,
        scratch_tokens_per_branch=extra,
        dtype_bytes=dtype.itemsize,
        max_in_flight=2,
    )
    book = KVBook(spec, sessions=2)
    storage = KVStorage(spec, book.pool.statistics().total + spec.scratch_pages, device=DEVICE, dtype=dtype)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    shape = (2 * tokens + extra, heads, 128)
    kept: dict[str, list[list[tuple[Tensor, Tensor]]]] = {"a": [[], []], "b": [[], []]}
    worst = 0.0
    for session in kept:
        book.begin(session)
    for tick in range(10):
        names = [name for name in kept if tick > 1 or name == "a"]
        blocks = {name: book.plan_block(name) for name in names}
        rows = [RowPlan.of(blocks[name].branches[0], extra_tokens=extra) for name in names]
        plan = backend.plan(rows, storage)
        for commit in (False, False, True):
            for layer in range(2):
                q, k, v = (
                    torch.randn((len(names), *shape), generator=generator, device=DEVICE, dtype=torch.float32).to(dtype)
                    for _ in range(3)
                )
                out = plan.attend(layer, q, k, v, rows=range(len(names)), commit=commit)
                for at, name in enumerate(names):
                    seen = [frame.index for frame in rows[at].history]
                    past = [kept[name][layer][index] for index in seen]
                    want = oracle(q[at], [*(p[0] for p in past), k[at]], [*(p[1] for p in past), v[at]])
                    worst = max(worst, relative(out[at], want))
                    if commit:
                        for frame in range(2):
                            part = slice(frame * tokens, (frame + 1) * tokens)
                            kept[name][layer].append((k[at, part].clone(), v[at, part].clone()))
        for at, name in enumerate(names):
            assert plan.complete(at)
            book.commit(blocks[name])
        plan.close()
    book.check()
    if not worst <= TOLERANCE[dtype]:
        raise AssertionError(f"error {worst:.3g} is over {TOLERANCE[dtype]:.3g}")
    return worst


def lingbot(backend: AttentionBackend, repeats: int = 8) -> dict[str, float]:
    """One layer at full size: error of sampled queries, milliseconds of one probe, and of planning with the first
    probe.
    """
    tokens, heads, dtype = 1560, 40, torch.bfloat16
    spec = KVSpec(1, heads, 128, tokens, 3, 9, 9, page_tokens=16)
    book = KVBook(spec, sessions=1)
    storage = KVStorage(spec, book.pool.statistics().total + spec.scratch_pages, device=DEVICE, dtype=dtype)
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    book.begin("a")
    for _ in range(7):
        block = book.plan_block("a")
        for pools in (storage.flat_k, storage.flat_v):
            slots = storage.slots(block.branches[0].frames)
            pools[0][slots] = torch.randn((len(slots), heads, 128), generator=generator, device=DEVICE).to(dtype)
        book.commit(block)
    row = RowPlan.of(book.plan_block("a").branches[0])
    q, k, v = (torch.randn((1, row.tokens, heads, 128), generator=generator, device=DEVICE).to(dtype) for _ in range(3))
    torch.cuda.synchronize()
    plan = backend.plan([row], storage)
    begun = time.perf_counter()
    out = plan.attend(0, q, k, v, rows=[0], commit=False)
    torch.cuda.synchronize()
    first_ms = (time.perf_counter() - begun) * 1e3
    begun = time.perf_counter()
    for _ in range(repeats):
        plan.attend(0, q, k, v, rows=[0], commit=False)
    torch.cuda.synchronize()
    probe_ms = (time.perf_counter() - begun) * 1e3 / repeats
    past_k, past_v = storage.read(0, row.history)
    picked = torch.arange(0, row.tokens, 97, device=DEVICE)
    want = oracle(q[0, picked, :2], [past_k[:, :2], k[0, :, :2]], [past_v[:, :2], v[0, :, :2]])
    error = relative(out[0, picked, :2], want)
    flops = 4.0 * row.tokens * (row.history_tokens + row.tokens) * heads * 128
    plan.attend(0, q, k, v, rows=[0], commit=True)
    plan.close()
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(f"error {error:.3g} is over {TOLERANCE[dtype]:.3g}")
    return {"error": error, "first_ms": first_ms, "probe_ms": probe_ms, "tflops": flops / probe_ms / 1e9}


def paged(kernel: str, tokens: int, extra: int) -> float:
    """``small`` through one FlashInfer kernel family."""
    return small(FlashInferBackend(kernel=kernel), torch.bfloat16, tokens, extra=extra)


def paged_lingbot(kernel: str) -> dict[str, float]:
    """``lingbot`` through one FlashInfer kernel family."""
    return lingbot(FlashInferBackend(kernel=kernel))


def part(name: str, work: Callable[[], Any]) -> None:
    """Run one part and note its result and seconds, or its failure."""
    begun = time.monotonic()
    try:
        report["parts"][name] = {"ok": True, "result": work()}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        report["parts"][name] = {"ok": False, "why": f"{type(error).__name__}: {error}"[:300]}
    report["parts"][name]["seconds"] = round(time.monotonic() - begun, 2)
    print(name, report["parts"][name], file=sys.stderr, flush=True)


def finish(status: int | None = None) -> None:
    """Print the report and leave at once, whatever is still compiling."""
    report["seconds"] = round(time.monotonic() - started, 1)
    report["timed_out"] = status is not None
    failed = any(not entry["ok"] for entry in report["parts"].values())
    print(json.dumps(report), flush=True)
    os._exit(status if status is not None else int(failed))


def main() -> None:
    """Run every part that can run here, within the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=150.0)
    limit_s = parser.parse_args().limit_s
    watchdog = threading.Timer(limit_s, finish, args=(3,))
    watchdog.daemon = True
    watchdog.start()
    report["torch"] = torch.__version__
    if not torch.cuda.is_available():
        report["why"] = "torch sees no CUDA device"
        finish()
    report["device"] = torch.cuda.get_device_name()
    found = probe()
    report["flashinfer"] = found.reason
    part("sdpa float32, 39 tokens, pages of 16", lambda: small(SdpaBackend(), torch.float32, 39))
    part("sdpa float64, 39 tokens, 5 extra", lambda: small(SdpaBackend(), torch.float64, 39, extra=5))
    part("sdpa bf16, 40 tokens", lambda: small(SdpaBackend(), torch.bfloat16, 40))
    part("sdpa lingbot, gathering each layer", lambda: lingbot(SdpaBackend()))
    part("sdpa lingbot, history kept", lambda: lingbot(SdpaBackend(cache_history=True)))
    for kernel in ("fa2", "fa3") if found.available else ():
        for tokens, extra in ((40, 0), (39, 0), (40, 5)):
            part(f"{kernel} bf16, {tokens} tokens, {extra} extra", partial(paged, kernel, tokens, extra))
        part(f"{kernel} lingbot", partial(paged_lingbot, kernel))
    finish()


if __name__ == "__main__":
    main()
