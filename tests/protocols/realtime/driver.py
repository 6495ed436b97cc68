"""A Realtime machine driven from a test: dicts in, dicts out, every event judged by `Grammar`.

With ``REALTIME_EVENT_DUMP`` set, every event is appended to that file: the conformance tests show them to the
clients' own validators.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
from typing import Any

from protocols.realtime.grammar import Grammar
from realtime_omni_protocols.realtime import Close, Profile, RealtimeServerSide, Send, encode
from realtime_omni_protocols.realtime.commands import Command, Fact, Output

Json = dict[str, Any]
PROFILE = Profile(session_id="sess_1", model="puppet", voices=("puppet", "second"), expires_at=1_800_000_000)
DUMP = os.environ.get("REALTIME_EVENT_DUMP")


def dump(event: bytes) -> None:
    if DUMP:
        with open(DUMP, "ab") as file:
            file.write(event + b"\n")


def pcm(ms: int) -> bytes:
    return bytes(48 * ms)


class Driver:
    """``commands``: what the last call asked of the session."""

    def __init__(self, profile: Profile = PROFILE, *, duplex: bool = False) -> None:
        numbers = itertools.count(1)
        self.side = RealtimeServerSide(profile, lambda prefix: f"{prefix}_{next(numbers)}", duplex=duplex)
        self.numbers: list[int] = []
        """``server_event_seq`` of what was sent."""
        self._dumped = not duplex
        self.grammar = Grammar()
        self.commands: list[Command] = []
        self.close: Close | None = None
        self.first = self.take(self.side.open())

    def take(self, outputs: list[Output]) -> list[Json]:
        events = []
        self.commands = []
        for output in outputs:
            if isinstance(output, Send):
                text = encode(output.event)
                if self._dumped:
                    dump(text)
                events.append(json.loads(text))
                self.numbers += [events[-1]["server_event_seq"]] if "server_event_seq" in events[-1] else []
                self.grammar.see(events[-1])
            elif isinstance(output, Close):
                self.close = output
            else:
                self.commands.append(output)
        self.grammar.at_rest()
        return events

    def send(self, kind: str, **fields: Any) -> list[Json]:
        return self.take(self.side.receive(json.dumps({"type": kind, **fields})))

    def apply(self, fact: Fact) -> list[Json]:
        return self.take(self.side.apply(fact))

    def update(self, **session: Any) -> list[Json]:
        return self.send("session.update", session={"type": "realtime", **session})

    def append(self, ms: int) -> list[Json]:
        return self.send("input_audio_buffer.append", audio=base64.b64encode(pcm(ms)).decode())

    def say(self, text: str, role: str = "user", **fields: Any) -> list[Json]:
        kind = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}
        return self.send("conversation.item.create", item=item)

    @property
    def response(self) -> str:
        assert self.side.response is not None
        return self.side.response


def kinds(events: list[Json]) -> list[str]:
    return [event["type"] for event in events]
