"""The golden vectors of the Live protocol hold for the parser and the machine."""

from __future__ import annotations

import base64
import json
from typing import Any, assert_never

import pytest

from protocols.live.make_vectors import FILES, REFUSED, SESSIONS, TAKEN, TARGET, render
from realtime_omni_protocols.live import (
    Append,
    Close,
    Command,
    End,
    GoOn,
    Inject,
    LiveCode,
    LiveError,
    LiveServerSide,
    PlayFixture,
    Send,
    Start,
    ToolOutput,
    UseTools,
    parse_client,
    parse_server,
)
from realtime_omni_protocols.live.client_events import event_type

BYTES = ("audio", "reflected")


def test_the_files_are_what_the_script_writes() -> None:
    for name, vectors in FILES.items():
        assert (TARGET / name).read_text(encoding="utf-8") == render(vectors), name


@pytest.mark.parametrize("vector", TAKEN, ids=lambda vector: vector["name"])
def test_a_good_event_is_taken(vector: dict[str, Any]) -> None:
    event = parse_client(vector["wire"], fork=vector["fork"])
    assert event_type(event) == json.loads(vector["wire"])["type"]


@pytest.mark.parametrize("vector", REFUSED, ids=lambda vector: vector["name"])
def test_a_bad_event_is_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(LiveError) as caught:
        parse_client(vector["wire"], fork=vector["fork"])
    error = caught.value
    told = {"code": error.code.value, "param": error.param, "client_event_id": error.client_event_id}
    assert told == vector["expect"]


def shown(command: Command) -> dict[str, Any]:
    """A command in the vectors' form; an error's text is free."""
    match command:
        case Send(peer=peer, data=data):
            parse_server(data)
            event = json.loads(data)
            event.get("error", {}).pop("message", None)
            return {"send": peer, "event": event}
        case Close(peer=peer, code=code, reason=reason):
            return {"close": peer, "code": int(code), "reason": reason}
        case Start(config=config):
            return {"start": config.model}
        case Append(audio=audio, heard=heard):
            return {"append": base64.b64encode(audio).decode(), "heard": heard}
        case Inject(ticket=ticket, kind=kind, text=text):
            return {"inject": ticket, "kind": kind, "text": text}
        case PlayFixture(audio=audio):
            return {"fixture": base64.b64encode(audio).decode()}
        case UseTools(tools=tools, choice=choice):
            return {"tools": None if tools is None else [tool.name for tool in tools], "choice": choice}
        case ToolOutput(call_id=call_id, output=output):
            return {"tool_output": call_id, "output": output}
        case GoOn():
            return {"go_on": True}
        case End(reason=reason):
            return {"end": reason}
        case _:
            assert_never(command)


def carry_out(side: LiveServerSide, step: dict[str, Any]) -> list[Command]:
    if "receive" in step:
        return side.receive(step["peer"], json.dumps(step["receive"]))
    args = {name: base64.b64decode(value) if name in BYTES else value for name, value in step["args"].items()}
    match step["fact"]:
        case "attach":
            side.attach()
            return []
        case "refuse_start":
            return side.refuse_start(LiveError(LiveCode(args["code"]), "x"))
        case name:
            said: list[Command] = getattr(side, name)(**args)
            return said


@pytest.mark.parametrize("vector", SESSIONS, ids=lambda vector: vector["name"])
def test_a_session(vector: dict[str, Any]) -> None:
    side = LiveServerSide()
    for number, step in enumerate(vector["steps"]):
        assert [shown(command) for command in carry_out(side, step)] == step["expect"], f"step {number}"
