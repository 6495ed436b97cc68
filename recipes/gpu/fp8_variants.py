"""What eight bits cost on a CUDA machine, candidate by candidate, at LingBot's shapes. JSON lines.

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/fp8_variants.py [--limit-s 60] [--scale tiny --device cpu]

Every candidate is timed warm (CUDA events, the best of three rounds) and compared with the same in bfloat16 or float32. Parts,
each on its own so that one failure hides no other:

``fused``      the kernels between two products: whether they compute what torch does, and microseconds of each.
``attention``  4,680 queries of 28,080 keys, 40 heads of 128: bfloat16, FlashAttention-3 in one call and as
               a pass does, cuDNN.
``cross``      attention over the text, bfloat16.
``matrices``   products with a scale per row and with one per tensor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.float8 import E4M3, to_e4m3
from realtime_omni.kv.attention import flash3 as flash3_kernels
from realtime_omni.kv.attention.fp8 import Fp8Kernel, reference
from realtime_omni.models.common.fp8 import Fp8Linear
from realtime_omni.models.common.wan import fused

Found = dict[str, Any]


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        full = args.scale == "full"
        self.device, self.only, self.failed = args.device, args.parts, False
        self.tokens, self.seen, self.heads, self.size, self.text = (
            (4680, 28080, 40, 128, 512) if full else (32, 96, 2, 16, 8)
        )
        self.width, self.mlp = self.heads * self.size, 13824 if full else 64
        self.end_s = time.monotonic() + args.limit_s

    def part(self, name: str, work: Callable[[], Found]) -> None:
        if self.only and name.split()[0] not in self.only:
            return
        if time.monotonic() > self.end_s:
            print(json.dumps({"part": name, "skipped": "no time is left"}), flush=True)
            return
        began_s = time.monotonic()
        try:
            found = work()
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.failed = True
            found = {"failed": f"{type(error).__name__}: {error}"[:800]}
        print(json.dumps({"part": name, **found, "seconds": round(time.monotonic() - began_s, 1)}), flush=True)

    def ms(self, work: Callable[[], object], number: int = 10) -> float:
        for _ in range(2):
            work()
        if self.device == "cpu":
            return 0.0
        best = float("inf")
        for _ in range(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(number):
                work()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / number)
        return round(best, 4)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)


def off(got: Tensor, wanted: Tensor) -> float:
    return round(float((got.float() - wanted.float()).norm() / wanted.float().norm()), 5)


# ---------------------------------------------------------------------------------------------------------------- fused


def kernels_right(bench: Bench) -> Found:
    if bench.device == "cpu":
        return {"reference": "itself"}
    from realtime_omni.models.common.wan import kernels

    fused.check(kernels, torch.device(bench.device))
    return {"right": True}


def kernels_timed(bench: Bench) -> Found:
    do: Any = fused.TorchOperations()
    if bench.device != "cpu":
        from realtime_omni.models.common.wan import kernels as do  # type: ignore[no-redef]
    T, D = bench.tokens, bench.width
    x, part, camera = bench.normal(1, T, D), bench.normal(1, T, D), (bench.normal(1, T, D), bench.normal(1, T, D))
    modulation = bench.normal(1, 6, D, dtype=torch.float32)
    norm, affine = (modulation[:, 1], modulation[:, 0]), (bench.normal(D), bench.normal(D))
    qkv, wide = bench.normal(1, T, 3 * D), bench.normal(1, T, bench.mlp)
    angle = bench.normal(1, T, 1, bench.size // 2, dtype=torch.float32)
    weights = bench.normal(2, D, dtype=torch.float32)
    shape: dict[str, Any] = {"half": bench.size // 2, "eps": 1e-6}
    one: dict[str, Any] = {"about_one": True, "eps": 1e-6}
    works: dict[str, Callable[[], object]] = {
        "enter": lambda: do.mix(x, None, None, None, norm, **one),
        "heads": lambda: do.heads(qkv, weights, (angle, angle), **shape),
        "round": lambda: do.activate(x),
        "attended": lambda: do.mix(x, part, modulation[:, 2], camera, affine, about_one=False, eps=1e-6),
        "cross q": lambda: do.heads(x, weights[:1], None, **shape),
        "crossed": lambda: do.mix(x, part, None, None, norm, **one),
        "gelu": lambda: do.activate(wide, "gelu"),
        "leave": lambda: do.mix(x, part, modulation[:, 2], None, None, **one),
    }
    found = {name: bench.ms(work, 20) for name, work in works.items()}
    return found | {"sum of a pass over 40 layers": round(40 * (sum(found.values()) + found["round"]), 2)}


def converted(bench: Bench) -> Found:
    """The compiled conversions around attention: a pass's keys or values into the gathered ones, and queries."""
    kernel = Fp8Kernel(bench.device)
    x = bench.normal(bench.tokens, bench.heads, bench.size)
    out = torch.empty(x.shape, device=bench.device, dtype=E4M3)
    v = bench.normal(bench.tokens, 3 * bench.width)[:, -bench.width :].unflatten(-1, (bench.heads, -1))
    return {
        "append": bench.ms(lambda: kernel.append(x, out)),
        "append of a view": bench.ms(lambda: kernel.append(v, out)),
    }


# ------------------------------------------------------------------------------------------------------------ attention


class Heads:
    """Queries, keys and values [1, heads, tokens, size], laid out token by token."""

    def __init__(self, bench: Bench) -> None:
        torch.manual_seed(0)
        self.q, self.k, self.v = (
            bench.normal(1, n, bench.heads, bench.size).transpose(1, 2) for n in (bench.tokens, bench.seen, bench.seen)
        )
        self.eight = tuple(to_e4m3(part) for part in (self.q, self.k, self.v))
        self.exact = scaled_dot_product_attention(self.q[:, :2], self.k[:, :2], self.v[:, :2]).float()
        self.flop = 4 * bench.tokens * bench.seen * bench.heads * bench.size

    def told(self, bench: Bench, out: Callable[[], Tensor]) -> Found:
        error, ms = off(out()[:, :2], self.exact), bench.ms(out)
        return {"error": error, "ms": ms, "tflop_per_s": round(self.flop / ms / 1e9, 1) if ms else None}


def plain(bench: Bench, backend: SDPBackend) -> Found:
    given = Heads(bench)
    with sdpa_kernel([backend] if bench.device != "cpu" else [SDPBackend.MATH]):
        return given.told(bench, lambda: scaled_dot_product_attention(given.q, given.k, given.v))


def eight(bench: Bench, library: str) -> Found:
    """Queries are rounded in it, as in a pass."""
    kernel, given = Fp8Kernel(bench.device, library), Heads(bench)
    found = given.told(bench, lambda: kernel(given.q, given.eight[1], given.eight[2], None))
    cuts = getattr(getattr(kernel._on_gpu, "_attend", None), "_cuts", {})
    return found | {"cut": list(cuts.values())}


def flash3(bench: Bench, *, bf16: bool) -> Found:
    attend, given = flash3_kernels.load(), Heads(bench)
    parts = [given.q, given.k, given.v] if bf16 else list(given.eight)
    parts = [part.transpose(1, 2) for part in parts]
    return given.told(bench, lambda: attend._run(*parts, None).transpose(1, 2))


def rounded_by_hand(bench: Bench) -> Found:
    """What e4m3 costs by itself, two heads."""
    given = Heads(bench)
    q, k, v = (part[:, :2] for part in given.eight)
    return {"error": off(reference(q, k, v), given.exact)}


# ----------------------------------------------------------------------------------------------------- cross, matrices


def cross(bench: Bench) -> Found:
    q, k, v = (
        bench.normal(1, n, bench.heads, bench.size).transpose(1, 2) for n in (bench.tokens, bench.text, bench.text)
    )
    found = {}
    for backend in (
        (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if bench.device != "cpu" else (SDPBackend.MATH,)
    ):
        with sdpa_kernel([backend]):
            found[backend.name] = bench.ms(lambda: scaled_dot_product_attention(q, k, v), 20)
    return found


def matrices(bench: Bench) -> Found:
    D = bench.width
    shapes = {"qkv": (D, 3 * D), "square": (D, D), "up": (D, bench.mlp), "down": (bench.mlp, D)}
    return {name: products(bench, *shape) for name, shape in shapes.items()}


def products(bench: Bench, k: int, n: int) -> Found:
    """Milliseconds and TFLOP/s of each way."""
    linear = torch.nn.Linear(k, n, device=bench.device, dtype=torch.bfloat16).requires_grad_(False)
    x, one = bench.normal(bench.tokens, k), torch.ones((), device=bench.device)
    rows, scale = fused.TorchOperations().activate(x)
    matrix = Fp8Linear(linear.weight, linear.bias)
    scaled: dict[str, Any] = {"bias": linear.bias, "out_dtype": x.dtype, "use_fast_accum": True}
    works: dict[str, Callable[[], Tensor]] = {
        "bf16": lambda: linear(x),
        "rows": lambda: matrix.product(rows, scale, x.dtype),
        "tensor": lambda: torch._scaled_mm(rows, matrix.weight.t(), scale_a=one, scale_b=one, **scaled),
    }
    if bench.device == "cpu":
        works.pop("tensor")
    found: Found = {"error": off(works["rows"](), linear(x))}
    for name, work in works.items():
        ms = bench.ms(work)
        found[name] = [ms, round(2 * bench.tokens * k * n / ms / 1e9) if ms else None]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--parts", nargs="*", help="only these: fused attention cross matrices")
    bench = Bench(parser.parse_args())
    with torch.inference_mode():
        bench.part("fused: right", lambda: kernels_right(bench))
        bench.part("fused: ms", lambda: kernels_timed(bench))
        bench.part("attention flash3, e4m3", lambda: flash3(bench, bf16=False))
        bench.part("attention flash3 as in a pass", lambda: eight(bench, "flash3"))
        bench.part("attention cudnn as in a pass", lambda: eight(bench, "cudnn"))
        bench.part("attention bfloat16", lambda: plain(bench, SDPBackend.CUDNN_ATTENTION))
        bench.part("attention rounded by hand", lambda: rounded_by_hand(bench))
        bench.part("attention flash3, bfloat16", lambda: flash3(bench, bf16=True))
        bench.part("cross", lambda: cross(bench))
        bench.part("fused: conversions around attention", lambda: converted(bench))
        bench.part("matrices", lambda: matrices(bench))
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
