"""What a tick of a session starts from: pictures as latents, the window they open, and what the network is conditioned on.

Owns the way from an observation (or from what was imagined, where there is none) to the block that becomes history. Pure
functions of a state and a tick; must not know batches, pages or the sampler.

History is a window of blocks: one frame opens it, blocks of F follow. When it is full the next picture opens another one, which
has its own condition and image features; the encoder's memory and the text stay (DreamZero's code, Apache-2.0).

Shape legend: F latent frames of a block, W of a window, C latent channels, h w the latent grid, H W = 8 h, 8 w pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realtime_omni.models.base import StepRow
from realtime_omni.models.common.conditioning import Conditioning, KeysValues, Parts
from realtime_omni.models.common.wan.clip import PictureEncoder
from realtime_omni.models.common.wan.text import TextEncoder
from realtime_omni.models.common.wan.vae import TIME_STRIDE, CodecState, WanVAE
from realtime_omni.models.common.wan.visual import MASK_CHANNELS
from realtime_omni.models.dreamzero.network import DreamZeroTransformer
from realtime_omni.models.dreamzero.robot import Robot
from realtime_omni.models.dreamzero.state import DreamZeroState, Window

CONDITIONAL, UNCONDITIONAL = "conditional", "unconditional"
TEXT, IMAGE = "text", "image"
SHOWN = 4
"""Pictures that a block is seen in when a robot sends one, or a few, at a time; each then stands for F of them."""


@dataclass(frozen=True, slots=True)
class Scene:
    """``context`` float32 [n, C, h, w]: the block that becomes history, at frame ``start`` of its window. ``robot`` [D]: the
    robot's state in its own units. The rest is the next state's."""

    start: int
    context: Tensor
    window: Window
    conditioning: Conditioning
    robot: NDArray[np.float32]
    shown: Tensor | None
    encoder: CodecState
    decoder: CodecState

    @property
    def frames(self) -> int:
        return len(self.context)

    @property
    def ahead(self) -> int:
        """Where the block that is imagined stands in the window."""
        return self.start + self.frames


@dataclass(frozen=True, slots=True)
class Words:
    """``template``: what an instruction becomes, ``{prompt}`` being itself; ``lower``: in small letters. ``negative``: what the
    unconditional branch reads."""

    template: str = "{prompt}"
    lower: bool = False
    negative: str = ""

    def of(self, prompt: str) -> str:
        return self.template.replace("{prompt}", prompt.strip().lower() if self.lower else prompt.strip())


class Scenes:
    """Makes scenes for one model. ``frames``: F; ``blocks``: of a window, the opening frame's among them."""

    def __init__(
        self,
        network: DreamZeroTransformer,
        text: TextEncoder,
        vae: WanVAE,
        images: PictureEncoder | None,
        robot: Robot,
        words: Words,
        *,
        size: tuple[int, int],
        frames: int,
        blocks: int,
        guided: bool,
    ) -> None:
        self._network, self._text, self._vae, self._images = network, text, vae, images
        self._robot, self._words, self._size, self._frames = robot, words, size, frames
        self._committed = 1 + frames * (blocks - 1)
        self._total = self._committed + frames
        self._conditioned = network.config.in_channels > network.config.out_channels
        self._dtype = network.patches.weight.dtype
        self._negative = self._read(words.negative) if guided else None
        """The same for all sessions, so it is read once."""

    @property
    def window_frames(self) -> int:
        """Frames of a window that become history; those behind the last of them are only imagined."""
        return self._committed

    @property
    def total_frames(self) -> int:
        """W."""
        return self._total

    def nothing(self) -> Conditioning:
        """Of a session that has read nothing yet."""
        parts = (TEXT,) if self._images is None else (TEXT, IMAGE)
        return Conditioning(self._network.config.layers, parts)

    def of(self, row: StepRow) -> Scene:
        """Where one session stands at the beginning of its tick."""
        state: DreamZeroState = row.state
        seen = row.tick.observation
        number, start = divmod(row.frame_index, self._committed)
        given = None if seen is None else self._robot.canvas(seen.images, *self._size).to(self._vae.device)
        shown = state.shown
        encoder, decoder, window = state.encoder, state.decoder, state.window
        if start == 0:
            picture = self._opening(state, given)
            window, context = self._window(picture)
            decoder = CodecState()
            if given is not None and encoder.is_fresh:
                _, encoder = self._vae.encode(_signed(picture[None]), encoder)
        elif given is not None:
            context, encoder = self._seen(given, _latest(shown, given), encoder)
        else:
            assert state.imagined is not None
            context = state.imagined
        assert window is not None
        if given is not None:
            shown = _latest(shown, given)
        prompt = (None if seen is None else seen.prompt) or row.tick.prompt or state.prompt
        conditioning = self._conditioning(state.conditioning, prompt, number, window)
        return Scene(start, context, window, conditioning, self._robot_at(row), shown, encoder, decoder)

    def _robot_at(self, row: StepRow) -> NDArray[np.float32]:
        if row.tick.observation is not None:
            return row.tick.observation.state
        if row.tick.controls:
            return np.array(row.tick.controls[-1].data["state"], dtype=np.float32)
        state: DreamZeroState = row.state
        return self._robot.state.middle if state.robot is None else state.robot

    def _opening(self, state: DreamZeroState, given: Tensor | None) -> Tensor:
        """The picture that opens a window, uint8 [3, H, W]: the latest given, else imagined, else the start's, else black."""
        if given is not None:
            return given[-1]
        if state.imagined is not None:
            pictures, _ = self._vae.decode(state.imagined, CodecState())
            return unsigned(pictures[-1])
        if state.shown is not None:
            return state.shown[-1]
        return torch.zeros(3, *self._size, dtype=torch.uint8, device=self._vae.device)

    def _window(self, picture: Tensor) -> tuple[Window, Tensor]:
        """The window that a picture opens, and its first frame as latents [1, C, h, w]."""
        features = None if self._images is None else self._images.encode(picture).to(self._vae.device, self._dtype)
        still = _signed(picture[None])
        if not self._conditioned:
            first, _ = self._vae.encode(still, CodecState())
            return Window(first.new_zeros(self._total, 0, *first.shape[2:]), features), first
        clip = torch.cat((still, still.new_zeros(TIME_STRIDE * (self._total - 1), *still.shape[1:])))
        latents, _ = self._vae.encode(clip, CodecState())
        mask = latents.new_zeros(self._total, MASK_CHANNELS, *latents.shape[2:])
        mask[0] = 1.0
        return Window(torch.cat((mask, latents), dim=1), features), latents[:1].clone()

    def _seen(self, given: Tensor, shown: Tensor, encoder: CodecState) -> tuple[Tensor, CodecState]:
        """The block that the robot has seen, [F, C, h, w]."""
        needed = TIME_STRIDE * self._frames
        clip = given[-needed:]
        if len(clip) < needed:
            clip = torch.cat((shown[:1].expand(SHOWN - len(shown), -1, -1, -1), shown)).repeat_interleave(
                self._frames, dim=0
            )
        if encoder.is_fresh:
            clip = torch.cat((clip[:1], clip))
        latents, encoder = self._vae.encode(_signed(clip), encoder)
        return latents[-self._frames :], encoder

    def _conditioning(self, known: Conditioning, prompt: str, window: int, content: Window) -> Conditioning:
        """Both branches: the text is read when it changes, the picture when a window opens."""
        image: list[KeysValues] = []

        def encode(branch: str, words: str, read: tuple[KeysValues, ...] | None) -> Parts:
            before = known.get(branch)
            if read is None:
                same = before is not None and before.key == (words, window - 1)
                read = before[TEXT] if same and before is not None else self._read(words)
            if content.features is None:
                return {TEXT: read}
            if not image:
                image.extend(_alone(self._network.image_cache(content.features[None])))
            return {TEXT: read, IMAGE: image}

        words = self._words.of(prompt)
        held = known.capture(CONDITIONAL, (words, window), lambda: encode(CONDITIONAL, words, None))
        if self._negative is None:
            return held
        return held.capture(UNCONDITIONAL, ("", window), lambda: encode(UNCONDITIONAL, "", self._negative))

    def _read(self, words: str) -> tuple[KeysValues, ...]:
        features = self._text.encode(words).to(device=self._vae.device, dtype=self._dtype)
        with torch.no_grad():
            return _alone(self._network.text_cache(features[None]))


def unsigned(pictures: Tensor) -> Tensor:
    """[-1, 1] to uint8."""
    return ((pictures + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _signed(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def _latest(before: Tensor | None, given: Tensor) -> Tensor:
    """The latest ``SHOWN`` pictures; a copy, so that a longer stack is not kept alive."""
    return (given if before is None else torch.cat((before, given)))[-SHOWN:].clone()


def _alone(layers: tuple[KeysValues, ...]) -> tuple[KeysValues, ...]:
    """Of a batch of one, without its first axis."""
    return tuple((k[0], v[0]) for k, v in layers)
