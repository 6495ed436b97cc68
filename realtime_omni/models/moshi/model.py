"""Moshi and PersonaPlex behind the duplex contract. One tick, one frame of 80 ms of every due call, in one batch::

    listen   Mimi's encoder: the user's frame becomes codes
    think    the transformer over time, one step, on pages; a word or none; the transformer over the frame's codebooks
    speak    Mimi's decoder: the newest whole frame of the agent's codes becomes sound

A call begins with its prompt (:mod:`.prompts`). Its first frame may name voice and text, so that one is answered by silence;
then the prompt is written, a step a pass, beside the ticks of others. Nothing is kept on the model: a call that is taken back
to a frame goes on from that frame's state and pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.base import (
    Checkpoint,
    ModelSpec,
    PackedState,
    RowOutput,
    SessionSetup,
    Step,
    StepBatch,
    StepRow,
    WarmedModel,
)
from realtime_omni.models.duplex import DuplexBase, duplex_output, speech_artifact
from realtime_omni.models.moshi import prompts, speaking
from realtime_omni.models.moshi import state as saved
from realtime_omni.models.moshi.captured import CapturedStages
from realtime_omni.models.moshi.codec import CodecState, run
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.prompts import PROMPT_CODES, PromptCodes, Voice
from realtime_omni.models.moshi.sampling import AUDIO, TEXT, Chance, races
from realtime_omni.models.moshi.stages import Heard, Rows, Stages, Thinking
from realtime_omni.models.moshi.state import Facts, MoshiState
from realtime_omni.models.moshi.streams import NOTHING, Streams
from realtime_omni.models.moshi.text import Pieces
from realtime_omni.session.frame import AddText, Configure, Directive
from realtime_omni.session.signals import Signal
from realtime_omni.session.values import ChunkMetadata

if TYPE_CHECKING:
    from realtime_omni.config import Config

PROMPT_FRAMES = 125
"""Ten seconds: after them, or after the agent's first word, a call's voice and text are settled."""

SETTLING_FRAMES = 12
"""Of silence, before a codec's codes of it are taken: about a second."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How tokens are drawn, and what stands in for speakers during prompts."""

    text: Chance = TEXT
    audio: Chance = AUDIO
    codes: PromptCodes = PROMPT_CODES


class Moshi(DuplexBase, WarmedModel):
    """See the module docstring. ``voices`` by name; a model whose depth transformer can write both speakers' streams is a
    PersonaPlex, and takes a text."""

    def __init__(
        self,
        lm: MoshiLM,
        mimi: Mimi,
        pieces: Pieces,
        settings: Settings,
        *,
        voices: Mapping[str, Voice] | None = None,
        name: str = "moshi",
        device: torch.device | str = "cpu",
        fingerprint: str = "",
        captured_rows: int | None = None,
    ) -> None:
        """``captured_rows``: of a batch at most, whose stages are CUDA graphs; None: none are.

        Raises ConfigError where codec and language model do not fit."""
        config = lm.config
        if (mimi.count, mimi.config.bins) != (config.own_streams, config.card) or config.dep_q < config.own_streams:
            raise ConfigError(
                f"the codec has {mimi.count} codebooks of {mimi.config.bins}, the language model writes "
                f"{config.own_streams} of {config.card}",
                path="options.checkpoint",
            )
        self.lm, self.mimi = lm.eval(), mimi.eval()
        self._pieces, self._settings = pieces, settings
        self._voices = dict(voices or {})
        self._device = torch.device(device)
        self._fingerprint = fingerprint
        self._streams = Streams(config, 1 + config.own_streams, device)
        self._carried = {"ears": mimi.encoder.carried, "mouth": mimi.decoder.carried}
        self._personal = config.dep_q > config.own_streams
        codec = mimi.config
        self._duplex = DuplexSpec(
            frame_ms=1000 / codec.frame_rate,
            input_rate_hz=codec.sample_rate,
            output_rate_hz=codec.sample_rate,
            turn_modes=("model",),
            voices=tuple(self._voices),
            takes_text=self._personal,
            yields=True,
            keeps_on_barge_in=True,
        )
        ring = self._streams.count * self._streams.columns * 8
        own = ring + sum(CodecState.most_bytes(codec, carried) for carried in self._carried.values())
        past = ring + sum(CodecState.past_bytes(codec, carried) for carried in self._carried.values())
        self._spec = ModelSpec(
            name=name,
            kv=KVSpec(
                num_layers=config.num_layers,
                num_kv_heads=config.num_heads,
                head_dim=config.head_dim,
                tokens_per_frame=1,
                frames_per_block=1,
                window_frames=config.context,
                model_owned_bytes_per_session=own,
            ),
            artifacts=(speech_artifact(self._duplex),),
            height=0,
            width=0,
            fps=codec.frame_rate,
            frames_per_block=1,
            rollback_safe=True,
            past_state_bytes=past,
            duplex=self._duplex,
        )
        hush = torch.tensor([config.existing_text_padding_id, *_silent_codes(mimi, self._device)], device=device)
        self._thinking = Thinking(self.lm, self._streams, settings.text, settings.audio, hush)
        self._stages = (
            Stages(self._thinking, self.mimi)
            if captured_rows is None
            else CapturedStages(self._thinking, self.mimi, captured_rows, self._device)
        )
        self._silence: NDArray[np.float32] = np.zeros(self._duplex.output_samples, np.float32)
        self._silence.setflags(write=False)

    @classmethod
    def from_config(cls, config: Config) -> Moshi:
        from realtime_omni.models.moshi.loader import load

        return load(config)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def warm_up(self, storage: KVStorage) -> None:
        self._stages.warm_up(storage, prompts=self._personal or bool(self._voices))

    def open(self, setup: SessionSetup) -> MoshiState:
        """Raises ArgumentError for a text that is too long, or that the model does not take."""
        text: tuple[int, ...] = ()
        if setup.prompt is not None:
            if not self._personal:
                raise ArgumentError("this model takes no text", path="prompt")
            text = self._tokens(setup.prompt)
            if len(text) > prompts.MOST_TEXT_TOKENS:
                raise ArgumentError(f"{len(text)} tokens; at most {prompts.MOST_TEXT_TOKENS}", path="prompt")
        voice = self._duplex.voices[0] if self._duplex.voices else None
        return self._fresh(Facts(voice=voice, text=text))

    def needs_prefill(self, state: MoshiState) -> bool:
        facts = state.facts
        return facts.begun and facts.prompted < prompts.length(self._voice(facts), facts.text)

    @torch.no_grad()
    def prefill(self, batch: StepBatch) -> Step:
        """One step of the prompt of every row."""
        yield Checkpoint("forward", "prompt")
        active = batch.active
        rows = [batch.row(number) for number in active]
        columns = [self._column(row.state.facts) for row in rows]
        rings = self._stages.prompt(batch, _standing(active, rows), columns)
        outputs: dict[int, RowOutput | Exception] = {}
        for number, row, ring in zip(active, rows, rings, strict=True):
            facts = msgspec.structs.replace(row.state.facts, prompted=row.state.facts.prompted + 1)
            following = replace(row.state, facts=facts, ring=ring)
            outputs[number] = RowOutput(ChunkMetadata.from_tick(row.tick), (), following)
        return outputs

    @torch.no_grad()
    def step(self, batch: StepBatch) -> Step:
        yield Checkpoint("forward", "listen")
        told = {n: self._told(batch.row(n)) for n in batch.active}
        begins = {n: facts for n, facts in told.items() if facts is not None}
        active = self._live(batch, begins)
        signals: dict[int, list[Signal]] = {n: [] for n in active}
        speeches = {
            n: speaking.obey(batch.row(n).state.facts.speech, _directives(batch.row(n)), signals[n]) for n in active
        }
        heard: dict[int, tuple[Tensor, CodecState]] = {}
        if active:
            sound = np.stack([_audio(batch.row(n)) for n in active])
            states = [batch.row(n).state.ears for n in active]
            codes, ears = self._stages.listen(torch.from_numpy(sound).to(self._device), states)
            heard = dict(zip(active, zip(codes, ears, strict=True), strict=True))
        yield Checkpoint("forward", "think")
        active = self._live(batch, begins)
        frames: dict[int, tuple[Tensor, Tensor]] = {}
        words: dict[int, int] = {}
        if active:
            silenced = [speeches[n].muted for n in active]
            rings, newest = self._think(batch, active, torch.stack([heard[n][0] for n in active]), silenced)
            frames = {n: (rings[i], newest[i]) for i, n in enumerate(active)}
            words = dict(zip(active, newest[:, 0].tolist(), strict=True))
        yield Checkpoint("forward", "speak")
        active = self._live(batch, begins)
        whole = [n for n in active if words[n] != NOTHING]
        spoken: dict[int, tuple[Tensor, CodecState]] = {}
        if whole:
            said = torch.stack([frames[n][1][1:] for n in whole])
            sounds, mouths = self._stages.speak(said, [batch.row(n).state.mouth for n in whole])
            spoken = dict(zip(whole, zip(sounds.clamp(-1, 1).cpu(), mouths, strict=True), strict=True))
        outputs: dict[int, RowOutput | Exception] = {}
        for n in active:
            row = batch.row(n)
            sound_of, mouth = spoken.get(n, (None, row.state.mouth))
            facts = msgspec.structs.replace(row.state.facts, speech=speeches[n])
            following = MoshiState(facts, frames[n][0], heard[n][1], mouth)
            outputs[n] = self._output(row, following, words[n], sound_of, signals[n])
        for n, facts in begins.items():
            if n in batch.active:
                outputs[n] = duplex_output(
                    self._duplex, batch.row(n), self._silence, (), self._begun(batch.row(n), facts)
                )
        return outputs

    def pack(self, state: MoshiState) -> PackedState:
        return saved.pack(state)

    def unpack(self, packed: PackedState) -> MoshiState:
        config, ring = self.lm.config, (self._streams.count, self._streams.columns)
        state = saved.unpack(
            packed, self.mimi.config, ring, (config.text_card, config.card), self._carried, self._device
        )
        facts = state.facts
        if facts.voice is not None and facts.voice not in self._voices:
            raise ArgumentError(f"no voice {facts.voice!r}", path="state.voice")
        if facts.prompted > prompts.length(self._voice(facts), facts.text):
            raise ArgumentError("the state is further than its prompt is long", path="state.prompted")
        return state

    def fingerprint(self) -> str:
        return self._fingerprint

    # ------------------------------------------------------------------ prompts

    def _fresh(self, facts: Facts) -> MoshiState:
        sides = [CodecState.start(self._carried[side], self._device) for side in ("ears", "mouth")]
        return MoshiState(facts, self._streams.start(), *sides)

    def _voice(self, facts: Facts) -> Voice | None:
        return None if facts.voice is None else self._voices[facts.voice]

    def _column(self, facts: Facts) -> tuple[list[int], Tensor | None]:
        voice, codes = self._voice(facts), self._settings.codes
        return prompts.column(self.lm.config, codes, voice, facts.text, facts.prompted)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._pieces.tokens(prompts.framed(text))) if text.strip() else ()

    def _told(self, row: StepRow) -> Facts | None:
        """The prompt that this frame asks for, where it still can; None: none."""
        frame, facts = row.tick.frame, row.state.facts
        assert frame is not None
        first = not facts.begun and (facts.voice is not None or bool(facts.text))
        if not first and (not frame.directives or facts.speech.count or row.tick.chunk_index >= PROMPT_FRAMES):
            return None
        voice, texts = facts.voice, []
        for directive in frame.directives:
            voice = directive.voice or voice if isinstance(directive, Configure) else voice
            texts += _texts(directive)
        text = facts.text
        if texts and self._personal:
            text = self._tokens(" ".join(texts))[: prompts.MOST_TEXT_TOKENS]  # cut, because a frame is never refused
        same = (voice, text) == (facts.voice, facts.text)
        return None if same and not first else Facts(voice=voice, text=text, begun=True)

    def _begun(self, row: StepRow, facts: Facts) -> MoshiState:
        """The call begins anew with its prompt, behind what was: pages stay, as silence stays."""
        return replace(self._fresh(facts), ring=row.state.ring)

    @staticmethod
    def _live(batch: StepBatch, begins: Mapping[int, Facts]) -> tuple[int, ...]:
        return tuple(n for n in batch.active if n not in begins)

    # ------------------------------------------------------------------ the language model

    def _think(
        self, batch: StepBatch, active: tuple[int, ...], user: Tensor, silenced: Sequence[bool]
    ) -> tuple[list[Tensor], Tensor]:
        """The rings after the step, and the newest whole frame [B, generated]."""
        rows = [batch.row(n) for n in active]
        width, draws = self._thinking.width, self._streams.generated
        chance: Tensor | None = None
        if width:
            chance = torch.stack([races(row.seed, row.tick.chunk_index, draws, width) for row in rows])
        return self._stages.think(batch, _standing(active, rows), Heard(user, silenced, chance))

    def _output(
        self, row: StepRow, following: MoshiState, word: int, sound: Tensor | None, signals: list[Signal]
    ) -> RowOutput:
        config = self.lm.config
        padding = (NOTHING, config.existing_text_padding_id, config.existing_text_end_padding_id)
        piece = "" if word in padding else self._pieces.text(word)
        start_ms = row.tick.chunk_index * self._duplex.frame_ms
        before = following.facts.speech
        speech = speaking.advance(before, piece, start_ms, start_ms + self._duplex.frame_ms, signals)
        audio = self._silence if sound is None or before.muted else sound.numpy().copy()
        facts = msgspec.structs.replace(following.facts, speech=speech)
        return duplex_output(self._duplex, row, audio, tuple(signals), replace(following, facts=facts))


def _standing(active: tuple[int, ...], rows: Sequence[StepRow]) -> Rows:
    return Rows(active, [row.state.ring for row in rows], [row.frame_index for row in rows])


def _silent_codes(mimi: Mimi, device: torch.device) -> list[int]:
    """What the codec makes of silence once it has settled."""
    state = CodecState.start(mimi.encoder.carried, device)
    frame = torch.zeros(1, mimi.config.frame_samples, device=device)
    codes: list[int] = []
    with torch.no_grad():
        for _ in range(SETTLING_FRAMES):
            made, (state,) = run(mimi.encode, mimi.config, frame, [state])
            codes = made[0].tolist()
    return codes


def _directives(row: StepRow) -> tuple[Directive, ...]:
    assert row.tick.frame is not None
    return row.tick.frame.directives


def _audio(row: StepRow) -> NDArray[np.float32]:
    assert row.tick.frame is not None
    return row.tick.frame.audio


def _texts(directive: Directive) -> list[str]:
    match directive:
        case Configure(instructions=str(text)):
            return [text]
        case AddText():
            return [directive.text]
        case _:
            return []


__all__ = ["Moshi", "Settings"]
