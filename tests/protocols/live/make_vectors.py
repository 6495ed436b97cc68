"""Writes protocols/vectors/live: every expectation here is written by hand from live.md, none by the package.

``python tests/protocols/live/make_vectors.py``
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[3] / "protocols" / "vectors" / "live"
Vector = dict[str, Any]

PCM = base64.b64encode(bytes(8)).decode()
START = {"type": "session.start", "event_id": "s", "session": {"model": "m"}}
FULL = {
    "model": "m",
    "instructions": "Be brief.",
    "audio": {"format": {"type": "audio/pcmu", "rate": 8000}, "output": {"voice": {"id": "v1"}}},
    "input": [
        {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "user", "content": [{"text": "b"}], "id": "i", "status": "completed", "type": "message"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
    ],
    "delegation": {"type": "client", "acknowledgement_delay_ms": 400},
    "triggers": [],
    "store": True,
    "safety_identifier": "u",
}
TAKEN: list[Vector] = [
    {"name": name, "fork": False, "wire": json.dumps(event)}
    for name, event in {
        "a start": START,
        "a start with everything": {**START, "session": FULL},
        "a start with hosted delegation": {
            **START,
            "session": {"model": "m", "delegation": {"type": "responses", "responses": {"model": "b", "x": 1}}},
        },
        "a start with nulls": {**START, "event_id": None, "session": {"model": "m", "audio": None, "store": None}},
        "an unknown key beside session is ignored": {**START, "later": 1},
        "an update": {"type": "session.update", "session": {"delegation": {"type": "client"}}},
        "an update of nothing": {"type": "session.update", "session": {}},
        "audio": {"type": "session.input_audio.append", "audio": PCM},
        "mute": {"type": "session.input_audio.mute", "event_id": "1"},
        "unmute": {"type": "session.input_audio.unmute"},
        "a fixture": {"type": "session.output_audio.fixture.play", "audio": PCM},
        "instructions": {"type": "session.instructions.append", "content": "x", "delegation_id": None},
        "thinking": {"type": "session.thinking.append", "content": "x", "delegation_id": "d"},
        "commentary without a delegation": {"type": "session.commentary.append", "content": "x"},
        "close": {"type": "session.close"},
        "a response": {"type": "response.create"},
        "an item": {"type": "response.item.create", "item": {}},
        "a decision": {"type": "decision.create"},
        "a key of a telephone": {"type": "transport.dtmf.send", "event": "1"},
    }.items()
]
TAKEN += [
    {"name": f"a fork's start: {name}", "fork": True, "wire": json.dumps({"type": "session.start", "session": session})}
    for name, session in {
        "as it was": {},
        "another format": {"audio": {"format": {"type": "audio/pcm", "rate": 16000}}},
        "kept": {"store": True},
    }.items()
]


def refused(
    name: str, wire: object, code: str, param: str | None, event_id: str | None = None, fork: bool = False
) -> Vector:
    text = wire if isinstance(wire, str) else json.dumps(wire)
    return {
        "name": name,
        "fork": fork,
        "wire": text,
        "expect": {"code": code, "param": param, "client_event_id": event_id},
    }


def start(**session: Any) -> Vector:
    return {**START, "session": {"model": "m", **session}}


REFUSED: list[Vector] = [
    refused("nothing", "", "invalid_json", None),
    refused("half an object", '{"type":', "invalid_json", None),
    refused("a list", "[]", "invalid_json", None),
    refused("a number that is none", '{"type":"session.close","x":NaN}', "invalid_json", None),
    refused("33 levels", '{"x":' + "[" * 33 + "]" * 33 + "}", "invalid_json", None),
    refused("no type", {"event_id": "e"}, "missing_required_parameter", "type", "e"),
    refused("a type that is a number", {"type": 1}, "missing_required_parameter", "type"),
    refused("a type nobody knows", {"type": "session.begin", "event_id": "e"}, "unknown_event", "type", "e"),
    refused("a server's type", {"type": "session.started"}, "unknown_event", "type"),
    refused("an event_id that is a number", {"type": "session.close", "event_id": 1}, "invalid_value", "event_id"),
    refused("an event_id of 513", {"type": "session.close", "event_id": "x" * 513}, "invalid_value", "event_id"),
    refused("a start without session", {"type": "session.start"}, "missing_required_parameter", "session"),
    refused("a start without a model", {**START, "session": {}}, "missing_required_parameter", "session.model", "s"),
    refused("an empty model", start(model=""), "invalid_value", "session.model", "s"),
    refused("a model that is a list", start(model=[]), "invalid_type", "session.model", "s"),
    refused("voice at the wrong place", start(voice="v"), "unknown_parameter", "session.voice", "s"),
    refused("realtime's modalities", start(modalities=["audio"]), "unknown_parameter", "session.modalities", "s"),
    refused("an unknown key inside audio", start(audio={"input": {}}), "unknown_parameter", "session.audio.input", "s"),
    refused(
        "PCM at 8 kHz",
        start(audio={"format": {"type": "audio/pcm", "rate": 8000}}),
        "invalid_value",
        "session.audio.format",
        "s",
    ),
    refused(
        "G.711 at 16 kHz",
        start(audio={"format": {"type": "audio/pcma", "rate": 16000}}),
        "invalid_value",
        "session.audio.format",
        "s",
    ),
    refused(
        "a format without a rate",
        start(audio={"format": {"type": "audio/pcm"}}),
        "missing_required_parameter",
        "session.audio.format.rate",
        "s",
    ),
    refused(
        "Opus",
        start(audio={"format": {"type": "audio/opus", "rate": 24000}}),
        "invalid_value",
        "session.audio.format.type",
        "s",
    ),
    refused(
        "a system message",
        start(input=[{"role": "system", "content": [{"text": "x"}]}]),
        "invalid_value",
        "session.input[0].role",
        "s",
    ),
    refused(
        "two parts in a message",
        start(input=[{"role": "user", "content": [{"text": "x"}, {"text": "y"}]}]),
        "invalid_value",
        "session.input[0].content",
        "s",
    ),
    refused(
        "a user who holds output_text",
        start(input=[{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]),
        "invalid_value",
        "session.input[0]",
        "s",
    ),
    refused(
        "129 messages",
        start(input=[{"role": "user", "content": [{"text": "x"}]}] * 129),
        "invalid_value",
        "session.input",
        "s",
    ),
    refused("decisions", start(delegation={"type": "decisions"}), "invalid_value", "session.delegation.type", "s"),
    refused(
        "client delegation with a backend",
        start(delegation={"type": "client", "responses": {}}),
        "invalid_value",
        "session.delegation",
        "s",
    ),
    refused("store that is a word", start(store="yes"), "invalid_type", "session.store", "s"),
    refused(
        "an update of the model",
        {"type": "session.update", "session": {"model": "n"}},
        "immutable_parameter",
        "session.model",
    ),
    refused(
        "an update of the instructions",
        {"type": "session.update", "session": {"instructions": "n"}},
        "immutable_parameter",
        "session.instructions",
    ),
    refused(
        "an update of what does not exist",
        {"type": "session.update", "session": {"turn_detection": None}},
        "unknown_parameter",
        "session.turn_detection",
    ),
    refused(
        "a delay below zero",
        {"type": "session.update", "session": {"delegation": {"type": "client", "acknowledgement_delay_ms": -1}}},
        "invalid_value",
        "session.delegation.acknowledgement_delay_ms",
    ),
    refused("audio that is missing", {"type": "session.input_audio.append"}, "missing_required_parameter", "audio"),
    refused("audio that is a list", {"type": "session.input_audio.append", "audio": []}, "invalid_type", "audio"),
    refused(
        "content that is missing",
        {"type": "session.thinking.append", "delegation_id": None},
        "missing_required_parameter",
        "content",
    ),
    refused(
        "content that is a list of parts",
        {"type": "session.thinking.append", "content": [{"text": "x"}], "delegation_id": None},
        "invalid_type",
        "content",
    ),
    refused(
        "empty content",
        {"type": "session.commentary.append", "content": "", "delegation_id": None},
        "invalid_value",
        "content",
    ),
    refused(
        "a fork with another model",
        {"type": "session.start", "session": {"model": "n"}},
        "immutable_parameter",
        "session.model",
        fork=True,
    ),
    refused(
        "a fork with another voice",
        {"type": "session.start", "session": {"audio": {"output": {"voice": "n"}}}},
        "immutable_parameter",
        "session.audio.output",
        fork=True,
    ),
]

RESOURCE = {
    "id": "live_1",
    "expires_at": 1900000000,
    "model": "m",
    "status": "active",
    "audio": {"format": {"type": "audio/pcm", "rate": 24000}, "output": {"voice": "v"}},
    "delegation": {"type": "client", "acknowledgement_delay_ms": 0},
    "store": False,
    "triggers": [],
}


def says(event: Vector, peer: int = 0) -> Vector:
    return {"send": peer, "event": event}


def closes(peer: int = 0, reason: str = "close_requested") -> Vector:
    return {"close": peer, "code": 1000, "reason": reason}


def receive(event: Vector, *expect: Vector, peer: int = 0) -> Vector:
    return {"receive": event, "peer": peer, "expect": list(expect)}


def fact(name: str, args: dict[str, Any], *expect: Vector) -> Vector:
    return {"fact": name, "args": args, "expect": list(expect)}


def error(
    number: int, code: str, client_event_id: str | None = None, param: str | None = None, peer: int = 0
) -> Vector:
    body = {"type": "invalid_request_error", "code": code}
    extra = {"param": param} if param else {}
    extra |= {"client_event_id": client_event_id} if client_event_id else {}
    return says({"type": "error", "event_id": f"event_{number}", "error": body | extra}, peer)


def timed(kind: str, number: int, start_ms: int, end_ms: int, **more: Any) -> Vector:
    return {"type": kind, "event_id": f"event_{number}", "start_ms": start_ms, "end_ms": end_ms, **more}


STARTED = {"type": "session.started", "event_id": "event_1", "client_event_id": "s", "session": RESOURCE}
BEGIN = [
    receive(START, {"start": "m"}),
    fact("started", {"session_id": "live_1", "expires_at": 1900000000, "model": "m", "voice": "v"}, says(STARTED)),
]
CLOSED = {"type": "session.closed", "reason": "close_requested", "session": RESOURCE, "usage": {"seconds": 7}}
CLOSE = {"type": "session.close", "event_id": "x"}
TONE = base64.b64encode(b"\x01\x00\x02\x00").decode()
AUDIO = {"audio": TONE, "start_ms": 0, "end_ms": 80, "reflected": TONE}

SESSIONS: list[Vector] = [
    {
        "name": "hello, a tick, good-bye",
        "steps": [
            *BEGIN,
            receive({"type": "session.input_audio.append", "audio": PCM}, {"append": PCM, "heard": True}),
            fact("output_audio", AUDIO, says({"type": "session.output_audio.delta", "delta": TONE})),
            fact(
                "output_transcript",
                {"text": "Hi", "start_ms": 0, "end_ms": 80},
                says(timed("session.output_transcript.delta", 2, 0, 80, delta="Hi")),
            ),
            fact(
                "input_transcript",
                {"text": "Hey", "start_ms": 0, "end_ms": 80},
                says(timed("session.input_transcript.delta", 3, 0, 80, delta="Hey")),
            ),
            fact(
                "usage",
                {"seconds": 5, "usage_ratio": 0.25},
                says(
                    {
                        "type": "session.usage.updated",
                        "event_id": "event_4",
                        "usage": {"seconds": 5},
                        "context_window": {"usage_ratio": 0.25},
                    }
                ),
            ),
            receive(CLOSE, {"end": "close_requested"}),
            fact("output_audio", AUDIO),
            fact(
                "closed",
                {"seconds": 7},
                says({**CLOSED, "event_id": "event_5", "client_event_id": "x"}),
                closes(),
            ),
            receive(CLOSE),
        ],
    },
    {
        "name": "nothing before the start, one start only, and a start may be tried again",
        "steps": [
            receive({"type": "session.input_audio.append", "audio": PCM}, error(1, "session_not_started")),
            receive({**CLOSE}, error(2, "session_not_started", "x")),
            receive(
                {**START, "session": {"model": "m", "client": {}}},
                error(3, "unsupported_parameter", "s", "session.client"),
            ),
            receive(
                {**START, "session": {"model": "m", "triggers": [{}]}},
                error(4, "unsupported_parameter", "s", "session.triggers"),
            ),
            receive(START, {"start": "m"}),
            receive(START, error(5, "session_already_started", "s")),
            fact("refuse_start", {"code": "model_not_found"}, error(6, "model_not_found", "s")),
            receive(START, {"start": "m"}),
            fact(
                "started",
                {"session_id": "live_1", "expires_at": 1900000000, "model": "m", "voice": "v"},
                says({**STARTED, "event_id": "event_7"}),
            ),
            receive(START, error(8, "session_already_started", "s")),
        ],
    },
    {
        "name": "text goes in at a tick, each ack with its own id and span",
        "steps": [
            *BEGIN,
            receive(
                {"type": "session.commentary.append", "event_id": "a", "content": "Say hi.", "delegation_id": None},
                {"inject": 1, "kind": "commentary", "text": "Say hi."},
            ),
            receive(
                {"type": "session.thinking.append", "event_id": "b", "content": "Rain.", "delegation_id": None},
                {"inject": 2, "kind": "thinking", "text": "Rain."},
            ),
            fact(
                "injected",
                {"ticket": 2, "start_ms": 160, "end_ms": 240},
                says(timed("session.thinking.appended", 2, 160, 240, client_event_id="b")),
            ),
            fact(
                "injected",
                {"ticket": 1, "start_ms": 160, "end_ms": 240},
                says(timed("session.commentary.appended", 3, 160, 240, client_event_id="a")),
            ),
            receive(
                {"type": "session.instructions.append", "event_id": "c", "content": "x", "delegation_id": "d"},
                error(4, "delegation_not_found", "c", "delegation_id"),
            ),
            fact(
                "called",
                {"call_id": "d", "name": "f", "arguments": "{}", "offset_ms": 320},
                says(
                    {
                        "type": "session.delegation.created",
                        "event_id": "event_5",
                        "delegation": {"id": "d", "target": "client", "type": "delegation"},
                        "offset_ms": 320,
                    }
                ),
            ),
            receive(
                {"type": "session.commentary.append", "event_id": "e", "content": "x", "delegation_id": "d"},
                {"inject": 3, "kind": "commentary", "text": "x"},
            ),
            receive(CLOSE, error(6, "session_closed", "e"), {"end": "close_requested"}),
        ],
    },
    {
        "name": "mute, and a fixture, during which nothing is heard or appended",
        "steps": [
            *BEGIN,
            receive(
                {"type": "session.input_audio.mute", "event_id": "m"},
                says({"type": "session.input_audio.muted", "event_id": "event_2", "client_event_id": "m"}),
            ),
            receive({"type": "session.input_audio.append", "audio": PCM}, {"append": PCM, "heard": False}),
            receive(
                {"type": "session.input_audio.unmute"},
                says({"type": "session.input_audio.unmuted", "event_id": "event_3"}),
            ),
            receive(
                {"type": "session.output_audio.fixture.play", "event_id": "f", "audio": TONE},
                says({"type": "session.output_audio.fixture.playing", "event_id": "event_4", "client_event_id": "f"}),
                {"fixture": TONE},
            ),
            receive({"type": "session.input_audio.append", "audio": PCM}, {"append": PCM, "heard": False}),
            receive(
                {"type": "session.output_audio.fixture.play", "event_id": "g", "audio": TONE},
                error(5, "fixture_active", "g"),
            ),
            receive(
                {"type": "session.thinking.append", "event_id": "h", "content": "x", "delegation_id": None},
                error(6, "fixture_active", "h"),
            ),
            fact(
                "fixture_played",
                {},
                says({"type": "session.output_audio.fixture.played", "event_id": "event_7", "client_event_id": "f"}),
            ),
            receive({"type": "session.input_audio.append", "audio": PCM}, {"append": PCM, "heard": True}),
            receive(
                {"type": "session.input_audio.append", "event_id": "i", "audio": "AAA="},
                {"append": "AAA=", "heard": True},
            ),
            receive(
                {"type": "session.input_audio.append", "event_id": "j", "audio": "AA=="},
                error(8, "invalid_audio", "j", "audio"),
            ),
        ],
    },
    {
        "name": "a sideband sees both directions, may command, and hears the end",
        "steps": [
            *BEGIN,
            fact("attach", {}),
            fact(
                "output_audio",
                AUDIO,
                says({"type": "session.output_audio.delta", "delta": TONE}),
                says({"type": "session.output_audio.delta", "delta": TONE, "start_ms": 0, "end_ms": 80}, 1),
            ),
            fact("reflect_input", {"audio": TONE}, says({"type": "session.input_audio.append", "audio": TONE}, 1)),
            receive(
                {"type": "session.input_audio.append", "event_id": "a", "audio": PCM},
                error(2, "primary_connection_only", "a", peer=1),
                peer=1,
            ),
            receive(
                {"type": "session.input_audio.mute", "event_id": "s"},
                says({"type": "session.input_audio.muted", "event_id": "event_3"}),
                says({"type": "session.input_audio.muted", "event_id": "event_3", "client_event_id": "s"}, 1),
                peer=1,
            ),
            receive({"type": "response.create", "event_id": "b"}, error(4, "unsupported_event", "b", peer=1), peer=1),
            fact("lost", {"peer": 0}, {"end": "connection_lost"}),
            fact(
                "closed",
                {"seconds": 7},
                says({**CLOSED, "event_id": "event_5", "reason": "connection_lost"}, 1),
                closes(1, "connection_lost"),
            ),
        ],
    },
    {
        "name": "a close that comes while the session is being started",
        "steps": [
            receive(START, {"start": "m"}),
            receive(CLOSE),
            fact(
                "started",
                {"session_id": "live_1", "expires_at": 1900000000, "model": "m", "voice": "v"},
                says(STARTED),
                {"end": "close_requested"},
            ),
            fact(
                "closed",
                {"seconds": 7},
                says({**CLOSED, "event_id": "event_2", "client_event_id": "x"}),
                closes(),
            ),
        ],
    },
]

BACKEND = {"type": "responses", "responses": {"model": "b", "tools": [{"type": "function", "name": "f"}]}}


def backend(number: int, event: Vector, **more: Any) -> Vector:
    return says({"type": "response.event", "event_id": f"event_{number}", "event": event, **more})


def lifecycle(response: str, status: str) -> Vector:
    kind = {"in_progress": "response.created", "completed": "response.completed"}[status]
    return {
        "type": kind,
        "response": {"id": response, "object": "response", "model": "m", "output": [], "status": status},
    }


OUTPUT = {"type": "response.item.create", "item": {"type": "function_call_output", "call_id": "c1", "output": "sunny"}}
SESSIONS.append(
    {
        "name": "a model that calls functions stands in for the backend",
        "steps": [
            receive({**START, "session": {"model": "m", "delegation": BACKEND}}, {"start": "m"}),
            fact(
                "started",
                {
                    "session_id": "live_1",
                    "expires_at": 1900000000,
                    "model": "m",
                    "voice": "v",
                    "takes_tools": True,
                },
                says(
                    {
                        **STARTED,
                        "session": {
                            **RESOURCE,
                            "delegation": {
                                "type": "responses",
                                "acknowledgement_delay_ms": 0,
                                "responses": {"model": "b"},
                            },
                        },
                    }
                ),
            ),
            fact(
                "called",
                {"call_id": "c1", "name": "f", "arguments": '{"x":1}', "offset_ms": 80},
                says(
                    {
                        "type": "session.delegation.created",
                        "event_id": "event_2",
                        "delegation": {
                            "id": "delegation_c1",
                            "target": "responses",
                            "type": "delegation",
                            "response_id": "resp_1",
                        },
                        "offset_ms": 80,
                    }
                ),
                backend(3, lifecycle("resp_1", "in_progress"), delegation_id="delegation_c1"),
                backend(
                    4,
                    {
                        "type": "response.output_item.done",
                        "output_index": 0,
                        "item": {
                            "type": "function_call",
                            "id": "fc_c1",
                            "call_id": "c1",
                            "name": "f",
                            "arguments": '{"x":1}',
                            "status": "completed",
                        },
                    },
                    delegation_id="delegation_c1",
                ),
                backend(5, lifecycle("resp_1", "completed"), delegation_id="delegation_c1"),
            ),
            receive(OUTPUT, {"tool_output": "c1", "output": "sunny"}),
            receive({**OUTPUT, "event_id": "again"}, error(6, "invalid_value", "again", "item.call_id")),
            receive(
                {"type": "response.create", "event_id": "on"},
                backend(7, lifecycle("resp_2", "in_progress"), client_event_id="on"),
                {"go_on": True},
                backend(8, lifecycle("resp_2", "completed")),
            ),
            receive(
                {
                    "type": "session.update",
                    "event_id": "u",
                    "session": {"delegation": {"type": "responses", "responses": {"tools": 3}}},
                },
                error(9, "invalid_value", "u", "session.delegation.responses.tools"),
            ),
        ],
    }
)

FILES = {"client_taken.json": TAKEN, "client_refused.json": REFUSED, "sessions.json": SESSIONS}


def render(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for file_name, vectors in FILES.items():
        (TARGET / file_name).write_text(render(vectors), encoding="utf-8")
