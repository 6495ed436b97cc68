"""A Wan network of which several ranks hold a share: which part of each parameter, and a layer with its exchanges.

Owns the split. Residual tokens belong to one rank each, whatever the grid, so that everything between matrices is computed
once. Around self-attention the ranks of a *sequence* group trade tokens for heads and back (Ulysses, arXiv 2309.14509): each
sees all tokens, and its pages hold the keys and values of its heads. In a *tensor* group (Megatron-LM, arXiv 1909.08053, its
exchanges as gather and reduce-scatter, arXiv 2205.05198) a matrix that widens keeps some rows and one that narrows some
columns; its input is gathered, its partial outputs are summed and shared out. Embeddings, the camera and norms are whole on
every rank. A bias behind a sum is rank 0's of the group alone.

Must not know processes, pages or sessions. Shape legend as in ``transformer`` and ``parallel.mesh``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.wan.rope import rotate
from realtime_omni.models.common.wan.transformer import (
    CrossAttention,
    KeysValues,
    WanConfig,
    WanLayer,
    WanTransformer,
)
from realtime_omni.parallel.mesh import Grid, Mesh, by_rank, by_token

_NARROWS = r"\.(attention\.out|cross\.out|down)\."
_WIDENS = r"\.(attention\.(qkv|[qkv]|[qk]_norm)|cross\.(kv|[qkv]|[qk]_norm)|up)\."

Share = tuple[slice, ...] | None
"""Of a stored tensor; None: zeros instead."""


def share_of(parameter: str, shape: Sequence[int], grid: Grid) -> Share:
    """Which part of a whole parameter of this shape a rank keeps. Fused matrices are asked for by each of their parts."""
    if grid.tensor_size == 1:
        return (slice(None),)
    if re.search(_NARROWS, parameter):
        if len(shape) == 1:
            return (slice(None),) if grid.tensor == 0 else None
        return (slice(None), _slice(shape[1], grid))
    return (_slice(shape[0], grid),) if re.search(_WIDENS, parameter) else (slice(None),)


def whole_shape(parameter: str, shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """The shape of the whole of which a share has ``shape``."""
    if re.search(_NARROWS, parameter) and len(shape) == 2:
        return (shape[0], shape[1] * shards)
    return (shape[0] * shards, *shape[1:]) if re.search(_WIDENS, parameter) else tuple(shape)


def _slice(size: int, grid: Grid) -> slice:
    own = size // grid.tensor_size
    return slice(grid.tensor * own, (grid.tensor + 1) * own)


def check_grid(config: WanConfig, tokens: int, grid: Grid) -> None:
    """Raises ConfigError when heads, MLP or the ``tokens`` of a block cannot be shared evenly."""
    if config.heads % grid.size:
        raise ConfigError(f"{config.heads} heads cannot be shared by {grid.size} ranks", path="parallel")
    if config.mlp_width % grid.tensor_size:
        raise ConfigError(f"an MLP of {config.mlp_width} cannot be shared by {grid.tensor_size}", path="parallel.tp")
    if tokens % grid.size:
        raise ConfigError(f"a block of {tokens} tokens cannot be shared by {grid.size} ranks", path="parallel")


class ShardedTransformer(WanTransformer):
    """One rank's share. Every rank calls the same methods with the same inputs, in the same order."""

    def __init__(self, config: WanConfig, mesh: Mesh) -> None:
        """``config``: of the whole network."""
        self.mesh = mesh
        super().__init__(replace(config, shards=mesh.grid.tensor_size))

    def _new_layer(self) -> WanLayer:
        if self.mesh.grid.tensor_size == 1:
            return SequenceLayer(self.config, self.mesh)
        return TensorLayer(self.config, self.mesh)

    def own_tokens(self, x: Tensor) -> Tensor:
        return self.mesh.grid.own_tokens(x)

    def attention_tokens(self, x: Tensor) -> Tensor:
        return self.mesh.grid.group_tokens(x)

    def all_tokens(self, x: Tensor) -> Tensor:
        return self.mesh.everybody(x)


class SequenceLayer(WanLayer):
    """All heads of some tokens, but in self-attention some heads of all tokens."""

    parts = ("_sent", "_rest")

    def __init__(self, config: WanConfig, mesh: Mesh) -> None:
        super().__init__(config)
        self._mesh = mesh
        self._ranks = mesh.grid.sequence_size

    def before(self, x: Tensor, time: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sent = self._sent(x, time, cos, sin)
        q, k, v = self._mesh.to_heads(*(self._mesh.exchange(part) for part in sent))
        return q, k, v

    def after(self, x: Tensor, seen: Tensor, time: Tensor, text: KeysValues, camera: KeysValues | None) -> Tensor:
        returned = self._mesh.to_tokens(seen)
        return self._rest(x, returned, time, text, camera)

    def _sent(self, x: Tensor, time: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.attention.project(self.attention_input(x, time), cos, sin)
        return by_rank(q, self._ranks), by_rank(k, self._ranks), by_rank(v, self._ranks)

    def _rest(self, x: Tensor, returned: Tensor, time: Tensor, text: KeysValues, camera: KeysValues | None) -> Tensor:
        x = self.attended(x, self.attention.out(by_token(returned)), time, camera)
        return self.widened(x + self.cross(self.cross_input(x), *text), time)


class ShardedCross(CrossAttention):
    """Some heads of the text."""

    def __init__(self, config: WanConfig, mesh: Mesh) -> None:
        super().__init__(config)
        self._mesh = mesh
        self._width = config.width

    def cache(self, text: Tensor) -> KeysValues:
        k, v = self.kv(text).chunk(2, dim=-1)
        k = _normed(k, self._mesh.summed(_squares(k)), self._width, self.k_norm)
        return _by_head(k, self.heads), _by_head(v.contiguous(), self.heads)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.reshape(*x.shape[:-1], heads, -1)


def _squares(x: Tensor) -> Tensor:
    """Float32 (or wider) [.., 1]: of the own channels."""
    return _wide(x).square().sum(-1, keepdim=True)


def _normed(x: Tensor, squares: Tensor, width: int, norm: nn.RMSNorm) -> Tensor:
    """RMS norm over ``width`` channels, of which these are some and whose squares sum up to ``squares``."""
    assert norm.eps is not None
    scaled = _wide(x) * torch.rsqrt(squares / width + norm.eps)
    return scaled.to(x.dtype) * norm.weight


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class TensorLayer(WanLayer):
    """Some heads and some of the MLP; between the matrices, the tokens of one rank.

    Queries and keys are normalised over the full width, so their sums of squares are exchanged, too (two numbers a token)."""

    parts = (
        *("attention_input", "_projected", "_sent", "_mixed", "_crossing", "_asked", "_answered", "_growing"),
        *("mlp", "grown"),
    )

    def __init__(self, config: WanConfig, mesh: Mesh) -> None:
        super().__init__(config)
        self._mesh = mesh
        self._ranks = mesh.grid.sequence_size
        self._width = config.width
        self.cross = ShardedCross(config, mesh)

    def before(self, x: Tensor, time: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self._mesh.gathered(self.attention_input(x, time))
        q, k, v, squares = self._projected(h)
        sent = self._sent(q, k, v, self._mesh.summed(squares), cos, sin)
        q, k, v = self._mesh.to_heads(*(self._mesh.exchange(part) for part in sent))
        return q, k, v

    def after(self, x: Tensor, seen: Tensor, time: Tensor, text: KeysValues, camera: KeysValues | None) -> Tensor:
        mesh = self._mesh
        mixed = mesh.summed_share(self._mixed(mesh.to_tokens(seen)))
        x, h = self._crossing(x, mixed, time, camera)
        q, squares = self._asked(mesh.gathered(h))
        x, h = self._growing(x, mesh.summed_share(self._answered(q, mesh.summed(squares), *text)), time)
        return self.grown(x, mesh.summed_share(self.mlp(mesh.gathered(h))), time)

    def _projected(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = self.attention.qkv(h).chunk(3, dim=-1)
        return q, k, v, torch.cat((_squares(q), _squares(k)), dim=-1)

    def _sent(
        self, q: Tensor, k: Tensor, v: Tensor, squares: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.attention.heads
        q = _normed(q, squares[..., :1], self._width, self.attention.q_norm)
        k = _normed(k, squares[..., 1:], self._width, self.attention.k_norm)
        return (
            by_rank(rotate(_by_head(q, heads), cos, sin), self._ranks),
            by_rank(rotate(_by_head(k, heads), cos, sin), self._ranks),
            by_rank(_by_head(v, heads), self._ranks),
        )

    def _mixed(self, returned: Tensor) -> Tensor:
        mixed: Tensor = self.attention.out(by_token(returned))
        return mixed

    def _crossing(self, x: Tensor, mixed: Tensor, time: Tensor, camera: KeysValues | None) -> tuple[Tensor, Tensor]:
        x = self.attended(x, mixed, time, camera)
        return x, self.cross_input(x)

    def _asked(self, h: Tensor) -> tuple[Tensor, Tensor]:
        q = self.cross.q(h)
        return q, _squares(q)

    def _answered(self, q: Tensor, squares: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q = _by_head(_normed(q, squares, self._width, self.cross.q_norm), self.cross.heads)
        parts = [part.transpose(1, 2) for part in (q, keys, values)]
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        mixed: Tensor = self.cross.out(seen.transpose(1, 2).flatten(-2))
        return mixed

    def _growing(self, x: Tensor, mixed: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        x = x + mixed
        return x, self.mlp_input(x, time)
