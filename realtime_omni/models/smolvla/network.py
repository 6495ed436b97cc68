"""SmolVLA (arXiv 2506.01844) as a stateless network.

The first layers of SmolVLM2 read pictures, prompt and the state token; an action expert follows them layer by layer.
In *joint* layers the actions see the prefix and earlier actions; in *cross* layers they see only the prefix, through
keys and values that the expert projects from the language model's. That projection is the same in every denoise step,
so ``prefill`` does it once and keeps the projected keys in place of the language model's.

Owns: modules and their configuration. Must not know: checkpoints, tokenizers, units, how a prefix is kept.
Shape legend: B rows, T tokens, D width, N camera slots, K tokens per picture, H actions per chunk, A action channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.vla.attention import Prefix, PrefixAttention, PrefixKV, attend, rope
from realtime_omni.models.common.vla.decoder import DecoderConfig, DecoderLayer, layers_of, make_norm
from realtime_omni.models.common.vla.flow import MAX_PERIOD, MIN_PERIOD, time_embedding
from realtime_omni.models.common.vla.network import PolicyInputs, PolicyShape
from realtime_omni.models.common.vla.siglip import VisionConfig, VisionTower

SMOLVLM2_500M = DecoderConfig(
    width=960, layers=16, mlp_width=2560, heads=15, kv_heads=5, head_dim=64, family="llama", eps=1e-5
)
"""Its first 16 layers of 32, which is what SmolVLA keeps."""
SIGLIP_BASE_512 = VisionConfig(image_size=512, patch=16, width=768, layers=12, heads=12, mlp_width=3072)


@dataclass(frozen=True, slots=True)
class SmolVLAConfig:
    """Dimensions; the defaults are lerobot/smolvla_base's. ``language.layers`` counts only the layers that are kept.

    ``joint_every``: layers whose index is a multiple of it are joint, the others cross. ``shuffle`` x ``shuffle`` patches
    become one token.
    """

    vision: VisionConfig = SIGLIP_BASE_512
    language: DecoderConfig = SMOLVLM2_500M
    expert_width: int = 720
    joint_every: int = 2
    shuffle: int = 4
    vocabulary: int = 49_280
    horizon: int = 50
    state_dim: int = 32
    action_dim: int = 32
    steps: int = 10
    prompt_tokens: int = 48
    min_period: float = MIN_PERIOD
    max_period: float = MAX_PERIOD

    def __post_init__(self) -> None:
        if self.vision.side % self.shuffle:
            raise ValueError(f"{self.vision.side} patches a side do not divide by the pixel shuffle {self.shuffle}")

    @property
    def expert(self) -> DecoderConfig:
        language = self.language
        return DecoderConfig(
            width=self.expert_width,
            layers=language.layers,
            mlp_width=gated_mlp_width(self.expert_width),
            heads=language.heads,
            kv_heads=language.kv_heads,
            head_dim=language.head_dim,
            family="llama",
            eps=language.eps,
        )

    def is_joint(self, layer: int) -> bool:
        return self.joint_every > 0 and layer % self.joint_every == 0


def gated_mlp_width(width: int) -> int:
    """8/3 of the width, rounded up to a multiple of 256: Llama's rule (arXiv 2302.13971, section 2.2)."""
    inner = 4 * int(2 * width / 3)
    return -(-inner // 256) * 256


class SmolVLANetwork(nn.Module):
    """A :class:`~realtime_omni.models.common.vla.network.FlowNetwork`."""

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__()
        self.config = config
        language, expert = config.language, config.expert
        keys = language.kv_heads * language.head_dim
        self.vision = VisionTower(config.vision)
        self.projector = nn.Linear(config.vision.width * config.shuffle**2, language.width, bias=False)
        self.words = nn.Embedding(config.vocabulary, language.width)
        self.language = nn.ModuleList(DecoderLayer(language) for _ in range(language.layers))
        self.expert = nn.ModuleList(
            DecoderLayer(expert, None if config.is_joint(index) else keys) for index in range(expert.layers)
        )
        self.norm = make_norm(expert)
        self.state_in = nn.Linear(config.state_dim, language.width)
        self.action_in = nn.Linear(config.action_dim, expert.width)
        self.action_out = nn.Linear(expert.width, config.action_dim)
        self.time_in = nn.Linear(2 * expert.width, expert.width)
        self.time_out = nn.Linear(expert.width, expert.width)

    @property
    def shape(self) -> PolicyShape:
        config = self.config
        return PolicyShape(
            horizon=config.horizon,
            action_dim=config.action_dim,
            state_dim=config.state_dim,
            image_size=config.vision.image_size,
            picture_tokens=config.vision.patches // config.shuffle**2,
            prompt_tokens=config.prompt_tokens,
            steps=config.steps,
            layers=config.language.layers,
            kv_heads=config.language.kv_heads,
            head_dim=config.language.head_dim,
            state_in_prefix=True,
            state_token=False,
        )

    def embed_images(self, images: Tensor) -> Tensor:
        """Groups of ``shuffle`` x ``shuffle`` patches become one token."""
        side, shuffle = self.config.vision.side, self.config.shuffle
        patches = self.vision(images).unflatten(1, (side // shuffle, shuffle, side // shuffle, shuffle))
        grouped = patches.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)
        projected: Tensor = self.projector(grouped)
        return projected

    def embed_prefix(self, features: Tensor, inputs: PolicyInputs) -> Prefix:
        """Pictures and prompt in block 0, the state token in block 1."""
        scale = self.config.language.width**0.5
        pictures = features.flatten(1, 2) * scale
        words = self.words(inputs.tokens) * scale
        state = self.state_in(inputs.state.to(self.state_in.weight.dtype))[:, None]
        return Prefix(torch.cat((pictures, words.to(pictures.dtype), state), dim=1), *self.layout(inputs))

    def layout(self, inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
        picture_mask = inputs.image_mask.repeat_interleave(self.shape.picture_tokens, dim=1)
        state_mask = torch.ones_like(inputs.token_mask[:, :1])
        mask = torch.cat((picture_mask, inputs.token_mask, state_mask), dim=1)
        block = torch.zeros_like(mask, dtype=torch.long)
        block[:, -1] = 1
        return mask, block

    def prefill(self, prefix: Prefix) -> PrefixKV:
        """What the expert reads of the prefix: the language model's keys in joint layers, projected ones in cross layers.

        The last layer computes its keys and values alone: its output has no reader."""
        at = rope(prefix.positions, self.config.language.head_dim)
        visible = prefix.visible()
        expert = layers_of(self.expert)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def see(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keep(k, v)
            return attend(q, k, v, visible)

        def keep(k: Tensor, v: Tensor) -> None:
            index = len(keys)
            kept = (k, v) if self.config.is_joint(index) else expert[index].keys_of(k, v)
            keys.append(kept[0])
            values.append(kept[1])

        x = prefix.embeddings
        *inner, last = layers_of(self.language)
        for layer in inner:
            x = layer(x, at, see)
        keep(*last.keys(x, at))
        return PrefixKV(torch.stack(keys), torch.stack(values), prefix.mask)

    def add_state(self, kv: PrefixKV, state: Tensor) -> PrefixKV:
        return kv

    def denoise_step(self, x: Tensor, t: Tensor, attention: PrefixAttention) -> Tensor:
        h = self._embed_actions(x, t)
        steps = torch.arange(x.shape[1], device=x.device)[None]
        head_dim = self.config.language.head_dim
        after_prefix = rope(attention.lengths[:, None] + steps, head_dim)
        from_zero = rope(steps, head_dim)
        for index, layer in enumerate(layers_of(self.expert)):
            if self.config.is_joint(index):
                see = partial(attention.joint, index, causal=True)
                h = layer(h, after_prefix, see, None, attention.own(index))
            else:
                h = layer.cross(h, from_zero, partial(attention.cross, index))
        h, _ = self.norm(h)
        velocity: Tensor = self.action_out(h)
        return velocity.float()

    def first_step(self, x: Tensor, t: Tensor, state: Tensor, attention: PrefixAttention) -> Tensor:
        raise NotImplementedError("the state is in the prefix")

    def _embed_actions(self, x: Tensor, t: Tensor) -> Tensor:
        config = self.config
        actions = self.action_in(x.to(self.action_in.weight.dtype))
        t = t if t.ndim == 2 else t[:, None]
        time = time_embedding(t, config.expert_width, min_period=config.min_period, max_period=config.max_period).to(
            actions.dtype
        )
        mixed = torch.cat((actions, time.expand_as(actions)), dim=-1)
        embedded: Tensor = self.time_out(functional.silu(self.time_in(mixed)))
        return embedded
