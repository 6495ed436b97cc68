"""Writes protocols/vectors/realtime: ``python tests/protocols/realtime/make_vectors.py``.

Every expectation is typed by hand from the text of realtime.md; this file does not import the package it judges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[3] / "protocols" / "vectors" / "realtime"
Json = dict[str, Any]


def client(kind: str, /, *server: Json, **fields: Any) -> Json:
    return {"client": {"type": kind, **fields}, "server": list(server)}


def fact(kind: str, /, *server: Json, **fields: Any) -> Json:
    return {"fact": {"type": kind, **fields}, "server": list(server)}


def event(kind: str, /, **fields: Any) -> Json:
    return {"type": kind, **fields}


def error(code: str, param: str | None, client_event: str | None = None, kind: str = "invalid_request_error") -> Json:
    return event("error", error={"type": kind, "code": code, "param": param, "event_id": client_event})


def user_text(text: str, **fields: Any) -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}], **fields}


def create(name: str, text: str, previous: str | None, **fields: Any) -> Json:
    """A client's text item and its two acknowledgements."""
    shown = user_text(text, id=name, status="completed", object="realtime.item")
    return client(
        "conversation.item.create",
        event("conversation.item.added", previous_item_id=previous, item=shown),
        event("conversation.item.done", previous_item_id=previous, item=shown),
        item=user_text(text),
        **fields,
    )


def assistant(name: str, status: str, *content: Json) -> Json:
    return {"type": "message", "role": "assistant", "id": name, "status": status, "content": list(content)}


def created(name: str, conversation: str | None = "$conv", metadata: Json | None = None, **fields: Any) -> Json:
    response = {"id": name, "object": "realtime.response", "status": "in_progress", "output": []}
    return event(
        "response.created", response={**response, "conversation_id": conversation, "metadata": metadata, **fields}
    )


def of(name: str, item: str, kind: str, index: int = 0, /, **fields: Any) -> Json:
    return event(f"response.{kind}", response_id=name, output_index=index, item_id=item, **fields)


def opened(name: str, item: str, previous: str | None, index: int = 0, kind: str = "audio") -> list[Json]:
    part = {"type": "audio", "transcript": ""} if kind == "audio" else {"type": "text", "text": ""}
    shown = assistant(item, "in_progress")
    return [
        event("response.output_item.added", response_id=name, output_index=index, item=shown),
        event("conversation.item.added", item=shown, previous_item_id=previous),
        of(name, item, "content_part.added", index, content_index=0, part=part),
    ]


def spoken(name: str, item: str, text: str, previous: str | None, status: str = "completed") -> list[Json]:
    """The end of a spoken message."""
    done = assistant(item, status, {"type": "output_audio", "transcript": text})
    return [
        of(name, item, "output_audio.done", content_index=0),
        of(name, item, "output_audio_transcript.done", content_index=0, transcript=text),
        of(name, item, "content_part.done", content_index=0, part={"type": "audio", "transcript": text}),
        event("response.output_item.done", response_id=name, output_index=0, item=done),
        event("conversation.item.done", item=done, previous_item_id=previous),
    ]


def done(name: str, status: str, reason: str | None = None, **fields: Any) -> Json:
    details = {"type": status} | ({} if reason is None else {"reason": reason})
    return event("response.done", response={"id": name, "status": status, "status_details": details, **fields})


def turn(item: str, previous: str | None, answer: Json, *extra: Json) -> list[Json]:
    """Speech of a user, from its first sample to the response that answers it."""
    user = {"type": "message", "role": "user", "id": item, "content": [{"type": "input_audio", "transcript": None}]}
    return [
        fact(
            "user_started",
            event("input_audio_buffer.speech_started", audio_start_ms=700, item_id=item),
            *extra,
            audio_start_ms=700,
        ),
        fact(
            "user_stopped",
            event("input_audio_buffer.speech_stopped", audio_end_ms=2500, item_id=item),
            event("input_audio_buffer.committed", item_id=item, previous_item_id=previous),
            event("conversation.item.added", item=user, previous_item_id=previous),
            event("conversation.item.done", item=user, previous_item_id=previous),
            answer,
            audio_end_ms=2500,
        ),
    ]


def speech(name: str, item: str, ms: int, *first: Json, **times: int) -> Json:
    delta = of(name, item, "output_audio.delta", content_index=0, delta_bytes=48 * ms, **times)
    return fact("response_speech", *first, delta, response_id=name, audio_ms=ms, **times)


def text(name: str, item: str, words: str, *first: Json, **times: int) -> Json:
    delta = of(name, item, "output_audio_transcript.delta", content_index=0, delta=words, **times)
    return fact("response_text", *first, delta, response_id=name, text=words, **times)


SESSION = {
    "id": "sess_1",
    "object": "realtime.session",
    "type": "realtime",
    "model": "puppet",
    "expires_at": 1800000000,
}
VAD = {
    "type": "server_vad",
    "threshold": 0.5,
    "prefix_padding_ms": 300,
    "silence_duration_ms": 500,
    "create_response": True,
    "interrupt_response": True,
    "idle_timeout_ms": None,
}
HELLO = {
    "open": True,
    "server": [
        event(
            "session.created",
            session={
                **SESSION,
                "instructions": "",
                "output_modalities": ["audio"],
                "tools": [],
                "tool_choice": "auto",
                "max_output_tokens": "inf",
                "truncation": "auto",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24000},
                        "turn_detection": VAD,
                        "transcription": None,
                        "noise_reduction": None,
                    },
                    "output": {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "puppet", "speed": 1.0},
                },
            },
        ),
        event("conversation.created", conversation={"id": "$conv", "object": "realtime.conversation"}),
    ],
}


def updated(*, input_audio: Json | None = None, **session: Any) -> Json:
    shown = {**SESSION, **session}
    return event("session.updated", session=shown | ({} if input_audio is None else {"audio": {"input": input_audio}}))


CONVERSATIONS: dict[str, list[Json]] = {
    "an update merges object by object": [
        HELLO,
        client(
            "session.update",
            updated(input_audio={"turn_detection": {**VAD, "threshold": 0.8}}, instructions="Be brief."),
            session={
                "type": "realtime",
                "instructions": "Be brief.",
                "audio": {"input": {"turn_detection": {"threshold": 0.8}}},
            },
        ),
        client(
            "session.update",
            updated(
                input_audio={
                    "turn_detection": {
                        "type": "semantic_vad",
                        "eagerness": "auto",
                        "create_response": True,
                        "interrupt_response": True,
                    }
                },
                instructions="Be brief.",
            ),
            session={"type": "realtime", "audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}},
        ),
        client(
            "session.update",
            updated(input_audio={"turn_detection": None}, instructions=""),
            session={"instructions": "", "audio": {"input": {"turn_detection": None}}, "tracing": "auto"},
        ),
        client(
            "session.update",
            error("invalid_value", "session.audio.input.format.rate", "mine"),
            event_id="mine",
            session={"instructions": "lost", "audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
        ),
        client("session.update", updated(instructions=""), session={"type": "realtime"}),
    ],
    "a greeting by text alone": [
        HELLO,
        create("$hi", "hi", None),
        client("response.create", created("$r", metadata={"n": "1"}), response={"metadata": {"n": "1"}}),
        text("$r", "$a", "Hello ", *opened("$r", "$a", "$hi"), start_ms=0, end_ms=400),
        speech("$r", "$a", 80, start_ms=0, end_ms=80),
        text("$r", "$a", "there.", start_ms=400, end_ms=900),
        fact(
            "response_completed",
            *spoken("$r", "$a", "Hello there.", "$hi"),
            done(
                "$r",
                "completed",
                metadata={"n": "1"},
                output=[assistant("$a", "completed", {"type": "output_audio", "transcript": "Hello there."})],
                usage={
                    "total_tokens": 0,
                    "input_tokens": 0,
                    "output_tokens": 0,
                    "input_token_details": {"text_tokens": 0, "audio_tokens": 0, "image_tokens": 0, "cached_tokens": 0},
                    "output_token_details": {"text_tokens": 0, "audio_tokens": 0},
                },
            ),
            response_id="$r",
        ),
    ],
    "a user who speaks interrupts, and is answered": [
        HELLO,
        *turn("$u1", None, created("$r1")),
        text("$r1", "$a1", "One two", *opened("$r1", "$a1", "$u1")),
        speech("$r1", "$a1", 100),
        *turn(
            "$u2",
            "$a1",
            created("$r2"),
            *spoken("$r1", "$a1", "One two", "$u1", "incomplete"),
            done("$r1", "cancelled", "turn_detected"),
        ),
        fact("response_speech", response_id="$r1", audio_ms=10),
        fact("response_completed", response_id="$r1"),
        client(
            "conversation.item.truncate",
            event("conversation.item.truncated", item_id="$a1", content_index=0, audio_end_ms=100),
            item_id="$a1",
            content_index=0,
            audio_end_ms=185,
        ),
        client(
            "conversation.item.truncate",
            event("conversation.item.truncated", item_id="$a1", content_index=0, audio_end_ms=0),
            item_id="$a1",
            content_index=0,
            audio_end_ms=0,
        ),
        client(
            "conversation.item.retrieve",
            event(
                "conversation.item.retrieved",
                item=assistant("$a1", "incomplete", {"type": "output_audio", "transcript": ""}),
            ),
            item_id="$a1",
        ),
    ],
    "create right after cancel": [
        HELLO,
        client("response.create", created("$r1")),
        speech("$r1", "$a", 10, *opened("$r1", "$a", None)),
        client("response.create", error("conversation_already_has_active_response", None, "twice"), event_id="twice"),
        client(
            "response.cancel",
            *spoken("$r1", "$a", "", None, "incomplete"),
            done("$r1", "cancelled", "client_cancelled"),
        ),
        client("response.create", created("$r2")),
        client("response.cancel", done("$r2", "cancelled", "client_cancelled", output=[]), response_id="$r2"),
        client("response.cancel", error("response_cancel_not_active", None, "late"), event_id="late"),
    ],
    "a function is called and answers": [
        HELLO,
        client("response.create", created("$r1")),
        fact(
            "tool_call",
            event(
                "response.output_item.added",
                response_id="$r1",
                output_index=0,
                item={"type": "function_call", "id": "$f", "name": "time", "arguments": "", "status": "in_progress"},
            ),
            event(
                "conversation.item.added",
                previous_item_id=None,
                item={"type": "function_call", "id": "$f", "name": "time", "call_id": "$call"},
            ),
            of("$r1", "$f", "function_call_arguments.delta", call_id="$call", delta='{"zone": "utc"}'),
            of("$r1", "$f", "function_call_arguments.done", call_id="$call", name="time", arguments='{"zone": "utc"}'),
            event(
                "response.output_item.done",
                response_id="$r1",
                output_index=0,
                item={"type": "function_call", "id": "$f", "status": "completed", "arguments": '{"zone": "utc"}'},
            ),
            event("conversation.item.done", previous_item_id=None, item={"id": "$f", "status": "completed"}),
            response_id="$r1",
            name="time",
            arguments='{"zone": "utc"}',
        ),
        fact("response_completed", done("$r1", "completed"), response_id="$r1"),
        client(
            "conversation.item.create",
            error("invalid_tool_call_id", "item.call_id"),
            item={"type": "function_call_output", "call_id": "nobody", "output": "12"},
        ),
        client(
            "conversation.item.create",
            event("conversation.item.added", previous_item_id="$f", item={"call_id": "$call", "output": "12"}),
            event("conversation.item.done", previous_item_id="$f", item={"type": "function_call_output"}),
            item={"type": "function_call_output", "call_id": "$call", "output": "12"},
        ),
        client(
            "conversation.item.create",
            error("invalid_tool_call_id", "item.call_id"),
            item={"type": "function_call_output", "call_id": "$call", "output": "13"},
        ),
        client("response.create", created("$r2")),
    ],
    "a text answer out of band, beside the conversation": [
        HELLO,
        client("response.create", created("$r1")),
        client(
            "response.create",
            created("$r2", None, {"topic": "mood"}, output_modalities=["text"]),
            response={
                "conversation": "none",
                "output_modalities": ["text"],
                "metadata": {"topic": "mood"},
                "input": [user_text("Is it glad?")],
            },
        ),
        fact(
            "response_text",
            event("response.output_item.added", response_id="$r2", item=assistant("$o", "in_progress")),
            of("$r2", "$o", "content_part.added", part={"type": "text", "text": ""}),
            of("$r2", "$o", "output_text.delta", content_index=0, delta="Yes."),
            response_id="$r2",
            text="Yes.",
        ),
        fact(
            "response_completed",
            of("$r2", "$o", "output_text.done", content_index=0, text="Yes."),
            of("$r2", "$o", "content_part.done", part={"type": "text", "text": "Yes."}),
            event(
                "response.output_item.done",
                response_id="$r2",
                item=assistant("$o", "completed", {"type": "output_text", "text": "Yes."}),
            ),
            done("$r2", "completed", metadata={"topic": "mood"}, conversation_id=None),
            response_id="$r2",
        ),
        client(
            "conversation.item.retrieve",
            error("item_retrieve_invalid_item_id", "item_id", "q"),
            item_id="$o",
            event_id="q",
        ),
    ],
    "items are placed, found and removed": [
        HELLO,
        create("$b", "b", None),
        create("$a", "a", None, previous_item_id="root"),
        create("$c", "c", "$a", previous_item_id="$a"),
        client(
            "conversation.item.create",
            error("item_create_invalid_previous_item_id", "previous_item_id"),
            item=user_text("d"),
            previous_item_id="nobody",
        ),
        client(
            "conversation.item.create", error("item_create_duplicate_item_id", "item.id"), item=user_text("d", id="$a")
        ),
        client("conversation.item.delete", event("conversation.item.deleted", item_id="$c"), item_id="$c"),
        client("conversation.item.delete", error("item_delete_invalid_item_id", "item_id"), item_id="$c"),
        client(
            "conversation.item.truncate",
            error("item_truncate_invalid_item_id", "item_id"),
            item_id="$c",
            content_index=0,
            audio_end_ms=1,
        ),
        client(
            "conversation.item.truncate",
            error("invalid_value", "item_id"),
            item_id="$a",
            content_index=0,
            audio_end_ms=1,
        ),
        create("$e", "e", "$b"),
    ],
    "a client that detects turns itself": [
        HELLO,
        client(
            "session.update",
            updated(input_audio={"turn_detection": None}),
            session={"audio": {"input": {"turn_detection": None}}},
        ),
        client("input_audio_buffer.commit", error("input_audio_buffer_commit_empty", None)),
        client("input_audio_buffer.append", audio="AAAA"),
        client("input_audio_buffer.clear", event("input_audio_buffer.cleared")),
        client("input_audio_buffer.commit", error("input_audio_buffer_commit_empty", None)),
        client("input_audio_buffer.append", error("invalid_value", "audio"), audio="no base64!"),
        client("input_audio_buffer.append", audio="AAAA"),
        fact("user_started", audio_start_ms=5),
        client(
            "input_audio_buffer.commit",
            event("input_audio_buffer.committed", item_id="$u", previous_item_id=None),
            event("conversation.item.added", previous_item_id=None, item={"id": "$u", "role": "user"}),
            event("conversation.item.done", previous_item_id=None, item={"id": "$u", "status": "completed"}),
        ),
        client("response.create", created("$r")),
    ],
    "what a user said is transcribed": [
        HELLO,
        client(
            "session.update",
            updated(input_audio={"transcription": {"model": "m", "language": None, "prompt": None}}),
            session={"audio": {"input": {"transcription": {"model": "m"}}}},
        ),
        *turn("$u", None, created("$r")),
        fact(
            "user_transcript",
            event(
                "conversation.item.input_audio_transcription.delta",
                item_id="$u",
                content_index=0,
                delta="Hi.",
                start_ms=800,
                end_ms=1200,
            ),
            item_id="$u",
            delta="Hi.",
            start_ms=800,
            end_ms=1200,
        ),
        fact(
            "user_transcribed",
            event(
                "conversation.item.input_audio_transcription.completed",
                item_id="$u",
                content_index=0,
                transcript="Hi.",
                usage={"type": "duration", "seconds": 1.8},
            ),
            item_id="$u",
            transcript="Hi.",
            seconds=1.8,
        ),
        client(
            "conversation.item.retrieve",
            event(
                "conversation.item.retrieved",
                item={"id": "$u", "content": [{"type": "input_audio", "transcript": "Hi."}]},
            ),
            item_id="$u",
        ),
    ],
    "responses that end early": [
        HELLO,
        client("response.create", created("$r1")),
        fact(
            "response_stopped",
            done("$r1", "incomplete", "max_output_tokens"),
            response_id="$r1",
            reason="max_output_tokens",
        ),
        client("response.create", created("$r2")),
        text("$r2", "$a", "One ", *opened("$r2", "$a", None)),
        fact(
            "response_failed",
            *spoken("$r2", "$a", "One ", None, "incomplete"),
            event(
                "response.done",
                response={
                    "id": "$r2",
                    "status": "failed",
                    "status_details": {"type": "failed", "error": {"type": "server_error", "code": "model_failed"}},
                },
            ),
            response_id="$r2",
            message="the model failed",
        ),
    ],
}


def sent(kind: str, /, **fields: Any) -> str:
    return json.dumps({"type": kind, **fields})


def session(**fields: Any) -> str:
    return sent("session.update", session=fields)


def item(**fields: Any) -> str:
    return sent("conversation.item.create", item=fields)


def content(role: str, kind: str) -> str:
    return item(type="message", role=role, content=[{"type": kind}])


PARAMETERS = "session.tools[0].parameters"
BIG: Json = {"maximum": 2**53 + 1}
DEEP: Json = {}
for _ in range(17):
    DEEP = {"items": DEEP}
DETECTION = "session.audio.input.turn_detection"
VALUE, MISSING, JSON = "invalid_value", "missing_required_parameter", "invalid_json"
SENT: list[tuple[str, str, str, str | None]] = [
    ("not JSON", "{", JSON, None),
    ("not an object", "[1]", JSON, None),
    ("too deep", "[" * 2000 + "]" * 2000, JSON, None),
    ("no type", "{}", MISSING, "type"),
    ("an unknown type", sent("hello"), VALUE, "type"),
    ("a type that is no text", '{"type": 1}', VALUE, "type"),
    ("no session", sent("session.update"), MISSING, "session"),
    ("another kind of session", session(type="transcription"), VALUE, "session.type"),
    ("both modalities", session(output_modalities=["text", "audio"]), VALUE, "session.output_modalities"),
    ("a voice nobody has", session(audio={"output": {"voice": "../x"}}), VALUE, "session.audio.output.voice"),
    ("a speed beyond the range", session(audio={"output": {"speed": 2}}), VALUE, "session.audio.output.speed"),
    (
        "turn detection of no kind",
        session(audio={"input": {"turn_detection": {"type": "x"}}}),
        VALUE,
        DETECTION + ".type",
    ),
    ("a tool without a name", session(tools=[{"type": "function"}]), MISSING, "session.tools[0].name"),
    (
        "a tool nested too deep",
        session(tools=[{"type": "function", "name": "f", "parameters": DEEP}]),
        VALUE,
        PARAMETERS,
    ),
    (
        "a number no double holds",
        session(tools=[{"type": "function", "name": "f", "parameters": BIG}]),
        VALUE,
        PARAMETERS,
    ),
    ("no audio", sent("input_audio_buffer.append"), MISSING, "audio"),
    ("an item without a type", item(), MISSING, "item.type"),
    ("an item with an empty id", item(type="message", role="user", content=[], id=""), VALUE, "item.id"),
    ("a picture", content("user", "input_image"), VALUE, "item.content[0].type"),
    ("audio without a transcript", content("user", "input_audio"), MISSING, "item.content[0].transcript"),
    ("speech of an assistant", content("assistant", "output_audio"), VALUE, "item.content[0].type"),
    ("a call's output without a call", item(type="function_call_output", output=""), MISSING, "item.call_id"),
    (
        "metadata that is no text",
        sent("response.create", response={"metadata": {"a": {}}}),
        VALUE,
        "response.metadata[...]",
    ),
    (
        "a reference to nothing",
        sent("response.create", response={"input": [{"type": "item_reference", "id": "x"}]}),
        VALUE,
        "response.input[0].id",
    ),
]


def main() -> None:
    TARGET.mkdir(parents=True, exist_ok=True)
    conversations = [{"name": name, "steps": steps} for name, steps in CONVERSATIONS.items()]
    refused = [
        {"name": name, "wire": wire, "expect": {"code": code, "param": param}} for name, wire, code, param in SENT
    ]
    for name, content in (("conversations", conversations), ("refused", refused)):
        (TARGET / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
