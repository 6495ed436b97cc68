"""`RealtimeServerSide`: the server's end of one Realtime connection, sans I/O.

Owns: the session object, the conversation, which response runs, the order of every event.  Must not know: sockets, clocks,
models, resampling, voice activity; positions in audio come with facts.
Invariants: ``session.created`` is first; every event has its own ``event_id``; a response has exactly one
``response.done`` and no event after it; what cancels a response gives back its terminal events in the same call, so
they are out before the next input is read; `receive` never raises for what a peer sent, and a refused event has
changed nothing.

A shell does, in two loops::

    for output in side.receive(text):  # and: in side.apply(fact)
        match output:
            case Send(event): await ws.send(encode(event))
            case Close(code, reason): await ws.close(code, reason)
            case command: ...  # carry it out; what comes of it are facts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, assert_never

import msgspec
from msgspec import UNSET, Struct

from ..errors import LocalError
from . import commands as c
from . import server_events as e
from .client_events import (
    AnyClientEvent,
    AudioAppend,
    AudioClear,
    AudioCommit,
    BargeIn,
    Heartbeat,
    ItemCreate,
    ItemDelete,
    ItemRetrieve,
    ItemTruncate,
    OutputClear,
    PlaybackAck,
    ResponseCancel,
    ResponseCreate,
    ResponseRequest,
    SessionClose,
    SessionUpdate,
    decode_audio,
    event_id_of,
    parse_client,
    parse_object,
)
from .codes import RealtimeClose, RealtimeCode, RealtimeError
from .conversation import Conversation
from .input_buffer import InputBuffer
from .items import (
    DurationUsage,
    FunctionCallOutputItem,
    InputAudio,
    Item,
    ItemReference,
    MessageItem,
    OutputAudio,
    check_item,
    kept_item,
)
from .responses import Responses
from .session import (
    JsonObject,
    Profile,
    ResponseConfig,
    ResponseOverrides,
    SessionConfig,
    initial,
    response_config,
    shown_session,
    updated,
)

MAX_CONTEXT_ITEMS = 1_000


class RealtimeStatistics(Struct, frozen=True, kw_only=True):
    received: int
    sent: int
    errors: int
    responses: int
    cancelled: int
    stale: int
    """Facts about what had ended already."""
    items: int
    active: int


class RealtimeServerSide:
    """One session. ``mint(prefix)`` makes an id that was never used; ``session`` is a patch that is known to be good;
    ``duplex``: the client has opted in to the duplex dialect."""

    def __init__(
        self,
        profile: Profile,
        mint: Callable[[str], str],
        session: Mapping[str, Any] = MappingProxyType({}),
        *,
        duplex: bool = False,
    ) -> None:
        self._duplex = duplex
        self.profile = profile
        self.config: SessionConfig = updated(initial(profile), session, profile, voice_fixed=False)
        self._mint = mint
        self._out: list[c.Output] = []
        self._conversation = Conversation()
        self._conversation_id = mint("conv")
        self._responses = Responses(self._conversation, self._conversation_id, mint)
        self._owed = False
        """A turn ended while a response was under way: answer it afterwards."""
        self._input = InputBuffer(mint)
        self._early: c.UserTranscribed | None = None
        self._opened = self._closed = False
        self._received = self._sent = self._errors = self._stale = 0

    @property
    def user_item(self) -> str | None:
        """The id announced for what the user is saying now."""
        return self._input.item_id

    @property
    def response(self) -> str | None:
        """The response that writes the conversation, while it is under way."""
        return self._responses.writer

    def open(self) -> list[c.Output]:
        """What a new connection gets before it has said anything."""
        if self._opened:
            raise LocalError("the connection is open already")
        self._opened = True
        self._send(e.SessionCreated(session=shown_session(self.config, self.profile)))
        self._send(e.ConversationCreated(conversation=e.Conversation(id=self._conversation_id)))
        self._out.append(c.Configure(self.config))
        return self._take()

    def receive(self, text: str) -> list[c.Output]:
        """One text frame of the client."""
        if self._closed:
            return []
        self._received += 1
        event_id = None
        try:
            value = parse_object(text)
            event_id = event_id_of(value)
            self._handle(parse_client(value, duplex=self._duplex))
        except RealtimeError as error:
            self._refuse(error, event_id)
        return self._take()

    def receive_binary(self) -> list[c.Output]:
        """A binary frame: this protocol has none."""
        if not self._closed:
            self._received += 1
            self._refuse(RealtimeError(RealtimeCode.INVALID_JSON, "an event is a text frame with a JSON object"), None)
        return self._take()

    def apply(self, fact: c.Fact) -> list[c.Output]:
        """What happened in the session. A fact about something that has ended is dropped and counted."""
        if not self._closed:
            self._apply(fact)
        return self._take()

    def report(self, error: RealtimeError) -> list[c.Output]:
        """A command could not be carried out: the client is told."""
        if not self._closed:
            self._refuse(error, None)
        return self._take()

    def resumable(self, token: str, grace_s: float) -> list[c.Output]:
        """In the duplex dialect: with what a client whose connection is lost may come back."""
        self._send(e.SessionResumable(resume_token=token, grace_s=grace_s))
        return self._take()

    def end(self, error: RealtimeError, close: RealtimeClose) -> list[c.Output]:
        """The server ends the connection: terminal events of what runs, the error, the close."""
        if self._closed:
            return []
        self._out += self._responses.fail_all(error)
        self._refuse(error, None)
        self._out.append(c.Close(close, error.code.value))
        self._closed = True
        return self._take()

    def statistics(self) -> RealtimeStatistics:
        return RealtimeStatistics(
            received=self._received,
            sent=self._sent,
            errors=self._errors,
            responses=self._responses.started,
            cancelled=self._responses.cancelled,
            stale=self._stale,
            items=len(self._conversation),
            active=len(self._responses),
        )

    # ---- client events

    def _handle(self, event: AnyClientEvent) -> None:
        match event:
            case AudioAppend(audio=audio):
                self._append(audio)
            case SessionUpdate(session=patch):
                self._update(patch)
            case AudioCommit():
                self._commit_by_client()
            case AudioClear():
                self._input.clear()
                self._early = None
                self._out.append(c.ClearInput())
                self._send(e.Cleared())
            case ItemCreate():
                self._create_item(event)
            case ItemRetrieve(item_id=item_id):
                self._expect(item_id, RealtimeCode.RETRIEVE_INVALID_ITEM)
                self._send(e.ItemRetrieved(item=self._conversation.get(item_id)))
            case ItemDelete(item_id=item_id):
                self._expect(item_id, RealtimeCode.DELETE_INVALID_ITEM)
                self._remove(item_id)
            case ItemTruncate():
                self._truncate(event)
            case ResponseCreate(response=request):
                self._create_response(request or ResponseRequest())
            case ResponseCancel(response_id=response_id):
                self._cancel_by_client(response_id)
            case OutputClear():
                self._out.append(c.ClearOutput())
                if self._responses.last_id is not None:
                    self._send(e.OutputCleared(response_id=self._responses.last_id))
            case Heartbeat():
                self._send(e.HeartbeatAck())
            case SessionClose():
                self._close()
            case PlaybackAck():
                self._played(event)
            case BargeIn():
                self._owed = False
                self._out += self._responses.cancel(None, "turn_detected") or []
            case _:
                assert_never(event)

    def _update(self, patch: JsonObject) -> None:
        new = updated(self.config, patch, self.profile, voice_fixed=self._responses.spoke)
        if new.audio.input.format != self.config.audio.input.format:
            self._input.forget_rest()
        if new.audio.input.turn_detection is None:
            self._input.speaking = False
        self.config = new
        self._out.append(c.Configure(new))
        self._send(e.SessionUpdated(session=shown_session(new, self.profile)))

    def _append(self, text: str) -> None:
        audio_format = self.config.audio.input.format
        audio = self._input.append(decode_audio(text), audio_format)
        if audio:
            self._out.append(c.AppendAudio(audio, audio_format))

    def _commit_by_client(self) -> None:
        if self._input.empty:
            text = "there is no audio in the input buffer to commit"
            raise RealtimeError(RealtimeCode.COMMIT_EMPTY, text)
        self._commit(by_client=True)

    def _create_item(self, event: ItemCreate) -> None:
        item = event.item
        check_item(item)
        if isinstance(item, FunctionCallOutputItem):
            self._conversation.check_output(item)
        previous = event.previous_item_id or None
        self._conversation.check_place(item.id, previous, self._input.item_id)
        kept = kept_item(item, self._mint)
        assert kept.id is not None
        self._conversation.add(kept, previous)
        self._out.append(c.AddItem(kept, self._conversation.previous(kept.id), self._conversation.last_id == kept.id))
        self._announce(kept)

    def _truncate(self, event: ItemTruncate) -> None:
        item_id = event.item_id
        self._expect(item_id, RealtimeCode.TRUNCATE_INVALID_ITEM)
        item, spoken = self._conversation.get(item_id), self._conversation.spoken(item_id)
        if not isinstance(item, MessageItem) or item.role != "assistant":
            text = "only what the assistant said can be truncated"
            raise RealtimeError(RealtimeCode.INVALID_VALUE, text, "item_id")
        if event.content_index != 0:
            raise RealtimeError(RealtimeCode.INVALID_VALUE, "speech is at content_index 0", "content_index")
        heard = 0
        if spoken is not None and isinstance(item.content[0], OutputAudio):
            heard = int(spoken.cut(event.audio_end_ms))
            self._out.append(c.TruncateItem(item_id, spoken.response_id, heard, spoken.heard()))
        self._send(e.ItemTruncated(item_id=item_id, audio_end_ms=heard))

    def _create_response(self, request: ResponseRequest) -> None:
        out_of_band = request.conversation == "none"
        self._responses.check_room(out_of_band=out_of_band)
        context = None if request.input is None else self._own_context(request.input)
        self._start(self._config_of(request), context, out_of_band=out_of_band)

    def _own_context(self, given: tuple[Item | ItemReference, ...]) -> tuple[Item, ...]:
        if len(given) > MAX_CONTEXT_ITEMS:
            text = f"at most {MAX_CONTEXT_ITEMS} items"
            raise RealtimeError(RealtimeCode.INVALID_VALUE, text, "response.input")
        context = []
        for index, item in enumerate(given):
            where = f"response.input[{index}]"
            if not isinstance(item, ItemReference):
                check_item(item, where)
                context.append(kept_item(item, self._mint))
            elif item.id in self._conversation:
                context.append(self._conversation.get(item.id))
            else:
                raise RealtimeError(RealtimeCode.INVALID_VALUE, "there is no item with this id", f"{where}.id")
        return tuple(context)

    def _cancel_by_client(self, response_id: str | None) -> None:
        cancelled = self._responses.cancel(response_id, "client_cancelled")
        if cancelled is None:
            # One client knows a harmless race by these first words.
            raise RealtimeError(RealtimeCode.CANCEL_NOT_ACTIVE, "Cancellation failed: no active response found")
        self._owed = self._owed and self._responses.writer is not None
        self._out += cancelled

    def _close(self) -> None:
        """The client has said that it goes."""
        text = "the client has closed the session"
        self._out += self._responses.fail_all(RealtimeError(RealtimeCode.CLOSED, text))
        self._send(e.SessionClosed(reason="client"))
        self._out.append(c.Close(RealtimeClose.NORMAL, "client"))
        self._closed = True

    def _played(self, event: PlaybackAck) -> None:
        self._expect(event.item_id, RealtimeCode.INVALID_VALUE)
        spoken = self._conversation.spoken(event.item_id)
        played = 0 if spoken is None else int(min(max(0, event.played_ms), spoken.audio_ms))
        if spoken is not None:
            self._out.append(c.Played(spoken.response_id, played))
        self._send(e.PlaybackAcknowledged(item_id=event.item_id, played_ms=played))

    # ---- facts

    def _apply(self, fact: c.Fact) -> None:
        match fact:
            case c.UserStarted(audio_start_ms):
                self._user_started(audio_start_ms)
            case c.UserStopped(audio_end_ms):
                self._user_stopped(audio_end_ms)
            case c.IdleTimeout(audio_start_ms, audio_end_ms):
                item_id = self._input.start()
                self._input.speaking = False
                self._send(
                    e.TimeoutTriggered(audio_start_ms=audio_start_ms, audio_end_ms=audio_end_ms, item_id=item_id)
                )
                self._commit(by_client=False)
                self._answer()
            case c.UserTranscript() | c.UserTranscribed() | c.UserTranscriptFailed():
                self._transcript(fact)
            case c.InputTrouble(kind, at_ms, measured_hz):
                if self._duplex:
                    self._send(e.InputReport(kind=kind, at_ms=round(at_ms), measured_hz=measured_hz))
            case c.ContextUsed(ratio):
                if self._duplex:
                    self._send(e.ContextUsage(usage_ratio=ratio))
            case c.ResponseOpened(response_id):
                self._out += self._responses.begin(response_id, self._config_of(ResponseOverrides()))
            case (
                c.ResponseSpeech()
                | c.ResponseText()
                | c.ToolCall()
                | c.ResponseCompleted()
                | c.ResponseStopped()
                | c.ResponseFailed()
            ):
                carried = self._responses.carry(fact)
                self._stale += carried is None
                self._out += carried or []
                self._settle()
            case _:
                assert_never(fact)

    def _user_started(self, audio_start_ms: int) -> None:
        detection = self.config.audio.input.turn_detection
        if detection is None or self._input.speaking:
            self._stale += 1
            return
        self._send(e.SpeechStarted(audio_start_ms=audio_start_ms, item_id=self._input.start()))
        if detection.interrupt_response and not self.profile.model_yields:
            self._owed = False
            self._out += self._responses.cancel(None, "turn_detected") or []

    def _user_stopped(self, audio_end_ms: int) -> None:
        detection, item_id = self.config.audio.input.turn_detection, self._input.item_id
        if detection is None or item_id is None or not self._input.speaking:
            self._stale += 1
            return
        self._input.speaking = False
        self._send(e.SpeechStopped(audio_end_ms=audio_end_ms, item_id=item_id))
        self._commit(by_client=False)
        if detection.create_response:
            self._answer()

    def _transcript(self, fact: c.UserTranscript | c.UserTranscribed | c.UserTranscriptFailed) -> None:
        told = self.config.audio.input.transcription is not None
        if fact.item_id == self._input.item_id and isinstance(fact, c.UserTranscribed):
            self._early = fact  # told when the item is there
            return
        if fact.item_id not in self._conversation and fact.item_id != self._input.item_id:
            self._stale += 1
            return
        match fact:
            case c.UserTranscript(item_id, delta, start_ms, end_ms):
                start = UNSET if start_ms is None else start_ms
                end = UNSET if end_ms is None else end_ms
                event: e.ServerEvent = e.TranscriptionDelta(item_id=item_id, delta=delta, start_ms=start, end_ms=end)
            case c.UserTranscribed(item_id, transcript, seconds):
                self._conversation.transcribe(item_id, transcript)
                usage = DurationUsage(seconds)
                event = e.TranscriptionCompleted(item_id=item_id, transcript=transcript, usage=usage)
            case c.UserTranscriptFailed(item_id, message):
                error = RealtimeError(RealtimeCode.MODEL_FAILED, message)
                event = e.TranscriptionFailed(item_id=item_id, error=e.ErrorBody.of(error))
        if told:
            self._send(event)

    # ---- inside

    def _expect(self, item_id: str, code: RealtimeCode) -> None:
        if item_id not in self._conversation:
            raise RealtimeError(code, "there is no item with this id", "item_id")

    def _commit(self, *, by_client: bool) -> None:
        item_id = self._input.commit()
        previous = self._conversation.last_id
        item = MessageItem(role="user", id=item_id, content=(InputAudio(),))
        self._conversation.add(item)
        self._out.append(c.CommitInput(item_id, by_client))
        self._send(e.Committed(item_id=item_id, previous_item_id=previous))
        self._announce(item)
        if self._early is not None:
            early, self._early = self._early, None
            self._transcript(early)

    def _announce(self, item: Item) -> None:
        """A whole item is in the conversation."""
        assert item.id is not None
        previous = self._conversation.previous(item.id)
        self._send(e.ItemAdded(item=item, previous_item_id=previous), e.ItemDone(item=item, previous_item_id=previous))
        for dropped in self._conversation.overflow(item.id):
            self._out.append(c.RemoveItem(dropped))
            self._send(e.ItemDeleted(item_id=dropped))

    def _remove(self, item_id: str) -> None:
        self._conversation.remove(item_id)
        self._out.append(c.RemoveItem(item_id))
        self._send(e.ItemDeleted(item_id=item_id))

    def _answer(self) -> None:
        """A turn has ended that wants an answer: now, or after the response under way."""
        if self.profile.model_decides:
            return
        if self._responses.writer is not None:
            self._owed = True
            return
        self._start(self._config_of(ResponseOverrides()), None, out_of_band=False)

    def _config_of(self, own: ResponseOverrides) -> ResponseConfig:
        return response_config(self.config, own, self.profile)

    def _start(self, config: ResponseConfig, context: tuple[Item, ...] | None, *, out_of_band: bool) -> None:
        response_id = self._mint("resp")
        self._out += self._responses.begin(response_id, config, out_of_band=out_of_band)
        own = context is not None
        items = self._conversation.items() if context is None else context
        self._out.append(c.StartResponse(response_id, config, items, own, out_of_band))

    def _settle(self) -> None:
        """Answer the turn that waited for a response to end."""
        if self._owed and self._responses.writer is None:
            self._owed = False
            self._answer()

    def _refuse(self, error: RealtimeError, event_id: str | None) -> None:
        self._errors += 1
        self._send(e.ErrorEvent(error=e.ErrorBody.of(error, event_id)))

    def _send(self, *events: e.ServerEvent) -> None:
        self._out.extend(c.Send(event) for event in events)

    def _take(self) -> list[c.Output]:
        """What goes out now; an event gets its id at this door, so that none leaves without one or with another's."""
        out, self._out = [self._stamped(output) for output in self._out], []
        return out

    def _stamped(self, output: c.Output) -> c.Output:
        if not isinstance(output, c.Send):
            return output
        self._sent += 1
        number = self._sent if self._duplex else UNSET
        stamped = msgspec.structs.replace(output.event, event_id=self._mint("event"), server_event_seq=number)
        return c.Send(stamped)
