"""A Wan layer in eight bits whose rounding is part of what precedes it.

In a layer of :class:`~realtime_omni.models.common.fp8.Fp8Linear` every product needs its input as e4m3 rows with a scale each.
Made on its own that costs a third of a product; here the norm, the gate, GELU or the rotation before it writes it. What is
computed is what :class:`~realtime_omni.models.common.wan.transformer.WanLayer` computes, rounded at the same places.

Owns the order of these operations and their meaning. On CUDA they are the kernels of :mod:`.kernels`; elsewhere, and as their
reference, the same in torch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.errors import BackendUnavailable
from realtime_omni.float8 import to_e4m3
from realtime_omni.kv.attention.sdpa import fast_kernels
from realtime_omni.models.common.fp8 import Fp8Linear, quantised
from realtime_omni.models.common.wan.rope import rotate

log = logging.getLogger(__name__)

_MOST_OFF = 0.05
"""In the mean square. Another order of a sum moves a few numbers by a step of e4m3; a wrong kernel is off by one."""

Pair = tuple[Tensor, Tensor]
"""Keys and values, or scale and shift."""
Rounded = tuple[Tensor, Tensor]
"""e4m3 [rows, width] and float32 scales [rows, 1]."""


class TorchOperations:
    """What the kernels compute, in torch, on any device."""

    def mix(
        self,
        x: Tensor,
        part: Tensor | None,
        gate: Tensor | None,
        camera: tuple[Tensor, Tensor] | None,
        norm: tuple[Tensor, Tensor] | None,
        *,
        about_one: bool,
        eps: float,
    ) -> tuple[Tensor, Rounded | None]:
        """``x + gate * part``, then ``(1 + scale) x + shift`` of the camera, in the dtype of x [B, T, D]; and that, layer
        normalised, times gain plus offset, rounded to e4m3.

        gate, gain and offset float32 [B, D], or [D] for gain and offset; ``about_one``: one is added to the gain."""
        if part is not None:
            more = part.float() if gate is None else part.float() * gate[:, None]
            x = (x.float() + more).to(x.dtype)
            if camera is not None:
                scale, shift = camera
                x = ((1 + scale.float()) * x.float() + shift.float()).to(x.dtype)
        if norm is None:
            return x, None
        gain, offset = (each.float() if each.dim() == 1 else each[:, None] for each in norm)
        y = functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * (gain + about_one) + offset
        return x, quantised(y.to(x.dtype).flatten(0, -2))

    def activate(self, x: Tensor, function: str = "") -> Rounded:
        """x [.., width] rounded to e4m3, or of it GELU in the tanh form (``gelu``), or SiLU (``silu``)."""
        if function == "gelu":
            x = functional.gelu(x, approximate="tanh")
        elif function == "silu":
            x = functional.silu(x)
        return quantised(x.flatten(0, -2))

    def heads(
        self,
        x: Tensor,
        weights: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        *,
        half: int,
        eps: float,
        rounded: bool = False,
    ) -> tuple[Tensor, ...]:
        """The first ``n`` parts of x [B, T, >= n * width], each RMS-normalised over its width by weights [n, width] and, with
        the cosines and sines of ``angles`` (float32 [B, T, 1, half]), its heads of ``2 * half`` rotated: [B, T, width] each,
        the first as e4m3 where ``rounded`` says so."""
        number, width = weights.shape
        out = []
        for part, weight in zip(x[..., : number * width].chunk(number, -1), weights, strict=True):
            y = functional.rms_norm(part.float(), (width,), weight.float(), eps).to(x.dtype)
            out.append(y if angles is None else rotate(y.view(*y.shape[:-1], -1, 2 * half), *angles).flatten(-2))
        return to_e4m3(out[0]) if rounded else out[0], *out[1:]


class FusedLayer:
    """``before``, ``after`` and ``camera`` of a layer whose matrices are in eight bits; made when all its weights are there."""

    following: FusedLayer | None = None
    """The layer behind it, whose input it rounds together with its own end."""

    def __init__(self, layer: Any, operations: Any, *, rounded_queries: bool = False) -> None:
        """``layer``: a WanLayer whose products over tokens are all Fp8Linear. ``rounded_queries``: attention takes them as
        e4m3."""
        attention, cross = layer.attention, layer.cross
        self._layer, self._do, self._injector = layer, operations, layer.camera
        self._rounded_queries = rounded_queries
        self._entered: tuple[Tensor, Rounded] | None = None  # tokens that the layer before has rounded already
        self._modulation = layer.modulation.detach().float()
        self._qk_weights = torch.stack((attention.q_norm.weight, attention.k_norm.weight)).detach().float()
        self._cross_weights = cross.q_norm.weight.detach().float()[None]
        self._cross_norm = (layer.cross_norm.weight.detach(), layer.cross_norm.bias.detach())

    def before(self, x: Tensor, time: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``WanLayer.before``."""
        layer, attention = self._layer, self._layer.attention
        entered, self._entered = self._entered, None
        if entered is not None and entered[0] is x:
            rounded = entered[1]
        else:
            _, rounded = self._do.mix(x, None, None, None, self._norm(time), about_one=True, eps=layer.eps)
        qkv = attention.qkv.product(*rounded, x.dtype).view(*x.shape[:-1], -1)
        half, split = cos.shape[-1], (attention.heads, -1)
        angles = (cos.contiguous(), sin.contiguous())
        q, k = self._do.heads(
            qkv, self._qk_weights, angles, half=half, eps=attention.q_norm.eps, rounded=self._rounded_queries
        )
        v = qkv.chunk(3, dim=-1)[2]
        return q.unflatten(-1, split), k.unflatten(-1, split), v.unflatten(-1, split)

    def after(self, x: Tensor, seen: Tensor, time: Tensor, text: Pair, camera: Pair | None) -> Tensor:
        """See ``WanLayer.after``."""
        layer, do = self._layer, self._do
        modulation = self._modulation + time
        part = self._product(layer.attention.out, seen.flatten(-2))
        rounded: Rounded
        x, rounded = do.mix(x, part, modulation[:, 2], camera, self._cross_norm, about_one=False, eps=layer.eps)
        part = self._crossed(x, rounded, *text)
        norm = (modulation[:, 4], modulation[:, 3])
        x, rounded = do.mix(x, part, None, None, norm, about_one=True, eps=layer.eps)
        part = self._product(layer.down, layer.up.product(*rounded, x.dtype).view(*x.shape[:-1], -1), "gelu")
        following = self.following
        norm_behind = None if following is None else following._norm(time)
        x, rounded = do.mix(x, part, modulation[:, 5], None, norm_behind, about_one=True, eps=layer.eps)
        if following is not None:
            following._entered = (x, rounded)
        return x

    def _norm(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Gain (less one) and offset of the first norm, float32 [B, D]."""
        modulation = self._modulation + time
        return modulation[:, 1], modulation[:, 0]

    def camera(self, camera: Tensor) -> tuple[Tensor, Tensor]:
        """See ``CameraInjector.forward``."""
        injector, do = self._injector, self._do
        part = self._product(injector.second, self._product(injector.first, camera), "silu")
        mixed, _ = do.mix(camera, part, None, None, None, about_one=True, eps=0.0)
        rounded = do.activate(mixed)
        scale, shift = (each.product(*rounded, mixed.dtype) for each in (injector.scale, injector.shift))
        return scale.view(mixed.shape), shift.view(mixed.shape)

    def _crossed(self, x: Tensor, rounded: Rounded, keys: Tensor, values: Tensor) -> Tensor:
        cross = self._layer.cross
        asked = cross.q.product(*rounded, x.dtype).view(x.shape)
        half = cross.q_norm.weight.numel() // cross.heads // 2
        q = self._do.heads(asked, self._cross_weights, None, half=half, eps=cross.q_norm.eps)[0]
        q = q.unflatten(-1, (cross.heads, -1)).transpose(1, 2)
        with fast_kernels(q):
            seen = functional.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2))
        return self._product(cross.out, seen.transpose(1, 2).flatten(-2))

    def _product(self, matrix: Fp8Linear, x: Tensor, function: str = "") -> Tensor:
        rows, scales = self._do.activate(x.contiguous(), function)
        return matrix.product(rows, scales, x.dtype).view(*x.shape[:-1], -1)


def matrices(layer: Any) -> tuple[Any, ...]:
    """The products of a layer that every token is in."""
    camera = layer.camera
    per_block = () if camera is None else (camera.first, camera.second, camera.scale, camera.shift)
    return (layer.attention.qkv, layer.attention.out, layer.cross.q, layer.cross.out, layer.up, layer.down, *per_block)


def operations_for(layers: Any) -> Any | None:
    """Kernels for these layers; None where they are not all in eight bits and on a GPU, and, with a line in the log, where the
    kernels do not run or do not compute what they are to."""
    if not all(
        isinstance(matrix, Fp8Linear) and matrix.weight.is_cuda for layer in layers for matrix in matrices(layer)
    ):
        return None
    try:
        from realtime_omni.models.common.wan import kernels

        check(kernels, layers[0].attention.qkv.weight.device)
    except Exception:
        log.exception("layers in eight bits are compiled: fused kernels do not run here")
        return None
    return kernels


def check(kernels: Any, device: torch.device) -> None:
    """Run every kernel once on a few rows against :class:`TorchOperations`. Raises BackendUnavailable on another result."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, dtype)

    plain: Any = TorchOperations()
    x = normal(2, 5, 96)
    part, camera = normal(2, 5, 96), (normal(2, 5, 96), normal(2, 5, 96))
    modulation = normal(2, 6, 96, dtype=torch.float32)
    given = (x, part, modulation[:, 2], camera, (modulation[:, 1], modulation[:, 0]))
    angle = normal(2, 5, 1, 8, dtype=torch.float32)
    turning: dict[str, Any] = {"half": 8, "eps": 1e-6}
    weights, angles = normal(2, 32, dtype=torch.float32), (angle.cos(), angle.sin())
    pairs = []
    for do in (kernels, plain):
        whole, rounded = do.mix(*given, about_one=True, eps=1e-6)
        pairs.append(
            (
                whole,
                _back(rounded),
                *(_back(do.activate(x, f)) for f in ("", "gelu", "silu")),
                *do.heads(x, weights, angles, **turning),
                do.heads(x, weights, angles, rounded=True, **turning)[0],
            )
        )
    for got, wanted in zip(*pairs, strict=True):
        error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < _MOST_OFF:
            raise BackendUnavailable(f"a fused kernel is off by {error:.3g}")


def _back(rounded: Rounded) -> Tensor:
    rows, scales = rounded
    return rows.float() * scales
