"""What a loader of the Wan family asks of a checkpoint's folder before it reads a weight.

Owns: dimensions read off the stored shapes, the folders of a pipeline's parts, the progress of a load.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.wan.weights import shards
from realtime_omni.models.common.weights import shapes_in

log = logging.getLogger(__name__)

HEAD_DIM = 128
"""Of every published Wan network."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of a folder by name, as shapes. ``folder`` names them in refusals."""

    folder: Path
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def read(cls, folder: Path) -> Stored:
        """Raises ConfigError when there is no file, or one that is no safetensors."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in shards(folder):
            shapes.update(shapes_in(path))
        return cls(folder, shapes)

    def matrix(self, *names: str) -> tuple[int, ...]:
        """Shape of a matrix or kernel that is there under one of these names. Raises ConfigError."""
        for name in names:
            if len(self.shapes.get(name, ())) >= 2:
                return self.shapes[name]
        raise ConfigError(f"{self.folder.name} does not hold this model; missing: {names[0]}", path=self.folder.name)

    @property
    def layers(self) -> int:
        return len({m.group(1) for name in self.shapes if (m := re.match(r"blocks\.(\d+)\.", name))})


def head_size(folder: Path, width: int, given: int | None) -> int:
    """Channels of a head: as ``given``, else as the folder's ``config.json`` says. Raises ConfigError."""
    size = given or read_json(folder / "config.json").get("attention_head_dim", HEAD_DIM)
    if not isinstance(size, int) or size < 6 or width % size:
        raise ConfigError(f"a width of {width} has no heads of {size}", path="options.head_dim")
    return size


def root_of(checkpoint: str, option: str = "options.checkpoint") -> Path:
    """The folder that an option names. Raises ConfigError."""
    root = Path(checkpoint).expanduser()
    if not checkpoint or not root.is_dir():
        raise ConfigError(f"{option}: no folder {checkpoint!r}", path=option)
    return root


def part_of(root: Path, given: str | None, name: str) -> Path:
    """The folder of a pipeline's part, where a recipe gives none. Raises ConfigError."""
    folder = root / name if given is None else Path(given).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"options.{name}: no folder {folder.name!r}; a pickled file is not opened, give a folder in diffusers' layout",
            path=f"options.{name}",
        )
    return folder


class Progress:
    """Says in the log how far a load is, at most every two seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._said_s = what, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if done == total or now_s - self._said_s >= 2:
            self._said_s = now_s
            log.info("%s: %.1f of %.1f GB", self._what, done / 1e9, total / 1e9)


def read_json(path: Path) -> dict[str, Any]:
    """An object of a file; empty where there is none. Raises ConfigError for what is no JSON."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{path.name} cannot be read as JSON", path=path.name) from None
    return found if isinstance(found, dict) else {}
