"""The golden checkpoints as folders that load. Their weights are not kept: ``make_vla_golden.py`` drew them from a seeded
generator, one tensor after the other by name, and here they are drawn again."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

KEPT = Path(__file__).parent / "golden"


def drawn(shape: list[int], generator: torch.Generator) -> torch.Tensor:
    """As ``make_vla_golden.randomise`` fills a parameter."""
    fan_in = torch.Size(shape[1:]).numel() if len(shape) > 1 else 25
    return torch.randn(shape, generator=generator) / fan_in**0.5


@cache
def golden() -> Path:
    """A folder with ``pi0``, ``pi05`` and ``smolvla``, made once per machine and state of the kept files."""
    digest = hashlib.sha256()
    for path in sorted(KEPT.rglob("*")):
        if path.is_file() and "moshi" not in path.parts:
            digest.update(path.relative_to(KEPT).as_posix().encode() + path.read_bytes())
    target = Path(tempfile.gettempdir()) / f"realtime-omni-golden-{digest.hexdigest()[:16]}"
    if target.is_dir():
        return target
    building = Path(tempfile.mkdtemp(dir=target.parent))
    for source in sorted(KEPT.glob("*/weights.json")):
        folder = building / source.parent.name
        shutil.copytree(source.parent, folder, ignore=shutil.ignore_patterns(source.name))
        kept = json.loads(source.read_text())
        generator = torch.Generator().manual_seed(kept["seed"])
        weights = {name: drawn(shape, generator) for name, shape in kept["shapes"].items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    try:
        os.rename(building, target)
    except OSError:  # another process was faster
        shutil.rmtree(building)
    return target
