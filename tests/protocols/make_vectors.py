"""Writes the golden vectors of the world protocol: ``python tests/protocols/make_vectors.py``.

Every expectation here is typed by hand from the text of world.md; this file does not import the package it judges. Frames are
packed with `struct` from the table of section 4.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[2] / "protocols" / "vectors" / "world"
Vector = dict[str, Any]
DROP = object()


def good(name: str, message: dict[str, Any], wire: str | None = None, direction: str = "c2s") -> Vector:
    text = wire if wire is not None else json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    return {"name": name, "direction": direction, "kind": "text", "wire": text, "expect": {"message": message}}


def bad(
    name: str, wire: str | list[tuple[str, int]], path: str = "$", code: str = "bad_message", direction: str = "c2s"
) -> Vector:
    return {
        "name": name,
        "direction": direction,
        "kind": "text",
        "wire": wire,
        "expect": {"error": {"code": code, "path": path}},
    }


def bad_bytes(name: str, wire: bytes, direction: str = "c2s") -> Vector:
    error = {"code": "bad_message", "path": "$"}
    return {"name": name, "direction": direction, "kind": "text", "wire_hex": wire.hex(), "expect": {"error": error}}


def control(data: Any, track: str = "camera", schema: str = "realtime_omni.held_keys.v1") -> dict[str, Any]:
    return {"track": track, "schema": schema, "data": data}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


EVENT = '{"type":"session.event","event_id":%s}'
BIG = 2**53

CLIENT_GOOD = [
    good("start with the smallest set of fields", {"type": "session.start", "format": "jpeg"}),
    good(
        "start with every field but the picture",
        {
            "type": "session.start",
            "id": "1",
            "format": "h264",
            "model": "tiny-world",
            "session_id": "a.B_c-9",
            "prompt": "a lantern maze at night",
            "seed": BIG,
            "start": "courtyard",
            "fps": 12.5,
            "cadence": "on_demand",
            "lead_frames": 0,
        },
    ),
    good("start with a picture", {"type": "session.start", "format": "rgb24", "image": "iVBORw0KGgo="}),
    good(
        "null means absent, paced is the default",
        {"type": "session.start", "format": "latent"},
        '{"type":"session.start","format":"latent","prompt":null,"seed":null,"cadence":"paced","id":null}',
    ),
    good(
        "fields in any order, white space around",
        {"type": "session.start", "format": "jpeg", "seed": 3},
        ' {"seed" : 3,\n"format":"jpeg",\t"type":"session.start"} \r\n',
    ),
    good(
        "resume",
        {"type": "session.resume", "session_id": "s1", "resume_token": "kT-_09", "last_seq": 17},
    ),
    good(
        "resume with takeover and another format",
        {
            "type": "session.resume",
            "session_id": "s1",
            "resume_token": "t",
            "last_seq": BIG,
            "format": "rgb24",
            "takeover": True,
        },
    ),
    good("event with a prompt", {"type": "session.event", "event_id": 0, "prompt": "turn left"}),
    good("prompt outside of the basic plane", {"type": "session.event", "event_id": 1, "prompt": "雪 \U0001f3d4 été"}),
    good(
        "escaped surrogate pair is one character",
        {"type": "session.event", "event_id": 1, "prompt": "\U0001f3d4"},
        '{"type":"session.event","event_id":1,"prompt":"\\ud83c\\udfd4"}',
    ),
    good("prompt of 2000 characters", {"type": "session.event", "event_id": 1, "prompt": "x" * 2000}),
    good(
        "event with held keys",
        {"type": "session.event", "event_id": 7, "controls": [control({"keys": ["w", "l"], "t_ms": 5321})]},
    ),
    good(
        "event with prompt and two controls and id",
        {
            "type": "session.event",
            "id": "e7",
            "event_id": BIG,
            "prompt": "snow",
            "controls": [
                control({"keys": []}),
                control({"mode": "script", "frames": [["w"], ["w", "j"], []]}, schema="lingbot.camera_actions.v1"),
            ],
        },
    ),
    good(
        "data may hold any JSON within the bounds",
        {
            "type": "session.event",
            "event_id": 2,
            "controls": [control({"n": None, "f": -1.5e-3, "i": -BIG, "b": False, "o": {"": [[], {}]}})],
        },
    ),
    good(
        "data nested 16 levels",
        {"type": "session.event", "event_id": 2, "controls": [control({"x": nested(15)})]},
    ),
    good("next", {"type": "session.next"}),
    good("next with an id of 64 characters", {"type": "session.next", "id": "n" * 64}),
    good("ack", {"type": "session.ack", "seq": 12, "displayed": 3, "epoch": 0}),
    good("ack of nothing", {"type": "session.ack", "seq": 0, "displayed": 0, "epoch": 4294967295}),
    good("pause", {"type": "session.pause"}),
    good("resume_play", {"type": "session.resume_play", "id": "p"}),
    good("reset with nothing", {"type": "session.reset"}),
    good("reset with prompt and seed", {"type": "session.reset", "prompt": "a beach", "seed": 0}),
    good("fork", {"type": "session.fork"}),
    good("fork with the branch's id", {"type": "session.fork", "id": "f", "session_id": "what-if.2"}),
    good("rewind", {"type": "session.rewind", "chunk_index": 0}),
    good("rewind to the last chunk there can be", {"type": "session.rewind", "id": "r", "chunk_index": 4294967295}),
    good("log", {"type": "session.log"}),
    good("replay", {"type": "session.replay", "id": "p", "log": "e30="}),
    good("abort", {"type": "session.abort"}),
    good("rollback", {"type": "session.rollback"}),
    good("close", {"type": "session.close"}),
    good("ping", {"type": "ping"}),
    good("ping with a negative number", {"type": "ping", "t": -1.25}),
]

CLIENT_BAD = [
    bad("empty text", ""),
    bad("not JSON", "hello"),
    bad("two values", '{"type":"ping"}{"type":"ping"}'),
    bad("an array", '[{"type":"ping"}]'),
    bad("a number", "42"),
    bad("null", "null"),
    bad("cut in the middle", '{"type":"ping","t":'),
    bad("trailing comma", '{"type":"ping",}'),
    bad("single quotes", "{'type':'ping'}"),
    bad("byte order mark", '\ufeff{"type":"ping"}'),
    bad("no type", '{"t":1}', "$.type"),
    bad("type is a number", '{"type":7}', "$.type"),
    bad("unknown type", '{"type":"session.dance"}', "$.type"),
    bad("a server's type", '{"type":"pong","server_ms":1}', "$.type"),
    bad("unknown field", '{"type":"session.close","now":true}', "$.now"),
    bad("the same key twice", '{"type":"ping","t":1,"t":2}', "$.t"),
    bad("the type twice", '{"type":"ping","type":"session.close"}', "$.type"),
    bad(
        "the same key twice deep inside",
        '{"type":"session.event","event_id":1,"controls":[{"track":"camera","schema":"s","data":{"a":[{"k":1,"k":1}]}}]}',
        "$.controls[0].data.a[0].k",
    ),
    bad("NaN", '{"type":"ping","t":NaN}'),
    bad("Infinity", '{"type":"ping","t":-Infinity}'),
    bad("a number beyond a 64-bit float", '{"type":"ping","t":1e999}', "$.t"),
    bad("a number with 1,000 digits", '{"type":"ping","t":' + "9" * 1000 + "}"),
    bad("a leading zero", '{"type":"ping","t":01}'),
    bad("a lone high surrogate", '{"type":"session.event","event_id":1,"prompt":"a\\ud800b"}'),
    bad("a lone low surrogate", '{"type":"session.event","event_id":1,"prompt":"a\\udc00"}'),
    bad("a raw control character in a string", '{"type":"session.event","event_id":1,"prompt":"a\nb"}'),
    bad_bytes("not UTF-8", b'{"type":"session.event","event_id":1,"prompt":"\xff"}'),
    bad_bytes("a surrogate as UTF-8 bytes", b'{"type":"session.event","event_id":1,"prompt":"\xed\xa0\x80"}'),
    bad_bytes("an overlong zero byte", b'{"type":"session.event","event_id":1,"prompt":"\xc0\x80"}'),
    bad("nested 5,000 arrays", [("[", 5000)]),
    bad("nested 5,000 objects", [('{"a":', 5000)]),
    bad("nested 33 levels", '{"type":"ping","t":' + "[" * 32 + "]" * 32 + "}"),
    bad("id is empty", '{"type":"ping","id":""}', "$.id"),
    bad("id has 65 characters", '{"type":"ping","id":"' + "x" * 65 + '"}', "$.id"),
    bad("id is a number", '{"type":"ping","id":5}', "$.id"),
    bad("start without format", '{"type":"session.start"}', "$.format"),
    bad("start with a format nobody has", '{"type":"session.start","format":"webp"}', "$.format", "unsupported_format"),
    bad("start with format null", '{"type":"session.start","format":null}', "$.format"),
    bad(
        "start with a session id with a slash",
        '{"type":"session.start","format":"jpeg","session_id":"a/b"}',
        "$.session_id",
    ),
    bad(
        "start with a session id and a newline",
        '{"type":"session.start","format":"jpeg","session_id":"ab\\n"}',
        "$.session_id",
    ),
    bad("start with an empty session id", '{"type":"session.start","format":"jpeg","session_id":""}', "$.session_id"),
    bad(
        "start with picture and start", '{"type":"session.start","format":"jpeg","image":"AA==","start":"c"}', "$.start"
    ),
    bad("start with a negative seed", '{"type":"session.start","format":"jpeg","seed":-1}', "$.seed"),
    bad("start with a seed above 2^53", '{"type":"session.start","format":"jpeg","seed":9007199254740993}', "$.seed"),
    bad("start with fps 0", '{"type":"session.start","format":"jpeg","fps":0}', "$.fps"),
    bad("start with fps true", '{"type":"session.start","format":"jpeg","fps":true}', "$.fps"),
    bad("start with another cadence", '{"type":"session.start","format":"jpeg","cadence":"fast"}', "$.cadence"),
    bad("start with a blank prompt", '{"type":"session.start","format":"jpeg","prompt":" \\n\\t "}', "$.prompt"),
    bad("resume without token", '{"type":"session.resume","session_id":"s","last_seq":1}', "$.resume_token"),
    bad(
        "resume with a negative seq",
        '{"type":"session.resume","session_id":"s","resume_token":"t","last_seq":-1}',
        "$.last_seq",
    ),
    bad(
        "resume with takeover 1",
        '{"type":"session.resume","session_id":"s","resume_token":"t","last_seq":1,"takeover":1}',
        "$.takeover",
    ),
    bad("event with neither prompt nor controls", EVENT % "1"),
    bad("event without id", '{"type":"session.event","prompt":"x"}', "$.event_id"),
    bad("event id true", '{"type":"session.event","event_id":true,"prompt":"x"}', "$.event_id"),
    bad("event id as a string", '{"type":"session.event","event_id":"1","prompt":"x"}', "$.event_id"),
    bad("event id 1.0", '{"type":"session.event","event_id":1.0,"prompt":"x"}', "$.event_id"),
    bad("event id negative", '{"type":"session.event","event_id":-1,"prompt":"x"}', "$.event_id"),
    bad("event id 2^53 + 1", '{"type":"session.event","event_id":9007199254740993,"prompt":"x"}', "$.event_id"),
    bad("event id null", '{"type":"session.event","event_id":null,"prompt":"x"}', "$.event_id"),
    bad("event with an empty prompt", '{"type":"session.event","event_id":1,"prompt":""}', "$.prompt"),
    bad(
        "event with a prompt of 2001 characters",
        '{"type":"session.event","event_id":1,"prompt":"' + "x" * 2001 + '"}',
        "$.prompt",
    ),
    bad("event with no controls in the list", '{"type":"session.event","event_id":1,"controls":[]}', "$.controls"),
    bad(
        "event with 17 controls",
        json.dumps({"type": "session.event", "event_id": 1, "controls": [control({})] * 17}),
        "$.controls",
    ),
    bad("event with controls as an object", '{"type":"session.event","event_id":1,"controls":{}}', "$.controls"),
    bad(
        "control without track",
        '{"type":"session.event","event_id":1,"controls":[{"schema":"s","data":{}}]}',
        "$.controls[0].track",
    ),
    bad(
        "second control with an unknown field",
        '{"type":"session.event","event_id":1,"controls":[{"track":"a","schema":"s","data":{}},{"track":"a","schema":"s","data":{},"x":1}]}',
        "$.controls[1].x",
    ),
    bad(
        "control data as a list",
        json.dumps({"type": "session.event", "event_id": 1, "controls": [control([])]}),
        "$.controls[0].data",
    ),
    bad(
        "control data nested 17 levels",
        json.dumps({"type": "session.event", "event_id": 1, "controls": [control({"x": nested(16)})]}),
        "$.controls[0].data.x" + "[0]" * 15,
    ),
    bad(
        "control data with an integer above 2^53",
        '{"type":"session.event","event_id":1,"controls":[{"track":"a","schema":"s","data":{"n":[0,9007199254740993]}}]}',
        "$.controls[0].data.n[1]",
    ),
    bad(
        "control data above 16 KiB",
        [
            ('{"type":"session.event","event_id":1,"controls":[{"track":"a","schema":"s","data":{"x":"', 1),
            ("y", 16_400),
            ('"}}]}', 1),
        ],
        "$.controls[0].data",
    ),
    bad("a message above 64 KiB", [('{"type":"ping","id":"x"}', 1), (" ", 65_536)], "$", "message_too_large"),
    bad("ack without epoch", '{"type":"session.ack","seq":1,"displayed":0}', "$.epoch"),
    bad("ack with a float seq", '{"type":"session.ack","seq":1.5,"displayed":0,"epoch":0}', "$.seq"),
    bad("ack with a negative count", '{"type":"session.ack","seq":1,"displayed":-3,"epoch":0}', "$.displayed"),
    bad(
        "ack with an epoch above 32 bits", '{"type":"session.ack","seq":1,"displayed":0,"epoch":4294967296}', "$.epoch"
    ),
    bad("fork with a session id with a slash", '{"type":"session.fork","session_id":"a/b"}', "$.session_id"),
    bad("fork with a label", '{"type":"session.fork","label":"left"}', "$.label"),
    bad("replay of nothing", '{"type":"session.replay"}', "$.log"),
    bad("replay of an empty log", '{"type":"session.replay","log":""}', "$.log"),
    bad("replay of a log as an object", '{"type":"session.replay","log":{}}', "$.log"),
    bad("rewind to nowhere", '{"type":"session.rewind"}', "$.chunk_index"),
    bad("rewind by a negative number", '{"type":"session.rewind","chunk_index":-1}', "$.chunk_index"),
    bad("rewind to true", '{"type":"session.rewind","chunk_index":true}', "$.chunk_index"),
    bad("rewind beyond 32 bits", '{"type":"session.rewind","chunk_index":4294967296}', "$.chunk_index"),
    bad("ping with a string", '{"type":"ping","t":"now"}', "$.t"),
    bad("ping with true", '{"type":"ping","t":true}', "$.t"),
]

STARTED: dict[str, Any] = {
    "type": "session.started",
    "seq": 1,
    "session_id": "8d1f",
    "resume_token": "kT",
    "model": "tiny-world",
    "prompt": None,
    "seed": 7,
    "format": "h264",
    "codec": "avc1.42C00A",
    "width": 64,
    "height": 64,
    "fps": 20,
    "frames_per_block": 3,
    "cadence": "paced",
    "lead_frames": 3,
    "limits": {
        "max_pending_events": 16,
        "max_message_bytes": 65536,
        "max_events_per_s": 60,
        "grace_s": 30,
        "stall_timeout_s": 60.5,
        "horizon_frames": None,
    },
    "controls": [{"track": "camera", "schema": "s.v1", "json_schema": {"type": "object"}, "description": "keys"}],
    "prompts": ["a maze"],
    "starts": [],
    "next_event_id": 0,
    "can_fork": True,
    "oldest_rewind": 0,
}
RESUMED: dict[str, Any] = {
    "type": "session.resumed",
    "session_id": "8d1f",
    "resume_token": "Qb",
    "replayed_from": 10,
    "state": "playing",
    "epoch": 0,
    "next_frame": 4,
    "next_event_id": 1,
    "format": "jpeg",
    "codec": None,
}
CHUNK: dict[str, Any] = {
    "type": "chunk",
    "seq": 8,
    "epoch": 0,
    "chunk_index": 1,
    "first_frame": 3,
    "frames": 3,
    "applied_event_ids": [0, 4],
    "prompt": "a maze",
    "timings_ms": {"tick": 12.5, "encode": 0.4, "wait": 0},
    "kv": {"pages_used": 4, "pages_total": 64},
    "oldest_rewind": None,
}
FORKED: dict[str, Any] = {
    "type": "session.forked",
    "seq": 12,
    "session_id": "8d1f-2",
    "resume_token": "Zp",
    "grace_s": 30,
    "epoch": 1,
    "chunk_index": 2,
    "next_frame": 6,
    "prompt": "a maze",
    "seed": 7,
    "next_event_id": 5,
    "oldest_rewind": 0,
}
REWOUND: dict[str, Any] = {
    "type": "session.rewound",
    "seq": 13,
    "epoch": 1,
    "chunk_index": 1,
    "next_frame": 3,
    "prompt": None,
    "oldest_rewind": 1,
}


def server(message: dict[str, Any], name: str, /, **changes: Any) -> Vector:
    return good(name, {k: v for k, v in (message | changes).items() if v is not DROP}, direction="s2c")


def server_bad(
    message: dict[str, Any], name: str, path: str, error_code: str = "bad_message", /, **changes: Any
) -> Vector:
    return bad(
        name, json.dumps({k: v for k, v in (message | changes).items() if v is not DROP}), path, error_code, "s2c"
    )


HELLO: dict[str, Any] = {
    "type": "hello",
    "protocol": "realtime-omni.world.v1",
    "server": "realtime-omni/0.1",
    "models": ["tiny-world"],
    "handshake_timeout_s": 10,
}
ERROR: dict[str, Any] = {"type": "error", "code": "stale", "message": "old id", "fatal": False}
APPLIED: dict[str, Any] = {"type": "event.applied", "seq": 7, "event_ids": [0, 4], "chunk_index": 1, "first_frame": 3}
ACCEPTED: dict[str, Any] = {"type": "event.accepted", "seq": 6, "event_id": 0, "status": "accepted", "pending": 1}
CLOSED: dict[str, Any] = {"type": "session.closed", "seq": 12, "reason": "client"}
FAILED: dict[str, Any] = {
    "type": "session.failed",
    "seq": 9,
    "code": "tick_failed",
    "message": "the model failed",
    "chunk_index": 2,
    "can": ["reset", "close"],
}

SERVER_TEXT = [
    server(HELLO, "hello"),
    server_bad(
        HELLO, "hello of another version", "$.protocol", "unsupported_version", protocol="realtime-omni.world.v9"
    ),
    server_bad(HELLO, "hello without models", "$.models", models=DROP),
    server(STARTED, "started"),
    server(STARTED, "started in answer to an id", re="1", prompt="a maze", codec=None, format="rgb24"),
    server_bad(STARTED, "started with seq 0", "$.seq", seq=0),
    server_bad(STARTED, "started without codec", "$.codec", codec=DROP),
    server_bad(STARTED, "started with an unknown field", "$.latency", latency=3),
    server_bad(
        STARTED,
        "started without a limit",
        "$.limits.grace_s",
        limits={k: v for k, v in STARTED["limits"].items() if k != "grace_s"},
    ),
    server(RESUMED, "resumed"),
    server(STARTED, "started without a way back", can_fork=False, oldest_rewind=None),
    server_bad(STARTED, "started that does not say whether it can fork", "$.can_fork", can_fork=DROP),
    server_bad(STARTED, "started with a fork of 1", "$.can_fork", can_fork=1),
    server_bad(STARTED, "started with a way back to -1", "$.oldest_rewind", oldest_rewind=-1),
    server_bad(RESUMED, "resumed with a state that does not exist", "$.state", state="closing"),
    server_bad(RESUMED, "resumed has no seq", "$.seq", seq=3),
    server(ACCEPTED, "event accepted"),
    server(
        ACCEPTED, "event is a duplicate, with the prompt understood", status="duplicate", prompt="turn left", re="e"
    ),
    server_bad(ACCEPTED, "event accepted with another status", "$.status", status="maybe"),
    server(APPLIED, "event applied"),
    server_bad(APPLIED, "event applied with ids out of order", "$.event_ids", event_ids=[4, 0]),
    server_bad(APPLIED, "event applied with an id twice", "$.event_ids", event_ids=[4, 4]),
    server_bad(APPLIED, "event applied with no ids", "$.event_ids", event_ids=[]),
    server({"type": "event.discarded", "seq": 9, "event_ids": [5], "reason": "closed"}, "event discarded"),
    server(
        {"type": "event.discarded", "seq": 9, "event_ids": [5, 6], "reason": "rewind"}, "event discarded by a rewind"
    ),
    server(CHUNK, "chunk"),
    server(CHUNK, "chunk with a way back", oldest_rewind=1),
    server_bad(CHUNK, "chunk that does not say how far back", "$.oldest_rewind", oldest_rewind=DROP),
    server(CHUNK, "chunk without events and prompt", applied_event_ids=[], prompt=None),
    server(CHUNK, "latent chunk", latent_shape=[16, 3, 8, 8], frames=12),
    server_bad(CHUNK, "chunk with no frames", "$.frames", frames=0),
    server_bad(CHUNK, "chunk with 256 frames", "$.frames", frames=256),
    server_bad(CHUNK, "chunk without timings", "$.timings_ms", timings_ms=DROP),
    server({"type": "chunk.aborted", "seq": 3, "chunk_index": None}, "aborted, nothing ran"),
    server({"type": "chunk.aborted", "seq": 3, "chunk_index": 0, "re": "x"}, "aborted a chunk"),
    server({"type": "session.paused", "seq": 3}, "paused"),
    server({"type": "session.playing", "seq": 4, "re": "p"}, "playing"),
    server({"type": "session.reset_done", "seq": 5, "epoch": 1, "prompt": None, "seed": 0}, "reset done"),
    server(FORKED, "forked"),
    server(FORKED, "forked in answer to an id", re="f", prompt=None, oldest_rewind=None),
    server_bad(FORKED, "forked without a token", "$.resume_token", resume_token=DROP),
    server_bad(FORKED, "forked with a negative grace", "$.grace_s", grace_s=-1),
    server_bad(FORKED, "forked with no number", "$.seq", seq=DROP),
    server(REWOUND, "rewound"),
    server(REWOUND, "rewound in answer to an id", re="r", prompt="a maze"),
    server_bad(REWOUND, "rewound without an epoch", "$.epoch", epoch=DROP),
    server_bad(REWOUND, "rewound with a seed", "$.seed", seed=1),
    server({"type": "session.logged", "log": "e30=", "re": "l"}, "logged"),
    server_bad({"type": "session.logged", "log": "e30="}, "logged has no seq", "$.seq", seq=3),
    server({"type": "session.replayed", "seq": 9, "complete": True, "next_event_id": 4}, "replayed"),
    server({"type": "session.replaying", "seq": 8, "chunk_index": 0, "chunks": 3, "re": "p"}, "replaying"),
    server_bad({"type": "session.replaying", "seq": 8, "chunk_index": 0}, "replaying nothing", "$.chunks", chunks=0),
    server_bad(
        {"type": "session.replayed", "seq": 9, "complete": True, "next_event_id": 4},
        "replayed that does not say whether to the end",
        "$.complete",
        complete=DROP,
    ),
    server(FAILED, "failed"),
    server_bad(FAILED, "failed with a code that is not in the list", "$.code", code="bad_luck"),
    server_bad(FAILED, "failed with another remedy", "$.can[0]", can=["pray"]),
    server({"type": "session.recovered", "seq": 6, "chunk_index": 2}, "recovered"),
    server(CLOSED, "closed"),
    server(CLOSED, "closed by a failure", reason="failed", code="tick_failed", message="gone"),
    server(CLOSED, "taken over has no number", reason="taken_over", seq=DROP),
    server_bad(CLOSED, "taken over with a number", "$.seq", reason="taken_over"),
    server_bad(CLOSED, "closed without a number", "$.seq", seq=DROP),
    server({"type": "pong", "t": 1.5, "server_ms": 12.25}, "pong"),
    server({"type": "pong", "server_ms": 0}, "pong without t"),
    server(ERROR, "error"),
    server(ERROR, "error with everything", path="$.event_id", event_id=4, re="e", fatal=True, code="bad_message"),
    server_bad(ERROR, "error without fatal", "$.fatal", fatal=DROP),
    server_bad(ERROR, "error with fatal 0", "$.fatal", fatal=0),
    server_bad(ERROR, "error with an unknown code", "$.code", code="E42"),
    bad("a client's type", '{"type":"session.next"}', "$.type", direction="s2c"),
    bad("a key twice", '{"type":"pong","server_ms":1,"server_ms":1}', "$.server_ms", direction="s2c"),
]

FRAME: dict[str, Any] = {
    "format": "jpeg",
    "key": True,
    "last": False,
    "replay": False,
    "index": 0,
    "seq": 3,
    "epoch": 0,
    "chunk_index": 0,
    "frame": 0,
    "applied_event_id": None,
    "pts_ms": 0,
    "payload_bytes": 4,
}
NUMBERS = {"h264": 1, "jpeg": 2, "rgb24": 3, "latent": 4}


def frame_bytes(header: dict[str, Any], payload: bytes, **raw: int) -> bytes:
    """Section 4 by hand; ``raw`` overrides what a header cannot say."""
    flags = header["key"] * 1 + header["last"] * 2 + header["replay"] * 4
    event = 2**64 - 1 if header["applied_event_id"] is None else header["applied_event_id"]
    size = raw.get("header_bytes", 48)
    packed = struct.pack(
        "<H B B B B H Q I I Q Q I I",
        raw.get("magic", 0x4F52),
        raw.get("version", 1),
        raw.get("format", NUMBERS[header["format"]]),
        raw.get("flags", flags),
        header["index"],
        size,
        header["seq"],
        header["epoch"],
        header["chunk_index"],
        header["frame"],
        event,
        header["pts_ms"],
        header["payload_bytes"],
    )
    return packed + bytes(raw.get("extra", 0)) + payload


def frame(name: str, payload: bytes = b"\xff\xd8\xff\xd9", raw: dict[str, int] | None = None, **changes: Any) -> Vector:
    header = {**FRAME, "payload_bytes": len(payload), **changes}
    return {
        "name": name,
        "direction": "s2c",
        "kind": "binary",
        "wire": frame_bytes(header, payload, **(raw or {})).hex(),
        "expect": {"header": header, "payload": payload.hex()},
    }


def frame_bad(
    name: str,
    path: str,
    code: str = "bad_message",
    cut: int | None = None,
    tail: bytes = b"",
    raw: dict[str, int] | None = None,
    **changes: Any,
) -> Vector:
    data = (frame_bytes({**FRAME, **changes}, b"\xff\xd8\xff\xd9", **(raw or {})) + tail)[:cut]
    return {
        "name": name,
        "direction": "s2c",
        "kind": "binary",
        "wire": data.hex(),
        "expect": {"error": {"code": code, "path": path}},
    }


FRAMES = [
    frame("first frame"),
    frame("last frame of a chunk", last=True, index=2, seq=5, frame=2, pts_ms=100),
    frame(
        "H.264 delta frame",
        format="h264",
        key=False,
        payload=b"\x00\x00\x00\x01\x41\x9a",
        index=1,
        seq=4,
        frame=1,
        pts_ms=50,
    ),
    frame("H.264 key frame, replayed", format="h264", replay=True, payload=b"\x00\x00\x00\x01\x67\x42\xc0\x0a", seq=10),
    frame("raw picture of one pixel", format="rgb24", payload=b"\x01\x02\x03"),
    frame("latent of two numbers", format="latent", last=True, payload=b"\x00\x3c\x00\xbc"),
    frame("with an applied event", applied_event_id=0),
    frame("with the largest applied event", applied_event_id=BIG),
    frame(
        "every field at its largest",
        last=True,
        replay=True,
        index=255,
        seq=BIG,
        epoch=2**32 - 1,
        chunk_index=2**32 - 1,
        frame=BIG,
        pts_ms=2**32 - 1,
    ),
    frame("a longer header is skipped", raw={"header_bytes": 56, "extra": 8}),
    {
        "name": "the worked example of the specification, byte by byte",
        "direction": "s2c",
        "kind": "binary",
        "wire": "524f010203023000"
        + "0500000000000000"
        + "01000000"
        + "07000000"
        + "0800000000000000"
        + "0900000000000000"
        "0a000000" + "02000000" + "abcd",
        "expect": {
            "header": {
                "format": "jpeg",
                "key": True,
                "last": True,
                "replay": False,
                "index": 2,
                "seq": 5,
                "epoch": 1,
                "chunk_index": 7,
                "frame": 8,
                "applied_event_id": 9,
                "pts_ms": 10,
                "payload_bytes": 2,
            },
            "payload": "abcd",
        },
    },
    frame_bad("empty", "$", cut=0),
    frame_bad("47 bytes", "$", cut=47),
    frame_bad("another magic", "$.magic", raw={"magic": 0x4F53}),
    frame_bad("magic in the other byte order", "$.magic", raw={"magic": 0x524F}),
    frame_bad("version 2", "$.version", "unsupported_version", raw={"version": 2}),
    frame_bad("version 0", "$.version", "unsupported_version", raw={"version": 0}),
    frame_bad("format 0", "$.format", "unsupported_format", raw={"format": 0}),
    frame_bad("format 5", "$.format", "unsupported_format", raw={"format": 5}),
    frame_bad("a reserved flag", "$.flags", raw={"flags": 9}),
    frame_bad("header length 47", "$.header_bytes", raw={"header_bytes": 47}),
    frame_bad("header length 1025", "$.header_bytes", raw={"header_bytes": 1025}),
    frame_bad("header longer than the message", "$.payload_bytes", raw={"header_bytes": 1000}),
    frame_bad("seq 0", "$.seq", seq=0),
    frame_bad("seq above 2^53", "$.seq", seq=BIG + 1),
    frame_bad("frame index above 2^53", "$.frame", frame=2**60),
    frame_bad("applied event above 2^53", "$.applied_event_id", applied_event_id=2**63),
    frame_bad("payload longer than told", "$.payload_bytes", tail=b"x"),
    frame_bad("payload cut", "$.payload_bytes", cut=50),
    frame_bad("no payload", "$.payload_bytes", cut=48, payload_bytes=0),
]

FILES: dict[str, list[Vector]] = {
    "client_messages.json": CLIENT_GOOD,
    "client_refused.json": CLIENT_BAD,
    "server_messages.json": SERVER_TEXT,
    "frames.json": FRAMES,
}


def render(vectors: list[Vector]) -> str:
    return "[\n" + ",\n".join(json.dumps(vector, ensure_ascii=True) for vector in vectors) + "\n]\n"


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for file_name, vectors in FILES.items():
        (TARGET / file_name).write_text(render(vectors), encoding="utf-8")
        print(file_name, len(vectors))
