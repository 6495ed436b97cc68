"""The causal diffusion transformer of the Wan family, one block of latent frames at a time.

Owns the modules and their arithmetic. History is not its business: self-attention goes through ``attend``, which is given
the rotated queries and keys of every layer and decides what they see (a paged cache, or nothing but the block). Text is
turned into keys and values once per prompt (:meth:`WanTransformer.text_cache`) and camera features once per block
(:meth:`WanTransformer.camera_cache`); both are values that the caller keeps.

With ``camera_channels == 0`` a layer is that of Wan 2.1 / 2.2 and of diffusers' ``WanTransformer3DModel`` (the tests hold
it to that); with a camera, features of the block are injected between self- and cross-attention: ``c' = c + L2(SiLU(L1 c))``,
``x = (1 + scale(c')) x + shift(c')``. Modulation, norms and residual sums are float32, matrices the weights' dtype.

Shape legend: B rows, F latent frames, H W the latent grid, T = F * H/2 * W/2 tokens, D width, L text tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.wan import fused
from realtime_omni.models.common.wan.rope import axis_channels, rotary, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q, k, v)``: each [B, T, heads, head_dim], q and k rotated; returns the same shape."""
Write = Callable[[int, Tensor, Tensor], None]
"""``write(layer, k, v)``: keys and values as ``attend`` gets them, kept and not attended to."""
KeysValues = tuple[Tensor, Tensor]
"""Of one layer: [B, L, heads, head_dim] each (text), or [B, T, D] each (camera scale and shift)."""

PATCH = 2
"""Latent cells per token and side; one latent frame is never merged with another."""
_PER_PASS = ("attention.qkv", "attention.out", "cross.q", "cross.out", "up", "down")
_PER_BLOCK = ("camera.first", "camera.second", "camera.scale", "camera.shift")


@dataclass(frozen=True, slots=True)
class WanConfig:
    """Dimensions. ``camera_channels``: channels per latent cell of the camera input (LingBot: 384), 0 for none.

    ``frequencies``: width of the sinusoidal timestep. The defaults are those of the 14B model with LingBot's inputs.
    """

    layers: int = 40
    heads: int = 40
    head_dim: int = 128
    mlp_width: int = 13_824
    in_channels: int = 36
    out_channels: int = 16
    text_width: int = 4096
    frequencies: int = 256
    camera_channels: int = 0
    eps: float = 1e-6
    shards: int = 1
    """Networks that share the heads and the MLP; each has all of the rest."""

    def __post_init__(self) -> None:
        axis_channels(self.head_dim)
        if self.frequencies % 2:
            raise ValueError("frequencies must be even")
        if self.heads % self.shards or self.mlp_width % self.shards:
            raise ValueError(f"{self.heads} heads and an MLP of {self.mlp_width} cannot be shared by {self.shards}")

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def own_heads(self) -> int:
        return self.heads // self.shards

    @property
    def own_width(self) -> int:
        """Of all own heads."""
        return self.own_heads * self.head_dim


def timestep_features(t: Tensor, width: int) -> Tensor:
    """cos then sin, float32 [B, width], of timesteps [B] in 0..1000, computed in float64 (base 10,000)."""
    exponent = torch.arange(width // 2, dtype=torch.float64, device=t.device) / (width // 2)
    angles = t.to(torch.float64)[:, None] * torch.exp(-math.log(10_000.0) * exponent)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def _norm(x: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(x.float(), x.shape[-1:], eps=eps)


class SelfAttention(nn.Module):
    """Queries, keys and values by one matrix; q and k are RMS-normalised over the full width, before heads are split."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = config.own_heads
        self.qkv = nn.Linear(config.width, 3 * config.own_width)
        self.q_norm = nn.RMSNorm(config.own_width, eps=config.eps)
        self.k_norm = nn.RMSNorm(config.own_width, eps=config.eps)
        self.out = nn.Linear(config.own_width, config.width)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads, head_dim], q and k rotated."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        split = (self.heads, -1)
        return (
            rotate(self.q_norm(q).unflatten(-1, split), cos, sin),
            rotate(self.k_norm(k).unflatten(-1, split), cos, sin),
            v.unflatten(-1, split),
        )


class CrossAttention(nn.Module):
    """Over text whose keys and values were made beforehand (:meth:`cache`)."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = config.own_heads
        self.q = nn.Linear(config.width, config.own_width)
        self.kv = nn.Linear(config.width, 2 * config.own_width)
        self.q_norm = nn.RMSNorm(config.own_width, eps=config.eps)
        self.k_norm = nn.RMSNorm(config.own_width, eps=config.eps)
        self.out = nn.Linear(config.own_width, config.width)

    def cache(self, text: Tensor) -> KeysValues:
        """Keys and values [B, L, heads, head_dim] of text [B, L, D]."""
        k, v = self.kv(text).chunk(2, dim=-1)
        split = (self.heads, -1)
        return self.k_norm(k).unflatten(-1, split), v.contiguous().unflatten(-1, split)  # a view would keep k, too

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = self.q_norm(self.q(x)).unflatten(-1, (self.heads, -1))
        heads_first = [part.transpose(1, 2) for part in (q, keys, values)]
        seen = functional.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2])
        mixed: Tensor = self.out(seen.transpose(1, 2).flatten(-2))
        return mixed


class CameraInjector(nn.Module):
    """What a layer makes of the camera features of a block: a scale and a shift of every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.scale = nn.Linear(width, width)
        self.shift = nn.Linear(width, width)

    def forward(self, camera: Tensor) -> KeysValues:
        """Scale (less one) and shift [B, T, D] of features [B, T, D]."""
        mixed = camera + self.second(functional.silu(self.first(camera)))
        return self.scale(mixed), self.shift(mixed)


class WanLayer(nn.Module):
    """Self-attention, camera, cross-attention and MLP, each behind its norm; in two halves around what ``attend`` does, each
    of which is one graph to a compiler."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.modulation = nn.Parameter(torch.zeros(6, config.width))
        self.attention = SelfAttention(config)
        self.camera = CameraInjector(config.width) if config.camera_channels else None
        self.cross_norm = nn.LayerNorm(config.width, eps=config.eps)
        self.cross = CrossAttention(config)
        self.up = nn.Linear(config.width, config.mlp_width // config.shards)
        self.down = nn.Linear(config.mlp_width // config.shards, config.width)

    def before(self, x: Tensor, time: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of tokens x [B, T, D]; time float32 [B, 6, D], the projected timestep."""
        return self.attention.project(self.attention_input(x, time), cos, sin)

    def attention_input(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation.float() + time)[:, :2, None].unbind(1)
        return (_norm(x, self.eps) * (1 + scale) + shift).to(x.dtype)

    def after(self, x: Tensor, seen: Tensor, time: Tensor, text: KeysValues, camera: KeysValues | None) -> Tensor:
        """The rest of the layer, [B, T, D]. seen [B, T, heads, head_dim]; camera: scale and shift."""
        return self.widened(self.crossed(x, seen, time, text, camera), time)

    def crossed(
        self, x: Tensor, seen: Tensor, time: Tensor, text: KeysValues, camera: KeysValues | None = None
    ) -> Tensor:
        """:meth:`after` without its last part, the MLP."""
        x = self.attended(x, self.attention.out(seen.flatten(-2)), time, camera)
        crossed: Tensor = x + self.cross(self.cross_input(x), *text)
        return crossed

    def widened(self, x: Tensor, time: Tensor) -> Tensor:
        """The MLP behind its norm, [B, T, D]."""
        return self.grown(x, self.mlp(self.mlp_input(x, time)), time)

    def attended(self, x: Tensor, mixed: Tensor, time: Tensor, camera: KeysValues | None) -> Tensor:
        """Self-attention's part added, then the camera."""
        x = (x.float() + mixed * (self.modulation.float() + time)[:, 2, None]).to(x.dtype)
        if camera is not None:
            scale, shift = camera
            x = (1 + scale) * x + shift
        return x

    def mlp_input(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation.float() + time)[:, 3:5, None].unbind(1)
        return (_norm(x, self.eps) * (1 + scale) + shift).to(x.dtype)

    def mlp(self, h: Tensor) -> Tensor:
        widened: Tensor = self.down(functional.gelu(self.up(h), approximate="tanh"))
        return widened

    def grown(self, x: Tensor, widened: Tensor, time: Tensor) -> Tensor:
        """The MLP's part added."""
        return (x.float() + widened.float() * (self.modulation.float() + time)[:, 5, None]).to(x.dtype)

    parts: ClassVar[tuple[str, ...]] = ("before", "after")
    """Methods that are one graph each."""

    def compile_parts(self, *, dynamic: bool | None) -> None:
        for part in self.parts:
            plain = getattr(type(self), part).__get__(self)
            setattr(self, part, torch.compile(plain, fullgraph=True, dynamic=dynamic))

    def fuse_parts(self, layer: fused.FusedLayer, behind: fused.FusedLayer | None) -> fused.FusedLayer:
        """What :meth:`compile_parts` is for, for a layer in eight bits, with the one behind it; see :mod:`.fused`."""
        layer.following = behind
        for part in ("before", "after"):
            setattr(self, part, getattr(layer, part))
        if self.camera is not None:
            self.camera.forward = layer.camera  # type: ignore[method-assign]
        return layer

    def cross_input(self, x: Tensor) -> Tensor:
        weight, bias = self.cross_norm.weight.float(), self.cross_norm.bias.float()
        return functional.layer_norm(x.float(), x.shape[-1:], weight, bias, self.eps).to(x.dtype)


class WanTransformer(nn.Module):
    """Predicts the flow (noise less clean latents) of one block; see :meth:`forward`."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patches = nn.Linear(config.in_channels * PATCH * PATCH, width)
        self.time_in = nn.Linear(config.frequencies, width)
        self.time_out = nn.Linear(width, width)
        self.time_projection = nn.Linear(width, 6 * width)
        self.text_in = nn.Linear(config.text_width, width)
        self.text_out = nn.Linear(width, width)
        if config.camera_channels:
            self.camera_patches = nn.Linear(config.camera_channels * PATCH * PATCH, width)
            self.camera_first = nn.Linear(width, width)
            self.camera_second = nn.Linear(width, width)
        self.layers = nn.ModuleList(self._new_layer() for _ in range(config.layers))
        self.head_modulation = nn.Parameter(torch.zeros(2, width))
        self.head = nn.Linear(width, config.out_channels * PATCH * PATCH)

    def _new_layer(self) -> WanLayer:
        return WanLayer(self.config)

    # All tokens, where the network is whole; a network of which there are several computes some.

    def own_tokens(self, x: Tensor) -> Tensor:
        """Of [B, T, ..], the tokens that this network computes."""
        return x

    def attention_tokens(self, x: Tensor) -> Tensor:
        """Of [B, T, ..], those that it makes queries of."""
        return x

    def all_tokens(self, x: Tensor) -> Tensor:
        """[B, T, ..] from its own."""
        return x

    def text_cache(self, text: Tensor) -> tuple[KeysValues, ...]:
        """Keys and values of every layer for encoded text [B, L, text_width]."""
        projected = self.text_out(functional.gelu(self.text_in(text), approximate="tanh"))
        return tuple(layer.cross.cache(projected) for layer in self._layers)

    def camera_features(self, camera: Tensor) -> Tensor:
        """Features [B, own tokens, D] of a block's camera input [B, F, camera_channels, H, W]."""
        embedded = self.camera_patches(self.own_tokens(patchify(camera)).to(self.camera_patches.weight.dtype))
        mixed: Tensor = embedded + self.camera_second(functional.silu(self.camera_first(embedded)))
        return mixed

    def camera_cache(self, camera: Tensor) -> tuple[KeysValues, ...]:
        """Scale and shift of every layer; the same for all passes over a block (LingBot at 480 x 832: 3.6 GiB)."""
        features = self.camera_features(camera)
        return tuple(layer.camera(features) for layer in self._layers if layer.camera is not None)

    def forward(
        self,
        latents: Tensor,
        t: Tensor,
        frames: Tensor,
        text: Sequence[KeysValues],
        attend: Attend,
        *,
        camera: Sequence[KeysValues] | None = None,
    ) -> Tensor:
        """The flow, float32 [B, F, out_channels, H, W].

        latents [B, F, in_channels, H, W]; t [B] timestep of the whole block, 0..1000; frames int64 [B, F] absolute frame
        numbers; text and camera per layer, from :meth:`text_cache` and :meth:`camera_cache`."""
        grid = (latents.shape[-2] // PATCH, latents.shape[-1] // PATCH)
        x, time = self.trunk(latents, t, frames, text, attend, camera=camera)
        shift, scale = (self.head_modulation.float() + time[:, None])[:, :, None].unbind(1)
        h = _norm(x, self.config.eps) * (1 + scale) + shift
        flow = self.all_tokens(self.head(h.to(x.dtype)).float())
        return unpatchify(flow, grid, self.config.out_channels)

    def commit(
        self,
        latents: Tensor,
        t: Tensor,
        frames: Tensor,
        text: Sequence[KeysValues],
        attend: Attend,
        write: Write,
        *,
        camera: Sequence[KeysValues] | None = None,
    ) -> None:
        """The same pass for its keys and values alone: the last layer's go to ``write``, and nothing follows them."""
        self.trunk(latents, t, frames, text, attend, write, camera=camera)

    def trunk(
        self,
        latents: Tensor,
        t: Tensor,
        frames: Tensor,
        text: Sequence[KeysValues],
        attend: Attend,
        write: Write | None = None,
        *,
        camera: Sequence[KeysValues] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Own tokens after the last layer [B, T, D], or before it where it only writes; and the embedded timestep, float32
        [B, D]."""
        dtype = self.patches.weight.dtype
        x = self.patches(self.own_tokens(patchify(latents)).to(dtype))
        rows, columns = latents.shape[-2] // PATCH, latents.shape[-1] // PATCH
        cos, sin = map(self.attention_tokens, rotary(frames, rows, columns, self.config.head_dim))
        time = self.time_out(functional.silu(self.time_in(timestep_features(t, self.config.frequencies).to(dtype))))
        projected = self.time_projection(functional.silu(time)).float().unflatten(-1, (6, -1))
        for index, layer in enumerate(self._layers):
            q, k, v = layer.before(x, projected, cos, sin)
            if write is not None and index == self.config.layers - 1:
                write(index, k, v)
                break
            seen = attend(index, q, k, v)
            x = layer.after(x, seen, projected, text[index], None if camera is None else camera[index])
        return x, time.float()

    def heavy_matrices(self) -> tuple[str, ...]:
        """Names of the linear maps that nearly all of the arithmetic is in: those of a layer that see every token. Text is
        not among them (once per prompt)."""
        names = (*_PER_PASS, *(_PER_BLOCK if self.config.camera_channels else ()))
        return tuple(f"layers.{index}.{name}" for index in range(self.config.layers) for name in names)

    def compile_layers(self, *, dynamic: bool | None = False, fp8_attention: bool = False) -> None:
        """Have torch compile both halves of a layer, once for all; the first pass of each shape takes tens of seconds.
        ``dynamic``: as torch.compile's; None: a graph for any size from the second size on. What was compiled before is
        compiled anew, as after an exchange of matrices it must be. Whole layers in eight bits on a GPU need no compiler: they
        have kernels of their own (:mod:`.fused`), which round queries where ``fp8_attention`` says that they may."""
        import torch._dynamo  # slow to import, and only this needs it

        torch._dynamo.config.recompile_limit = 64  # all layers share a function's code: rows times tokens of a pass
        whole = all(type(layer) is WanLayer for layer in self._layers)
        kernels = fused.operations_for(self._layers) if whole else None
        behind: fused.FusedLayer | None = None
        for layer in reversed(self._layers):
            if kernels is None:
                layer.compile_parts(dynamic=dynamic)
            else:
                behind = layer.fuse_parts(fused.FusedLayer(layer, kernels, rounded_queries=fp8_attention), behind)

    @property
    def _layers(self) -> Sequence[WanLayer]:
        return self.layers  # type: ignore[return-value]


def patchify(x: Tensor) -> Tensor:
    """[B, F, C, H, W] to tokens [B, F * H/2 * W/2, C * 4], channels then row then column as in a convolution's kernel."""
    B, F, C, H, W = x.shape
    if H % PATCH or W % PATCH:
        raise ValueError(f"the latent grid must be even, got {H} x {W}")
    x = x.view(B, F, C, H // PATCH, PATCH, W // PATCH, PATCH).permute(0, 1, 3, 5, 2, 4, 6)
    return x.reshape(B, F * (H // PATCH) * (W // PATCH), C * PATCH * PATCH)


def unpatchify(x: Tensor, grid: tuple[int, int], channels: int) -> Tensor:
    """Tokens [B, T, 4 * channels], row then column then channel, to [B, F, channels, H, W]."""
    rows, columns = grid
    x = x.view(x.shape[0], -1, rows, columns, PATCH, PATCH, channels).permute(0, 1, 6, 2, 4, 3, 5)
    return x.reshape(x.shape[0], x.shape[1], channels, rows * PATCH, columns * PATCH)
