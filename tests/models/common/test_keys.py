"""From held keys and scripts to the keys of each frame of a block."""

from __future__ import annotations

from typing import Any

import pytest

from realtime_omni.errors import ArgumentError
from realtime_omni.models.common.keys import HELD, KEYS, SCRIPT, TRACK, KeyReducer, check_control, schemas
from realtime_omni.session.values import ControlInput, EventId, SessionEvent

FRAMES = 3


def held(*keys: str, **more: Any) -> ControlInput:
    return ControlInput(TRACK, HELD, {"keys": list(keys), **more})


def script(*frames: list[str]) -> ControlInput:
    return ControlInput(TRACK, SCRIPT, {"mode": "script", "frames": list(frames)})


def reduce(reducer: KeyReducer, *controls: ControlInput, commit: bool = True) -> list[str]:
    """The keys of each frame, as one string per frame."""
    events = [SessionEvent(EventId(i), controls=(control,)) for i, control in enumerate(controls)]
    prepared = reducer.prepare({}, events, 0)
    if commit:
        reducer.commit(prepared)
    (snapshot,) = prepared.controls
    assert (snapshot.track, snapshot.schema) == (TRACK, SCRIPT)
    assert prepared.after == ()
    check_control(snapshot, FRAMES)
    return ["".join(keys) for keys in snapshot.data["frames"]]


def test_without_events_nothing_is_held() -> None:
    assert reduce(KeyReducer(FRAMES)) == ["", "", ""]


def test_a_held_key_acts_on_every_frame_until_it_is_replaced() -> None:
    reducer = KeyReducer(FRAMES)
    assert reduce(reducer, held("w")) == ["w", "w", "w"]
    assert reduce(reducer) == ["w", "w", "w"]
    assert reduce(reducer, held("w", "l")) == ["wl", "wl", "wl"]
    assert reduce(reducer, held()) == ["", "", ""]
    assert reduce(reducer) == ["", "", ""]


def test_a_key_tapped_between_two_blocks_acts_for_one_frame() -> None:
    reducer = KeyReducer(FRAMES)
    assert reduce(reducer, held("w"), held()) == ["w", "", ""]
    assert reduce(reducer) == ["", "", ""]


def test_two_earlier_sets_get_a_frame_each_and_the_last_one_the_rest() -> None:
    assert reduce(KeyReducer(FRAMES), held("w"), held("a"), held("s")) == ["w", "a", "s"]


def test_when_there_are_more_sets_than_frames_no_key_is_lost() -> None:
    assert reduce(KeyReducer(FRAMES), held("j"), held("w"), held("a"), held("d"), held("s")) == ["waj", "d", "s"]


def test_a_script_is_used_for_one_block_and_held_keys_go_on_behind_it() -> None:
    reducer = KeyReducer(FRAMES)
    assert reduce(reducer, held("w"), script(["a"], [], ["a", "i"])) == ["a", "", "ai"]
    assert reduce(reducer) == ["w", "w", "w"]


def test_the_last_event_wins_when_scripts_and_held_keys_come_together() -> None:
    assert reduce(KeyReducer(FRAMES), script(["a"], ["a"], ["a"]), held("d")) == ["d", "d", "d"]
    assert reduce(KeyReducer(FRAMES), script(["a"], ["a"], ["a"]), script(["s"], [], [])) == ["s", "", ""]


def test_keys_are_lower_case_unique_and_in_one_order() -> None:
    assert reduce(KeyReducer(FRAMES), held("L", "w", "W")) == ["wl"] * 3


def test_prepare_alone_changes_nothing_and_reset_lets_go_of_every_key() -> None:
    reducer = KeyReducer(FRAMES)
    reduce(reducer, held("w"))
    assert reduce(reducer, held("s"), commit=False) == ["s", "s", "s"]
    assert reduce(reducer, commit=False) == ["w", "w", "w"]
    reducer.reset()
    assert reduce(reducer) == ["", "", ""]


def test_a_slow_and_a_fast_turn_are_different_motions() -> None:
    """No normalisation per block: one frame of a key is less motion than three."""
    slow, fast = script(["l"], [], []), script(["l"], ["l"], ["l"])
    assert reduce(KeyReducer(FRAMES), slow) != reduce(KeyReducer(FRAMES), fast)


@pytest.mark.parametrize(
    ("control", "path"),
    [
        (ControlInput(TRACK, HELD, {}), "data.keys"),
        (ControlInput(TRACK, HELD, {"keys": "wasd"}), "data.keys"),
        (ControlInput(TRACK, HELD, {"keys": [1]}), "data.keys"),
        (ControlInput(TRACK, HELD, {"keys": ["x"]}), "data.keys"),
        (ControlInput(TRACK, HELD, {"keys": ["ArrowUp"]}), "data.keys"),
        (held("w", t_ms=-1), "data.t_ms"),
        (held("w", t_ms=True), "data.t_ms"),
        (held("w", t_ms="1"), "data.t_ms"),
        (held("w", speed=2), "data.speed"),
        (ControlInput(TRACK, SCRIPT, {"mode": "velocity", "frames": [[], [], []]}), "data.mode"),
        (ControlInput(TRACK, SCRIPT, {"frames": [[], [], []]}), "data.mode"),
        (script([], []), "data.frames"),
        (script([], [], [], []), "data.frames"),
        (script([], ["q"], []), "data.frames[1]"),
        (ControlInput(TRACK, SCRIPT, {"mode": "script", "frames": [[], 1, []]}), "data.frames[1]"),
        (ControlInput(TRACK, SCRIPT, {"mode": "script", "frames": [[], [], []], "fov": 1}), "data.fov"),
    ],
    ids=repr,
)
def test_a_control_that_cannot_be_is_refused_with_its_path(control: ControlInput, path: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        check_control(control, FRAMES)
    assert (refused.value.code, refused.value.path) == ("control_invalid", path)


@pytest.mark.parametrize(("track", "schema"), [("camera", "pose.v1"), ("hand", HELD)])
def test_another_track_or_schema_is_unknown(track: str, schema: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        check_control(ControlInput(track, schema, {"keys": []}), FRAMES)
    assert refused.value.code == "schema_unknown"


def test_the_declared_schemas_describe_what_is_accepted() -> None:
    import jsonschema

    by_name = {s.schema: s.json_schema for s in schemas(FRAMES)}
    for control in (held("w", "l", t_ms=12.5), held(), script(["w"], [], list(KEYS))):
        jsonschema.validate(control.to_dict()["data"], by_name[control.schema])
        check_control(control, FRAMES)
    for control in (held("x"), script([], []), held("w", t_ms=-1)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(control.to_dict()["data"], by_name[control.schema])


def test_held_keys_are_what_a_camera_remembers() -> None:
    reducer, fresh = KeyReducer(FRAMES), KeyReducer(FRAMES)
    reduce(reducer, held("l", "w"))
    assert reducer.save() == ["w", "l"]
    fresh.load(reducer.save())
    assert reduce(fresh, commit=False) == reduce(reducer, commit=False) == ["wl", "wl", "wl"]
    reduce(reducer, held())
    assert fresh.save() == ["w", "l"], "what was loaded is its own"


@pytest.mark.parametrize("memory", [None, {}, "wl", ["x"], [1], [["w"]]], ids=repr)
def test_what_no_camera_saved_is_not_loaded(memory: Any) -> None:
    reducer = KeyReducer(FRAMES)
    with pytest.raises(ArgumentError):
        reducer.load(memory)
    assert reducer.save() == []
