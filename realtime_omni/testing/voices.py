"""Two tiny duplex voices of kinds that are not built here; they keep the contract, so the contract carries their kinds.

:class:`TinyTurnCommit`, as Qwen3-Omni works: what it hears means nothing until a turn is committed, and an answer is made of
the whole conversation, read once more from its beginning. Its state is the conversation and nothing computed.

:class:`TinyRecurrentVoice`, as Nemotron VoiceChat works: a hidden state that every frame of 80 ms moves on, one token of text
and one of functions a frame, no turns; tools are called and answered while it goes on.

All values are integers that float64 holds exactly, so that a batch equals its members bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

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
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.packing import fingerprint, unpack_tensor, unpack_values
from realtime_omni.models.duplex import DuplexBase, duplex_output, speech_artifact
from realtime_omni.session.frame import AddText, Cancel, Commit, Configure, Directive, Respond, ToolResult, Truncate
from realtime_omni.session.signals import (
    OutputText,
    ResponseEnded,
    ResponseStarted,
    Signal,
    Speaking,
    ToolCall,
    TurnCommitted,
)
from realtime_omni.session.values import canonical_json

WIDTH = 8
RATE = 8000
FRAME_MS = 80.0
LETTERS = 26
MOST_TURNS, MOST_HEARD = 32, 64
Count = Annotated[int, Meta(ge=0)]
Tokens = tuple[Annotated[int, Meta(ge=0, lt=LETTERS)], ...]


def _spec(name: str, duplex: DuplexSpec, own_bytes: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        kv=KVSpec.none(frames_per_block=1, model_owned_bytes_per_session=own_bytes),
        artifacts=(speech_artifact(duplex),),
        height=0,
        width=0,
        fps=1000 / FRAME_MS,
        frames_per_block=1,
        rollback_safe=True,
        duplex=duplex,
    )


def _weights(seed: int) -> tuple[Tensor, Tensor]:
    """A matrix [D, D] and a table [letters, D] of small integers."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randint(-3, 4, (WIDTH, WIDTH), generator=generator).double()
    return matrix, torch.randint(-9, 10, (LETTERS, WIDTH), generator=generator).double()


def _wrap(x: Tensor) -> Tensor:
    return torch.remainder(x + 32, 64) - 32


def _heard(row: StepRow) -> int:
    """What a frame sounds like, as a letter."""
    assert row.tick.frame is not None
    return round(float(np.abs(row.tick.frame.audio.astype(np.float64)).mean()) * 1000) % LETTERS


def _directives(row: StepRow) -> tuple[Directive, ...]:
    assert row.tick.frame is not None
    return row.tick.frame.directives


def _letters(text: str) -> Tokens:
    return tuple(ord(letter) % LETTERS for letter in text[:MOST_HEARD])


def _tone(letter: int | None, samples: int) -> NDArray[np.float32]:
    if letter is None:
        return np.zeros(samples, np.float32)
    return (0.2 * np.sin(2 * np.pi * (100 + 10 * letter) * np.arange(samples) / RATE)).astype(np.float32)


# ---------------------------------------------------------------------- turn by turn


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one side said or heard, as letters."""

    id: str
    role: Literal["system", "user", "assistant"]
    letters: Tokens


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A response that sounds, a letter a frame; ``said`` of them so far."""

    id: str
    letters: Tokens
    said: Count = 0


class Conversation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``heard`` since frame ``since``: the turn that is not committed yet. ``asked``: responses that wait."""

    turns: Annotated[tuple[Turn, ...], Meta(max_length=MOST_TURNS)] = ()
    heard: Annotated[Tokens, Meta(max_length=MOST_HEARD)] = ()
    since: Count = 0
    utterances: Count = 0
    asked: Annotated[tuple[str, ...], Meta(max_length=MOST_TURNS)] = ()
    answer: Answer | None = None


class TinyTurnCommit(DuplexBase):
    """See the module docstring."""

    def __init__(self) -> None:
        self._matrix, self._table = _weights(21)
        self._duplex = DuplexSpec(
            frame_ms=FRAME_MS,
            input_rate_hz=RATE,
            output_rate_hz=RATE,
            turn_modes=("client",),
            takes_text=True,
            takes_requests=True,
        )
        self._spec = _spec("tiny-turn-commit", self._duplex, 0)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> Conversation:
        prompt = setup.prompt
        return (
            Conversation() if prompt is None else _remember(Conversation(), Turn("prompt", "system", _letters(prompt)))
        )

    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward", "listen")
        signals: dict[int, list[Signal]] = {n: [] for n in batch.active}
        states = {n: self._listen(batch.row(n), signals[n]) for n in batch.active}
        yield Checkpoint("forward", "read")
        for n in batch.active:
            if states[n].answer is None and states[n].asked:
                states[n] = self._begin(states[n], signals[n])
        outputs: dict[int, RowOutput | Exception] = {}
        for n in batch.active:
            states[n], letter = self._speak(states[n], batch.row(n), signals[n])
            audio = _tone(letter, self._duplex.output_samples)
            outputs[n] = duplex_output(self._duplex, batch.row(n), audio, tuple(signals[n]), states[n])
        return outputs

    def pack(self, state: Conversation) -> PackedState:
        return PackedState({}, msgspec.to_builtins(state))

    def unpack(self, packed: PackedState) -> Conversation:
        state = unpack_values(packed, Conversation)
        if canonical_json(msgspec.to_builtins(state)) != canonical_json(packed.values):
            raise ArgumentError("the state is not complete", path="state")
        if state.answer is not None and state.answer.said > len(state.answer.letters):
            raise ArgumentError("more was said than there is", path="state.answer")
        return state

    def fingerprint(self) -> str:
        return fingerprint("tiny-turn-commit", str(self._matrix.tolist()), str(self._table.tolist()))

    def _listen(self, row: StepRow, signals: list[Signal]) -> Conversation:
        state: Conversation = row.state
        number = row.tick.chunk_index
        for directive in _directives(row):
            match directive:
                case Commit():
                    name = f"heard-{state.utterances}"
                    signals.append(TurnCommitted(name, state.since * FRAME_MS, number * FRAME_MS))
                    state = _remember(state, Turn(name, "user", state.heard))
                    state = replace(state, heard=(), since=number, utterances=state.utterances + 1)
                case AddText():
                    state = _remember(state, Turn(directive.id or "text", directive.role, _letters(directive.text)))
                case Configure(instructions=str(text)):
                    state = _remember(state, Turn("instructions", "system", _letters(text)))
                case Respond() if len(state.asked) < MOST_TURNS:
                    state = replace(state, asked=(*state.asked, directive.id))
                case Respond():
                    signals += (ResponseStarted(directive.id), ResponseEnded(directive.id, "failed"))
                case Cancel():
                    state = _cancel(state, directive, signals)
                case Truncate():
                    turns = tuple(_cut(turn, directive.response, directive.heard_ms) for turn in state.turns)
                    state = replace(state, turns=turns)
                case _:
                    pass
        return replace(state, heard=(*state.heard, _heard(row))[-MOST_HEARD:])

    def _begin(self, state: Conversation, signals: list[Signal]) -> Conversation:
        """An answer to the whole conversation, which is read once more from its beginning."""
        hidden = torch.zeros(WIDTH, dtype=torch.float64)
        for turn in state.turns:
            for letter in turn.letters:
                hidden = _wrap(hidden @ self._matrix + self._table[letter])
        letters: list[int] = []
        for _ in range(3 + int(hidden[0]) % 4):
            letters.append(int(hidden.sum()) % LETTERS)
            hidden = _wrap(hidden @ self._matrix + self._table[letters[-1]])
        signals.append(ResponseStarted(state.asked[0]))
        return replace(state, answer=Answer(state.asked[0], tuple(letters)), asked=state.asked[1:])

    def _speak(self, state: Conversation, row: StepRow, signals: list[Signal]) -> tuple[Conversation, int | None]:
        answer = state.answer
        if answer is None:
            return state, None
        letter, start_ms = answer.letters[answer.said], row.tick.chunk_index * FRAME_MS
        signals += [Speaking(answer.id), OutputText(answer.id, chr(97 + letter), start_ms, start_ms + FRAME_MS)]
        answer = replace(answer, said=answer.said + 1)
        if answer.said < len(answer.letters):
            return replace(state, answer=answer), letter
        signals.append(ResponseEnded(answer.id, "completed"))
        return replace(_remember(state, Turn(answer.id, "assistant", answer.letters)), answer=None), letter


def _remember(state: Conversation, turn: Turn) -> Conversation:
    return replace(state, turns=(*state.turns, turn)[-MOST_TURNS:])


def _cut(turn: Turn, response: str, heard_ms: float) -> Turn:
    return replace(turn, letters=turn.letters[: int(heard_ms / FRAME_MS)]) if turn.id == response else turn


def _cancel(state: Conversation, directive: Cancel, signals: list[Signal]) -> Conversation:
    for waiting in state.asked:
        if directive.response in (None, waiting):
            signals += (ResponseStarted(waiting), ResponseEnded(waiting, "cancelled"))
            state = replace(state, asked=tuple(name for name in state.asked if name != waiting))
    answer = state.answer
    if answer is None or directive.response not in (None, answer.id):
        return state
    signals.append(ResponseEnded(answer.id, "cancelled"))
    turn = Turn(answer.id, "assistant", answer.letters[: answer.said])
    if directive.heard_ms is not None:
        turn = _cut(turn, answer.id, directive.heard_ms)
    return replace(_remember(state, turn), answer=None)


# ---------------------------------------------------------------------- recurrent


class Talk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``response``: the running one. ``quiet``: frames since the last word. ``muted``: silent since a cancel. ``fed``: letters
    that the next frame takes in beside its sound."""

    response: str | None = None
    responses: Count = 0
    calls: Count = 0
    quiet: Count = 0
    muted: bool = False
    tools: Annotated[tuple[str, ...], Meta(max_length=MOST_TURNS)] = ()
    fed: Annotated[Tokens, Meta(max_length=MOST_HEARD)] = ()


@dataclass(frozen=True, slots=True)
class RecurrentVoiceState:
    """``hidden`` float64 [D], whole numbers in -32..31."""

    hidden: Tensor
    talk: Talk = field(default_factory=Talk)


PAUSE = 3
"""Frames without a word that end a response."""


class TinyRecurrentVoice(DuplexBase):
    """See the module docstring."""

    def __init__(self) -> None:
        self._matrix, self._table = _weights(22)
        self._duplex = DuplexSpec(
            frame_ms=FRAME_MS,
            input_rate_hz=RATE,
            output_rate_hz=RATE,
            takes_text=True,
            takes_tools=True,
            yields=True,
            keeps_on_barge_in=True,
        )
        self._spec = _spec("tiny-recurrent-voice", self._duplex, 8 * WIDTH)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def open(self, setup: SessionSetup) -> RecurrentVoiceState:
        fed = () if setup.prompt is None else _letters(setup.prompt)
        return RecurrentVoiceState(torch.zeros(WIDTH, dtype=torch.float64), Talk(fed=fed))

    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward")
        rows = {n: batch.row(n) for n in batch.active}
        signals: dict[int, list[Signal]] = {n: [] for n in rows}
        talks = {n: self._obey(row.state.talk, _directives(row), signals[n]) for n, row in rows.items()}
        outputs: dict[int, RowOutput | Exception] = {}
        if not rows:
            return outputs
        hidden_BD = torch.stack([row.state.hidden for row in rows.values()]) @ self._matrix
        for place, (n, row) in enumerate(rows.items()):
            chance = block_noise(row.seed, row.tick.chunk_index, 0, (WIDTH,), dtype=torch.float64)
            fed = sum((self._table[letter] for letter in talks[n].fed), torch.zeros(WIDTH, dtype=torch.float64))
            hidden = _wrap(hidden_BD[place] + self._table[_heard(row)] + fed + torch.round(3 * chance))
            talk, letter = self._say(replace(talks[n], fed=()), hidden, row, signals[n])
            audio = _tone(letter, self._duplex.output_samples)
            state = RecurrentVoiceState(hidden.clone(), talk)
            outputs[n] = duplex_output(self._duplex, row, audio, tuple(signals[n]), state)
        return outputs

    def pack(self, state: RecurrentVoiceState) -> PackedState:
        return PackedState({"hidden": state.hidden}, msgspec.to_builtins(state.talk))

    def unpack(self, packed: PackedState) -> RecurrentVoiceState:
        talk = unpack_values(packed, Talk, ["hidden"])
        if canonical_json(msgspec.to_builtins(talk)) != canonical_json(packed.values):
            raise ArgumentError("the state is not complete", path="state")
        hidden = unpack_tensor(packed, "hidden", (WIDTH,), dtype=torch.float64, device="cpu")
        if not torch.equal(hidden, _wrap(hidden.round())):
            raise ArgumentError("the state's numbers are whole, -32 to 31", path="state.hidden")
        return RecurrentVoiceState(hidden, talk)

    def fingerprint(self) -> str:
        return fingerprint("tiny-recurrent-voice", str(self._matrix.tolist()), str(self._table.tolist()))

    @staticmethod
    def _obey(talk: Talk, directives: Sequence[Directive], signals: list[Signal]) -> Talk:
        for directive in directives:
            match directive:
                case Configure(tools=tuple(tools)):
                    talk = replace(talk, tools=tuple(tool.name for tool in tools)[:MOST_TURNS])
                case AddText(text=text) | ToolResult(output=text):
                    talk = replace(talk, fed=(*talk.fed, *_letters(text))[:MOST_HEARD])
                case Cancel(response=named) if talk.response is not None and named in (None, talk.response):
                    signals.append(ResponseEnded(talk.response, "cancelled"))
                    talk = replace(talk, response=None, muted=True)
                case _:
                    pass
        return talk

    @staticmethod
    def _say(talk: Talk, hidden: Tensor, row: StepRow, signals: list[Signal]) -> tuple[Talk, int | None]:
        """A frame's two tokens: a letter or none, a function or none. Returns what sounds."""
        letter = int(hidden[2]) % LETTERS if int(hidden[0]) % 4 == 0 else None
        talk = replace(talk, quiet=0 if letter is not None else min(talk.quiet + 1, PAUSE))
        if talk.quiet == PAUSE:
            if talk.response is not None:
                signals.append(ResponseEnded(talk.response, "completed"))
            return replace(talk, response=None, muted=False), None
        if talk.muted or (letter is None and talk.response is None):
            return talk, None
        if talk.response is None:
            talk = replace(talk, response=f"said-{talk.responses}", responses=talk.responses + 1)
            signals.append(ResponseStarted(str(talk.response)))
        response, start_ms = str(talk.response), row.tick.chunk_index * FRAME_MS
        signals.append(Speaking(response))
        if letter is not None:
            signals.append(OutputText(response, chr(97 + letter), start_ms, start_ms + FRAME_MS))
        if talk.tools and int(hidden[1]) % 8 == 0:
            signals.append(ToolCall(response, f"call-{talk.calls}", talk.tools[0], "{}"))
            talk = replace(talk, calls=talk.calls + 1)
        return talk, letter
