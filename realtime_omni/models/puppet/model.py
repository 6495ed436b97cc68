"""The puppet: a duplex model without weights, for tests and demonstrations of everything around a model.

It answers a turn with the next line of its script, speaks in tones (:mod:`.speech`), hears by energy (:mod:`.ears`) and, when
the user speaks while it does, gives way or insists. It obeys the last text of the user: ``say ...`` is said, ``call name {..}``
calls the tool, ``repeat`` says what it remembers to have said last (so: what was heard of it). All of it is a function of
its input, frame by frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta
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
from realtime_omni.models.puppet.scene import Scene
from realtime_omni.models.puppet.state import Manners, PuppetState, Turn
from realtime_omni.session.values import canonical_json

if TYPE_CHECKING:
    from realtime_omni.config import Config

Rate = Annotated[int, Meta(ge=8000, le=48_000)]


class PuppetOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``.

    ``lines``: said in turn; ``call NAME {arguments}`` calls the client's tool of that name, where there is one.
    ``yields``: by itself, ``yield_after_ms`` into the user's speech; else it insists, until it is interrupted. ``greeting``:
    said when the call begins. ``rewinds``: after a barge-in it is taken back to what was heard, as a native model is.
    """

    lines: tuple[str, ...] = ("I hear you.", "Please go on.", "That is good to know.", "And what happened then?")
    greeting: str | None = None
    yields: bool = False
    yield_after_ms: Annotated[float, Meta(ge=0, le=60_000)] = 200.0
    rewinds: bool = True
    frame_ms: Annotated[float, Meta(ge=20, le=1000)] = 80.0
    input_rate_hz: Rate = 24_000
    output_rate_hz: Rate = 24_000
    voices: tuple[str, ...] = ("tones",)
    phases: Annotated[int, Meta(ge=1, le=80)] = 8


class Puppet(DuplexBase):
    """See the module docstring."""

    def __init__(self, options: PuppetOptions | None = None) -> None:
        self.options = o = options if options is not None else PuppetOptions()
        self._fingerprint = fingerprint("puppet", repr(o))
        self._duplex = DuplexSpec(
            frame_ms=o.frame_ms,
            input_rate_hz=o.input_rate_hz,
            output_rate_hz=o.output_rate_hz,
            turn_modes=("energy", "client", "semantic", "model"),
            voices=o.voices,
            transcribes=True,
            takes_text=True,
            takes_requests=True,
            says=True,
            text_only=True,
            isolates=True,
            takes_tools=True,
            yields=o.yields,
            keeps_on_barge_in=o.rewinds,
            phases=o.phases,
        )
        self._spec = ModelSpec(
            name="puppet",
            kv=KVSpec.none(frames_per_block=1, model_owned_bytes_per_session=0),
            artifacts=(speech_artifact(self._duplex),),
            height=0,
            width=0,
            fps=1000 / o.frame_ms,
            frames_per_block=1,
            rollback_safe=True,
            duplex=self._duplex,
        )
        self._silence: NDArray[np.float32] = np.zeros(self._duplex.output_samples, np.float32)
        self._silence.setflags(write=False)

    @classmethod
    def from_config(cls, config: Config) -> Puppet:
        return cls(config.options_as(PuppetOptions))

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> PuppetState:
        manners = Manners(mode="energy", respond=True, threshold=0.5, silence_ms=500.0, idle_ms=None)
        turns = () if setup.prompt is None else (Turn(id="", role="system", text=setup.prompt),)
        return PuppetState(manners=manners, turns=turns)

    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward")
        return {number: self._output(batch.rows[number]) for number in batch.active}

    def pack(self, state: PuppetState) -> PackedState:
        return PackedState(values=msgspec.to_builtins(state))

    def unpack(self, packed: PackedState) -> PuppetState:
        state = unpack_values(packed, PuppetState)
        if canonical_json(msgspec.to_builtins(state)) != canonical_json(packed.values):
            raise ArgumentError("the state is not complete", path="state")
        return state

    def fingerprint(self) -> str:
        return self._fingerprint

    def _output(self, row: StepRow) -> RowOutput:
        frame, duplex = row.tick.frame, self._duplex
        assert frame is not None
        scene = Scene(row.state, row.tick.chunk_index * duplex.frame_ms, self.options, duplex)
        for directive in frame.directives:
            scene.obey(directive)
        scene.listen(frame)
        sound = scene.speak()
        return duplex_output(duplex, row, self._silence if sound is None else sound, tuple(scene.signals), scene.state)


__all__ = ["Puppet", "PuppetOptions"]
