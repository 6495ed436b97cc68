"""DreamZero's geometry with random weights on a CUDA machine: is it right there, and how long does a chunk take?

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/dreamzero_speed.py [--limit-s 240] [--parts tiny solo ...]

One JSON line per part, the most important first; a part that fails is a line with its error, and the next one runs.
``tiny``: the same small network on the CPU and on the GPU, five ticks over the end of a window in float32. Then the 14B
dimensions in bfloat16, weights N(0, 1 / fan_in), both branches, 16 steps, 352 x 640: ``solo`` (one robot), ``compiled`` (as the
recipe has it; parts after it are, too), ``gathered`` (history copied once a tick), ``frames`` (with pictures), ``pair`` (two
robots in one batch), ``flashinfer`` (its paged kernels, with their error against torch's attention). Wan's autoencoder where
diffusers is installed, else averages. ``--scale tiny --device cpu`` rehearses it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.config import Config, EngineSection, KVSection, SessionSection
from realtime_omni.kv.attention.flashinfer import FlashInferBackend, probe
from realtime_omni.models.common.wan.transformer import WanConfig
from realtime_omni.models.common.wan.vae import TIME_STRIDE, CodecState, SlotShape, SlotShapes, WanVAE
from realtime_omni.models.dreamzero.model import DreamZero, Settings
from realtime_omni.models.dreamzero.network import DreamZeroConfig, DreamZeroTransformer
from realtime_omni.models.dreamzero.robot import Quantiles, Robot
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Chunk
from realtime_omni.testing.inline import InlineEngine

CAMERAS = ("wrist", "left", "right")
FULL = DreamZeroConfig(WanConfig())
TINY = DreamZeroConfig(
    WanConfig(layers=3, heads=4, head_dim=64, mlp_width=512, text_width=64), image_width=32, hidden=64
)
BOUNDS = Quantiles(np.full(8, -1, np.float32), np.full(8, 1, np.float32))
ROBOT = Robot(CAMERAS, "droid", BOUNDS, BOUNDS, (*range(7), None))


class Words:
    """Text and picture features drawn from a seed."""

    def __init__(self, width: int, tokens: int, device: str) -> None:
        self.width, self.tokens, self._device = width, tokens, device

    def check(self, prompt: str) -> None:
        """Every prompt will do."""

    def encode(self, what: str | Tensor) -> Tensor:
        seed = len(what) if isinstance(what, str) else int(what.long().sum() % 1000)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.tokens, self.width, generator=generator, device="cpu").to(self._device)


class Averages(WanVAE):
    """Sixteen channels of averages, where there is no autoencoder."""

    def __init__(self, device: str) -> None:
        self._dtype, self._where = torch.float32, torch.device(device)

    @property
    def device(self) -> torch.device:
        return self._where

    @property
    def channels(self) -> int:
        return 16

    def slot_shapes(self, height: int, width: int) -> tuple[SlotShapes, SlotShapes]:
        slot = SlotShape((1, 1, 1, 1, 1), torch.float32)
        return (slot,), (slot,)

    def encode(self, pictures: Tensor, state: CodecState) -> tuple[Tensor, CodecState]:
        small = functional.avg_pool2d(pictures.float(), 8)
        lone = 1 if state.is_fresh else 0
        groups = [*small[:lone, None], *small[lone:].unflatten(0, (-1, TIME_STRIDE))]
        latents = torch.stack([group.mean(0).repeat(6, 1, 1)[:16] for group in groups])
        return latents, CodecState((latents.new_zeros(1, 1, 1, 1, 1),))

    def decode(self, latents: Tensor, state: CodecState) -> tuple[Tensor, CodecState]:
        pictures = functional.interpolate(latents[:, :3].float(), scale_factor=8).repeat_interleave(TIME_STRIDE, 0)
        kept = pictures[TIME_STRIDE - 1 :] if state.is_fresh else pictures
        return kept.clamp(-1, 1), CodecState((latents.new_zeros(1, 1, 1, 1, 1),))


def autoencoder(device: str, *, real: bool) -> WanVAE:
    if real:
        try:
            import diffusers

            with torch.device(device):
                return WanVAE(diffusers.AutoencoderKLWan().to(torch.bfloat16))
        except ImportError:
            pass
    return Averages(device)


def network(config: DreamZeroConfig, device: str, dtype: torch.dtype) -> DreamZeroTransformer:
    """Drawn tensor by tensor where it will be; on a CPU when the numbers must be the same everywhere."""
    with torch.device("meta"):
        made = DreamZeroTransformer(config).to(dtype)
    made.to_empty(device=device)
    drawn_on = device if config is FULL else "cpu"
    generator = torch.Generator(drawn_on).manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1)
            elif parameter.dim() < 2 or name.endswith("bias"):
                parameter.zero_()
            else:
                fan_in = parameter.shape[-2] if "coder." in name else parameter.shape[-1]
                noise = torch.randn(parameter.shape, generator=generator, device=drawn_on, dtype=torch.float32)
                parameter.copy_(noise / fan_in**0.5)
    return made


def model_of(config: DreamZeroConfig, device: str, dtype: torch.dtype, **settings: Any) -> DreamZero:
    trunk, full = config.trunk, config is FULL
    return DreamZero(
        network(config, device, dtype),
        Words(trunk.text_width, 512 if full else 8, device),
        autoencoder(device, real=full),
        Words(config.image_width, 257 if full else 5, device),
        ROBOT,
        Settings(**settings),
        device=device,
        fingerprint="0" * 64,
    )


def engine_of(
    model: DreamZero, device: str, dtype: str, sessions: int, *, keep_gathered: bool | None = None
) -> InlineEngine:
    config = Config(
        device="cuda" if device.startswith("cuda") else "cpu",
        dtype=dtype,  # type: ignore[arg-type]
        kv=KVSection(memory_fraction=0.9, requested_sessions=sessions, rewind_blocks=1, keep_gathered=keep_gathered),
        engine=EngineSection(max_batch=sessions, threads=4),
        session=SessionSection(max_sessions=sessions),
    )
    engine = InlineEngine(model, config)
    engine.observe = seen
    return engine


def seen(chunk: int) -> Observation:
    random = np.random.default_rng(chunk)
    shape = (180, 320, 3) if chunk == 0 else (4, 180, 320, 3)
    images = {name: random.integers(0, 256, shape, np.uint8) for name in CAMERAS}
    return Observation(images, random.uniform(-1, 1, 8).astype(np.float32), "push the cube")


def timed(engine: InlineEngine, names: str, ticks: int, outputs: tuple[str, ...] = ("actions",)) -> dict[str, Any]:
    """The first tick, then the others, in milliseconds."""
    for name in names:
        engine.create(name, seed=1)
    spent: list[float] = []
    first, last = 0.0, np.zeros(1)
    for tick in range(ticks + 1):
        began = time.perf_counter()
        chunks = engine.next_all(names, outputs=outputs)
        ms = (time.perf_counter() - began) * 1000
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise chunk
        last = np.asarray(chunks[0].artifacts["actions"].data)  # type: ignore[union-attr]
        if tick == 0:
            first = ms
        else:
            spent.append(ms)
    for name in names:
        engine.close(name)
    valid = bool(np.isfinite(last).all()) and 1e-3 < float(np.std(last)) < 1e3
    found = {"valid": valid, "first_ms": round(first), "p50_ms": round(statistics.median(spent)), "ticks": ticks}
    return found | {"max_ms": round(max(spent)), "actions_std": round(float(np.std(last)), 3)}


class Bench:
    """The model is made once; parts share it."""

    def __init__(self, scale: str, device: str) -> None:
        self.config, self.device = (FULL if scale == "full" else TINY), device
        self.dtype = "bfloat16" if device.startswith("cuda") else "float32"
        self.how: dict[str, Any] = {} if scale == "full" else {"height": 32, "width": 64, "steps": 3}
        self.ticks = 6 if scale == "full" else 5
        self._model: DreamZero | None = None

    @property
    def model(self) -> DreamZero:
        if self._model is None:
            self._model = model_of(self.config, self.device, getattr(torch, self.dtype), **self.how)
        return self._model

    def engine(self, sessions: int = 1, *, keep_gathered: bool | None = None) -> InlineEngine:
        return engine_of(self.model, self.device, self.dtype, sessions, keep_gathered=keep_gathered)

    def tiny(self) -> dict[str, Any]:
        worst = 0.0
        runs = []
        for device in ("cpu", self.device):
            model = model_of(TINY, device, torch.float32, height=32, width=64, steps=3)
            engine = engine_of(model, device, "float32", 2)
            for name in "ab":
                engine.create(name, seed=2)
            engine.next("a")
            runs.append([engine.next_all("ab", outputs=("actions", "latents")) for _ in range(5)])
        for one, other in zip(*runs, strict=True):
            for a, b in zip(one, other, strict=True):
                if not isinstance(a, Chunk) or not isinstance(b, Chunk):
                    raise RuntimeError(f"{a} {b}")
                for name in ("actions", "latents"):
                    worst = max(worst, float(np.abs(a.artifacts[name].data - b.artifacts[name].data).max()))
        return {"worst": worst, "valid": worst <= 1e-3}

    def solo(self) -> dict[str, Any]:
        return timed(self.engine(), "a", self.ticks)

    def pair(self) -> dict[str, Any]:
        return timed(self.engine(2), "ab", self.ticks // 2)

    def frames(self) -> dict[str, Any]:
        return timed(self.engine(), "a", self.ticks // 2, ("actions", "frames"))

    def flashinfer(self) -> dict[str, Any]:
        found = probe()
        if not found.available:
            return {"skipped": found.reason}
        one = np.asarray(self._first(None))
        other = np.asarray(self._first(FlashInferBackend(device=self.device)))
        error = float(np.abs(one - other).max() / np.abs(one).max())
        engine = self.engine()
        engine.runner.backend = FlashInferBackend(device=self.device)
        return {"error": error, **timed(engine, "a", self.ticks // 2)}

    def _first(self, backend: FlashInferBackend | None) -> Any:
        engine = self.engine()
        if backend is not None:
            engine.runner.backend = backend
        engine.create("a", seed=1)
        for _ in range(2):
            chunk = engine.next("a", outputs=("actions",))
        return chunk.artifacts["actions"].data

    def compiled(self) -> dict[str, Any]:
        """As the recipe has it. What runs later in the process stays compiled."""
        self.model.network.compile_layers()
        return timed(self.engine(), "a", self.ticks)

    def gathered(self) -> dict[str, Any]:
        """``kv.keep_gathered``: history is copied once a tick."""
        return timed(self.engine(keep_gathered=True), "a", self.ticks)


PARTS = ("tiny", "solo", "compiled", "gathered", "frames", "pair", "flashinfer")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    started, bench = time.monotonic(), Bench(given.scale, given.device)
    cuda = given.device.startswith("cuda")
    for part in given.parts:
        left = given.limit_s - (time.monotonic() - started)
        if left < 15:
            print(json.dumps({"part": part, "skipped": "no time left"}), flush=True)
            continue
        began = time.monotonic()
        run: Callable[[], dict[str, Any]] = getattr(bench, part)
        try:
            with torch.no_grad():
                line = run()
        except Exception as error:  # the next part may run all the same
            line = {"error": f"{type(error).__name__}: {error}"[:400]}
        if cuda:
            torch.cuda.synchronize()
            line["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
            torch.cuda.reset_peak_memory_stats()
            gc.collect()
            torch.cuda.empty_cache()
        print(json.dumps({"part": part, **line, "took_s": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
