"""Whatever a client sends and whatever happens in a session, in any order: the grammar holds.

Faults that were put into the machine on purpose, and that this test found, each alone:
- the terminal events of a cancelled response left out, or sent twice;
- ``conversation.item.done`` with the status ``in_progress``; a message left open when its response fails;
- a delta after ``response.done`` (a fact about an ended response carried on);
- a second response that writes the conversation (a turn that ends while a response runs);
- another id committed than the one announced; an announced id that a client takes for its own item;
- ``output_index`` not counted up; ``event_id`` left empty;
- an item added before ``previous_item_id`` instead of after it; ``done`` sent for an item deleted meanwhile.

Not found by it, so test_server_side.py has a test for each: an owed answer that survives a cancel; audio deltas that
are not split.
"""

from __future__ import annotations

import base64
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocols.realtime.driver import Driver, pcm
from realtime_omni_protocols.realtime import (
    IdleTimeout,
    RealtimeClose,
    RealtimeCode,
    RealtimeError,
    ResponseCompleted,
    ResponseFailed,
    ResponseOpened,
    ResponseSpeech,
    ResponseStopped,
    ResponseText,
    ToolCall,
    Usage,
    UserStarted,
    UserStopped,
    UserTranscribed,
    UserTranscript,
    UserTranscriptFailed,
)

TEXT = st.text(max_size=20)
MS = st.integers(-10, 5_000)
MAYBE = st.none() | st.booleans()
DETECTION = st.sampled_from(
    [
        None,
        False,
        {"type": "semantic_vad"},
        {"type": "server_vad", "interrupt_response": False},
        {"type": "server_vad", "create_response": False},
        {"type": "server_vad"},
        {"threshold": 0.8},
    ]
)
CODE = st.sampled_from(["max_output_tokens", "content_filter", "turn_detected", "client_cancelled"])


class Session(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.responses: list[str] = []
        self.calls: list[str] = []
        self.opened = 0

    def ids(self, data: st.DataObject, known: list[str]) -> str:
        return data.draw(st.sampled_from([*known[-4:], "nobody"]))

    def note(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["type"] == "response.created":
                self.responses.append(event["response"]["id"])
            if event["type"] == "response.function_call_arguments.done":
                self.calls.append(event["call_id"])

    # ---- the client

    @rule(detection=DETECTION, transcription=MAYBE, text=MAYBE)
    def update(self, detection: Any, transcription: bool | None, text: bool | None) -> None:
        audio = {"input": {"turn_detection": detection, "transcription": {"model": "m"} if transcription else None}}
        modalities = [["text"], ["audio"]][bool(text)]
        self.driver.update(audio=audio, output_modalities=modalities)

    @rule(ms=st.integers(0, 50), cut=st.booleans())
    def append(self, ms: int, cut: bool) -> None:
        audio = base64.b64encode(pcm(ms) + b"\0" * cut).decode()
        self.driver.send("input_audio_buffer.append", audio=audio)

    @rule(kind=st.sampled_from(["commit", "clear"]))
    def buffer(self, kind: str) -> None:
        self.driver.send(f"input_audio_buffer.{kind}")

    @rule(data=st.data(), role=st.sampled_from(["user", "system", "assistant"]), text=TEXT)
    def create_item(self, data: st.DataObject, role: str, text: str) -> None:
        known = list(self.driver.grammar.order)
        announced = self.driver.grammar.announced
        item_id = data.draw(st.sampled_from([None, *known, announced, "mine"]))
        previous = data.draw(st.sampled_from([None, "root", "nobody", *known]))
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"id": item_id, "type": "message", "role": role, "content": [{"type": kind, "text": text}]}
        asked = known[-1] if previous is None and known else None if previous == "root" else previous
        events = self.driver.send("conversation.item.create", item=item, previous_item_id=previous)
        assert events[0]["type"] == "error" or events[0]["previous_item_id"] == asked

    @rule(data=st.data(), output=TEXT)
    def tool_result(self, data: st.DataObject, output: str) -> None:
        item = {"type": "function_call_output", "call_id": self.ids(data, self.calls), "output": output}
        self.driver.send("conversation.item.create", item=item)

    @rule(data=st.data(), kind=st.sampled_from(["retrieve", "delete"]))
    def item(self, data: st.DataObject, kind: str) -> None:
        self.driver.send(f"conversation.item.{kind}", item_id=self.ids(data, self.driver.grammar.order))

    @rule(data=st.data(), ms=MS)
    def truncate(self, data: st.DataObject, ms: int) -> None:
        item_id = self.ids(data, self.driver.grammar.order)
        self.driver.send("conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=ms)

    @rule(out_of_band=MAYBE, tag=TEXT, text=MAYBE, own=MAYBE)
    def respond(self, out_of_band: bool | None, tag: str, text: bool | None, own: bool | None) -> None:
        response: dict[str, Any] = {"metadata": {"tag": tag}, "conversation": "none" if out_of_band else None}
        if text is not None:
            response["output_modalities"] = ["text"] if text else ["audio"]
        if own:
            response["input"] = []
        self.note(self.driver.send("response.create", response=response))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from([None, *self.responses, "nobody"]))
        self.driver.send("response.cancel", response_id=which)
        if which is None:
            events = self.driver.send("response.create")
            assert events[0]["type"] == "response.created", "create right after cancel never races"
            self.note(events)

    @rule()
    def clear_output(self) -> None:
        self.driver.send("output_audio_buffer.clear")

    @rule(
        value=st.recursive(
            st.none() | st.booleans() | st.integers() | TEXT, lambda v: st.lists(v) | st.dictionaries(TEXT, v)
        )
    )
    def nonsense(self, value: Any) -> None:
        (event,) = self.driver.send("session.update", session=value, event_id="e") or [{"type": "error"}]
        assert event["type"] in ("error", "session.updated")

    # ---- the session

    @rule(ms=st.integers(0, 10**6))
    def user_starts(self, ms: int) -> None:
        self.driver.apply(UserStarted(ms))

    @rule(ms=st.integers(0, 10**6))
    def user_stops(self, ms: int) -> None:
        self.note(self.driver.apply(UserStopped(ms)))

    @rule()
    def idle(self) -> None:
        self.note(self.driver.apply(IdleTimeout(1, 2)))

    @rule(data=st.data(), text=TEXT, which=st.integers(0, 2))
    def transcript(self, data: st.DataObject, text: str, which: int) -> None:
        announced = self.driver.grammar.announced
        item_id = self.ids(data, [*self.driver.grammar.order, *([announced] if announced else [])])
        facts = [
            UserTranscript(item_id, text, 1, 2),
            UserTranscribed(item_id, text, 0.5),
            UserTranscriptFailed(item_id, text),
        ]
        self.driver.apply(facts[which])

    @precondition(lambda self: self.driver.side.response is None)
    @rule()
    def model_speaks(self) -> None:
        self.opened += 1
        self.note(self.driver.apply(ResponseOpened(f"own_{self.opened}")))

    @precondition(lambda self: self.responses)
    @rule(data=st.data(), ms=st.sampled_from([0, 20, 80, 6_000]), start=st.none() | st.floats(0, 1e6))
    def speech(self, data: st.DataObject, ms: int, start: float | None) -> None:
        end = None if start is None else start + ms
        self.driver.apply(ResponseSpeech(self.ids(data, self.responses), pcm(ms), start, end))

    @precondition(lambda self: self.responses)
    @rule(data=st.data(), text=TEXT, start=st.none() | st.floats(0, 1e6))
    def text(self, data: st.DataObject, text: str, start: float | None) -> None:
        self.driver.apply(ResponseText(self.ids(data, self.responses), text, start, start))

    @precondition(lambda self: self.responses)
    @rule(data=st.data(), arguments=TEXT)
    def call(self, data: st.DataObject, arguments: str) -> None:
        self.note(self.driver.apply(ToolCall(self.ids(data, self.responses), "f", arguments)))

    @precondition(lambda self: self.responses)
    @rule(data=st.data(), which=st.integers(0, 2), reason=CODE)
    def ends(self, data: st.DataObject, which: int, reason: Any) -> None:
        response = self.ids(data, self.responses)
        facts = [
            ResponseCompleted(response, Usage.of(text_out=3)),
            ResponseStopped(response, reason),
            ResponseFailed(response, "it broke"),
        ]
        self.note(self.driver.apply(facts[which]))

    @invariant()
    def counts_agree(self) -> None:
        statistics = self.driver.side.statistics()
        assert statistics.responses == self.driver.grammar.done + len(self.driver.grammar.running)
        assert statistics.items == len(self.driver.grammar.order)

    def teardown(self) -> None:
        self.driver.take(self.driver.side.end(RealtimeError(RealtimeCode.SHUTDOWN, "later"), RealtimeClose.SHUTDOWN))
        assert not self.driver.grammar.running, "every response ended"
        assert self.driver.send("response.create") == []


TestSession = Session.TestCase
TestSession.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
