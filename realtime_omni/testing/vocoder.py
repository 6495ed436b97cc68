"""A vocoder for tests and rehearsals: every code is a pitch. It meets ``models.minicpmo.mouth.Vocoder`` and makes no words.

options: {vocoder: "realtime_omni.testing.vocoder:Hum"}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from realtime_omni.errors import ArgumentError

if TYPE_CHECKING:
    from realtime_omni.models.minicpmo.mouth import Job

RATE = 24_000
SAMPLES = 960
"""Of a code."""
LOOKAHEAD = 3
SILENCE = 0
LOUDNESS = 0.2


class Hum:
    """Sines whose phase goes on from job to job; the code ``SILENCE`` is silent."""

    silence = SILENCE
    voice_bytes = 8
    fingerprint = "hum"

    def __init__(self, folder: Path, device: str) -> None:
        """What a factory of a vocoder is given; a hum needs neither."""

    def begin(self, voice: str | None) -> Mapping[str, Tensor]:
        return {"phase": torch.zeros(1, dtype=torch.float64)}

    def sound(self, jobs: Sequence[Job]) -> list[tuple[Tensor, Mapping[str, Tensor]]]:
        return [self._one(job.voice["phase"], job.codes if job.last else job.codes[:-LOOKAHEAD]) for job in jobs]

    def check(self, voice: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        phase = voice.get("phase")
        if set(voice) != {"phase"} or phase is None or phase.shape != (1,) or phase.dtype != torch.float64:
            raise ArgumentError("the vocoder's memory is a phase", path="state.voice")
        if not bool(phase.isfinite().all()):
            raise ArgumentError("the vocoder's phase is not finite", path="state.voice")
        return voice

    def _one(self, phase: Tensor, codes: Sequence[int]) -> tuple[Tensor, Mapping[str, Tensor]]:
        pitch = torch.tensor([100.0 + 20 * code for code in codes], dtype=torch.float64).repeat_interleave(SAMPLES)
        loud = torch.tensor([LOUDNESS * (code != SILENCE) for code in codes]).repeat_interleave(SAMPLES)
        angle = phase + (2 * math.pi / RATE * pitch).cumsum(0)
        after = angle[-1:] % (2 * math.pi) if len(angle) else phase
        return loud * angle.sin().float(), {"phase": after.clone()}
