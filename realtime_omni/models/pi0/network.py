"""pi0 (arXiv 2410.24164) and pi0.5 (arXiv 2504.16054) as a stateless network.

Two towers with the same heads share their attention layer by layer: Gemma over pictures and prompt, a narrower Gemma (the
action expert) over the actions. pi0 has a state token and mixes the flow time into every action token; pi0.5 writes the
state into the prompt and conditions the expert's norms on the time.

The state token sees the prefix and itself, and no time: its keys and values are the same in every denoise step. So it is
computed once and joins the prefix; the action tokens then see everything, and no step needs a mask of blocks.

Owns: modules and their configuration. Must not know: checkpoints, tokenizers, units, how a prefix is kept.
Shape legend: B rows, T tokens, D width, H actions per chunk, A action channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.vla.attention import (
    DensePrefixAttention,
    Prefix,
    PrefixAttention,
    PrefixKV,
    attend,
    rope,
)
from realtime_omni.models.common.vla.decoder import DecoderConfig, DecoderLayer, layers_of, make_norm
from realtime_omni.models.common.vla.flow import MAX_PERIOD, MIN_PERIOD, time_embedding
from realtime_omni.models.common.vla.network import PolicyInputs, PolicyShape
from realtime_omni.models.common.vla.siglip import SO400M, VisionConfig, VisionTower

VOCABULARY = 257_152

GEMMA_2B = DecoderConfig(width=2048, layers=18, mlp_width=16_384, heads=8, kv_heads=1, head_dim=256)
GEMMA_300M = DecoderConfig(width=1024, layers=18, mlp_width=4096, heads=8, kv_heads=1, head_dim=256)


@dataclass(frozen=True, slots=True)
class Pi0Config:
    """Dimensions; the defaults are pi0's published ones. ``adaptive``: pi0.5."""

    adaptive: bool = False
    vision: VisionConfig = SO400M
    language: DecoderConfig = GEMMA_2B
    expert: DecoderConfig = GEMMA_300M
    vocabulary: int = VOCABULARY
    horizon: int = 50
    state_dim: int = 32
    action_dim: int = 32
    steps: int = 10
    prompt_tokens: int = 48
    min_period: float = MIN_PERIOD
    max_period: float = MAX_PERIOD

    def __post_init__(self) -> None:
        language, expert = self.language, self.expert
        for name in ("layers", "heads", "kv_heads", "head_dim"):
            if getattr(language, name) != getattr(expert, name):
                raise ValueError(f"{name} of the language tower and of the action expert differ; they share attention")


class Pi0Network(nn.Module):
    """A :class:`~realtime_omni.models.common.vla.network.FlowNetwork`."""

    def __init__(self, config: Pi0Config) -> None:
        super().__init__()
        self.config = config
        width = config.expert.width
        expert = replace(config.expert, condition=width) if config.adaptive else config.expert
        self.vision = VisionTower(config.vision)
        self.projector = nn.Linear(config.vision.width, config.language.width)
        self.words = nn.Embedding(config.vocabulary, config.language.width)
        self.language = nn.ModuleList(DecoderLayer(config.language) for _ in range(config.language.layers))
        self.expert = nn.ModuleList(DecoderLayer(expert) for _ in range(expert.layers))
        self.norm = make_norm(expert)
        self.action_in = nn.Linear(config.action_dim, width)
        self.action_out = nn.Linear(width, config.action_dim)
        self.state_in = None if config.adaptive else nn.Linear(config.state_dim, width)
        self.time_in = nn.Linear(width if config.adaptive else 2 * width, width)
        self.time_out = nn.Linear(width, width)

    @property
    def shape(self) -> PolicyShape:
        config = self.config
        return PolicyShape(
            horizon=config.horizon,
            action_dim=config.action_dim,
            state_dim=config.state_dim,
            image_size=config.vision.image_size,
            picture_tokens=config.vision.patches,
            prompt_tokens=config.prompt_tokens,
            steps=config.steps,
            layers=config.language.layers,
            kv_heads=config.language.kv_heads,
            head_dim=config.language.head_dim,
            state_in_prefix=False,
            state_token=not config.adaptive,
        )

    def embed_images(self, images: Tensor) -> Tensor:
        projected: Tensor = self.projector(self.vision(images))
        return projected

    def embed_prefix(self, features: Tensor, inputs: PolicyInputs) -> Prefix:
        pictures = features.flatten(1, 2)
        words = self.words(inputs.tokens) * self.config.language.width**0.5
        mask, block = self.layout(inputs)
        embeddings = torch.cat((pictures, words.to(pictures.dtype)), dim=1)
        return Prefix(embeddings, mask, block)

    def layout(self, inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
        pictures = inputs.image_mask.repeat_interleave(self.config.vision.patches, dim=1)
        mask = torch.cat((pictures, inputs.token_mask), dim=1)
        return mask, torch.zeros_like(mask, dtype=torch.long)

    def prefill(self, prefix: Prefix) -> PrefixKV:
        """Keys and values of pictures and prompt. The last layer computes these alone: its output has no reader."""
        at = rope(prefix.positions, self.config.language.head_dim)
        visible = prefix.visible()
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def see(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            return attend(q, k, v, visible)

        x = prefix.embeddings
        *inner, last = layers_of(self.language)
        for layer in inner:
            x = layer(x, at, see)
        k, v = last.keys(x, at)
        return PrefixKV(torch.stack((*keys, k)), torch.stack((*values, v)), prefix.mask)

    def add_state(self, kv: PrefixKV, state: Tensor) -> PrefixKV:
        if self.state_in is None:
            return kv
        attention, x = DensePrefixAttention(kv), self._embed_state(state)
        at = rope(attention.lengths[:, None], self.config.expert.head_dim)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def see(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            return attention.joint(len(keys) - 1, q, k, v)

        *inner, last = layers_of(self.expert)
        for layer in inner:
            x = layer(x, at, see)
        k, v = last.keys(x, at)
        return kv.append(torch.stack((*keys, k)), torch.stack((*values, v)))

    def denoise_step(self, x: Tensor, t: Tensor, attention: PrefixAttention) -> Tensor:
        return self._velocity(*self._embed_actions(x, t), attention)

    def first_step(self, x: Tensor, t: Tensor, state: Tensor, attention: PrefixAttention) -> Tensor:
        h, condition = self._embed_actions(x, t)
        return self._velocity(torch.cat((self._embed_state(state), h), dim=1), condition, attention)[:, 1:]

    def _velocity(self, h: Tensor, condition: Tensor | None, attention: PrefixAttention) -> Tensor:
        positions = attention.lengths[:, None] + torch.arange(h.shape[1], device=h.device)
        at = rope(positions, self.config.expert.head_dim)
        for index, layer in enumerate(self.expert):
            h = layer(h, at, partial(attention.joint, index), condition, attention.own(index))
        h, _ = self.norm(h, condition)
        velocity: Tensor = self.action_out(h)
        return velocity.float()

    def _embed_state(self, state: Tensor) -> Tensor:
        """The state's token [B, 1, D]."""
        assert self.state_in is not None
        token: Tensor = self.state_in(state.to(self.state_in.weight.dtype))
        return token[:, None]

    def _embed_actions(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Action tokens [B, H, D] and, for pi0.5, the condition [B, 1 or H, D]."""
        config = self.config
        actions = self.action_in(x.to(self.action_in.weight.dtype))
        t = t if t.ndim == 2 else t[:, None]
        time = time_embedding(t, config.expert.width, min_period=config.min_period, max_period=config.max_period).to(
            actions.dtype
        )
        if config.adaptive:
            return actions, functional.silu(self.time_out(functional.silu(self.time_in(time))))
        mixed = torch.cat((actions, time.expand_as(actions)), dim=-1)
        return self.time_out(functional.silu(self.time_in(mixed))), None
