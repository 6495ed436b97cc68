"""The transformer of Matrix-Game 2: Wan's layers, a picture's features in place of text, actions in the first layers.

Owns the order of the parts. Self-attention goes through ``attend``, as in :mod:`realtime_omni.models.common.wan.transformer`;
the action modules' own history goes in and comes out as a value.

Shape legend: B rows, F latent frames, H W the latent grid, T = F * H/2 * W/2 tokens, D width, L tokens of the picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.wan.rope import rotary
from realtime_omni.models.common.wan.transformer import (
    PATCH,
    Attend,
    KeysValues,
    WanConfig,
    WanLayer,
    Write,
    patchify,
    timestep_features,
    unpatchify,
)
from realtime_omni.models.matrix_game.actions import (
    ActionConfig,
    ActionHistory,
    ActionModule,
    Remembered,
    rotation,
)

_CONTEXT_EPS = 1e-5
"""Of the two norms around the picture's features."""


@dataclass(frozen=True, slots=True)
class MatrixGameConfig:
    """Dimensions; the defaults are those of the published 1.8B network. ``action_layers``: how many of the first layers have
    an action module; ``context_width``: of the picture's features."""

    layers: int = 30
    heads: int = 12
    head_dim: int = 128
    mlp_width: int = 8960
    in_channels: int = 36
    out_channels: int = 16
    frequencies: int = 256
    context_width: int = 1280
    action_layers: int = 15
    action_heads: int = 16
    action_head_dim: int = 64
    key_width: int = 128
    keys: int = 4
    eps: float = 1e-6

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def trunk(self) -> WanConfig:
        """Of a layer without its actions."""
        return WanConfig(
            layers=self.layers,
            heads=self.heads,
            head_dim=self.head_dim,
            mlp_width=self.mlp_width,
            in_channels=self.in_channels,
            out_channels=self.out_channels,
            text_width=self.context_width,
            frequencies=self.frequencies,
            eps=self.eps,
        )

    @property
    def actions(self) -> ActionConfig:
        return ActionConfig(self.width, self.action_heads, self.action_head_dim, self.key_width, self.keys)


@dataclass(frozen=True, slots=True)
class Acted:
    """What was done during a block: ``mouse`` [B, F, PICTURES, 2], pitch and yaw; ``keys`` [B, F, PICTURES, keys]."""

    mouse: Tensor
    keys: Tensor


class MatrixGameLayer(WanLayer):
    """Wan's layer with an action module between cross-attention and MLP."""

    def __init__(self, config: MatrixGameConfig) -> None:
        super().__init__(config.trunk)
        self.action = ActionModule(config.actions)


class MatrixGameTransformer(nn.Module):
    """Predicts the flow (noise less clean latents) of one block; see :meth:`forward`."""

    def __init__(self, config: MatrixGameConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.patches = nn.Linear(config.in_channels * PATCH * PATCH, width)
        self.time_in = nn.Linear(config.frequencies, width)
        self.time_out = nn.Linear(width, width)
        self.time_projection = nn.Linear(width, 6 * width)
        self.context_norm_in = nn.LayerNorm(config.context_width, eps=_CONTEXT_EPS)
        self.context_in = nn.Linear(config.context_width, config.context_width)
        self.context_out = nn.Linear(config.context_width, width)
        self.context_norm_out = nn.LayerNorm(width, eps=_CONTEXT_EPS)
        self.layers = nn.ModuleList(
            MatrixGameLayer(config) if index < config.action_layers else WanLayer(config.trunk)
            for index in range(config.layers)
        )
        self.head_modulation = nn.Parameter(torch.zeros(2, width))
        self.head = nn.Linear(width, config.out_channels * PATCH * PATCH)

    def context_cache(self, features: Tensor) -> tuple[KeysValues, ...]:
        """Keys and values of every layer for a picture's features [B, L, context_width]."""
        hidden = functional.gelu(self.context_in(self.context_norm_in(features)))
        projected = self.context_norm_out(self.context_out(hidden))
        return tuple(layer.cross.cache(projected) for layer in self._layers)

    def no_history(self, tokens_per_frame: int) -> ActionHistory:
        """Of a session that begins."""
        config, weight = self.config, self.patches.weight
        shape = (config.action_layers, 2, tokens_per_frame, 0, config.action_heads, config.action_head_dim)
        return ActionHistory(weight.new_zeros(shape), weight.new_zeros((*shape[:2], *shape[3:])))

    def forward(
        self,
        latents: Tensor,
        t: Tensor,
        frames: Tensor,
        context: Sequence[KeysValues],
        acted: Acted,
        past: Sequence[ActionHistory],
        attend: Attend,
    ) -> tuple[Tensor, list[list[Remembered]]]:
        """The flow, float32 [B, F, out_channels, H, W], and per row what its action layers would remember of the block.

        latents [B, F, in_channels, H, W]; t [B] timestep of the whole block, 0..1000; frames int64 [B, F] absolute frame
        numbers; context per layer, from :meth:`context_cache`; past: of each row, as many frames as its attention sees."""
        x, time, remembered = self._trunk(latents, t, frames, context, acted, past, attend)
        shift, scale = (self.head_modulation.float() + time.float()[:, None])[:, :, None].unbind(1)
        h = functional.layer_norm(x.float(), x.shape[-1:], eps=self.config.eps) * (1 + scale) + shift
        grid = (latents.shape[-2] // PATCH, latents.shape[-1] // PATCH)
        return unpatchify(self.head(h.to(x.dtype)).float(), grid, self.config.out_channels), remembered

    def commit(
        self,
        latents: Tensor,
        t: Tensor,
        frames: Tensor,
        context: Sequence[KeysValues],
        acted: Acted,
        past: Sequence[ActionHistory],
        attend: Attend,
        write: Write,
    ) -> list[list[Remembered]]:
        """The same pass for what becomes history: ends with the last layer's keys and values, which go to ``write``, and
        returns what :meth:`forward` returns of the action layers."""
        _, _, remembered = self._trunk(latents, t, frames, context, acted, past, attend, write)
        return remembered

    def _trunk(
        self,
        latents: Tensor,
        t: Tensor,
        frames: Tensor,
        context: Sequence[KeysValues],
        acted: Acted,
        past: Sequence[ActionHistory],
        attend: Attend,
        write: Write | None = None,
    ) -> tuple[Tensor, Tensor, list[list[Remembered]]]:
        """Tokens [B, T, D], the embedded timestep [B, D], and what is remembered. With ``write`` the last layer only writes,
        unless it has actions: those come out of its whole."""
        dtype = self.patches.weight.dtype
        grid = (latents.shape[-2] // PATCH, latents.shape[-1] // PATCH)
        x = self.patches(patchify(latents).to(dtype))
        cos, sin = rotary(frames, *grid, self.config.head_dim)
        turn = rotation(frames, self.config.action_head_dim)
        time = self.time_out(functional.silu(self.time_in(timestep_features(t, self.config.frequencies).to(dtype))))
        projected = self.time_projection(functional.silu(time)).float().unflatten(-1, (6, -1))
        remembered: list[list[Remembered]] = [[] for _ in past]
        for index, layer in enumerate(self._layers):
            q, k, v = layer.before(x, projected, cos, sin)
            if write is not None and index == self.config.layers - 1 and not isinstance(layer, MatrixGameLayer):
                write(index, k, v)
                break
            x = layer.crossed(x, attend(index, q, k, v), projected, context[index])
            if isinstance(layer, MatrixGameLayer):
                held = [history.layer(index) for history in past]
                x, kept = layer.action(x, acted.mouse, acted.keys, turn, held)
                for row, values in enumerate(kept):
                    remembered[row].append(values)
            x = layer.widened(x, projected)
        return x, time, remembered

    @property
    def _layers(self) -> Sequence[WanLayer]:
        return self.layers  # type: ignore[return-value]
