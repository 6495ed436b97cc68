"""Observations in robot units to a network's inputs, and a chunk in model space to robot units.

Owns: the order of the steps, which is openpi's: pictures are fitted; the state is normalised, then written into the prompt
or padded; a chunk is cut to the robot's channels, unnormalised, then made absolute. Stateless: the state that a chunk is
relative to is an argument.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.models.common.vla.images import Fit, model_image, raw_image
from realtime_omni.models.common.vla.network import PolicyInputs
from realtime_omni.models.common.vla.normalize import Normalizer
from realtime_omni.models.common.vla.prompts import PromptForm, Tokenizer, prompt_text
from realtime_omni.models.common.vla.relative import to_absolute, to_relative

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Processing:
    """How one checkpoint reads observations and writes actions.

    ``cameras``: names of the slots in the network's order. ``state_channels`` and ``action_channels``: the robot's;
    ``state_dim`` and ``action_dim``: the network's padded widths. ``vocabulary``: words the network knows; an id beyond it is
    refused here, since on a GPU it would end the process. ``relative``: mask of relative channels, or None.
    """

    cameras: tuple[str, ...]
    image_size: int
    fit: Fit
    prompt: PromptForm
    prompt_tokens: int
    tokenizer: Tokenizer
    vocabulary: int
    state: Normalizer
    action: Normalizer
    state_channels: int
    action_channels: int
    state_dim: int
    action_dim: int
    relative: tuple[bool, ...] | None = None

    def inputs(
        self, images: Mapping[str, NDArray[Any]], state: Array, instruction: str, *, raw: bool = False
    ) -> PolicyInputs:
        """One row. ``images``: by camera name, [H, W, 3] uint8 or float32 in [0, 1]; an absent camera is masked, but at
        least one must be there. ``state`` [state_channels]. ``raw``: where no picture needs fitting they stay uint8, which
        ``images.signed`` brings to [-1, 1] where it costs less. Raises ArgumentError and names the field."""
        normalised = self.state.normalize(self._checked(state))
        pictures = self._raw_pictures(images) if raw else None
        pictures = self._pictures(images) if pictures is None else pictures
        tokens = self._tokens(instruction, normalised)
        padded = np.zeros(self.state_dim, np.float32)
        padded[: self.state_channels] = normalised
        return PolicyInputs(
            images=pictures[None],
            image_mask=torch.tensor([[name in images for name in self.cameras]]),
            tokens=tokens[None],
            token_mask=torch.ones_like(tokens, dtype=torch.bool)[None],
            state=torch.from_numpy(padded)[None],
        )

    def robot_actions(self, chunk: Tensor, state: Array) -> Array:
        """A chunk [H, action_dim] in model space to [H, action_channels] in robot units."""
        actions = self.action.unnormalize(chunk.detach().float().cpu().numpy()[:, : self.action_channels])
        return actions if self.relative is None else to_absolute(actions, self._checked(state), self.relative)

    def model_actions(self, actions: Array, state: Array) -> Tensor:
        """Absolute actions [n, action_channels] in robot units to model space [n, action_dim], relative to ``state``.

        What is left of a chunk is anchored to the state it was planned from; through here it is anchored to the state of
        now, as a network that continues it must see it."""
        if self.relative is not None:
            actions = to_relative(actions, self._checked(state), self.relative)
        padded = np.zeros((len(actions), self.action_dim), np.float32)
        padded[:, : self.action_channels] = self.action.normalize(actions)
        return torch.from_numpy(padded)

    def statistics_id(self) -> str:
        """A short name of the statistics in use, for the handshake and for cache keys."""
        return hashlib.blake2b(f"{self.state.digest()}{self.action.digest()}".encode(), digest_size=8).hexdigest()

    def _checked(self, state: Array) -> Array:
        if state.shape != (self.state_channels,):
            raise ArgumentError(f"state: {self.state_channels} channels are needed, not {state.shape}", path="state")
        if not np.isfinite(state).all():
            raise ArgumentError("state: every channel must be finite", path="state")
        return state.astype(np.float32)

    def _raw_pictures(self, images: Mapping[str, NDArray[Any]]) -> Tensor | None:
        self._check_cameras(images)
        given = {name: raw_image(image, self.image_size, f"images.{name}") for name, image in images.items()}
        blank = torch.zeros(self.image_size, self.image_size, 3, dtype=torch.uint8)
        slots = [given.get(name, blank) for name in self.cameras]
        there = [image for image in slots if image is not None]
        return torch.stack(there) if len(there) == len(slots) else None

    def _pictures(self, images: Mapping[str, NDArray[Any]]) -> Tensor:
        self._check_cameras(images)
        pictures = torch.full((len(self.cameras), 3, self.image_size, self.image_size), -1.0)
        for slot, name in enumerate(self.cameras):
            if name in images:
                pictures[slot] = model_image(images[name], self.image_size, self.fit, f"images.{name}")
        return pictures

    def _check_cameras(self, images: Mapping[str, NDArray[Any]]) -> None:
        unknown = sorted(set(images) - set(self.cameras))
        if unknown or not images:
            what = f"unknown camera {', '.join(unknown)}" if unknown else "no camera"
            raise ArgumentError(
                f"images: {what}; this policy knows {', '.join(self.cameras)}",
                code=ErrorCode.IMAGE_INVALID,
                path=f"images.{unknown[0]}" if unknown else "images",
            )

    def _tokens(self, instruction: str, normalised: Array) -> Tensor:
        ids = self.tokenizer.encode(prompt_text(self.prompt, instruction, normalised))
        if len(ids) > self.prompt_tokens:
            raise ArgumentError(
                f"prompt: {len(ids)} tokens, at most {self.prompt_tokens} are read",
                code=ErrorCode.PROMPT_UNKNOWN,
                path="prompt",
            )
        if any(not 0 <= token < self.vocabulary for token in ids):
            raise ArgumentError(
                f"prompt: the tokenizer gives ids that the network's {self.vocabulary} words do not have",
                code=ErrorCode.PROMPT_UNKNOWN,
                path="prompt",
            )
        return torch.tensor(ids, dtype=torch.long)
