"""FlashAttention-3's forward kernels (package ``fa3-fwd``), where they are installed: Hopper, bfloat16 and e4m3.

On an H200 one layer of LingBot, 4,680 queries of 28,080 keys and 40 heads of 128, takes 3.90 ms in bfloat16 (cuDNN 4.64) and
2.83 ms in e4m3 (cuDNN 3.25 at best). Owns finding the package; knows nothing of pages.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor

from realtime_omni.errors import BackendUnavailable
from realtime_omni.kv.attention.sdpa import TorchKernel

log = logging.getLogger(__name__)

_PACKAGE = "fa3_fwd_interface"
_HEAD_DIMS = (64, 128, 256)


def find() -> Any | None:
    """The function, where package and GPU are there; None, and a line in the log where the package does not load."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return None
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    try:
        return load()
    except BackendUnavailable:
        log.exception("FlashAttention-3 is installed and does not load; attention is by cuDNN")
        return None


def load() -> Any:
    """The function. Raises BackendUnavailable."""
    try:
        return importlib.import_module(_PACKAGE).flash_attn_func
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"attention by FlashAttention-3 needs fa3-fwd: {error}") from error


class Flash3Kernel(TorchKernel):
    """A :class:`~realtime_omni.kv.attention.sdpa.Kernel` in bfloat16; what it has no kernel for is torch's."""

    def __init__(self, attend: Any) -> None:
        self._attend = attend

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None or q.dtype != torch.bfloat16 or q.shape[-1] not in _HEAD_DIMS:
            return super().__call__(q, keys, values, mask)
        out: Tensor = self._attend(
            *(part.transpose(1, 2) for part in (q, keys, values)), softmax_scale=q.shape[-1] ** -0.5
        )
        return out.transpose(1, 2)
