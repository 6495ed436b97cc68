"""Times pi0's three stages for 16 robots in several ways on a CUDA machine, each stage alone. Prints JSON lines.

    PYTHONPATH=. python recipes/gpu/pi0_variants.py [--limit-s 200]
    PYTHONPATH=. python recipes/gpu/pi0_variants.py --device cpu --scale tiny --rows 2      (its own test)

``shipped`` is what ``speed: compiled`` does; every other way differs from it by what its name says. ``error``: of a stage's
result to the same weights in float32 without compiling, relative to its largest number.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from pi0_speed import CAMERAS, built, noise_of, observed, wait
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from realtime_omni.bench.geometry import TINY
from realtime_omni.models.common.vla import graphs, siglip
from realtime_omni.models.common.vla.devices import placed
from realtime_omni.models.common.vla.network import PolicyInputs
from realtime_omni.models.common.vla.siglip import VisionLayer
from realtime_omni.models.common.vla.stages import Stages
from realtime_omni.models.pi0.network import Pi0Config, Pi0Network

_CUDNN = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
Change = Callable[[Pi0Network], Any]
"""A context manager around a stage's whole life; may alter the network, which is its own."""


@contextmanager
def shipped(network: Pi0Network) -> Iterator[None]:
    yield


@contextmanager
def cudnn(network: Pi0Network) -> Iterator[None]:
    """cuDNN's attention where it can."""
    with sdpa_kernel(_CUDNN, set_priority=True):
        yield


@contextmanager
def unfused(network: Pi0Network) -> Iterator[None]:
    """A product of its own for each of q, k, v, gate, up."""
    with patch.object(graphs, "fuse", lambda network: None):
        yield


@contextmanager
def lt(network: Pi0Network) -> Iterator[None]:
    """Products by cuBLASLt."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library("default")


@contextmanager
def products(network: Pi0Network) -> Iterator[None]:
    """Two products and a compiled softmax for a step's attention, however many rows."""
    with patch.object(graphs, "FUSED_ROWS", 1 << 30):
        yield


@contextmanager
def masked(network: Pi0Network) -> Iterator[None]:
    """torch's fused attention with a mask for a step, as ``speed: graphs`` has it."""
    with patch.object(graphs, "biased", graphs.masked):
        yield


@contextmanager
def unpadded(network: Pi0Network) -> Iterator[None]:
    """SigLIP's inner width as it is."""
    with patch.object(siglip, "TILE", 1):
        yield


@torch.library.custom_op("omni_variants::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    made: Tensor = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return made.view(*x.shape[:-1], -1)


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@contextmanager
def epilogue(network: Pi0Network) -> Iterator[None]:
    """SigLIP's GELU in the epilogue of its product."""

    def forward(self: VisionLayer, x: Tensor) -> Tensor:
        assert self.qkv is not None
        assert self.mlp is not None
        h = self.attn_norm(x)
        q, k, v = (
            p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in functional.linear(h, *self.qkv).chunk(3, -1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        up, bias, down = self.mlp
        opened: Tensor = linear_gelu(self.mlp_norm(x), up, bias)
        return x + functional.linear(opened, down, self.down.bias)

    with patch.object(VisionLayer, "forward", forward):
        yield


@contextmanager
def without_kernel(network: Pi0Network) -> Iterator[None]:
    """A language layer's gate by the compiler alone; ``pi0_geglu.py`` times the two without their layers."""
    with patch.object(graphs, "runs", lambda weight: False):
        yield


WAYS: dict[str, tuple[Change, ...]] = {
    "denoise": (shipped, masked, products, lt, unfused),
    "images": (shipped, unpadded, epilogue, cudnn, unfused),
    "prefix": (shipped, without_kernel, cudnn, unfused),
}


@torch.no_grad()
def prepared(stage: str, way: Stages, inputs: PolicyInputs, noise: Tensor, steps: int) -> Callable[[], Tensor]:
    """The stage as a call; its inputs are computed before, by ``way``'s network without graphs."""
    images = placed(inputs.images[inputs.image_mask], way.device)
    if stage == "images":
        return lambda: way.features(images)
    generator = torch.Generator(way.device).manual_seed(7)
    dtype = next(way.network.parameters()).dtype  # type: ignore[attr-defined]
    shape = (*inputs.image_mask.shape, way.network.shape.picture_tokens, way.network.config.language.width)  # type: ignore[attr-defined]
    features = torch.randn(shape, device=way.device, generator=generator).to(dtype)
    there = inputs.to(way.device)
    if stage == "prefix":
        return lambda: torch.stack([kv.keys[:, 0] for kv in way.prefixes(features, there)])
    kv = way.network.shape
    length = kv.picture_tokens * CAMERAS + inputs.tokens.shape[1]
    prefixes = []
    for _ in inputs.state:
        keys, values = (
            torch.randn(kv.layers, 1, length, kv.kv_heads, kv.head_dim, device=way.device, generator=generator)
            for _ in range(2)
        )
        mask = torch.ones(1, length, dtype=torch.bool)
        prefixes.append(graphs.PrefixKV(keys.to(dtype), values.to(dtype), mask))
    states = list(there.state)

    def denoise() -> Tensor:
        velocity = way.velocity(prefixes, states)
        x = noise
        for step in range(steps):
            t = torch.full((len(noise),), 1.0 - step / steps, device=way.device)
            x = x - velocity(x, t) / steps
        return x

    return denoise


def run(args: argparse.Namespace, network: Pi0Network, stage: str, change: Change, expected: Tensor) -> None:
    device = torch.device(args.device)
    inputs, noise = observed(network.config, args.rows, 8, seed=3), noise_of(network.config, args.rows, device)
    torch._dynamo.reset()
    own, began_s = copy.deepcopy(network), time.perf_counter()
    with change(own), torch.no_grad():
        way = graphs.open_stages(own, device, CAMERAS, "compiled" if device.type == "cuda" else "graphs")
        work = prepared(stage, way, inputs, noise, network.config.steps)
        gap = float((work().float() - expected).abs().max() / expected.abs().max())
        for _ in range(2):
            work()
        wait(device)
        ready_s, taken = time.perf_counter() - began_s, list[float]()
        for _ in range(args.repeats):
            wait(device)
            began_s = time.perf_counter()
            work()
            wait(device)
            taken.append((time.perf_counter() - began_s) * 1000)
    print(
        json.dumps(
            {
                "stage": stage,
                "way": change.__name__,  # type: ignore[attr-defined]
                "p50_ms": round(median(taken), 2),
                "least_ms": round(min(taken), 2),
                "error": gap,
                "start_s": round(ready_s, 1),
            }
        ),
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Times pi0's stages in several ways.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=200.0)
    args = parser.parse_args(argv)
    began_s = time.perf_counter()
    device = torch.device(args.device)
    config = Pi0Config() if args.scale == "full" else TINY
    network = built(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    inputs, noise = observed(config, args.rows, 8, seed=3), noise_of(config, args.rows, device)
    wide = Stages(copy.deepcopy(network).float(), device)
    with torch.no_grad():
        expected = {stage: prepared(stage, wide, inputs, noise, config.steps)() for stage in WAYS}
    del wide
    for stage, ways in WAYS.items():
        for change in ways:
            if time.perf_counter() - began_s > args.limit_s:
                print(json.dumps({"stage": stage, "skipped": change.__name__}), flush=True)  # type: ignore[attr-defined]
                continue
            try:
                run(args, network, stage, change, expected[stage])
            except Exception:
                trace = traceback.format_exc()[-700:]
                print(json.dumps({"stage": stage, "failed": change.__name__, "error": trace}), flush=True)  # type: ignore[attr-defined]
    print(json.dumps({"end": round(time.perf_counter() - began_s, 1)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
