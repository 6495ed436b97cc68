"""The agent's side of a frame: which response it is at, what that says, how much of it sounds now, and how it ends.

Owns responses from their beginning to their end. What takes longer than a frame is asked again in the next one.
"""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from realtime_omni.models.voice import conversation
from realtime_omni.models.voice.board import Board
from realtime_omni.models.voice.deciding import Decision, offer_of
from realtime_omni.models.voice.speaker import Draft, Speaker
from realtime_omni.models.voice.speaking import sound, take_clauses
from realtime_omni.models.voice.state import MOST_TIMERS, Call, Entry, Response, Sound, Timer, Word
from realtime_omni.session.frame import Cancel
from realtime_omni.session.signals import (
    ContextUse,
    EndReason,
    OutputText,
    ResponseEnded,
    ResponseStarted,
    Speaking,
    ToolCall,
    Usage,
)

SPEECHLESS = "Sorry, I cannot answer: my language model does not reply."


class Answerer:
    """See the module docstring."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def cancel(self, directive: Cancel) -> None:
        board, response = self._board, self._board.facts.response
        if response is not None and directive.response in (None, response.id):
            heard_ms = response.sounded_ms if directive.heard_ms is None else directive.heard_ms
            self._end(replace(response, words=conversation.heard(response.words, heard_ms)), "cancelled")
        for waiting in board.facts.pending:
            if directive.response in (None, waiting.id):
                board.signals += (ResponseStarted(waiting.id), ResponseEnded(waiting.id, "cancelled"))
                board.set(pending=tuple(r for r in board.facts.pending if r is not waiting))

    def speak(self) -> Sound | None:
        """This frame's sound; None: silence."""
        board = self._board
        if board.facts.response is None and board.facts.pending:
            first, *rest = board.facts.pending
            board.set(response=first, pending=tuple(rest))
            board.signals.append(ResponseStarted(first.id))
            if not _undecided(first):
                self._hold_place(first)
        if board.facts.response is not None and _undecided(board.facts.response):
            self._decide()
        response = board.facts.response
        return None if response is None or _undecided(response) else self._go_on(response)

    @property
    def waits(self) -> bool:
        """For the first words of the language model."""
        response = self._board.facts.response
        if response is None or response.prompt is None or response.text_only:
            return False
        return not response.sounded_ms and self._board.cast.asking.speaks

    def rehearse(self) -> None:
        """The sound of what is to be said first, as soon as its words are there."""
        board, response, language = self._board, self._board.facts.response, self._board.cast.language
        if not self.waits or response is None or response.prompt is None or language is None:
            return
        draft = language.draft(response.prompt, response.limit, board.call)
        for clause in take_clauses(response, draft.text, done=draft.done).clauses:
            board.cast.asking.clip(clause, call=board.call)

    def _hold_place(self, response: Response) -> None:
        """In the conversation: what is said while it sounds comes after it."""
        if response.remember:
            self._board.add(Entry(response.id, "assistant", ""))

    def _decide(self) -> None:
        """What a response says, once everything that was said before is known."""
        board, response = self._board, self._board.facts.response
        assert response is not None
        if not _undecided(response) or (board.facts.untold and response.context is None):
            return
        entries = board.facts.entries if response.context is None else response.context
        decision = board.by_rule(response, entries) or self._ask(response, entries)
        if decision.prompt != board.facts.guess:
            board.drop_guess()
        self._hold_place(response)
        board.set(guess=None, response=replace(response, said=decision.said, prompt=decision.prompt))
        if decision.timer is not None and len(board.facts.timers) < MOST_TIMERS:
            timer = Timer(board.end_ms + decision.timer.seconds * 1000, decision.timer.alarm)
            board.set(timers=(*board.facts.timers, timer))
        if decision.drop_timers:
            board.set(timers=())
        if decision.call is not None:
            self._call(response, decision.call)

    def _call(self, response: Response, call: Call) -> str:
        """Ask the client; returns the call's name."""
        board, call_id = self._board, f"call-{self._board.facts.calls}"
        board.set(calls=board.facts.calls + 1)
        board.signals.append(ToolCall(response.id, call_id, call.name, call.arguments))
        return call_id

    def _ask(self, response: Response, entries: conversation.Entries) -> Decision:
        board, language = self._board, self._board.cast.language
        if language is None:
            asked = conversation.asked(entries)
            return Decision(said="I have no language model." if asked is None else f"You said: {asked.text}")
        instructions = board.facts.instructions if response.instructions is None else response.instructions
        offer = offer_of(response, board.facts)
        prompt = language.prompt(*conversation.reading(instructions, entries), offer)
        if language.context is not None:
            used = min(1.0, round(len(prompt) / language.context, 2))
            if used != board.facts.context_used:
                board.set(context_used=used)
                board.signals.append(ContextUse(used))
        return Decision(prompt=prompt)

    def _go_on(self, response: Response) -> Sound | None:
        board, language = self._board, self._board.cast.language
        text, done = response.said or "", True
        if response.prompt is not None and language is not None:
            draft = language.draft(response.prompt, response.limit, board.call)
            response = self._follow(response, draft, language)
            text, done = (draft.text, draft.done) if response.prompt is not None else (SPEECHLESS, True)
        if response.text_only or not board.cast.asking.speaks:
            self._write(response, text, done=done)
            return None
        before, response = response.cut, take_clauses(response, text, done=done)
        if done and response.prompt is not None and response.remember and before < len(text) <= response.cut:
            board.prepare(self._remembered(response, text))  # once, while the rest of it sounds
        clip_of = partial(board.cast.asking.clip, call=board.call)
        waiting = response.clauses
        response, audio, told = sound(response, board.cast.spec.output_samples, clip_of)
        board.cast.asking.forgive(waiting[: len(waiting) - len(response.clauses)], board.call)
        board.set(response=response)
        if audio is not None:
            board.signals.append(Speaking(response.id))
        for word in told:
            start_ms = board.start_ms + word.start_ms
            board.signals.append(OutputText(response.id, word.text, start_ms, board.start_ms + word.end_ms))
        if done and not response.clauses and not text[response.cut :].strip():
            self._end(response, "failed" if response.broken else "completed")
        return audio

    def _follow(self, response: Response, draft: Draft, language: Speaker) -> Response:
        """What is known of an answer now; its calls, once it is complete. Without a word it says that there is none."""
        response = replace(response, tokens=draft.tokens, read=draft.read, broken=draft.failed)
        if draft.failed and not draft.text and response.prompt is not None:
            language.drop(response.prompt, self._board.call)
            return replace(response, said=SPEECHLESS, prompt=None)
        if draft.done and draft.calls and not response.called:
            for call in draft.calls:
                call_id = self._call(response, call)
                if response.remember:
                    self._board.add(Entry(call_id, "assistant", call.arguments, "call", name=call.name))
            response = replace(response, called=True)
        return response

    def _write(self, response: Response, text: str, *, done: bool) -> None:
        """Text without sound, as it grows."""
        board = self._board
        if fragment := text[response.cut :]:
            board.signals.append(OutputText(response.id, fragment, board.start_ms, board.start_ms))
            response = replace(response, cut=len(text), words=(*response.words, Word(fragment, 0.0)))
        board.set(response=response)
        if done:
            self._end(response, "failed" if response.broken else "completed")

    def _end(self, response: Response, reason: EndReason) -> None:
        board, language = self._board, self._board.cast.language
        if response.prompt is not None and language is not None:
            language.drop(response.prompt, board.call)
        board.cast.asking.drop(response.clauses, board.call)
        said = "" if response.said == SPEECHLESS else conversation.joined(response.words)
        frames = round(response.sounded_ms / board.cast.spec.frame_ms)
        usage = Usage(input_text=response.read, output_text=response.tokens, output_audio=frames)
        board.signals.append(ResponseEnded(response.id, reason, usage))
        board.set(response=None, quiet_from_ms=board.end_ms)
        if response.remember:
            board.set(entries=self._remembered(response, said))
            board.prepare()

    def _remembered(self, response: Response, said: str) -> conversation.Entries:
        """The conversation behind a response that came to ``said``."""
        words = response.words if response.sounded_ms else ()
        return conversation.shorten(conversation.settle(self._board.facts.entries, response.id, said, words))


def _undecided(response: Response) -> bool:
    return response.said is None and response.prompt is None
