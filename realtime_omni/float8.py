"""Numbers of eight bits: e4m3, four bits of exponent and three of fraction. Knows torch and nothing of ours."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST: float = torch.finfo(E4M3).max


def to_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 numbers; beyond the largest, the largest (torch's own conversion gives NaN there)."""
    return x if x.dtype == E4M3 else x.clamp(-LARGEST, LARGEST).to(E4M3)
