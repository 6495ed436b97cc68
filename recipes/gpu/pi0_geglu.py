"""Times what lies between the two products of a language layer's MLP in several ways, alone. Prints JSON lines.

    PYTHONPATH=. python recipes/gpu/pi0_geglu.py [--tokens 13056]         (16 robots' prefixes; twenty seconds on one H200)
    PYTHONPATH=. python recipes/gpu/pi0_geglu.py --device cpu --tokens 48 --width 256     (its own test)

``error``: of the first tokens to the formula in float64, relative to the largest number; ``gb_s``: two reads and a write.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from realtime_omni.models.common.vla.decoder import gelu
from realtime_omni.models.common.vla.gated import geglu, written_out

ROWS = 16
REPEATS = 20
KERNELS = ((1024, 4), (2048, 4), (2048, 8), (4096, 8))
"""Columns and warps of a program."""


def formula(x: Tensor) -> Tensor:
    """As a layer has it."""
    gate, up = x.chunk(2, dim=-1)
    return gelu(gate) * up


def ways(device: torch.device, width: int) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    yield "torch", formula
    yield "shipped", geglu
    if device.type != "cuda" or find_spec("triton") is None:
        return
    from realtime_omni.models.common.vla.geglu_kernel import geglu as kernel

    for block, warps in KERNELS:
        if width % block == 0:
            yield f"kernel {block} x {warps}", lambda x, block=block, warps=warps: kernel(x, block, warps)  # type: ignore[misc]
    yield "compiled", torch.compile(formula)
    yield "compiled, tuned", torch.compile(formula, options={"coordinate_descent_tuning": True})


@torch.no_grad()
def measured(device: torch.device, tokens: int, width: int) -> Iterator[dict[str, Any]]:
    """``tokens``: of all robots together, a multiple of ``ROWS``."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(ROWS, tokens // ROWS, 2 * width, device=device).to(dtype)
    torch._dynamo.mark_dynamic(x, 1)  # as a server's prefixes are
    some = x[:1, :64]
    wanted = written_out(some.double())
    for name, way in ways(device, width):
        began_s = time.perf_counter()
        try:
            out = way(x)
            gap = float((out[:1, :64].double() - wanted).abs().max() / wanted.abs().max())
            ms = timed(lambda way=way: way(x), device)  # type: ignore[misc]
        except Exception as error:
            yield {"way": name, "failed": str(error)[-300:]}
            continue
        moved = (x.numel() + out.numel()) * x.element_size()
        whole_s = round(time.perf_counter() - began_s, 1)
        yield {"way": name, "ms": round(ms, 3), "gb_s": round(moved / ms / 1e6), "error": gap, "took_s": whole_s}


def timed(work: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call, the median of several in a row."""
    for _ in range(3):
        work()
    taken = list[float]()
    if device.type != "cuda":
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            work()
            taken.append((time.perf_counter() - began_s) * 1000)
        return median(taken)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return median(begin.elapsed_time(end) for begin, end in pairwise(marks))


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the gate of a language layer's MLP.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=13056)
    parser.add_argument("--width", type=int, default=16384)
    args = parser.parse_args()
    for way in measured(torch.device(args.device), args.tokens, args.width):
        print(json.dumps(way), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
