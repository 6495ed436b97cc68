"""MiniCPM-o 4.5 behind the duplex contract. One tick, one second of every due call, in one batch::

    listen   the encoder: the user's second becomes ten tokens
    think    the language model reads them on pages and writes: that it listens, or what it says in this second
    talk     the talker: the words become codes of sound
    speak    the vocoder: the codes become the second that is heard next

A call's first second may name its voice and text, so that one is answered by silence; then its prompt and that second are
written to the pages that stay, and later seconds slide. A second is a frame of the engine's pages and holds as many tokens as
were read and written, none more. The newest seconds keep their positions for ever; the prompt's keys are turned after them, to
stand right before the oldest that is seen. Nothing is kept on the model: a call that is taken back to a second goes on from
that second's state and pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.errors import ArgumentError
from realtime_omni.kv.attention.rooms import Rooms
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import (
    Checkpoint,
    GrowingAttention,
    ModelSpec,
    PackedState,
    RowOutput,
    SessionSetup,
    Step,
    StepBatch,
    StepRow,
    WarmedModel,
)
from realtime_omni.models.common.capture import Capture, fitting
from realtime_omni.models.duplex import DuplexBase, duplex_output, speech_artifact
from realtime_omni.models.minicpmo import listening, mel, mouth, sizes, speaking
from realtime_omni.models.minicpmo import state as saved
from realtime_omni.models.minicpmo.captured import CapturedThinker, TalkerRooms
from realtime_omni.models.minicpmo.config import Config45
from realtime_omni.models.minicpmo.ears import Ears
from realtime_omni.models.minicpmo.mouth import Vocoder
from realtime_omni.models.minicpmo.network import Language, rotate, turns
from realtime_omni.models.minicpmo.sampling import REMEMBERED, uniforms
from realtime_omni.models.minicpmo.settings import Settings
from realtime_omni.models.minicpmo.state import CallState, Facts
from realtime_omni.models.minicpmo.talker import CODES, Line, Talker
from realtime_omni.models.minicpmo.thinking import Thinker, Writing
from realtime_omni.models.minicpmo.units import Unit
from realtime_omni.models.minicpmo.vocabulary import Words, readable
from realtime_omni.models.minicpmo.voices import Prompts
from realtime_omni.session.frame import Directive
from realtime_omni.session.signals import Signal
from realtime_omni.session.values import ChunkMetadata

if TYPE_CHECKING:
    from realtime_omni.config import Config


@dataclass(frozen=True, slots=True)
class _Heard:
    """A row after its second was taken in: facts, tokens of the second, what the encoder remembers, the second itself."""

    facts: Facts
    silenced: bool
    tokens: Tensor
    past: tuple[Tensor, ...]
    seconds: tuple[Tensor, ...]


class MiniCPMO(DuplexBase, WarmedModel):
    """See the module docstring. ``voices``: the sound's tokens [n, D] of each, by name."""

    def __init__(
        self,
        config: Config45,
        language: Language,
        ears: Ears,
        talker: Talker,
        words: Words,
        vocoder: Vocoder,
        settings: Settings,
        *,
        voices: Mapping[str, Tensor] | None = None,
        name: str = "minicpm-o",
        device: torch.device | str = "cpu",
        fingerprint: str = "",
        captured_rows: int | None = None,
    ) -> None:
        """``captured_rows``: of a batch at most, whose passes are CUDA graphs; None: none are."""
        self.config = config
        self.ears, self.talker = ears.eval(), talker.eval()
        self._words, self._vocoder, self._settings = words, vocoder, settings
        self._device, self._marks = torch.device(device), words.marks
        self._fingerprint = fingerprint
        _, self._per_unit = sizes.unit_tokens(config, settings)
        frames = -(-settings.prompt_tokens // self._per_unit)
        self._prompts = Prompts(words, voices or {}, frames, self._per_unit)
        self._blocks = frames + 1
        itemsize = language.embed.element_size()
        self._shapes = sizes.shapes(config, settings, self._blocks, language.embed.dtype)
        self._duplex = DuplexSpec(
            frame_ms=1000.0,
            input_rate_hz=mel.RATE,
            output_rate_hz=mouth.RATE,
            voices=tuple(self._prompts.voices),
            takes_text=True,
            takes_requests=True,
            keeps_on_barge_in=True,
        )
        self._spec = ModelSpec(
            name=name,
            kv=KVSpec(
                num_layers=config.language.num_hidden_layers,
                num_kv_heads=config.language.num_key_value_heads,
                head_dim=config.language.head_dim,
                tokens_per_frame=self._per_unit,
                frames_per_block=1,
                window_frames=settings.window_units,
                sink_frames=frames,
                model_owned_bytes_per_session=sizes.own_bytes(config, itemsize, vocoder.voice_bytes),
            ),
            artifacts=(speech_artifact(self._duplex),),
            height=0,
            width=0,
            fps=1.0,
            frames_per_block=1,
            rollback_safe=True,
            past_state_bytes=sizes.past_bytes(config, settings, itemsize, vocoder.voice_bytes),
            duplex=self._duplex,
        )
        self._mind = Thinker(language, words.marks, settings, self._device)
        self._talks: TalkerRooms | None = None
        if captured_rows is not None:
            self._capture(language, captured_rows)
        self._turn_room = config.talker.max_position_embeddings - (settings.unit_words + CODES)
        self._silence: NDArray[np.float32] = np.zeros(self._duplex.output_samples, np.float32)
        self._silence.setflags(write=False)

    @classmethod
    def from_config(cls, config: Config) -> MiniCPMO:
        from realtime_omni.models.minicpmo.loader import load

        return load(config)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def warm_up(self, storage: KVStorage) -> None:
        self._mind.warm_up()
        if self._talks is not None:
            self._talks.steps.warm_up()

    def _capture(self, language: Language, rows: int) -> None:
        """Passes as graphs. Their memory is taken now, before what is left is shared out among calls."""
        like, capture = language.embed, Capture(self._device)
        self._mind = CapturedThinker(
            language,
            self._marks,
            self._settings,
            self._device,
            rooms=Rooms.of(self._spec.kv, fitting(rows), dtype=like.dtype, device=self._device),
            opening=1 + self.ears.tokens,
            capture=capture,
        )
        self._talks = TalkerRooms(self.talker, rows=rows, words=self._settings.unit_words, capture=capture)

    def open(self, setup: SessionSetup) -> CallState:
        """Raises ArgumentError for a text that is too long."""
        voice = self._duplex.voices[0] if self._duplex.voices else None
        prompt, missing = self._prompts.of(setup.prompt, voice)
        if missing:
            raise ArgumentError(f"the text is {missing} tokens too long", path="prompt")
        return CallState.fresh(prompt)

    def needs_prefill(self, state: CallState) -> bool:
        return state.facts.begun and state.facts.prompted < self._blocks

    @torch.no_grad()
    def prefill(self, batch: StepBatch) -> Step:
        """One block of the prompt of every row, or its first unit, in which the model listens."""
        yield Checkpoint("forward", "prompt")
        growing = self._growing(batch)
        together: dict[int, list[tuple[int, Tensor]]] = {}
        for n in batch.active:
            x = self._owed(batch.row(n).state)
            together.setdefault(len(x), []).append((n, x))
        outputs: dict[int, RowOutput | Exception] = {}
        for tokens, members in together.items():
            rows = [n for n, _ in members]
            if tokens:
                starts = [batch.row(n).state.facts.tokens for n in rows]
                self._mind.read(growing, rows, torch.stack([x for _, x in members]), starts)
            growing.finish(rows)
            for n in rows:
                row = batch.row(n)
                outputs[n] = RowOutput(ChunkMetadata.from_tick(row.tick), (), self._owes_less(row.state, tokens))
        return outputs

    @torch.no_grad()
    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward", "listen")
        signals: dict[int, list[Signal]] = {n: [] for n in batch.active}
        heard = self._listen(batch, signals)
        yield Checkpoint("forward", "think")
        live = [n for n in batch.active if batch.row(n).state.facts.begun]
        writing = {n: self._unit(batch.row(n), heard[n]) for n in live}
        if live:
            yield from self._mind.write(batch, self._growing(batch), writing)
        yield Checkpoint("forward", "talk")
        lines = self._lines(batch, writing, heard)
        spoken = list(lines.values())
        mind = self._talks.lines(spoken) if self._talks is not None else None
        codes, turns_after = self.talker.speak(spoken, self._settings.codes, mind) if lines else ([], [])
        talked = dict(zip(lines, zip(codes, turns_after, strict=True), strict=True))
        yield Checkpoint("forward", "speak")
        talked = {n: made for n, made in talked.items() if n in batch.active}
        mouths = self._sound(batch, writing, heard, {n: made[0] for n, made in talked.items()})
        outputs: dict[int, RowOutput | Exception] = {}
        for n in batch.active:
            if n in writing:
                outputs[n] = self._output(batch.row(n), writing[n], heard[n], talked.get(n), mouths[n], signals[n])
            else:
                begun = CallState(
                    heard[n].facts, heard[n].seconds, heard[n].past, heard[n].tokens, (), mouth.Mouth.silent()
                )
                outputs[n] = duplex_output(self._duplex, batch.row(n), self._silence, tuple(signals[n]), begun)
        return outputs

    def pack(self, state: CallState) -> PackedState:
        return saved.pack(state)

    def unpack(self, packed: PackedState) -> CallState:
        state = saved.unpack(packed, self._shapes, self._device)
        prompt = state.facts.prompt
        if prompt.voice is not None and prompt.voice not in self._prompts.voices:
            raise ArgumentError(f"no voice {prompt.voice!r}", path="state.prompt")
        if self._prompts.tokens(prompt) > self._prompts.frames * self._per_unit:
            raise ArgumentError("the state's prompt is too long", path="state.prompt")
        if state.mouth.voice is not None:
            state = replace(state, mouth=replace(state.mouth, voice=self._vocoder.check(state.mouth.voice)))
        return state

    def fingerprint(self) -> str:
        return self._fingerprint

    # ------------------------------------------------------------------ the prompt

    def _owed(self, state: CallState) -> Tensor:
        """Embeddings [T, D] of the next block that the state owes to its history."""
        facts: Facts = state.facts
        if facts.prompted < self._prompts.frames:
            return self._prompts.embedded(facts.prompt, facts.prompted, self._mind.embed)
        assert state.first is not None
        ends = self._mind.embed([self._marks.listen, self._marks.unit_end])
        return torch.cat((self._mind.embed([self._marks.unit]), state.first, ends))

    def _owes_less(self, state: CallState, tokens: int) -> CallState:
        facts = state.facts
        last = facts.prompted == self._prompts.frames
        facts = msgspec.structs.replace(
            facts,
            prompted=facts.prompted + 1,
            tokens=facts.tokens + tokens,
            frames=facts.frames + 1,
            lengths=bytes([tokens]) if last else b"",
        )
        return replace(state, first=None if last else state.first, facts=facts)

    # ------------------------------------------------------------------ hearing and thinking

    def _listen(self, batch: StepBatch, signals: Mapping[int, list[Signal]]) -> dict[int, _Heard]:
        rows = {n: batch.row(n) for n in batch.active}
        seconds, mels = {}, []
        for n, row in rows.items():
            sound = torch.tensor(_audio(row))
            seconds[n] = (*row.state.seconds, sound)[-mel.KEPT_UNITS :]
            mels.append(mel.features(row.state.facts.units, torch.stack(seconds[n]).to(self._device)))
        tokens, pasts = self.ears.hear(mels, [row.state.past for row in rows.values()])
        out: dict[int, _Heard] = {}
        for place, (n, row) in enumerate(rows.items()):
            facts, directives = row.state.facts, _directives(row)
            ear = listening.tuned(facts.ear, directives)
            ear = listening.listen(ear, _audio(row), row.tick.chunk_index * self._duplex.frame_ms, signals[n])
            speaker, silenced = speaking.obey(facts.speaker, directives, signals[n])
            facts = msgspec.structs.replace(facts, ear=ear, speaker=speaker, units=facts.units + 1)
            if not facts.begun:
                facts = msgspec.structs.replace(facts, begun=True, prompt=self._prompts.told(facts.prompt, directives))
            out[n] = _Heard(facts, silenced, tokens[place].clone(), pasts[place], seconds[n])
        return out

    def _growing(self, batch: StepBatch) -> GrowingAttention:
        def held(number: int, frame: int) -> int:
            facts: Facts = batch.row(number).state.facts
            if frame < self._prompts.frames:
                return self._prompts.held(facts.prompt, frame)
            length: int = facts.lengths[frame - facts.frames]
            return length

        ahead: dict[int, tuple[Tensor, Tensor]] = {}

        def turn(number: int, keys: Tensor) -> None:
            facts: Facts = batch.row(number).state.facts
            gone = facts.tokens - keys.shape[-2]
            if gone:
                if number not in ahead:  # the layers share it
                    size, place = self.config.language, torch.tensor(gone, device=keys.device)
                    ahead[number] = turns(place, size.head_dim, size.rope_theta)
                prompt = keys[..., : self._prompts.tokens(facts.prompt), :]
                prompt.copy_(rotate(prompt, ahead[number]))

        return batch.growing(held, turn)

    def _unit(self, row: StepRow, heard: _Heard) -> Writing:
        facts, most = heard.facts, self._settings.unit_words
        forced = None
        if heard.silenced:
            forced = self._marks.listen
        elif facts.speaker.requested and facts.speaker.response is None and facts.turn_over:
            forced = self._marks.speak
        unit = Unit(self._marks, most, facts.turn_over or heard.silenced, forced)
        numbers = uniforms(row.seed, row.tick.chunk_index, 2 * most)
        draws = list(zip(numbers[::2], numbers[1::2], strict=True))
        return Writing(unit, facts.tokens, heard.tokens, list(facts.chosen), draws)

    # ------------------------------------------------------------------ speaking

    def _speaks(self, writing: Writing, facts: Facts) -> bool:
        """A unit without words goes on with a turn, and begins none."""
        return not writing.unit.listens and (bool(writing.said) or facts.speaker.response is not None)

    def _lines(self, batch: StepBatch, writing: Mapping[int, Writing], heard: Mapping[int, _Heard]) -> dict[int, Line]:
        lines: dict[int, Line] = {}
        for n in batch.active:
            if n not in writing or not self._speaks(writing[n], heard[n].facts):
                continue
            row, said = batch.row(n), writing[n].said
            past = row.state.turn
            if heard[n].silenced or sum(part.shape[2] for part in past) > self._turn_room:
                past = ()  # a turn longer than the talker's table goes on as a new one
            condition = self.talker.condition([word for word, _ in said], [thought for _, thought in said])
            draws = uniforms(row.seed, ~row.tick.chunk_index, CODES)
            lines[n] = Line(condition, past, not past or writing[n].unit.ended_turn, draws)
        return lines

    def _sound(
        self,
        batch: StepBatch,
        writing: Mapping[int, Writing],
        heard: Mapping[int, _Heard],
        codes: Mapping[int, list[int]],
    ) -> dict[int, mouth.Mouth]:
        """The mouths of all rows before this second is heard."""
        mouths = {n: mouth.Mouth.silent() if heard[n].silenced else batch.row(n).state.mouth for n in batch.active}
        rows = [mouth.Speech(mouths[n], tuple(codes[n]), writing[n].unit.ended_turn) for n in codes]
        if rows:
            after = mouth.speak(self._vocoder, rows, [heard[n].facts.prompt.voice for n in codes])
            mouths |= dict(zip(codes, after, strict=True))
        return mouths

    def _output(
        self,
        row: StepRow,
        writing: Writing,
        heard: _Heard,
        talked: tuple[list[int], tuple[Tensor, ...]] | None,
        full: mouth.Mouth,
        signals: list[Signal],
    ) -> RowOutput:
        facts, unit = heard.facts, writing.unit
        speaker, start_ms = facts.speaker, row.tick.chunk_index * self._duplex.frame_ms
        audible = bool(len(full.pending))
        sound, rest = mouth.hear(full)
        turn = () if heard.silenced else row.state.turn
        if talked is not None:
            speaker = speaking.begin(speaker, signals)
            spoken = (*speaker.unread, *(word for word, _ in writing.said))
            text, unread = readable(self._words, spoken, last=unit.ended_turn)
            speaker = msgspec.structs.replace(
                speaker,
                over=unit.ended_turn,
                unread=unread,
                words=speaker.words + len(writing.said),
                codes=speaker.codes + len(talked[0]),
            )
            speaking.say(speaker, text, start_ms, start_ms + self._duplex.frame_ms, signals)
            turn = () if unit.ended_turn else talked[1]
        elif audible:
            speaking.say(speaker, "", start_ms, start_ms + self._duplex.frame_ms, signals)
        if speaker.over and not len(rest.pending):
            speaker = speaking.finish(speaker, signals)
        length = writing.tokens
        following = msgspec.structs.replace(
            facts,
            speaker=speaker,
            tokens=facts.tokens + length,
            frames=facts.frames + 1,
            lengths=(facts.lengths + bytes([length]))[-saved.MOST_UNITS :],
            turn_over=unit.turn_over,
            chosen=tuple(writing.chosen[-REMEMBERED:]),
        )
        state = CallState(following, heard.seconds, heard.past, None, turn, rest)
        return duplex_output(self._duplex, row, sound.numpy(), tuple(signals), state)


def _directives(row: StepRow) -> tuple[Directive, ...]:
    assert row.tick.frame is not None
    return row.tick.frame.directives


def _audio(row: StepRow) -> NDArray[np.float32]:
    assert row.tick.frame is not None
    return row.tick.frame.audio


__all__ = ["MiniCPMO", "Settings"]
