"""A module of transformers or diffusers from a folder, whole or not at all.

Both libraries fill what a checkpoint lacks with fresh random numbers and say so in the log; here that is a refusal. Must not
know which module it is, and imports neither library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from realtime_omni.errors import ConfigError

LISTED = 20
"""Names in a refusal; the rest is counted."""


class Pretrained(Protocol):
    """The class of a module in either library."""

    def from_pretrained(self, folder: Path, /, **how: Any) -> Any: ...


def load_pretrained(
    kind: Pretrained, folder: Path, *, what: str, path: str, dtype: torch.dtype, device: torch.device | str
) -> Any:
    """The module on its device, ready for inference. ``what``: its name in a refusal; ``path``: the option that chose it.

    Raises ConfigError: no such folder, files that cannot be read or that are pickles, tensors that are missing or of
    another shape. Tensors that the module has no use for are none of its business: a whole model's file may hold more."""
    if not folder.is_dir():
        raise ConfigError(f"{path}: no folder {folder.name!r} for the {what}", path=path)
    try:
        module, found = kind.from_pretrained(
            folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"no {what} can be read from {folder.name}: {_first_line(error)}", path=path) from None
    lacking = sorted(found["missing_keys"])
    if lacking:
        more = f" and {len(lacking) - LISTED} more" if len(lacking) > LISTED else ""
        raise ConfigError(
            f"{folder.name} does not hold this {what}; missing: {', '.join(lacking[:LISTED])}{more}", path=path
        )
    return module.to(device).eval().requires_grad_(False)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
