"""One frame of a call with the embedded voice: what it is told, what it hears, what it says; from one state to the next.

Owns the rules of the conversation. What takes longer than a frame is asked of the workshop and of the language model, and
asked again in the next frame. Lives as long as a frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_fields
from datetime import datetime

import numpy as np
from msgspec.structs import replace

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.models.voice import conversation
from realtime_omni.models.voice.activity import Hearing
from realtime_omni.models.voice.deciding import Decision, decide, manners_of
from realtime_omni.models.voice.listening import ASK_MS, MIN_VOICED, listen, silence_limit_ms
from realtime_omni.models.voice.lm.language import MOST_TOKENS
from realtime_omni.models.voice.parts import Parts
from realtime_omni.models.voice.speaking import sound, take_clauses
from realtime_omni.models.voice.state import (
    BEFORE_SPEECH_MS,
    MOST_HEARD_MS,
    MOST_PENDING,
    MOST_TIMERS,
    MOST_UNTOLD,
    Ears,
    Entry,
    Facts,
    Kept,
    Response,
    Sound,
    Timer,
    Untold,
    VoiceState,
    Word,
)
from realtime_omni.models.voice.work import Workshop
from realtime_omni.session.frame import (
    AddText,
    Cancel,
    Clear,
    Commit,
    Configure,
    Directive,
    RemoveText,
    Respond,
    Say,
    ToolResult,
    Truncate,
)
from realtime_omni.session.signals import (
    ContextUse,
    EndReason,
    IdleTimeout,
    InputTranscript,
    OutputText,
    ResponseEnded,
    ResponseStarted,
    Signal,
    Speaking,
    SpeechStarted,
    SpeechStopped,
    ToolCall,
    TurnCommitted,
    Usage,
)

RATE = 16_000


class Scene:
    """See the module docstring. ``signals`` and ``state`` are the frame's result."""

    def __init__(
        self,
        state: VoiceState,
        start_ms: float,
        spec: DuplexSpec,
        parts: Parts,
        workshop: Workshop,
        now: Callable[[], datetime],
    ) -> None:
        self.state = state
        self.signals: list[Signal] = []
        self._start_ms = start_ms
        self._end_ms = start_ms + spec.frame_ms
        self._spec = spec
        self._parts = parts
        self._workshop = workshop
        self._now = now

    @property
    def _facts(self) -> Facts:
        return self.state.facts

    # ------------------------------------------------------------------ what it is told

    def obey(self, directive: Directive) -> None:
        match directive:
            case Configure():
                self._configure(directive)
            case AddText():
                entry = Entry(directive.id or "", directive.role, directive.text, directive.kind)
                self._set(entries=conversation.add(self._facts.entries, entry, directive.after))
            case RemoveText():
                self._set(entries=conversation.remove(self._facts.entries, directive.id))
            case Commit():
                self._commit(self._start_ms, self._start_ms, respond=False)
            case Clear():
                self._clear()
            case Respond():
                self._queue(self._requested(directive))
            case Say():
                self._queue(Response(directive.id, said=directive.text))
            case Cancel():
                self._cancel(directive)
            case Truncate():
                entries = conversation.cut(self._facts.entries, directive.response, directive.heard_ms)
                self._set(entries=entries)
            case ToolResult():
                self._add(Entry(directive.call_id, "user", directive.output, "result"))

    def _configure(self, directive: Configure) -> None:
        if directive.instructions is not None:
            self._set(instructions=directive.instructions or None)
            self._prepare()
        if directive.tools is not None:
            self._set(tools=tuple(tool.name for tool in directive.tools))
        if directive.tool_choice == "none":
            self._set(tools=())
        if directive.turns is not None:
            self._set(manners=manners_of(directive.turns))

    def _requested(self, request: Respond) -> Response:
        context = None
        if request.context is not None:
            context = tuple(Entry(t.id or "", t.role, t.text, t.kind) for t in request.context)
        tools = None if request.tools is None else tuple(tool.name for tool in request.tools)
        return Response(
            request.id,
            text_only=request.text_only,
            remember=request.remember,
            instructions=request.instructions,
            context=context,
            tools=() if request.tool_choice == "none" else tools,
            limit=min(request.max_tokens or MOST_TOKENS, MOST_TOKENS),
        )

    def _cancel(self, directive: Cancel) -> None:
        response = self._facts.response
        if response is not None and directive.response in (None, response.id):
            heard_ms = response.sounded_ms if directive.heard_ms is None else directive.heard_ms
            self._end(replace(response, words=conversation.heard(response.words, heard_ms)), "cancelled")
        for waiting in self._facts.pending:
            if directive.response in (None, waiting.id):
                self.signals += (ResponseStarted(waiting.id), ResponseEnded(waiting.id, "cancelled"))
                self._set(pending=tuple(r for r in self._facts.pending if r is not waiting))

    # ------------------------------------------------------------------ what it hears

    def listen(self, audio: Sound, hearing: Hearing, probabilities: tuple[float, ...]) -> None:
        """``audio``: the frame's; ``hearing``, ``probabilities``: what the detector made of it."""
        facts, manners = self._facts, self._facts.manners
        detected_ms = self._end_ms - len(hearing.waiting) / RATE * 1000
        if manners.mode == "client":
            ears = replace(facts.ears, voiced=facts.ears.voiced + sum(p >= manners.threshold for p in probabilities))
        else:
            ears = listen(facts.ears, probabilities, detected_ms, manners, f"u{facts.utterances}")
        if ears.utterance is not None and facts.ears.utterance is None:
            self._set(utterances=facts.utterances + 1)
            self.signals.append(SpeechStarted(ears.utterance, ears.began_ms))
        self.state = with_fields(
            self.state, hearing=hearing, heard=(*self.state.heard, (audio * 32767).astype(np.int16))
        )
        self._set(ears=ears)
        self._shorten()
        if manners.mode != "client" and ears.utterance is not None and self._is_over(ears, detected_ms):
            self.signals.append(SpeechStopped(ears.utterance, ears.last_ms))
            self._commit(ears.last_ms, self._end_ms, respond=manners.respond)
        self._understand()
        self._mind_the_time()

    def _is_over(self, ears: Ears, now_ms: float) -> bool:
        manners, silence_ms = self._facts.manners, now_ms - ears.last_ms
        if silence_ms < ASK_MS:
            return False
        turn = self._heard_until(ears, ears.last_ms + ASK_MS)
        words = self._words(turn) if ears.voiced >= MIN_VOICED else ""
        if words and manners.respond:
            self._speculate(words)
        if manners.mode == "energy":
            return silence_ms >= manners.silence_ms
        finished = self._workshop.look(("finished", turn.tobytes()), lambda: self._parts.finished(_loud(turn)), 1.0)
        return silence_ms >= silence_limit_ms(finished, words, manners)

    def _speculate(self, words: str) -> None:
        """Begin the answer before it is sure that the turn is over; the same question is asked when it is."""
        language, entries = self._parts.language, (*self._facts.entries, Entry("", "user", words))
        busy = self._facts.response is not None or self._facts.untold
        if language is None or busy or decide(Response(""), entries, self._facts, self._now()) is not None:
            return
        prompt = language.prompt(*conversation.reading(self._facts.instructions, entries))
        if prompt != self._facts.guess:
            self._drop_guess()
            self._set(guess=prompt)
        language.draft(prompt)

    def _drop_guess(self) -> None:
        """The user went on, or something else is answered."""
        if self._facts.guess is not None and self._parts.language is not None:
            self._parts.language.drop(self._facts.guess)
        self._set(guess=None)

    def _words(self, turn: Kept) -> str | None:
        return self._workshop.look(("words", turn.tobytes()), lambda: self._parts.recognize(_loud(turn)), "")

    def _heard_until(self, ears: Ears, until_ms: float) -> Kept:
        samples = int((until_ms - ears.heard_from_ms) / 1000 * RATE)
        return np.concatenate((*self.state.heard, np.zeros(0, np.int16)))[:samples]

    def _shorten(self) -> None:
        """Before speech only a little is kept, during it at most half a minute."""
        ears, heard = self._facts.ears, self.state.heard
        waits = ears.utterance is None and self._facts.manners.mode != "client"
        most_ms = BEFORE_SPEECH_MS if waits else MOST_HEARD_MS
        drop = max(0, len(heard) - int(most_ms / self._spec.frame_ms))
        if drop:
            self.state = with_fields(self.state, heard=heard[drop:])
            voiced = 0 if waits and not ears.run else ears.voiced
            self._set(ears=replace(ears, heard_from_ms=ears.heard_from_ms + drop * self._spec.frame_ms, voiced=voiced))

    def _commit(self, end_ms: float, next_ms: float, *, respond: bool) -> None:
        """The user's turn ends; its sound waits to be understood. What is heard from ``next_ms`` on is the next one's."""
        ears = self._facts.ears
        name = ears.utterance
        if name is None:
            name = f"u{self._facts.utterances}"
            self._set(utterances=self._facts.utterances + 1)
        start_ms = ears.heard_from_ms if ears.utterance is None else ears.began_ms
        self.signals.append(TurnCommitted(name, min(start_ms, end_ms), end_ms))
        turn = self._heard_until(ears, end_ms + (ASK_MS if ears.utterance is not None else 0.0))
        untold = Untold(name, min(start_ms, end_ms), end_ms, ears.voiced, respond)
        self.state = with_fields(self.state, turns=(*self.state.turns, turn), heard=())
        untold_now = (*self._facts.untold, untold)
        self._set(untold=untold_now, quiet_from_ms=self._end_ms, ears=Ears(heard_from_ms=next_ms))

    def _clear(self) -> None:
        """An utterance that is under way goes on, without what was heard of it."""
        ears = self._facts.ears
        self.state = with_fields(self.state, heard=())
        self._set(ears=replace(ears, heard_from_ms=self._start_ms, began_ms=self._start_ms, voiced=0))

    def _understand(self) -> None:
        """Turns whose words are known now, in order."""
        while self._facts.untold:
            untold, turn = self._facts.untold[0], self.state.turns[0]
            late = len(self._facts.untold) > MOST_UNTOLD
            words = self._words(turn) if untold.voiced >= MIN_VOICED and not late else ""
            if words is None:
                return
            if not any(c.isalnum() for c in words):
                words = ""
            self.state = with_fields(self.state, turns=self.state.turns[1:])
            self._set(untold=self._facts.untold[1:])
            self.signals.append(InputTranscript(untold.utterance, words, untold.start_ms, untold.end_ms, True, True))
            if words:
                self._add(Entry(untold.utterance, "user", words))
                if untold.respond:
                    self._queue(Response(self._name_response(), limit=MOST_TOKENS))

    def _mind_the_time(self) -> None:
        """Timers and the silent user; neither interrupts anybody."""
        facts = self._facts
        if facts.ears.utterance is not None or facts.response is not None or facts.pending or facts.untold:
            self._set(quiet_from_ms=self._end_ms)
            return
        due = next((t for t in facts.timers if t.due_ms <= self._end_ms), None)
        if due is not None:
            self._set(timers=tuple(t for t in facts.timers if t is not due))
            self._queue(Response(self._name_response(), said=due.alarm))
        elif facts.manners.idle_ms is not None and self._end_ms - facts.quiet_from_ms >= facts.manners.idle_ms:
            self.signals.append(IdleTimeout(facts.quiet_from_ms, self._end_ms))
            self._queue(Response(self._name_response(), said="Are you still there?"))

    # ------------------------------------------------------------------ what it says

    def speak(self) -> Sound | None:
        """This frame's sound; None: silence."""
        if self._facts.response is None and self._facts.pending:
            first, *rest = self._facts.pending
            self._set(response=first, pending=tuple(rest))
            self.signals.append(ResponseStarted(first.id))
            if not self._undecided(first):
                self._hold_place(first)
        if self._facts.response is not None and self._undecided(self._facts.response):
            self._decide()
        response = self._facts.response
        return None if response is None or self._undecided(response) else self._go_on(response)

    @staticmethod
    def _undecided(response: Response) -> bool:
        return response.said is None and response.prompt is None

    def _hold_place(self, response: Response) -> None:
        """In the conversation: what is said while it sounds comes after it."""
        if response.remember:
            self._add(Entry(response.id, "assistant", ""))

    def _decide(self) -> None:
        """What a response says, once everything that was said before is known."""
        response = self._facts.response
        assert response is not None
        if not self._undecided(response) or (self._facts.untold and response.context is None):
            return
        entries = self._facts.entries if response.context is None else response.context
        decision = decide(response, entries, self._facts, self._now())
        if decision is None:
            decision = self._ask(response, entries)
        if decision.prompt != self._facts.guess:
            self._drop_guess()
        self._hold_place(response)
        self._set(guess=None, response=replace(response, said=decision.said, prompt=decision.prompt))
        if decision.timer is not None and len(self._facts.timers) < MOST_TIMERS:
            timer = Timer(self._end_ms + decision.timer.seconds * 1000, decision.timer.alarm)
            self._set(timers=(*self._facts.timers, timer))
        if decision.drop_timers:
            self._set(timers=())
        if decision.call is not None:
            call_id = f"call-{self._facts.calls}"
            self._set(calls=self._facts.calls + 1)
            self.signals.append(ToolCall(response.id, call_id, decision.call.name, decision.call.arguments))

    def _ask(self, response: Response, entries: conversation.Entries) -> Decision:
        language = self._parts.language
        if language is None:
            asked = conversation.asked(entries)
            return Decision(said="I have no language model." if asked is None else f"You said: {asked.text}")
        instructions = self._facts.instructions if response.instructions is None else response.instructions
        prompt = language.prompt(*conversation.reading(instructions, entries))
        used = round(len(prompt) / language.context, 2)
        if used != self._facts.context_used:
            self._set(context_used=min(1.0, used))
            self.signals.append(ContextUse(min(1.0, used)))
        return Decision(prompt=prompt)

    def _go_on(self, response: Response) -> Sound | None:
        text, done, failed = response.said or "", True, False
        if response.prompt is not None and self._parts.language is not None:
            draft = self._parts.language.draft(response.prompt, response.limit)
            text, done, failed = draft.text, draft.done, draft.failed
            response = replace(response, tokens=draft.tokens)
        if response.text_only or self._parts.say is None:
            self._write(response, text, done=done, failed=failed)
            return None
        response = take_clauses(response, text, done=done)
        response, audio, told = sound(response, self._spec.output_samples, self._workshop, self._parts.say)
        self._set(response=response)
        if audio is not None:
            self.signals.append(Speaking(response.id))
        for word in told:
            start_ms = self._start_ms + word.start_ms
            self.signals.append(OutputText(response.id, word.text, start_ms, self._start_ms + word.end_ms))
        if done and not response.clauses and not text[response.cut :].strip():
            self._end(response, "failed" if failed else "completed")
        return audio

    def _write(self, response: Response, text: str, *, done: bool, failed: bool) -> None:
        """Text without sound, as it grows."""
        if fragment := text[response.cut :]:
            self.signals.append(OutputText(response.id, fragment, self._start_ms, self._start_ms))
            response = replace(response, cut=len(text), words=(*response.words, Word(fragment, 0.0)))
        self._set(response=response)
        if done:
            self._end(response, "failed" if failed else "completed")

    def _end(self, response: Response, reason: EndReason) -> None:
        said = conversation.joined(response.words)
        if response.prompt is not None and self._parts.language is not None and reason == "cancelled":
            self._parts.language.drop(response.prompt)
        frames = round(response.sounded_ms / self._spec.frame_ms)
        usage = Usage(input_text=len(response.prompt or ()), output_text=response.tokens, output_audio=frames)
        self.signals.append(ResponseEnded(response.id, reason, usage))
        self._set(response=None, quiet_from_ms=self._end_ms)
        if response.remember:
            words = response.words if response.sounded_ms else ()
            self._set(entries=conversation.settle(self._facts.entries, response.id, said, words))
            self._prepare()

    def _prepare(self) -> None:
        """Let the language model read what the next question will begin with."""
        if self._parts.language is not None:
            self._parts.language.prepare(*conversation.reading(self._facts.instructions, self._facts.entries))

    # ------------------------------------------------------------------ inside

    def _set(self, **fields: object) -> None:
        self.state = with_fields(self.state, facts=replace(self.state.facts, **fields))

    def _add(self, entry: Entry) -> None:
        self._set(entries=conversation.add(self._facts.entries, entry))

    def _queue(self, response: Response) -> None:
        if len(self._facts.pending) < MOST_PENDING:
            self._set(pending=(*self._facts.pending, response))
        else:
            self.signals += (ResponseStarted(response.id), ResponseEnded(response.id, "failed"))

    def _name_response(self) -> str:
        self._set(responses=self._facts.responses + 1)
        return f"r{self._facts.responses}"


def _loud(kept: Kept) -> Sound:
    return kept.astype(np.float32) / np.float32(32768)
