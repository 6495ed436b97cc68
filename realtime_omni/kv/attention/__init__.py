"""Attention over paged KV memory, one module per backend.

``plan`` is the interface, ``sdpa`` the reference that runs anywhere, ``flashinfer`` the paged CUDA kernels (imported
on demand).
"""

from __future__ import annotations

from realtime_omni.errors import ConfigError
from realtime_omni.kv.attention.plan import AttentionBackend, AttentionPlan, RowPlan

__all__ = ["AttentionBackend", "AttentionPlan", "RowPlan", "open_backend"]


def open_backend(
    name: str = "auto", *, device: str = "cpu", keep_gathered: bool | None = None, fp8: bool = False
) -> AttentionBackend:
    """The backend of this name for this device: ``auto``, ``sdpa`` or ``flashinfer``.

    ``auto`` is SDPA everywhere: on an H200 it ran one 1,560-token, 40-head layer with 15 frames of history at 497 TFLOP/s
    with its gathering included, needs no compiler and starts at once. FlashInfer saves the gathered copy, is about as fast,
    and compiles its kernels for up to two minutes on first use, so it is asked for by name. SDPA's kernel is FlashAttention-3's
    where that is installed (:mod:`.flash3`), else torch's own. ``fp8``: SDPA gathers e4m3 and
    computes with them (:mod:`.fp8`). Raises BackendUnavailable when what was asked for cannot run, ConfigError on another
    name.
    """
    if fp8:
        from realtime_omni.kv.attention.fp8 import Fp8Kernel
        from realtime_omni.kv.attention.sdpa import SdpaBackend

        if name not in ("auto", "sdpa"):
            raise ConfigError(f"attention in eight bits is of the backend sdpa, not {name!r}", path="kv")
        return SdpaBackend(cache_history=keep_gathered, kernel=Fp8Kernel(device))
    if name == "flashinfer":
        from realtime_omni.kv.attention.flashinfer import FlashInferBackend

        return FlashInferBackend(device=device if device.startswith("cuda") else "cuda")
    if name not in ("auto", "sdpa"):
        raise ConfigError(f"unknown attention backend {name!r}; known: auto, sdpa, flashinfer")
    from realtime_omni.kv.attention.flash3 import Flash3Kernel, find
    from realtime_omni.kv.attention.sdpa import SdpaBackend

    attend = find() if device.startswith("cuda") else None
    return SdpaBackend(cache_history=keep_gathered, kernel=None if attend is None else Flash3Kernel(attend))
