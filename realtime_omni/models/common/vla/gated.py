"""What lies between the two products of Gemma's MLP, GELU of one half of a row times the other half, in one pass over memory.

Owns the operation, whether it runs here, and from which size on it is worth a launch of its own. Must not know: layers,
graphs. A compiler fuses it with what is around it, which is as good for few tokens; for 16 robots' prefixes its kernel took
0.75 ms a layer, this one takes 0.31 (H200).
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn import functional

log = logging.getLogger(__name__)

MANY = 1 << 24
"""Numbers of an input; a prefix of one robot has 25 million, a step of 16 robots has 7 million."""
_ROUNDING = 2.0**-8
"""Of bfloat16: its last bit, relative to the number."""


@torch.library.custom_op("realtime_omni::geglu", mutates_args=())
def geglu(x: Tensor) -> Tensor:
    """``gelu(gate) * up`` [..., D] of x [..., 2 D], gate before up, rounded once. GELU by its tanh approximation, see
    :func:`.decoder.gelu`. Without gradients."""
    if x.is_cuda:
        from realtime_omni.models.common.vla import geglu_kernel  # Triton comes with torch for CUDA only

        return geglu_kernel.geglu(x.contiguous())
    return written_out(x)


@geglu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def written_out(x: Tensor) -> Tensor:
    """The same by torch's operations, in float32 at least."""
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") * up).to(x.dtype)


def runs(weight: Tensor) -> bool:
    """Whether the kernel takes products with ``weight`` [2 D, width], and computes what it is to: asked once, at the start.
    Where a GPU does not run it, there is a line in the log."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    try:
        check(torch.randn(5, len(weight), generator=torch.Generator().manual_seed(0)).mul_(3).to(weight))
    except Exception:
        log.exception("an MLP's gate is compiled: its kernel does not run here")
        return False
    return True


def check(x: Tensor) -> None:
    """Raises RuntimeError where :func:`geglu` of x is farther from the formula than rounding is."""
    got, wanted = geglu(x).double(), written_out(x.double())
    if not torch.allclose(got, wanted, rtol=_ROUNDING, atol=1e-6):
        raise RuntimeError(f"the kernel is off by {float((got - wanted).abs().max()):.3g}")
