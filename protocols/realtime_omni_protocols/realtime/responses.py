"""`Responses`: the responses of a connection, of which at most one writes the conversation.

Owns: which run, how a fact continues or ends one, cancelling.  Must not know: turns, the session object, sockets.
Invariant: every response that began is finished exactly once; facts about a finished one give nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_never

from ..errors import LocalError
from . import commands as c
from . import server_events as e
from .codes import RealtimeCode, RealtimeError, error_type
from .conversation import Conversation
from .items import Usage
from .response import ResponseStream, Status
from .session import ResponseConfig

MAX_RESPONSES = 8
"""Responses at a time: one that writes the conversation, the others out of band."""


class Responses:
    def __init__(self, conversation: Conversation, conversation_id: str, mint: Callable[[str], str]) -> None:
        self._conversation = conversation
        self._conversation_id = conversation_id
        self._mint = mint
        self._running: dict[str, ResponseStream] = {}
        self._writer: ResponseStream | None = None
        self.last_id: str | None = None
        self.spoke = False
        """Whether audio of any response went out."""
        self.started = self.cancelled = 0

    def __len__(self) -> int:
        return len(self._running)

    @property
    def writer(self) -> str | None:
        """The response that writes the conversation."""
        return None if self._writer is None else self._writer.id

    def check_room(self, *, out_of_band: bool) -> None:
        """Whether a client may start one.

        Raises:
            RealtimeError: ``conversation_already_has_active_response``, ``too_many_responses``.
        """
        if not out_of_band and self._writer is not None:
            text = f"response {self._writer.id} is under way; wait for its response.done, or cancel it"
            raise RealtimeError(RealtimeCode.ACTIVE_RESPONSE, text)
        if len(self._running) >= MAX_RESPONSES:
            raise RealtimeError(RealtimeCode.TOO_MANY_RESPONSES, f"at most {MAX_RESPONSES} responses run at a time")

    def begin(self, response_id: str, config: ResponseConfig, *, out_of_band: bool = False) -> list[c.Output]:
        if not out_of_band and self._writer is not None:
            raise LocalError(f"response {self._writer.id} is under way")
        stream = ResponseStream(
            response_id,
            config,
            conversation=None if out_of_band else self._conversation,
            conversation_id=None if out_of_band else self._conversation_id,
            mint=self._mint,
        )
        self._running[response_id] = stream
        self.last_id = response_id
        self.started += 1
        if not out_of_band:
            self._writer = stream
        return [c.Send(stream.created())]

    def cancel(
        self, response_id: str | None, reason: Literal["turn_detected", "client_cancelled"]
    ) -> list[c.Output] | None:
        """The end of that response (None: of the one that writes the conversation), or None where it does not run."""
        stream = self._writer if response_id is None else self._running.get(response_id)
        if stream is None:
            return None
        self.cancelled += 1
        out = self._finish(stream, "cancelled", e.StatusDetails(type="cancelled", reason=reason), Usage())
        return [*out, c.CancelResponse(stream.id)]

    def fail_all(self, error: RealtimeError) -> list[c.Output]:
        """The connection ends: so does every response."""
        out: list[c.Output] = []
        details = e.StatusDetails(type="failed", error=_status_error(error.code, error.message))
        for stream in tuple(self._running.values()):
            out += [*self._finish(stream, "failed", details, Usage()), c.CancelResponse(stream.id)]
        return out

    def carry(self, fact: c.ResponseFact) -> list[c.Output] | None:
        """What a fact means on the wire; None where its response does not run (any more)."""
        stream = self._running.get(fact.response_id)
        if stream is None:
            return None
        match fact:
            case c.ResponseSpeech(_, audio, start_ms, end_ms):
                events = stream.speech(audio, start_ms, end_ms)
                self.spoke = self.spoke or stream.spoke
            case c.ResponseText(_, text, start_ms, end_ms):
                if not stream.fits(text):
                    return self._overflow(stream)
                events = stream.text(text, start_ms, end_ms)
            case c.ToolCall(_, name, arguments, call_id):
                if not stream.fits(name + arguments):
                    return self._overflow(stream)
                events = stream.tool_call(name, arguments, call_id)
            case c.ResponseCompleted(_, usage):
                return self._finish(stream, "completed", e.StatusDetails(type="completed"), usage)
            case c.ResponseStopped(_, reason, usage):
                status: Status = "cancelled" if reason in ("turn_detected", "client_cancelled") else "incomplete"
                return self._finish(stream, status, e.StatusDetails(type=status, reason=reason), usage)
            case c.ResponseFailed(_, message, code, usage):
                details = e.StatusDetails(type="failed", error=_status_error(code, message))
                return self._finish(stream, "failed", details, usage)
            case _:
                assert_never(fact)
        return [c.Send(event) for event in events]

    def _overflow(self, stream: ResponseStream) -> list[c.Output]:
        """It has more text than a frame may carry: it ends here."""
        details = e.StatusDetails(type="incomplete", reason="max_output_tokens")
        return [*self._finish(stream, "incomplete", details, Usage()), c.CancelResponse(stream.id)]

    def _finish(self, stream: ResponseStream, status: Status, details: e.StatusDetails, usage: Usage) -> list[c.Output]:
        del self._running[stream.id]
        if stream is self._writer:
            self._writer = None
        return [c.Send(event) for event in stream.finish(status, details, usage)]


def _status_error(code: RealtimeCode, message: str) -> e.StatusError:
    return e.StatusError(type=error_type(code), code=code.value, message=message[:1000])
