"""The embedded voice: a cascade of small networks as a duplex model. It hears, finds turns, recognises, answers, speaks.

A tick is bounded: it runs the speech detector for all calls in one batch, looks at what the threads have finished, and puts
together one frame of sound. Recognition, end-of-turn judgement and synthesis run in the workshop's threads, the language
model in its own, and all of them are functions of the state (:mod:`.work`). So a state is a value: calls fork, go back and
are saved while something is being computed for them. When a part is ready the next one begins, between two frames, too
(:mod:`.rehearsing`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.errors import ArgumentError
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.models.base import (
    Checkpoint,
    ModelSpec,
    PackedState,
    RowOutput,
    SessionSetup,
    Step,
    StepBatch,
    StepRow,
)
from realtime_omni.models.common.packing import fingerprint, unpack_values
from realtime_omni.models.duplex import DuplexBase, duplex_output, speech_artifact
from realtime_omni.models.voice.activity import WINDOW, Hearing
from realtime_omni.models.voice.asking import Asking
from realtime_omni.models.voice.board import Cast
from realtime_omni.models.voice.parts import Parts, VoiceOptions, load_parts
from realtime_omni.models.voice.rehearsing import Rehearsals
from realtime_omni.models.voice.scene import Scene
from realtime_omni.models.voice.state import MOST_HEARD_MS, MOST_UNTOLD, Facts, Sound, VoiceState
from realtime_omni.models.voice.weights import VOICE_WHEELS, cache_folder
from realtime_omni.models.voice.work import Workshop
from realtime_omni.session.values import canonical_json

if TYPE_CHECKING:
    from realtime_omni.config import Config

FRAME_MS = 40.0
"""Every decision waits for the end of a frame, half of one on average: when speech began, that it is over, when its answer
begins to sound. A frame costs a call 0.5 ms of processor time, so shorter ones would be most of the work of many calls."""
_MOST_SAMPLES = int(MOST_HEARD_MS * 16) + 4096
_LAYOUT = "voice-4"


class EmbeddedVoice(DuplexBase):
    """See the module docstring."""

    def __init__(self, parts: Parts, *, threads: int = 2, now: Callable[[], datetime] = datetime.now) -> None:
        """``now``: the wall clock in the user's time zone, for who asks what time it is."""
        self._parts = parts
        weakref.finalize(self, parts.close)  # its threads end with the last engine that uses this object
        self._fingerprint = _fingerprint(parts)
        self._duplex = DuplexSpec(
            frame_ms=FRAME_MS,
            input_rate_hz=16_000,
            output_rate_hz=24_000,
            turn_modes=("semantic", "energy", "client", "model"),
            voices=("heart",),
            transcribes=True,
            takes_text=True,
            takes_requests=True,
            says=True,
            text_only=True,
            isolates=True,
            takes_tools=True,
            context_tokens=None if parts.language is None else parts.language.context,
        )
        sound_bytes = 2 * _MOST_SAMPLES * (1 + MOST_UNTOLD) + 65_536
        self._spec = ModelSpec(
            name="voice",
            kv=KVSpec.none(frames_per_block=1, model_owned_bytes_per_session=sound_bytes),
            artifacts=(speech_artifact(self._duplex),),
            height=0,
            width=0,
            fps=1000 / FRAME_MS,
            frames_per_block=1,
            rollback_safe=True,
            duplex=self._duplex,
        )
        self._rehearsals = Rehearsals(threaded=threads > 0)
        weakref.finalize(self, self._rehearsals.close)
        if parts.language is not None:
            parts.language.watch(self._rehearsals.notice)
        asking = Asking(parts, Workshop(threads, self._rehearsals.notice))
        self._cast = Cast(self._duplex, asking, parts.language, parts.skills, now)
        self._silence: Sound = np.zeros(self._duplex.output_samples, np.float32)
        self._silence.setflags(write=False)

    @classmethod
    def from_config(cls, config: Config) -> EmbeddedVoice:
        options = config.options_as(VoiceOptions)
        folder = cache_folder() if options.weights is None else Path(options.weights)
        parts = load_parts(folder, options)
        return cls(parts, threads=options.threads)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> VoiceState:
        return VoiceState(Facts(instructions=setup.prompt))

    def close(self, state: VoiceState) -> None:
        self._rehearsals.forget(state)

    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward", "listen")
        active = batch.active
        rows = [batch.rows[number] for number in active]
        audio = [row.tick.frame.audio for row in rows if row.tick.frame is not None]
        heard = self._parts.activity.hear([row.state.hearing for row in rows], audio)
        yield Checkpoint("forward", "speak")
        wanted = set(batch.active)
        outputs: dict[int, RowOutput | Exception] = {}
        for number, row, hearing, probabilities in zip(active, rows, *heard, strict=True):
            if number in wanted:
                try:
                    outputs[number] = self._output(row, hearing, probabilities)
                except Exception as error:
                    outputs[number] = error
        return outputs

    def pack(self, state: VoiceState) -> PackedState:
        hearing = state.hearing
        sounds: dict[str, NDArray[Any]] = {
            "recurrent": hearing.recurrent,
            "context": hearing.context,
            "waiting": hearing.waiting,
            "heard": np.concatenate((*state.heard, np.zeros(0, np.int16))),
        }
        sounds |= {f"turn.{i}": turn for i, turn in enumerate(state.turns)}
        return PackedState({name: _tensor(sound) for name, sound in sounds.items()}, msgspec.to_builtins(state.facts))

    def unpack(self, packed: PackedState) -> VoiceState:
        turns = len([name for name in packed.tensors if name.startswith("turn.")])
        names = ["recurrent", "context", "waiting", "heard", *(f"turn.{i}" for i in range(turns))]
        facts = unpack_values(packed, Facts, names)
        if canonical_json(msgspec.to_builtins(facts)) != canonical_json(packed.values):
            raise ArgumentError("the state is not complete", path="state")
        sounds = {name: _checked(name, packed.tensors[name]) for name in names}
        frames, rest = divmod(len(sounds["heard"]), self._duplex.input_samples)
        if len(facts.untold) != turns or rest or len(sounds["waiting"]) >= WINDOW:
            raise ArgumentError("the state's sound is not what its facts say", path="state")
        heard = tuple(np.split(sounds["heard"], frames)) if frames else ()
        hearing = Hearing(sounds["recurrent"], sounds["context"], sounds["waiting"])
        return VoiceState(facts, hearing, heard, tuple(sounds[f"turn.{i}"] for i in range(turns)))

    def fingerprint(self) -> str:
        return self._fingerprint

    def _output(self, row: StepRow, hearing: Hearing, probabilities: tuple[float, ...]) -> RowOutput:
        frame = row.tick.frame
        assert frame is not None
        start_ms = row.tick.chunk_index * self._duplex.frame_ms
        with self._rehearsals.frame(row.tick.session_id, row.state) as state:
            scene = Scene(state, start_ms, self._cast, row.tick.session_id)
            for directive in frame.directives:
                scene.obey(directive)
            scene.listen(frame.audio, hearing, probabilities)
            sound = scene.speak()
            self._rehearsals.leave(row.tick.session_id, scene.rehearsal())
        signals = tuple(scene.signals)
        return duplex_output(self._duplex, row, self._silence if sound is None else sound, signals, scene.state)


def _fingerprint(parts: Parts) -> str:
    """What a saved call was made with. A prompt for an endpoint is nothing that the embedded model could go on from."""
    speaks = "chat" if parts.language is not None and parts.language.calls_tools else "embedded"
    return fingerprint(_LAYOUT, speaks, *(m.sha256 for w in VOICE_WHEELS for m in w.members))


def _tensor(sound: NDArray[Any]) -> torch.Tensor:
    """A copy; an empty one that torch makes of an array has strides that no file can hold."""
    return torch.empty(sound.shape, dtype=torch.from_numpy(sound).dtype).copy_(torch.from_numpy(sound))


_SHAPES = {"recurrent": (2, 128), "context": (64,)}


def _checked(name: str, tensor: torch.Tensor) -> NDArray[Any]:
    """Raises ArgumentError for what :meth:`EmbeddedVoice.pack` would not have made."""
    expected = _SHAPES.get(name, (tensor.numel(),))
    dtype = torch.float32 if name in ("recurrent", "context", "waiting") else torch.int16
    if tensor.dtype != dtype or tuple(tensor.shape) != expected or tensor.numel() > _MOST_SAMPLES:
        raise ArgumentError(f"the state's {name} is {tensor.dtype} {tuple(tensor.shape)}", path="state")
    if not bool(tensor.isfinite().all()):
        raise ArgumentError(f"the state's {name} is not finite", path="state")
    found: NDArray[Any] = tensor.numpy().copy()
    return found


__all__ = ["EmbeddedVoice", "VoiceOptions"]
