"""The contract between a policy network and whoever serves it, and the inputs of a chunk.

A network keeps no per-session state. Its stages are separate so that each can be cached, batched and scheduled by itself:

    features  = embed_images(pictures)          one per picture; reusable while the picture is the same
    prefix    = embed_prefix(features, inputs)  pictures and prompt (and SmolVLA's state)
    kv        = prefill(prefix)                 reusable while the whole prefix is the same
    kv        = add_state(kv, state)            pi0's state token; nothing elsewhere
    v         = denoise_step(x, t, attention)   once per Euler step, reads the prefix only

No stage switches gradients off; whoever serves calls them under ``torch.no_grad`` (not inference mode, which would forbid
the backward pass that a guided step takes), whoever trains does not.

Shape legend: B rows, N camera slots, K tokens per picture, L prompt tokens, H actions per chunk, A action channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.models.common.vla.attention import DensePrefixAttention, Prefix, PrefixAttention, PrefixKV
from realtime_omni.models.common.vla.devices import placed
from realtime_omni.models.common.vla.flow import StepRule, integrate


@dataclass(frozen=True, slots=True)
class PolicyShape:
    """What a server needs to know about a network; ``state_dim`` and ``action_dim`` are the padded widths,
    ``picture_tokens`` those that one picture takes of a prefix."""

    horizon: int
    action_dim: int
    state_dim: int
    image_size: int
    picture_tokens: int
    prompt_tokens: int
    steps: int
    layers: int
    kv_heads: int
    head_dim: int
    state_in_prefix: bool
    """``embed_prefix`` reads the state; otherwise a prefix serves any state."""
    state_token: bool
    """The state has a token of its own, which :meth:`FlowNetwork.add_state` puts behind the prefix."""


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Observations of B robots in model space.

    ``images`` [B, N, 3, S, S] float in [-1, 1] (or uint8 [B, N, S, S, 3], to be ``signed``);
    ``image_mask`` [B, N] bool, False for a slot without a camera;
    ``tokens`` [B, L] long; ``token_mask`` [B, L] bool; ``state`` [B, state_dim] float32, normalised and padded.
    """

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    token_mask: Tensor
    state: Tensor

    @staticmethod
    def stack(rows: Sequence[PolicyInputs]) -> PolicyInputs:
        """Rows with prompts of different lengths side by side; prompts are padded on the right."""
        longest = max(row.tokens.shape[1] for row in rows)

        def padded(tensor: Tensor) -> Tensor:
            return functional.pad(tensor, (0, longest - tensor.shape[1]))

        return PolicyInputs(
            torch.cat([row.images for row in rows]),
            torch.cat([row.image_mask for row in rows]),
            torch.cat([padded(row.tokens) for row in rows]),
            torch.cat([padded(row.token_mask) for row in rows]),
            torch.cat([row.state for row in rows]),
        )

    def to(self, device: torch.device | str) -> PolicyInputs:
        """The numbers on the device; masks stay, so that asking what is there waits for no device."""
        return PolicyInputs(
            placed(self.images, device),
            self.image_mask,
            placed(self.tokens, device),
            self.token_mask,
            placed(self.state, device),
        )


class FlowNetwork(Protocol):
    """A flow-matching policy network; see the module docstring for the order of the calls."""

    @property
    def shape(self) -> PolicyShape: ...

    def embed_images(self, images: Tensor) -> Tensor:
        """Pictures [n, 3, S, S] in [-1, 1] to language-model tokens [n, K, D]."""
        ...

    def embed_prefix(self, features: Tensor, inputs: PolicyInputs) -> Prefix:
        """``features`` [B, N, K, D], of any value where the camera is masked."""
        ...

    def layout(self, inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
        """Mask and block [B, T] of the prefix that ``embed_prefix`` makes of these inputs, where their masks are."""
        ...

    def prefill(self, prefix: Prefix) -> PrefixKV: ...

    def add_state(self, kv: PrefixKV, state: Tensor) -> PrefixKV:
        """The prefix with the state [B, state_dim] in it; the same object when it needs no token of its own here."""
        ...

    def denoise_step(self, x: Tensor, t: Tensor, attention: PrefixAttention) -> Tensor:
        """The velocity [B, H, A] float32 of x [B, H, A] at time t [B], or [B, H] for a time of its own per action."""
        ...

    def first_step(self, x: Tensor, t: Tensor, state: Tensor, attention: PrefixAttention) -> Tensor:
        """The same over a prefix without the state's token, which is the suffix's first here: a pass of its own would
        start every layer's kernels once more, for one token. ``attention`` lets it see none behind it; only with
        ``shape.state_token``."""
        ...


def picture_features(network: FlowNetwork, inputs: PolicyInputs) -> Tensor:
    """Features [B, N, K, D] of the cameras that are there; masked slots cost nothing and are zero."""
    if bool(inputs.image_mask.all()):
        return torch.unflatten(network.embed_images(inputs.images.flatten(0, 1)), 0, inputs.image_mask.shape)
    present = network.embed_images(inputs.images[inputs.image_mask])
    features = present.new_zeros(*inputs.image_mask.shape, *present.shape[1:])
    features[inputs.image_mask] = present
    return features


def encode(network: FlowNetwork, inputs: PolicyInputs, *, pack: bool = True) -> PrefixKV:
    """Everything of a chunk that comes before the first denoise step. ``pack`` leaves masked tokens out, which is exact."""
    prefix = network.embed_prefix(picture_features(network, inputs), inputs)
    kv = network.prefill(prefix.pack() if pack else prefix)
    return network.add_state(kv, inputs.state)


def sample(
    network: FlowNetwork, kv: PrefixKV, noise: Tensor, *, steps: int | None = None, rule: StepRule | None = None
) -> Tensor:
    """A chunk [B, H, A] in model space from noise of that shape. A prefix of one row serves any number of noise rows."""
    if kv.mask.shape[0] == 1 and noise.shape[0] > 1:
        kv = kv.expand(noise.shape[0])
    attention = DensePrefixAttention(kv)
    return integrate(
        lambda x, t: network.denoise_step(x, t, attention), noise, network.shape.steps if steps is None else steps, rule
    )
