"""A loaded policy: a network, how observations reach it, and what a server tells clients about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from realtime_omni.models.common.vla.network import FlowNetwork
from realtime_omni.models.common.vla.processing import Processing


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint is loaded.

    ``allow_identity_normalization``: serve without statistics where the checkpoint has none (off: refused).
    ``tokenizer``: a file or folder, when the checkpoint does not bring its own.
    """

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    allow_identity_normalization: bool = False
    tokenizer: Path | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """``statistics``: feature to where its numbers come from, or ``identity``; for the handshake."""

    family: str
    network: FlowNetwork
    processing: Processing
    statistics: dict[str, str] = field(default_factory=dict)
