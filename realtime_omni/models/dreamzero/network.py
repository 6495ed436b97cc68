"""The transformer: Wan's layers over video tokens and, behind them, registers for the actions and the robot's state.

Owns the order of the parts. Video and registers are denoised in one sequence and have timesteps of their own; every token of
a pass attends to history, to the block's video and to all registers (arXiv 2602.15922 and its code, Apache-2.0: the inference
path; the narrower mask of training is a matter of training). Video positions are Wan's three axes, registers count on one
axis over the whole head: action ``i`` of block ``b`` is at ``b N + i``, its state at ``b``.

Registers have small networks per embodiment: ``(category, in, out)`` matrices, of which a checkpoint may hold one.
History is not its business: self-attention goes through ``attend``, as in :mod:`realtime_omni.models.common.wan.transformer`.

Shape legend: B rows, F latent frames, H W the latent grid, T video tokens, N actions, S states, D width, L image tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.wan.rope import rotary, rotary_line
from realtime_omni.models.common.wan.transformer import (
    PATCH,
    Attend,
    KeysValues,
    WanConfig,
    WanLayer,
    WanTransformer,
    Write,
    patchify,
    timestep_features,
    unpatchify,
)

_IMAGE_EPS = 1e-5
"""Of the two norms around the picture's features."""


@dataclass(frozen=True, slots=True)
class DreamZeroConfig:
    """Dimensions beside the trunk's. ``image_width``: of a picture's features (CLIP: 1280), 0 for a network without.
    ``state_width`` and ``action_width``: the padded widths; ``hidden``: of the small networks of state and action."""

    trunk: WanConfig
    image_width: int = 1280
    state_width: int = 64
    action_width: int = 32
    hidden: int = 1024
    categories: int = 1


@dataclass(frozen=True, slots=True)
class Registers:
    """What is denoised beside a block. ``actions`` [B, N, action_width] at timestep ``t`` [B], ``state`` [B, S, state_width],
    ``index`` int64 [B]: the number of the block in its window. ``t`` None: the block's, and then all of it goes through a layer
    as one sequence: its weights are read once."""

    actions: Tensor
    state: Tensor
    t: Tensor | None
    index: Tensor


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Of one timestep. x [B, T, D]; time float32 [B, 6, D], the projected timestep; cos and sin [B, T, 1, head_dim / 2]."""

    x: Tensor
    time: Tensor
    cos: Tensor
    sin: Tensor

    def followed_by(self, other: _Tokens) -> _Tokens:
        """One sequence of both, at the timestep of the first."""
        x, cos, sin = _joined([(self.x, self.cos, self.sin), (other.x, other.cos, other.sin)])
        return _Tokens(x, self.time, cos, sin)


def _joined(each: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Tensors [B, T, ..] of several sequences, one behind the other; those of one are not copied."""
    return each[0] if len(each) == 1 else tuple(torch.cat(parts, dim=1) for parts in zip(*each, strict=True))


class CategoryLinear(nn.Module):
    """A matrix per embodiment."""

    def __init__(self, categories: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(categories, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(categories, outputs))

    def forward(self, x: Tensor, category: int) -> Tensor:
        mixed: Tensor = x.to(self.weight.dtype) @ self.weight[category] + self.bias[category]
        return mixed


class CategoryMLP(nn.Module):
    """Two of them around a ReLU."""

    def __init__(self, categories: int, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first = CategoryLinear(categories, inputs, hidden)
        self.second = CategoryLinear(categories, hidden, outputs)

    def forward(self, x: Tensor, category: int) -> Tensor:
        mixed: Tensor = self.second(functional.relu(self.first(x, category)), category)
        return mixed


class ActionEncoder(nn.Module):
    """Actions and their timestep: ``W3 silu(W2 [W1 a, sin(t f), cos(t f)])``."""

    def __init__(self, categories: int, inputs: int, width: int) -> None:
        super().__init__()
        self.first = CategoryLinear(categories, inputs, width)
        self.second = CategoryLinear(categories, 2 * width, width)
        self.third = CategoryLinear(categories, width, width)

    def forward(self, actions: Tensor, t: Tensor, category: int) -> Tensor:
        """[B, N, D] of actions [B, N, action_width] at t [B]."""
        embedded = self.first(actions, category)
        half = embedded.shape[-1] // 2
        rates = torch.exp(-math.log(10_000.0) / half * torch.arange(half, dtype=torch.float32, device=t.device))
        angles = t.float()[:, None] * rates
        time = torch.cat((angles.sin(), angles.cos()), dim=-1)[:, None].expand(embedded.shape).to(embedded.dtype)
        mixed = functional.silu(self.second(torch.cat((embedded, time), dim=-1), category))
        out: Tensor = self.third(mixed, category)
        return out


class DreamZeroLayer(WanLayer):
    """Wan's layer whose cross-attention also looks at a picture: two attentions with the same queries, added."""

    def __init__(self, config: DreamZeroConfig) -> None:
        super().__init__(config.trunk)
        width = config.trunk.width
        self.image_kv = nn.Linear(width, 2 * width) if config.image_width else None
        self.image_k_norm = nn.RMSNorm(width, eps=config.trunk.eps) if config.image_width else None

    def image_cache(self, image: Tensor) -> KeysValues:
        """Keys and values [B, L, heads, head_dim] of a projected picture [B, L, D]."""
        assert self.image_kv is not None
        assert self.image_k_norm is not None
        k, v = self.image_kv(image).chunk(2, dim=-1)
        split = (self.cross.heads, -1)
        return self.image_k_norm(k).unflatten(-1, split), v.contiguous().unflatten(-1, split)

    parts: ClassVar[tuple[str, ...]] = ("before", "finish")

    def finish(self, x: Tensor, seen: Tensor, time: Tensor, text: KeysValues, image: KeysValues | None) -> Tensor:
        """The rest of the layer after self-attention, [B, T, D]. seen [B, T, heads, head_dim]; time float32 [B, 6, D]."""
        x = self.attended(x, self.attention.out(seen.flatten(-2)), time, None)
        q = self.cross.q_norm(self.cross.q(self.cross_input(x))).unflatten(-1, (self.cross.heads, -1))
        looked = _cross_attend(q, text)
        if image is not None:
            looked = looked + _cross_attend(q, image)
        return self.widened(x + self.cross.out(looked), time)


def _cross_attend(q: Tensor, given: KeysValues) -> Tensor:
    heads_first = [part.transpose(1, 2) for part in (q, *given)]
    seen = functional.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2])
    return seen.transpose(1, 2).flatten(-2)


class DreamZeroTransformer(WanTransformer):
    """Predicts the flows of a block's latents and of its actions; see :meth:`joint`."""

    def __init__(self, config: DreamZeroConfig) -> None:
        self.shape = config
        super().__init__(config.trunk)
        width, categories = config.trunk.width, config.categories
        if config.image_width:
            self.image_norm_in = nn.LayerNorm(config.image_width, eps=_IMAGE_EPS)
            self.image_in = nn.Linear(config.image_width, config.image_width)
            self.image_out = nn.Linear(config.image_width, width)
            self.image_norm_out = nn.LayerNorm(width, eps=_IMAGE_EPS)
        self.state_encoder = CategoryMLP(categories, config.state_width, config.hidden, width)
        self.action_encoder = ActionEncoder(categories, config.action_width, width)
        self.action_decoder = CategoryMLP(categories, width, config.hidden, config.action_width)

    def _new_layer(self) -> DreamZeroLayer:
        return DreamZeroLayer(self.shape)

    def image_cache(self, features: Tensor) -> tuple[KeysValues, ...]:
        """Keys and values of every layer for a picture's features [B, L, image_width]."""
        hidden = functional.gelu(self.image_in(self.image_norm_in(features)))
        projected = self.image_norm_out(self.image_out(hidden))
        return tuple(layer.image_cache(projected) for layer in self._own_layers)

    def joint(
        self,
        latents: Tensor,
        t: Tensor,
        frames: Tensor,
        text: Sequence[KeysValues],
        image: Sequence[KeysValues] | None,
        attend: Attend,
        registers: Registers | None = None,
        *,
        category: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """The flows: float32 [B, F, out_channels, H, W], and with registers float32 [B, N, action_width].

        latents [B, F, in_channels, H, W] at timestep t [B], 0..1000; frames int64 [B, F], numbers in the window; text and
        image per layer, from :meth:`text_cache` and :meth:`image_cache`."""
        dtype, size = self.patches.weight.dtype, self.shape.trunk.head_dim
        grid = (latents.shape[-2] // PATCH, latents.shape[-1] // PATCH)
        time, projected = self._time(t)
        sequences = [_Tokens(self.patches(patchify(latents).to(dtype)), projected, *rotary(frames, *grid, size))]
        if registers is not None:
            own_t, own_time = (t, projected) if registers.t is None else (registers.t, self._time(registers.t)[1])
            turn = rotary_line(self._positions(registers), size)
            own = _Tokens(self._embedded(registers, own_t, category), own_time, *turn)
            sequences = [sequences[0].followed_by(own)] if registers.t is None else [*sequences, own]
        for index, layer in enumerate(self._own_layers):
            given = text[index], None if image is None else image[index]
            q, k, v = _joined([layer.before(part.x, part.time, part.cos, part.sin) for part in sequences])
            seen = torch.split(attend(index, q, k, v), [part.x.shape[1] for part in sequences], dim=1)
            sequences = [
                replace(part, x=layer.finish(part.x, attended, part.time, *given))
                for part, attended in zip(sequences, seen, strict=True)
            ]
        (x,) = _joined([(part.x,) for part in sequences])
        tokens = latents.shape[1] * grid[0] * grid[1]
        flow = self._flow(x[:, :tokens], time, grid)
        if registers is None:
            return flow, None
        return flow, self.action_decoder(x[:, tokens : tokens + registers.actions.shape[1]], category).float()

    def history(
        self,
        latents: Tensor,
        t: Tensor,
        frames: Tensor,
        text: Sequence[KeysValues],
        image: Sequence[KeysValues] | None,
        attend: Attend,
        write: Write,
    ) -> None:
        """:meth:`joint` without registers, for its keys and values alone: the last layer's go to ``write``."""
        video = self.patches(patchify(latents).to(self.patches.weight.dtype))
        turn = rotary(frames, latents.shape[-2] // PATCH, latents.shape[-1] // PATCH, self.shape.trunk.head_dim)
        _, time = self._time(t)
        *inner, last = self._own_layers
        for index, layer in enumerate(inner):
            seen = attend(index, *layer.before(video, time, *turn))
            video = layer.finish(video, seen, time, text[index], None if image is None else image[index])
        _, k, v = last.before(video, time, *turn)
        write(len(inner), k, v)

    def _time(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The embedded timestep, float32 [B, D], and its projection for the layers, float32 [B, 6, D]."""
        dtype = self.patches.weight.dtype
        features = timestep_features(t, self.config.frequencies).to(dtype)
        time = self.time_out(functional.silu(self.time_in(features)))
        return time.float(), self.time_projection(functional.silu(time)).float().unflatten(-1, (6, -1))

    def _embedded(self, registers: Registers, t: Tensor, category: int) -> Tensor:
        """[B, N + S, D]."""
        actions = self.action_encoder(registers.actions, t, category)
        return torch.cat((actions, self.state_encoder(registers.state, category)), dim=1)

    @staticmethod
    def _positions(registers: Registers) -> Tensor:
        """int64 [B, N + S]."""
        counts = (registers.actions.shape[1], registers.state.shape[1])
        each = [registers.index[:, None] * n + torch.arange(n, device=registers.index.device) for n in counts]
        return torch.cat(each, dim=1)

    def _flow(self, x: Tensor, time: Tensor, grid: tuple[int, int]) -> Tensor:
        shift, scale = (self.head_modulation.float() + time[:, None])[:, :, None].unbind(1)
        normed = functional.layer_norm(x.float(), x.shape[-1:], eps=self.config.eps) * (1 + scale) + shift
        return unpatchify(self.head(normed.to(x.dtype)).float(), grid, self.config.out_channels)

    @property
    def _own_layers(self) -> Sequence[DreamZeroLayer]:
        return self.layers  # type: ignore[return-value]
