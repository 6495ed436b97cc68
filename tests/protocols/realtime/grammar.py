"""The order of server events, judged from the wire alone: a second, independent statement of realtime.md sections 6 and 7.

`Grammar.see` is shown every event as plain JSON and fails at the first that may not come now. It shares nothing with the
machine, so that a fault in the machine is not also a fault in its judge.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
MAX_FRAME = 256 * 1024
REASONS = {
    "completed": {None},
    "cancelled": {"turn_detected", "client_cancelled"},
    "incomplete": {"max_output_tokens", "content_filter"},
    "failed": {None},
}


@dataclass
class OpenItem:
    kind: str
    index: int
    call_id: str | None = None
    name: str | None = None
    part: bool = False
    part_done: bool = False
    content_done: set[str] = field(default_factory=set)
    audio: int = 0
    text: str = ""


@dataclass
class OpenResponse:
    metadata: Json | None
    conversation: str | None
    modality: str
    outputs: int = 0
    items: dict[str, OpenItem] = field(default_factory=dict)
    finished: list[Json] = field(default_factory=list)


@dataclass
class Grammar:
    event_ids: set[str] = field(default_factory=set)
    running: dict[str, OpenResponse] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    every_item: set[str] = field(default_factory=set)
    expected: list[tuple[str, str]] = field(default_factory=list)
    """Events that have to come next: (type, item id)."""
    announced: str | None = None
    speaking: bool = False
    seen: int = 0
    done: int = 0

    def see(self, event: Json) -> None:
        assert len(json.dumps(event)) < MAX_FRAME
        kind = event["type"]
        assert event["event_id"], "every event has an id"
        assert event["event_id"] not in self.event_ids, "ids are never used twice"
        self.event_ids.add(event["event_id"])
        assert (self.seen == 0) == (kind == "session.created"), "session.created is the first event, once"
        self.seen += 1
        if self.expected:
            item_id = event["item"]["id"] if "item" in event else event.get("item_id")
            assert (kind, item_id) == self.expected.pop(0)
        if kind.startswith("response.") and "response_id" in event:
            assert event["response_id"] in self.running, f"{kind} of a response that does not run"
        handler = getattr(self, "on_" + kind.replace(".", "_"), None)
        if handler is not None:
            handler(event)
        elif kind.startswith("response."):
            self.content(event)

    def at_rest(self) -> None:
        """Between two inputs nothing is half said."""
        assert not self.expected
        for response in self.running.values():
            for item in response.items.values():
                assert item.kind == "message", "a call is whole"
                assert item.part
                assert not item.part_done

    # ---- input

    def on_input_audio_buffer_speech_started(self, event: Json) -> None:
        assert not self.speaking
        self.speaking = True
        if self.announced is not None:
            assert event["item_id"] == self.announced
        self.announced = event["item_id"]

    def on_input_audio_buffer_speech_stopped(self, event: Json) -> None:
        self.speaking = False
        self.expected = [("input_audio_buffer.committed", event["item_id"])]

    def on_input_audio_buffer_timeout_triggered(self, event: Json) -> None:
        self.expected = [("input_audio_buffer.committed", event["item_id"])]
        self.announced = None
        self.speaking = False

    def on_input_audio_buffer_committed(self, event: Json) -> None:
        if self.announced is not None:
            assert event["item_id"] == self.announced, "the announced id is the one that is committed"
        self.announced = None
        self.speaking = False
        assert event["previous_item_id"] == (self.order[-1] if self.order else None)
        self.expected = [("conversation.item.added", event["item_id"]), ("conversation.item.done", event["item_id"])]

    def on_input_audio_buffer_cleared(self, _: Json) -> None:
        self.announced = None
        self.speaking = False

    def on_session_updated(self, event: Json) -> None:
        if event["session"]["audio"]["input"]["turn_detection"] is None:
            self.speaking = False

    # ---- items

    def on_conversation_item_added(self, event: Json) -> None:
        item_id, previous = event["item"]["id"], event["previous_item_id"]
        assert item_id not in self.order
        assert item_id != self.announced, "that id is announced for what the user is saying"
        at = 0 if previous is None else self.order.index(previous) + 1
        self.order.insert(at, item_id)
        self.every_item.add(item_id)

    def on_conversation_item_done(self, event: Json) -> None:
        item_id = event["item"]["id"]
        at = self.order.index(item_id)
        assert event["previous_item_id"] == (self.order[at - 1] if at else None)
        assert event["item"]["status"] in ("completed", "incomplete")
        assert not any("audio" in part for part in event["item"].get("content", ()))

    def on_conversation_item_deleted(self, event: Json) -> None:
        self.order.remove(event["item_id"])

    def on_conversation_item_truncated(self, event: Json) -> None:
        assert event["item_id"] in self.order
        assert event["audio_end_ms"] >= 0

    # ---- responses

    def on_response_created(self, event: Json) -> None:
        response = event["response"]
        assert response["id"] not in self.running.keys() | self.ended
        assert response["status"] == "in_progress"
        assert response["output"] == []
        if response["conversation_id"] is not None:
            assert all(other.conversation is None for other in self.running.values()), "two write the conversation"
        self.running[response["id"]] = OpenResponse(
            response["metadata"], response["conversation_id"], response["output_modalities"][0]
        )

    def on_response_done(self, event: Json) -> None:
        response = event["response"]
        opened = self.running.pop(response["id"])
        self.ended.add(response["id"])
        self.done += 1
        assert not opened.items, "whatever was opened is closed"
        assert response["metadata"] == opened.metadata
        assert response["output"] == opened.finished
        assert response["usage"]["total_tokens"] >= 0
        details = response["status_details"]
        assert details["type"] == response["status"]
        assert details.get("reason") in REASONS[response["status"]]

    def on_response_output_item_added(self, event: Json) -> None:
        response, item = self.running[event["response_id"]], event["item"]
        assert not response.items, "one item at a time"
        assert event["output_index"] == response.outputs
        assert item["status"] == "in_progress"
        response.items[item["id"]] = OpenItem(item["type"], response.outputs, item.get("call_id"), item.get("name"))
        response.outputs += 1
        if item["type"] == "function_call":
            assert item["arguments"] == ""
        if response.conversation is not None:
            self.expected = [("conversation.item.added", item["id"])]

    def on_response_output_item_done(self, event: Json) -> None:
        response, done = self.running[event["response_id"]], event["item"]
        item = response.items.pop(done["id"])
        assert event["output_index"] == item.index
        assert done["status"] in ("completed", "incomplete")
        if item.kind == "message":
            assert item.part_done
            part = done["content"][0]
            assert part == (
                {"type": "output_text", "text": item.text}
                if response.modality == "text"
                else {"type": "output_audio", "transcript": item.text}
            )
        else:
            assert done["arguments"] == item.text
            assert item.content_done == {"arguments"}
        response.finished.append(done)
        if response.conversation is not None and done["id"] in self.order:
            self.expected = [("conversation.item.done", done["id"])]

    def content(self, event: Json) -> None:
        """Parts, deltas and their ends."""
        kind, response = event["type"], self.running[event["response_id"]]
        item = response.items[event["item_id"]]
        assert event["output_index"] == item.index
        if "function_call" in kind:
            assert event["call_id"] == item.call_id
            if kind.endswith("delta"):
                item.text += event["delta"]
            else:
                assert event["name"] == item.name
                assert event["arguments"] == item.text
                item.content_done.add("arguments")
            return
        assert event["content_index"] == 0
        if kind == "response.content_part.added":
            assert not item.part
            item.part = True
            assert event["part"] == (
                {"type": "text", "text": ""} if response.modality == "text" else {"type": "audio", "transcript": ""}
            )
            return
        assert item.part
        assert not item.part_done
        name = kind.split(".")[1]
        if kind == "response.content_part.done":
            assert item.content_done == (
                {"output_text"} if response.modality == "text" else {"output_audio", "output_audio_transcript"}
            )
            assert item.text in event["part"].values()
            item.part_done = True
        elif kind.endswith(".delta"):
            assert not item.content_done
            assert ("text" in name and "transcript" not in name) == (response.modality == "text")
            if name != "output_audio":
                item.text += event["delta"]
        else:
            item.content_done.add(name)
            if name != "output_audio":
                assert event.get("transcript", event.get("text")) == item.text
