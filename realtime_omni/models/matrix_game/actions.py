"""How keyboard and mouse act on a layer of Matrix-Game 2: attention over time, with a history of its own.

Owns the action module that the first layers have behind their cross-attention. Every latent frame sees the actions of twelve
pictures: those of frame f are pictures 4 f - 12 to 4 f - 1, where picture 0 is the first one and stands for those before it.

*Mouse*: each place of the latent grid attends to itself over the frames; its features and the twelve movements make query, key
and value. *Keyboard*: each token attends to one key per frame, made of the embedded keys of twelve pictures. Both see what
self-attention sees, the frames of the window, and remember keys and values of earlier blocks (:class:`ActionHistory`).
Only the first :data:`ROTATED` channels of a head are turned, by the frame's number, base 256.

Facts (dimensions, order of the parts, positions) from the configuration and modules that FastVideo 0.2.1 publishes
(Apache-2.0) and from arXiv 2508.13009; the tests hold this module to FastVideo's.

Shape legend: B rows, F latent frames of a block, S tokens of a frame, T = F * S, D width, P remembered frames, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.wan.rope import rotate

PICTURES = 12
"""Whose actions a latent frame sees."""
ROTATED = 8
"""Channels of a head that carry time."""
BASE = 256.0
MOUSE = 2
"""Pitch and yaw."""
_EPS = 1e-6

Remembered = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of one layer and row: keys and values of the mouse [S, frames, H, d], and of the keyboard [frames, H, d], keys rotated."""


@dataclass(frozen=True, slots=True)
class ActionConfig:
    """Dimensions of an action module. ``width``: of the layer that it belongs to; ``keys``: of the keyboard."""

    width: int
    heads: int = 16
    head_dim: int = 64
    key_width: int = 128
    keys: int = 4

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ActionHistory:
    """What the action modules remember of a session's earlier frames: ``mouse`` [layers, 2, S, P, H, d] and ``keyboard``
    [layers, 2, P, H, d], keys then values. Immutable."""

    mouse: Tensor
    keyboard: Tensor

    @property
    def frames(self) -> int:
        return self.keyboard.shape[2]

    def layer(self, index: int) -> Remembered:
        return self.mouse[index, 0], self.mouse[index, 1], self.keyboard[index, 0], self.keyboard[index, 1]

    def then(self, block: Sequence[Remembered], keep: int) -> ActionHistory:
        """With a block's keys and values of every layer behind it, and no more than the latest ``keep`` frames."""
        mouse = torch.stack([torch.stack((layer[0], layer[1])) for layer in block])
        keyboard = torch.stack([torch.stack((layer[2], layer[3])) for layer in block])
        mouse, keyboard = torch.cat((self.mouse, mouse), dim=3), torch.cat((self.keyboard, keyboard), dim=2)
        first = max(keyboard.shape[2] - keep, 0)
        return ActionHistory(mouse[:, :, :, first:].contiguous(), keyboard[:, :, first:].contiguous())


def rotation(frames: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [B, F, 1, head_dim / 2], of absolute frame numbers int64 [B, F]; of no angle beyond ROTATED."""
    exponent = torch.arange(0, ROTATED, 2, dtype=torch.float64, device=frames.device) / ROTATED
    angles = frames.to(torch.float64)[..., None] * BASE**-exponent
    angles = functional.pad(angles, (0, (head_dim - ROTATED) // 2))[:, :, None]
    return angles.cos().float(), angles.sin().float()


class ActionModule(nn.Module):
    """Adds what the actions do to the tokens of a layer."""

    def __init__(self, config: ActionConfig) -> None:
        super().__init__()
        self.config = config
        self.mouse_in = nn.Linear(config.width + MOUSE * PICTURES, config.inner)
        self.mouse_out = nn.Linear(config.inner, config.inner)
        self.mouse_norm = nn.LayerNorm(config.inner)
        self.mouse_qkv = nn.Linear(config.inner, 3 * config.inner, bias=False)
        self.mouse_q_norm = nn.RMSNorm(config.head_dim, eps=_EPS)
        self.mouse_k_norm = nn.RMSNorm(config.head_dim, eps=_EPS)
        self.mouse_proj = nn.Linear(config.inner, config.width, bias=False)
        self.key_in = nn.Linear(config.keys, config.key_width)
        self.key_out = nn.Linear(config.key_width, config.key_width)
        self.key_q = nn.Linear(config.width, config.inner, bias=False)
        self.key_kv = nn.Linear(config.key_width * PICTURES, 2 * config.inner, bias=False)
        self.key_q_norm = nn.RMSNorm(config.head_dim, eps=_EPS)
        self.key_k_norm = nn.RMSNorm(config.head_dim, eps=_EPS)
        self.key_proj = nn.Linear(config.inner, config.width, bias=False)

    def forward(
        self,
        x: Tensor,
        mouse: Tensor,
        keys: Tensor,
        turn: tuple[Tensor, Tensor],
        past: Sequence[Remembered],
    ) -> tuple[Tensor, list[Remembered]]:
        """Tokens [B, T, D], and what each row would remember of this block.

        x [B, T, D]; mouse [B, F, PICTURES, 2] and keys [B, F, PICTURES, keys]; turn: :func:`rotation` of the frames; past: of
        each row, the frames before the block that it sees."""
        x, mouse_kv = self._moved(x, mouse, turn, past)
        x, key_kv = self._pressed(x, keys, turn, past)
        return x, [(*m, *k) for m, k in zip(mouse_kv, key_kv, strict=True)]

    def _moved(
        self, x: Tensor, mouse: Tensor, turn: tuple[Tensor, Tensor], past: Sequence[Remembered]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        B, F = mouse.shape[:2]
        places = x.view(B, F, -1, x.shape[-1]).transpose(1, 2)  # [B, S, F, D]
        moves = mouse.flatten(2)[:, None].expand(B, places.shape[1], F, -1).to(x.dtype)
        mixed = self.mouse_out(functional.gelu(self.mouse_in(torch.cat((places, moves), dim=-1)), approximate="tanh"))
        normed = self.mouse_norm(mixed)
        q, k, v = self.mouse_qkv(normed).unflatten(-1, (3, self.config.heads, -1)).unbind(-3)
        cos, sin = (part[:, None] for part in turn)
        q, k = rotate(self.mouse_q_norm(q), cos, sin), rotate(self.mouse_k_norm(k), cos, sin)
        seen = [
            _attend(q[row], torch.cat((held[0], k[row]), dim=1), torch.cat((held[1], v[row]), dim=1))
            for row, held in enumerate(past)
        ]  # each [S, F, H, d]
        added = self.mouse_proj(torch.stack(seen).flatten(-2)).transpose(1, 2).flatten(1, 2)
        return x + added, list(zip(k.unbind(0), v.unbind(0), strict=True))

    def _pressed(
        self, x: Tensor, keys: Tensor, turn: tuple[Tensor, Tensor], past: Sequence[Remembered]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        F = keys.shape[1]
        embedded = self.key_out(functional.silu(self.key_in(keys.to(x.dtype)))).flatten(2)
        k, v = self.key_kv(embedded).unflatten(-1, (2, self.config.heads, -1)).unbind(-3)
        k = rotate(self.key_k_norm(k), *turn)
        q = self.key_q_norm(self.key_q(x).unflatten(-1, (self.config.heads, -1)))
        cos, sin = (part.repeat_interleave(x.shape[1] // F, dim=1) for part in turn)
        q = rotate(q, cos, sin)
        seen = [
            _attend(q[row], torch.cat((held[2], k[row])), torch.cat((held[3], v[row]))) for row, held in enumerate(past)
        ]  # each [T, H, d]
        return x + self.key_proj(torch.stack(seen).flatten(-2)), list(zip(k.unbind(0), v.unbind(0), strict=True))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of everything to everything: q [..., n, H, d], k and v [..., m, H, d]."""
    heads_first = [part.transpose(-3, -2) for part in (q, k, v)]
    return functional.scaled_dot_product_attention(heads_first[0], heads_first[1], heads_first[2]).transpose(-3, -2)
