"""Wan's decoder as a GPU likes it: channels last, and every norm together with the SiLU behind it.

diffusers' modules stay what they are; their weights are laid out anew, and norms are exchanged for :class:`NormSilu`. Results
differ by what another order of a convolution's sums does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.errors import BackendUnavailable

log = logging.getLogger(__name__)

Kernel = Callable[[Tensor, Tensor, float], Tensor]


class NormSilu(nn.Module):
    """A ``WanRMS_norm`` over channels, then SiLU: of [1, C, T, H, W]."""

    def __init__(self, norm: Any, kernel: Kernel | None = None) -> None:
        """``kernel``: computes it for what lies channels last."""
        super().__init__()
        self._norm = norm
        self._gamma = norm.gamma.detach().flatten().contiguous()
        self._factor = float(norm.scale)
        self._kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        if self._kernel is not None and x.is_contiguous(memory_format=torch.channels_last_3d):
            return self._kernel(x, self._gamma, self._factor)
        return functional.silu(self._norm(x))


def _fits(block: Any) -> bool:
    norms = (block.norm1, block.norm2)
    return isinstance(block.nonlinearity, nn.SiLU) and all(
        norm.channel_first and not isinstance(norm.bias, Tensor) for norm in norms
    )


def hasten(decoder: nn.Module, kernel: Kernel | None) -> int:
    """Lay out a decoder's weights channels last and exchange the norms of its residual blocks; returns how many blocks."""
    for module in decoder.modules():
        if isinstance(module, nn.Conv3d):
            module.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        elif isinstance(module, nn.Conv2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    blocks = [m for m in decoder.modules() if hasattr(m, "norm1") and hasattr(m, "nonlinearity") and _fits(m)]
    for block in blocks:
        found: Any = block
        found.norm1, found.norm2 = NormSilu(found.norm1, kernel), NormSilu(found.norm2, kernel)
        found.nonlinearity = nn.Identity()
    whole: Any = decoder
    if isinstance(whole.nonlinearity, nn.SiLU) and not isinstance(whole.norm_out.bias, Tensor):
        whole.norm_out, whole.nonlinearity = NormSilu(whole.norm_out, kernel), nn.Identity()
    return len(blocks)


def kernel_for(device: torch.device) -> Kernel | None:
    """The kernel where it runs and computes what it is to; None elsewhere, on a GPU with a line in the log."""
    if device.type != "cuda":
        return None
    try:
        from realtime_omni.models.common.wan.vae_kernels import norm_silu

        check(norm_silu, device)
    except Exception:
        log.exception("the decoder's norms are computed by torch: their kernel does not run here")
        return None
    return norm_silu


def check(kernel: Kernel, device: torch.device) -> None:
    """Run it once on a few numbers. Raises BackendUnavailable on another result than torch's."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 96, 2, 3, 5, generator=generator, device="cpu").to(device, torch.bfloat16)
    gamma = torch.linspace(-1, 2, 96, device=device, dtype=torch.bfloat16)
    got = kernel(x.to(memory_format=torch.channels_last_3d), gamma, 96**0.5)
    wanted = functional.silu(functional.normalize(x.float(), dim=1) * 96**0.5 * gamma.float().view(-1, 1, 1, 1))
    error = float((got.float() - wanted).norm() / wanted.norm())
    if not error < 0.02:
        raise BackendUnavailable(f"the kernel is off by {error:.3g}")
