"""Values refuse what they cannot be, by name, when they are built."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from realtime_omni.errors import ArgumentError, ChunkMetadataError
from realtime_omni.session.values import (
    MAX_EVENT_ID,
    MAX_PAYLOAD_BYTES,
    MAX_PAYLOAD_DEPTH,
    MAX_PROMPT_CHARS,
    MAX_TRACKS,
    Artifact,
    ChunkIndex,
    ChunkMetadata,
    ControlInput,
    EventId,
    Modality,
    Representation,
    SessionEvent,
    SessionId,
    TickRequest,
)

LOOK = ControlInput("camera", "test.v1", {"keys": ["w"]})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.req("AC-01")
@pytest.mark.parametrize("wrong", [True, False, -1, MAX_EVENT_ID + 1, 1.0, "1", None, math.nan], ids=repr)
def test_an_event_id_is_an_integer_from_0_to_2_to_the_53_and_never_a_bool(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="event_id") as refused:
        SessionEvent(wrong, prompt="red")
    assert refused.value.path == "event_id"


@pytest.mark.parametrize("event_id", [0, 1, MAX_EVENT_ID])
def test_the_smallest_and_the_largest_event_id_are_accepted(event_id: int) -> None:
    assert SessionEvent(EventId(event_id), prompt="red").event_id == event_id


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"a": math.nan}, "data.a"),
        ({"a": [1.0, math.inf]}, "data.a[1]"),
        ({"a": {"b": -math.inf}}, "data.a.b"),
        ({"a": object()}, "data.a"),
        ({"a": b"bytes"}, "data.a"),
        ({"a": {1, 2}}, "data.a"),
        ({"a": np.zeros(2)}, "data.a"),
        ({"a": np.int64(1)}, "data.a"),
        ({"a": 2**53 + 1}, "data.a"),
        ({"a": -(2**53) - 1}, "data.a"),
        ({"a": {7: 1}}, "data.a"),
        ({"a": "\ud800"}, "data.a"),
        ({"a": nested(MAX_PAYLOAD_DEPTH + 1)}, "data.a" + "[0]" * MAX_PAYLOAD_DEPTH),
        ({"a": "x" * MAX_PAYLOAD_BYTES}, "data"),
        ("text", "data"),
        ([1], "data"),
        (None, "data"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 90 else type(value).__name__,
)
def test_a_payload_that_is_not_plain_json_is_refused_with_the_path_of_the_culprit(data: Any, path: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        ControlInput("camera", "test.v1", data)
    assert refused.value.path == path


def test_a_payload_at_the_allowed_depth_is_accepted() -> None:
    assert ControlInput("camera", "test.v1", {"a": nested(MAX_PAYLOAD_DEPTH - 1)}).track == "camera"


@pytest.mark.parametrize(
    "prompt", ["", "  \n", "x" * (MAX_PROMPT_CHARS + 1), 3, "\udfff"], ids=["", "ws", "long", "3", "sur"]
)
def test_a_prompt_that_says_nothing_or_too_much_is_refused(prompt: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        SessionEvent(EventId(0), prompt=prompt)
    assert refused.value.path == "prompt"


@pytest.mark.parametrize(
    ("track", "schema", "path"),
    [("", "s", "track"), (" ", "s", "track"), ("t", "", "schema"), ("t", 3, "schema"), ("x" * 129, "s", "track")],
    ids=repr,
)
def test_track_and_schema_are_short_names(track: Any, schema: Any, path: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        ControlInput(track, schema, {})
    assert refused.value.path == path


def test_an_event_holds_one_control_per_track_and_not_too_many() -> None:
    with pytest.raises(ArgumentError, match="two entries"):
        SessionEvent(EventId(0), controls=(LOOK, LOOK))
    many = tuple(ControlInput(f"t{i}", "s", {}) for i in range(MAX_TRACKS + 1))
    with pytest.raises(ArgumentError, match="tracks"):
        SessionEvent(EventId(0), controls=many)


@pytest.mark.parametrize("controls", ["wasd", b"w", {"track": 1}, 7, ("w",)], ids=repr)
def test_controls_must_be_a_sequence_of_control_inputs(controls: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        SessionEvent(EventId(0), controls=controls)
    assert (refused.value.path or "").startswith("controls")


def test_an_event_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="must carry"):
        SessionEvent(EventId(0))


def test_a_payload_is_copied_when_the_event_is_built_and_cannot_be_edited() -> None:
    keys = ["w"]
    data = {"keys": keys}
    control = ControlInput("camera", "test.v1", data)
    keys.append("a")
    data["more"] = 1  # type: ignore[assignment]
    assert control.to_dict()["data"] == {"keys": ["w"]}
    with pytest.raises(TypeError):
        control.data["keys"] = ()  # type: ignore[index]


def test_fingerprints_tell_values_apart_that_python_calls_equal() -> None:
    prints = {
        SessionEvent(EventId(0), controls=(ControlInput("t", "s", {"v": v}),)).fingerprint for v in (1, 1.0, True, "1")
    }
    assert len(prints) == 4


def test_the_order_of_keys_in_a_payload_does_not_matter_to_the_fingerprint() -> None:
    one = ControlInput("t", "s", {"a": 1, "b": 2})
    two = ControlInput("t", "s", {"b": 2, "a": 1})
    assert (
        SessionEvent(EventId(0), controls=(one,)).fingerprint == SessionEvent(EventId(0), controls=(two,)).fingerprint
    )


def tick(**changes: Any) -> TickRequest:
    fields = {
        "session_id": SessionId("a"),
        "request_id": "ar-a-3",
        "chunk_index": ChunkIndex(3),
        "applied_event_ids": (EventId(7), EventId(8)),
        "prompt": "red",
        "controls": (LOOK,),
    }
    return TickRequest(**{**fields, **changes})


def test_a_tick_survives_the_trip_through_extra_args() -> None:
    original = tick(reset=True)
    assert TickRequest.from_extra_args({"own": 1, TickRequest.EXTRA_ARGS_KEY: original.to_extra_args()}) == original


def test_extra_args_without_a_tick_never_invent_a_session() -> None:
    assert TickRequest.from_extra_args({"session_id": "a", "reset": True}) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"session_id": ""},
        {"session_id": None},
        {"request_id": " "},
        {"chunk_index": True},
        {"chunk_index": -1},
        {"applied_event_ids": "78"},
        {"applied_event_ids": [8, 7]},
        {"applied_event_ids": [7, 7]},
        {"applied_event_ids": [True]},
        {"controls": "camera"},
        {"controls": ["camera"]},
        {"controls": [{"track": "camera"}]},
        {"controls": {"track": "camera"}},
        {"prompt": " "},
        {"reset": "false"},
        {"close_session": 0},
    ],
    ids=repr,
)
def test_a_malformed_tick_is_refused_as_an_argument(wrong: dict[str, Any]) -> None:
    raw = {**tick().to_extra_args(), **wrong}
    with pytest.raises((ArgumentError, ChunkMetadataError)) as refused:
        TickRequest.from_extra_args({TickRequest.EXTRA_ARGS_KEY: raw})
    assert next(iter(wrong)) in (refused.value.path or "")


def test_a_tick_that_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(ArgumentError, match="mapping"):
        TickRequest.from_extra_args({TickRequest.EXTRA_ARGS_KEY: [1]})


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"session_id": 3}, "session_id"),
        ({"chunk_index": True}, "chunk_index"),
        ({"chunk_index": None}, "chunk_index"),
        ({"applied_event_ids": [8, 7]}, "applied_event_ids"),
        ({"applied_event_ids": "7"}, "applied_event_ids"),
        ({"applied_event_ids": [True]}, "applied_event_ids[0]"),
    ],
    ids=repr,
)
def test_foreign_metadata_is_validated_again_by_path(wrong: dict[str, Any], path: str) -> None:
    raw = {**ChunkMetadata.from_tick(tick()).to_dict(), **wrong}
    with pytest.raises(ChunkMetadataError) as refused:
        ChunkMetadata.parse(raw)
    assert (refused.value.path or "").endswith(path)


def test_an_artifact_is_printed_without_its_numbers() -> None:
    data = np.zeros((3, 3, 8, 8), np.uint8)
    video = Artifact("frames", Modality.VIDEO, Representation.DECODED, "TCHW", data, fps=12.0)
    assert repr(video) == "Artifact('frames', video, decoded, TCHW, uint8 [3, 3, 8, 8], 576 bytes, fps=12.0)"
    latent = Artifact("latent", Modality.VIDEO, Representation.LATENT, "TCHW", torch.zeros(1, 2, dtype=torch.bfloat16))
    assert repr(latent) == "Artifact('latent', video, latent, TCHW, bfloat16 [1, 2], 4 bytes)"
