"""The language model: a transformer over time, and one over the codebooks of a step.

Owns the forward passes. Keys and values over time belong to whoever gives ``attend`` (pages, or in a test a dense cache);
those over depth live as long as a step. Formulas: Défossez et al. 2024, "Moshi"; norms, gating and rotary pairs as in kyutai's
published weights.

Shapes: B rows, T steps, D model, H heads, d head size, K streams, V vocabulary, S depth steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from realtime_omni.models.moshi.config import LMConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_BTHd, k_BTHd, v_BTHd), rotated, to the attention's output [B, T, H, d]; causal."""
Choose = Callable[[int, Tensor], Tensor]
"""(depth step, logits float32 [B, V]) to tokens int64 [B]."""
EPSILON = 1e-8


def empty(*shape: int) -> nn.Parameter:
    """A parameter that a loader fills."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In float32, whatever the dtype of ``x``."""
    wide = x.float()
    scale = weight.float().flatten() * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return (wide * scale).to(x.dtype)


def gated(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU: ``down @ (silu(gate @ x) * (up @ x))``."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, down)


def turns(positions: Tensor, head_dim: int, base: float) -> Tensor:
    """complex64 [..., d/2]: e ** (i * position * base ** (-2j / d)). The angle is computed in float64, so that a call of days
    loses nothing; there is no table to run out of."""
    j = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    angle = positions.double()[..., None] * base ** (-j / head_dim)
    return torch.complex(angle.cos(), angle.sin()).to(torch.complex64)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn each pair (2j, 2j+1) of ``x`` [..., d], as a complex number, by its angle."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class TemporalLayer(nn.Module):
    """One layer's weights; ``qkv`` holds queries, keys and values one below the other."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = empty(1, 1, dim)
        self.qkv = empty(3 * dim, dim)
        self.out = empty(dim, dim)
        self.norm2 = empty(1, 1, dim)
        self.gate_up = empty(2 * hidden, dim)
        self.down = empty(dim, hidden)

    def forward(self, x: Tensor, index: int, turn: Tensor, attend: Attend) -> Tensor:
        fused = linear(rms_norm(x, self.norm1), self.qkv)
        q, k, v = fused.view(*x.shape[:2], 3, -1, 2 * turn.shape[-1]).unbind(2)
        x = x + linear(attend(index, rotate(q, turn), rotate(k, turn), v).flatten(2), self.out)
        return x + gated(rms_norm(x, self.norm2), self.gate_up, self.down)


class Temporal(nn.Module):
    """From the tokens of a step to a hidden state and the logits of the text."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.text_emb = empty(config.text_card + 1, config.dim)
        self.audio_emb = nn.ParameterList(empty(config.card + 1, config.dim) for _ in range(config.n_q))
        self.layers = nn.ModuleList(TemporalLayer(config.dim, config.hidden) for _ in range(config.num_layers))
        self.norm = empty(1, 1, config.dim)
        self.text_head = empty(config.text_card, config.dim)

    def embed(self, tokens_BK: Tensor) -> Tensor:
        """[B, 1, D]: the sum of all streams' embeddings, text first."""
        x = embedding(tokens_BK[:, 1], self.audio_emb[0])
        for stream in range(1, self.config.n_q):
            x = x + embedding(tokens_BK[:, 1 + stream], self.audio_emb[stream])
        return (x + embedding(tokens_BK[:, 0], self.text_emb))[:, None]

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Hidden [B, D] and text logits [B, V] after the last step."""
        turn = turns(positions_BT, self.config.head_dim, self.config.max_period).unsqueeze(2)
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, index, turn, attend)
        hidden = rms_norm(x_BTD[:, -1], self.norm)
        return hidden, linear(hidden, self.text_head)


class DepthLayer(nn.Module):
    """One layer's weights, of every step one above the other: [S, ...]."""

    def __init__(self, steps: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = empty(1, 1, dim)
        self.qkv = empty(steps, 3 * dim, dim)
        self.out = empty(steps, dim, dim)
        self.norm2 = empty(1, 1, dim)
        self.gate_up = empty(steps, 2 * hidden, dim)
        self.down = empty(steps, dim, hidden)

    def forward(self, x: Tensor, step: int, heads: int, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """``past``: keys and values of the steps before; this one's are appended."""
        q, k, v = linear(rms_norm(x, self.norm1), self.qkv[step]).view(len(x), 3, heads, -1).unbind(1)
        past.append((k, v))
        keys, values = (torch.stack(each, dim=2) for each in zip(*past, strict=True))
        attended = scaled_dot_product_attention(q.unsqueeze(2), keys, values)
        x = x + linear(attended.flatten(1), self.out[step])
        return x + gated(rms_norm(x, self.norm2), self.gate_up[step], self.down[step])


class Depth(nn.Module):
    """The codebooks of one step, one after the other, each with weights of its own."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        dim, steps = config.depformer_dim, config.dep_q
        self.heads_per_layer = config.depformer_num_heads
        self.inputs = nn.ParameterList(empty(dim, config.dim) for _ in range(steps))
        self.text_emb = empty(config.text_card + 1, dim)
        self.audio_emb = nn.ParameterList(empty(config.card + 1, dim) for _ in range(steps - 1))
        self.layers = nn.ModuleList(
            DepthLayer(steps, dim, config.depth_hidden) for _ in range(config.depformer_num_layers)
        )
        self.heads = nn.ParameterList(empty(config.card, dim) for _ in range(steps))

    def forward(self, hidden_BD: Tensor, text_B: Tensor, steps: int, choose: Choose) -> Tensor:
        """Tokens int64 [B, steps] of the first ``steps`` codebooks."""
        token, chosen = text_B, []
        past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        for step in range(steps):
            table = self.audio_emb[step - 1] if step else self.text_emb
            x = linear(hidden_BD, self.inputs[step]) + embedding(token, table)
            for layer, known in zip(self.layers, past, strict=True):
                x = layer(x, step, self.heads_per_layer, known)
            token = choose(step, linear(x, self.heads[step]).float())
            chosen.append(token)
        return torch.stack(chosen, dim=1)


class MoshiLM(nn.Module):
    """Both transformers. Parameters are empty until :func:`~realtime_omni.models.moshi.weights.load_lm` fills them."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.temporal = Temporal(config)
        self.depth = Depth(config)
