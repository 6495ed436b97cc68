"""The user's side of a frame: what is heard, when a turn is over, what was said in it; timers and silence.

Owns the sound that waits to be understood. What takes longer than a frame is asked again in the next one.
"""

from __future__ import annotations

from dataclasses import replace as with_fields

import numpy as np
from msgspec.structs import replace

from realtime_omni.models.voice import conversation
from realtime_omni.models.voice.activity import WINDOW, Hearing
from realtime_omni.models.voice.asking import Heard
from realtime_omni.models.voice.board import Board
from realtime_omni.models.voice.deciding import offer_of
from realtime_omni.models.voice.listening import HEAR_MS, JUDGE_MS, MIN_VOICED, listen, silence_limit_ms
from realtime_omni.models.voice.speaking import next_clause
from realtime_omni.models.voice.state import (
    BEFORE_SPEECH_MS,
    MOST_HEARD_MS,
    MOST_UNTOLD,
    Ears,
    Entry,
    Kept,
    Response,
    Sound,
    Untold,
)
from realtime_omni.session.signals import IdleTimeout, InputTranscript, SpeechStarted, SpeechStopped, TurnCommitted

RATE = 16_000
NOT_UNDERSTOOD = "Sorry, I could not make out what you said."
_SILENT = Heard("")


class Listener:
    """See the module docstring."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def listen(self, audio: Sound, hearing: Hearing, probabilities: tuple[float, ...]) -> None:
        """``audio``: the frame's; ``hearing``, ``probabilities``: what the detector made of it."""
        board = self._board
        facts, manners, before = board.facts, board.facts.manners, board.state.hearing
        board.state = with_fields(board.state, hearing=hearing)
        if manners.mode == "client":
            ears = replace(facts.ears, voiced=facts.ears.voiced + sum(p >= manners.threshold for p in probabilities))
        else:
            levels = _levels(np.concatenate((before.waiting, audio)), len(probabilities))
            ears = listen(facts.ears, probabilities, levels, board.detected_ms, manners, f"u{facts.utterances}")
        if ears.utterance is not None and facts.ears.utterance is None:
            board.set(utterances=facts.utterances + 1)
            board.signals.append(SpeechStarted(ears.utterance, ears.began_ms))
        board.keep(heard=(*board.state.heard, (audio * 32767).astype(np.int16)))
        board.set(ears=ears)
        self._shorten()
        if manners.mode != "client" and ears.utterance is not None and self._is_over(ears):
            board.signals.append(SpeechStopped(ears.utterance, ears.last_ms))
            self.commit(ears.last_ms, board.end_ms, respond=manners.respond)
        self._understand()
        self._mind_the_time()

    def commit(self, end_ms: float, next_ms: float, *, respond: bool) -> None:
        """The user's turn ends; its sound waits to be understood. What is heard from ``next_ms`` on is the next one's."""
        board, ears = self._board, self._board.facts.ears
        name = ears.utterance
        if name is None:
            name = f"u{board.facts.utterances}"
            board.set(utterances=board.facts.utterances + 1)
        start_ms = ears.heard_from_ms if ears.utterance is None else ears.began_ms
        board.signals.append(TurnCommitted(name, min(start_ms, end_ms), end_ms))
        turn = self._heard_until(ears, end_ms + (HEAR_MS if ears.utterance is not None else 0.0))
        untold = Untold(name, min(start_ms, end_ms), end_ms, ears.voiced, respond)
        board.keep(heard=(), turns=(*board.state.turns, turn))
        untold_now = (*board.facts.untold, untold)
        board.set(untold=untold_now, quiet_from_ms=board.end_ms, ears=Ears(heard_from_ms=next_ms))

    def clear(self) -> None:
        """An utterance that is under way goes on, without what was heard of it."""
        board = self._board
        board.keep(heard=())
        start_ms = board.start_ms
        board.set(ears=replace(board.facts.ears, heard_from_ms=start_ms, began_ms=start_ms, voiced=0))

    def _is_over(self, ears: Ears) -> bool:
        if not self.pauses:
            return False
        manners, silence_ms = self._board.facts.manners, self._board.detected_ms - ears.last_ms
        heard = self._expect(self._heard_until(ears, ears.last_ms + HEAR_MS))
        if manners.mode == "energy":
            return silence_ms >= manners.silence_ms
        if silence_ms < JUDGE_MS:
            return False
        finished = self._board.cast.asking.finished(self._heard_until(ears, ears.last_ms + JUDGE_MS))
        return silence_ms >= silence_limit_ms(finished, None if heard is None else heard.text, manners)

    @property
    def pauses(self) -> bool:
        """Whether the user has stopped for long enough to ask what was said."""
        facts, ears = self._board.facts, self._board.facts.ears
        if facts.manners.mode == "client" or ears.utterance is None:
            return False
        return self._board.detected_ms - ears.last_ms >= HEAR_MS

    def rehearse(self) -> None:
        """In a pause that may be the turn's end: the answer, as far as it can be begun now."""
        ears = self._board.facts.ears
        if self.pauses:
            self._expect(self._heard_until(ears, ears.last_ms + HEAR_MS))

    def _expect(self, turn: Kept) -> Heard | None:
        """What was said; once that is known, the answer to it is begun."""
        facts = self._board.facts
        heard = self._board.cast.asking.words(turn) if facts.ears.voiced >= MIN_VOICED else _SILENT
        if heard is not None and heard.text and facts.manners.respond:
            self._speculate(heard.text)
        return heard

    def _speculate(self, words: str) -> None:
        """Begin the answer and its sound before it is sure that the turn is over; the same is asked when it is."""
        board, language = self._board, self._board.cast.language
        entries = conversation.add(board.facts.entries, Entry("", "user", words))
        busy = board.facts.response is not None or board.facts.untold
        guess = Response("")
        if busy:
            return
        decision = board.by_rule(guess, entries)
        if decision is not None:
            board.cast.asking.expect(next_clause(guess, decision.said or "", done=True)[0])
        if language is None or decision is not None:
            return
        prompt = language.prompt(*conversation.reading(board.facts.instructions, entries), offer_of(guess, board.facts))
        if prompt != board.facts.guess:
            board.drop_guess()
            board.set(guess=prompt)
        draft = language.draft(prompt, board.most_tokens, board.call)
        board.cast.asking.expect(next_clause(replace(guess, prompt=prompt), draft.text, done=draft.done)[0])

    def _heard_until(self, ears: Ears, until_ms: float) -> Kept:
        return self._board.heard()[: int((until_ms - ears.heard_from_ms) / 1000 * RATE)]

    def _shorten(self) -> None:
        """Before speech only a little is kept, during it at most half a minute."""
        board, ears, heard = self._board, self._board.facts.ears, self._board.state.heard
        waits = ears.utterance is None and board.facts.manners.mode != "client"
        most_ms, frame_ms = BEFORE_SPEECH_MS if waits else MOST_HEARD_MS, board.cast.spec.frame_ms
        drop = max(0, len(heard) - int(most_ms / frame_ms))
        if drop:
            board.keep(heard=heard[drop:])
            voiced = 0 if waits and not ears.run else ears.voiced
            board.set(ears=replace(ears, heard_from_ms=ears.heard_from_ms + drop * frame_ms, voiced=voiced))

    def _understand(self) -> None:
        """Turns whose words are known now, in order."""
        board = self._board
        while board.facts.untold:
            untold, turn = board.facts.untold[0], board.state.turns[0]
            late = len(board.facts.untold) > MOST_UNTOLD
            heard = board.cast.asking.words(turn) if untold.voiced >= MIN_VOICED and not late else _SILENT
            if heard is None:
                return
            words = heard.text if any(c.isalnum() for c in heard.text) else ""
            board.keep(heard=board.state.heard, turns=board.state.turns[1:])
            board.set(untold=board.facts.untold[1:])
            board.signals.append(InputTranscript(untold.utterance, words, untold.start_ms, untold.end_ms, True, True))
            if words:
                board.add(Entry(untold.utterance, "user", words))
            if untold.respond and heard.failed:
                board.queue(Response(board.name_response(), said=NOT_UNDERSTOOD, remember=False))
            elif untold.respond and words:
                board.queue(Response(board.name_response(), limit=board.most_tokens))

    def _mind_the_time(self) -> None:
        """Timers and the silent user; neither interrupts anybody."""
        board, facts = self._board, self._board.facts
        if facts.ears.utterance is not None or facts.response is not None or facts.pending or facts.untold:
            board.set(quiet_from_ms=board.end_ms)
            return
        due = next((t for t in facts.timers if t.due_ms <= board.end_ms), None)
        if due is not None:
            board.set(timers=tuple(t for t in facts.timers if t is not due))
            board.queue(Response(board.name_response(), said=due.alarm))
        elif facts.manners.idle_ms is not None and board.end_ms - facts.quiet_from_ms >= facts.manners.idle_ms:
            board.signals.append(IdleTimeout(facts.quiet_from_ms, board.end_ms))
            board.queue(Response(board.name_response(), said="Are you still there?"))


def _levels(audio: Sound, windows: int) -> list[float]:
    """Root mean squares of the windows at the beginning of ``audio``."""
    levels: list[float] = np.sqrt((audio[: windows * WINDOW].reshape(windows, WINDOW) ** 2).mean(axis=1)).tolist()
    return levels
