"""Attention over paged KV memory, one module per backend.

``plan`` is the interface, ``sdpa`` the reference that runs anywhere, ``flashinfer`` the paged CUDA kernels (imported
on demand).
"""

from __future__ import annotations

from realtime_omni.errors import ConfigError
from realtime_omni.kv.attention.plan import AttentionBackend, AttentionPlan, RowPlan

__all__ = ["AttentionBackend", "AttentionPlan", "RowPlan", "open_backend"]


def open_backend(name: str = "auto", *, device: str = "cpu") -> AttentionBackend:
    """The backend of this name for this device: ``sdpa``, ``flashinfer``, or ``auto``.

    ``auto`` is FlashInfer where its probe succeeds on a CUDA device, and SDPA elsewhere. Raises BackendUnavailable when
    FlashInfer was asked for by name and cannot run, ConfigError on another name.
    """
    from realtime_omni.kv.attention import flashinfer
    from realtime_omni.kv.attention.sdpa import SdpaBackend

    on_cuda = device.startswith("cuda")
    if name == "flashinfer" or (name == "auto" and on_cuda and flashinfer.probe().available):
        return flashinfer.FlashInferBackend(device=device if on_cuda else "cuda")
    if name not in ("auto", "sdpa"):
        raise ConfigError(f"unknown attention backend {name!r}; known: auto, sdpa, flashinfer")
    return SdpaBackend()
