"""Moshi's wire: vectors, the machine's promises, and that nothing a client says becomes a path."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.moshi.make_vectors import CLIENT, FILES, QUERIES, SERVER, TARGET, render
from realtime_omni_protocols.errors import LocalError
from realtime_omni_protocols.moshi import (
    MAX_MESSAGE_BYTES,
    Audio,
    Close,
    MoshiClose,
    MoshiCode,
    MoshiError,
    MoshiServerSide,
    MoshiState,
    Send,
    read_query,
)

SPEC = (Path(__file__).parents[3] / "protocols" / "moshi.md").read_text(encoding="utf-8")


def opened() -> MoshiServerSide:
    side = MoshiServerSide()
    side.ready()
    return side


def test_the_files_are_what_the_script_writes() -> None:
    for name, vectors in FILES.items():
        assert (TARGET / name).read_text(encoding="utf-8") == render(vectors), name


@pytest.mark.parametrize("vector", CLIENT, ids=lambda vector: vector["name"])
def test_a_message_of_a_client(vector: dict[str, Any]) -> None:
    side, expect = opened(), vector["expect"]
    commands = side.receive(bytes.fromhex(vector["wire_hex"]) + bytes(vector["zeros"]))
    if "audio" in expect:
        assert commands == [Audio(bytes.fromhex(expect["audio"]))]
    elif "audio_bytes" in expect:
        assert commands == [Audio(bytes(expect["audio_bytes"]))]
    elif "error" in expect:
        said, close = commands
        assert isinstance(said, Send)
        assert said.data.startswith(b"\x05" + expect["error"].encode() + b": ")
        assert close == Close(MoshiClose(expect["close"]), expect["error"])
        assert side.state is MoshiState.CLOSED
    else:
        assert commands == []
        assert side.statistics().ignored == 1


@pytest.mark.parametrize("vector", SERVER, ids=lambda vector: vector["name"])
def test_a_message_of_the_server(vector: dict[str, Any]) -> None:
    side = MoshiServerSide() if vector["say"] == "ready" else opened()
    args = {name: bytes.fromhex(value) if name == "data" else value for name, value in vector["args"].items()}
    said = getattr(side, vector["say"])(**args)
    frames = [output.data for output in ([said] if isinstance(said, Send) else said)]
    assert frames == ([] if vector["wire_hex"] is None else [bytes.fromhex(vector["wire_hex"])])


@pytest.mark.parametrize("vector", QUERIES, ids=lambda vector: vector["name"])
def test_a_query(vector: dict[str, Any]) -> None:
    pairs = parse_qsl(vector["query"], keep_blank_values=True)
    if "error" in vector:
        with pytest.raises(MoshiError) as caught:
            read_query(pairs)
        assert {"code": caught.value.code.value, "param": caught.value.param} == vector["error"]
        return
    chosen = {name: value for name, value in msgspec.to_builtins(read_query(pairs)).items() if value is not None}
    assert chosen == vector["expect"]


@given(st.text(max_size=80))
def test_a_voice_that_is_taken_is_no_path(name: str) -> None:
    try:
        voice = read_query([("voice_prompt", name)]).voice
    except MoshiError:
        return
    assert voice is None or re.fullmatch(r"[A-Za-z0-9_-]{1,64}", voice)


def test_nothing_is_read_or_said_before_the_handshake() -> None:
    side = MoshiServerSide()
    assert side.receive(b"\x01OggS") == []
    assert side.audio(b"OggS") == []
    assert side.text("hi") == []
    assert side.ready() == Send(b"\x00")
    with pytest.raises(LocalError):
        side.ready()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.text(max_size=5), st.integers(0, 3)), max_size=30))
def test_after_the_end_nothing_is_said_and_audio_is_kept_in_order(steps: list[bytes | str | int]) -> None:
    """Seeded faults that this finds: audio without its kind byte cut off; a second error; speech after the close."""
    side = opened()
    sent: list[Send | Close] = []
    heard = b""
    for step in steps:
        match step:
            case 0:
                sent += side.fail(MoshiError(MoshiCode.SHUTDOWN, "bye"))
            case 1:
                sent += side.audio(b"A")
            case 2:
                sent += side.text("t")
            case 3:
                side.lost()
            case frame:
                commands = side.receive(frame)  # type: ignore[arg-type]
                heard += b"".join(command.data for command in commands if isinstance(command, Audio))
    until = next((i for i, step in enumerate(steps) if step in (0, 3)), len(steps))
    frames = [step for step in steps[:until] if isinstance(step, bytes)]
    assert heard == b"".join(frame[1:] for frame in frames if frame[:1] == b"\x01")
    kinds = [output.data[0] for output in sent if isinstance(output, Send)]
    assert kinds == [step for step in steps[:until] if isinstance(step, int)] + (
        [5] if steps[until:][:1] == [0] else []
    )
    assert sum(isinstance(output, Close) for output in sent) == (steps[until:][:1] == [0])


def test_the_largest_message_is_an_ogg_page() -> None:
    assert MAX_MESSAGE_BYTES > 1 + 27 + 255 + 255 * 255


def test_every_code_is_in_the_text() -> None:
    for code in MoshiCode:
        assert f"`{code.value}`" in SPEC, code
    for close in MoshiClose:
        assert str(int(close)) in SPEC, close
