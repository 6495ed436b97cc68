"""The golden checkpoints as folders that load. Their weights are not kept: ``make_vla_golden.py``, ``make_moshi_golden.py`` and
``make_world_golden.py`` drew them from a seeded generator, one tensor after the other in the order of ``weights.json``; here
they are drawn again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

KEPT = Path(__file__).parent / "golden"


def drawn(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """As ``make_vla_golden.randomise`` fills a parameter."""
    fan_in = torch.Size(shape[1:]).numel() if len(shape) > 1 else 25
    return torch.randn(shape, generator=generator) / fan_in**0.5


def shaken(name: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """As ``make_moshi_golden.shake`` fills a parameter."""
    noise = torch.randn(shape, generator=generator)
    if "layer_scale" in name:
        return 0.5 + 0.1 * noise
    if name.endswith("alpha") or "norm" in name:
        return 0.2 * noise if name.endswith("bias") else 1 + 0.2 * noise
    if noise.dim() >= 2:
        return noise / noise[0].numel() ** 0.5 * 1.3
    return 0.1 * noise


def codebook(name: str, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """As ``make_moshi_golden.make_mimi`` fills a buffer of a codebook."""
    if name.endswith("embedding_sum"):
        return torch.randn(shape, generator=generator)
    if name.endswith("cluster_usage"):
        return 0.5 + torch.rand(shape, generator=generator)
    return torch.zeros(shape)


def _vla(kept: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(kept["seed"])
    return {name: drawn(shape, generator) for name, shape in kept["shapes"].items()}


def _minicpm(kept: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(kept["seed"])
    return {name: shaken(name, shape, generator) for name, shape in kept["shapes"].items()}


def _moshi(kept: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator, buffers = torch.Generator().manual_seed(kept["seed"]), torch.Generator().manual_seed(3)
    weights = {name: shaken(name, shape, generator) for name, shape in kept["shapes"].items()}
    return weights | {name: codebook(name, shape, buffers) for name, shape in kept.get("buffers", {}).items()}


@cache
def golden() -> Path:
    """A folder with ``pi0``, ``pi05`` and ``smolvla``, made once per machine and state of the kept files."""
    return _rebuilt([KEPT / name for name in ("pi0", "pi05", "smolvla")], _vla)


@cache
def moshi() -> Path:
    """The same with ``lm-8``, ``lm-16`` and ``mimi``."""
    return _rebuilt([KEPT / "moshi" / name for name in ("lm-8", "lm-16", "mimi")], _moshi)


@cache
def worlds() -> Path:
    """The same with ``matrix-game`` and ``lingbot``: a transformer's folder each."""
    return _rebuilt([KEPT / "worlds" / name for name in ("matrix-game", "lingbot")], _vla)


@cache
def minicpm() -> Path:
    """A folder with ``minicpm``."""
    return _rebuilt([KEPT / "minicpm"], _minicpm)


def token2wav_weights() -> dict[str, dict[str, torch.Tensor]]:
    """``flow.pt`` and ``hift.pt`` of ``token2wav``, under their published names."""
    kept = json.loads((KEPT / "token2wav" / "weights.json").read_text())
    generator = torch.Generator().manual_seed(kept["seed"])
    made = {file: {n: shaken(n, s, generator) for n, s in shapes.items()} for file, shapes in kept["shapes"].items()}
    for name, tensor in made["hift"].items():  # a pitch that is voiced now and then, sound that is seldom at its limit
        if "classifier" in name:
            tensor.mul_(40)
        if name.startswith("conv_post"):
            tensor.mul_(0.02)
    return made


def _rebuilt(folders: list[Path], weights: Callable[[dict[str, Any]], dict[str, torch.Tensor]]) -> Path:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(path for folder in folders for path in folder.iterdir()):
        digest.update(path.relative_to(KEPT).as_posix().encode() + path.read_bytes())
    target = Path(tempfile.gettempdir()) / f"realtime-omni-golden-{digest.hexdigest()[:16]}"
    if target.is_dir():
        return target
    building = Path(tempfile.mkdtemp(dir=target.parent))
    for source in folders:
        folder = building / source.name
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("weights.json", "answers.safetensors"))
        file = "mimi.safetensors" if source.name == "mimi" else "model.safetensors"
        made = weights(json.loads((source / "weights.json").read_text()))
        save_file(made, folder / file, metadata={"format": "pt"})
    try:
        os.rename(building, target)
    except OSError:  # another process was faster
        shutil.rmtree(building)
    return target
