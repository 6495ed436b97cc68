"""Whole seconds of the vocoder as CUDA graphs: all steps of the flow as one, the generator as another.

A second of a running turn has fixed shapes: fifty new frames over a memory of three possible lengths (a turn's first, second
and later seconds), of as many voices' samples as there are. Each of them and of a few sizes of batches is captured, over memory
that stays where it is; rows that are filled up are nobody's. What has other shapes, a turn's last piece and a short first one,
runs plainly. Nothing is kept between two calls. On the CPU the same memory is filled and the same work runs without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor

from realtime_omni.models.common.capture import Capture, fitting, sizes_up_to
from realtime_omni.models.minicpmo.talker import CODES
from realtime_omni.models.minicpmo.vocoder.encoder import RATE
from realtime_omni.models.minicpmo.vocoder.estimator import TAPS
from realtime_omni.models.minicpmo.vocoder.flow import KEPT_FRAMES, Flow, FlowMemory
from realtime_omni.models.minicpmo.vocoder.hift import AGAIN, HARMONICS, HOP, OVERLAP, HiFT

FRAMES = RATE * CODES
"""Of a second."""


class CapturedVocoder:
    """``rows``: of a batch at most. ``prompts``: frames of the voices' samples. What it returns are buffers, valid until the
    next call."""

    shared_by_content = True  # scratch of a call

    def __init__(self, flow: Flow, hift: HiFT, rows: int, prompts: Collection[int], capture: Capture) -> None:
        self._flow, self._hift, self._capture = flow, hift, capture
        self._rows, self._prompts = fitting(rows), frozenset(prompts)
        size, like, wide = flow.sizes.estimator, flow.encoder_proj.weight, hift.conv_post.weight
        steps = (flow.steps, size.depth, self._rows, 2)
        kept = (size.heads, max(prompts) + KEPT_FRAMES, 2 * size.head_size)
        self._follow = like.new_zeros(self._rows, FRAMES, size.mels)
        self._speaker = like.new_zeros(self._rows, size.mels)
        self._convolved = like.new_zeros(*steps, 2 * size.channels, TAPS)
        self._past = like.new_zeros(*steps, *kept)
        self._x = torch.zeros_like(self._follow)
        self._mel = wide.new_zeros(self._rows, size.mels, FRAMES + AGAIN)
        self._noise = wide.new_zeros(self._rows, (FRAMES + AGAIN) * HOP, HARMONICS)
        self._before = wide.new_zeros(self._rows, OVERLAP)
        self._speech, self._source = (wide.new_zeros(self._rows, (FRAMES + AGAIN) * HOP) for _ in range(2))
        self._solved: dict[tuple[int, int, int], Callable[[], None]] = {}
        self._generated: dict[tuple[int, bool], Callable[[], None]] = {}
        with torch.no_grad():
            for count in sizes_up_to(rows):
                for prompt in sorted(self._prompts):
                    for held in _lengths(prompt):
                        self._solved[count, prompt, held] = capture(partial(self._solve, count, prompt, held))
                for begins in (True, False):
                    self._generated[count, begins] = capture(partial(self._generate, count, begins))

    def solve(self, follow: Tensor, known: Tensor, memory: FlowMemory) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`.flow.Flow.solve`, of frames none of which is known."""
        count, held = len(follow), memory.past.shape[5]
        work = self._solved.get((fitting(count), memory.prompt, held))
        if work is None or follow.shape[1] != FRAMES:
            return self._flow.solve(follow, known, memory)
        self._follow[:count].copy_(follow)
        self._speaker[:count].copy_(memory.speaker)
        self._convolved[:, :, :count].copy_(memory.convolved)
        self._past[:, :, :count, :, :, :held].copy_(memory.past)
        work()
        after = min(held + FRAMES, memory.prompt + KEPT_FRAMES)
        return self._x[:count], self._convolved[:, :, :count], self._past[:, :, :count, :, :, :after]

    def generate(self, mel: Tensor, noise: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """As :class:`.hift.HiFT`."""
        count, frames, samples = len(mel), mel.shape[2], noise.shape[1]
        begins = not before.shape[1]
        work = self._generated.get((fitting(count), begins))
        if work is None or frames != (FRAMES if begins else FRAMES + AGAIN):
            made: tuple[Tensor, Tensor] = self._hift(mel, noise, before)
            return made
        self._mel[:count, :, :frames].copy_(mel)
        self._noise[:count, :samples].copy_(noise)
        if not begins:
            self._before[:count].copy_(before)
        work()
        return self._speech[:count, :samples], self._source[:count, :samples]

    def _solve(self, size: int, prompt: int, held: int) -> None:
        past = self._past[:, :, :size]
        nothing = self._flow.encoder.empty(0)
        memory = FlowMemory(
            prompt, self._speaker[:size], nothing, self._convolved[:, :, :size], past[:, :, :, :, :, :held]
        )
        follow = self._follow[:size]
        x, convolved, after = self._flow.solve(follow, torch.zeros_like(follow), memory)
        self._x[:size].copy_(x)
        self._convolved[:, :, :size].copy_(convolved)
        past[:, :, :, :, :, : after.shape[5]].copy_(after)

    def _generate(self, size: int, begins: bool) -> None:
        frames = FRAMES if begins else FRAMES + AGAIN
        before = self._before[:size, : 0 if begins else OVERLAP]
        speech, source = self._hift(self._mel[:size, :, :frames], self._noise[:size, : frames * HOP], before)
        self._speech[:size, : frames * HOP].copy_(speech)
        self._source[:size, : frames * HOP].copy_(source)


def _lengths(prompt: int) -> list[int]:
    """Of the flow's memory before a turn's first, second and later whole seconds."""
    return sorted({min(prompt + FRAMES * second, prompt + KEPT_FRAMES) for second in range(3)})
