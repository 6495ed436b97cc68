"""A camera steered by keys: two control schemas, and the reducer that makes keys per frame of them.

``lingbot.camera_actions.v1``: ``{"mode": "script", "frames": [[keys], ...]}``, one list per frame of the block, used
for one block. ``realtime_omni.held_keys.v1``: ``{"keys": [...], "t_ms": n}``: what is held from that client time on,
until replaced.

Reduction of held keys: every event since the last block is one held set. The last one rules the block; each earlier
one still gets a frame at its beginning, so that a key tapped between two blocks acts (longest sets are dropped last
when there are more sets than frames: their keys join the first frame).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.models.base import ControlSchema, PreparedControls
from realtime_omni.session.values import ControlInput, SessionEvent

KEYS: tuple[str, ...] = ("w", "a", "s", "d", "i", "j", "k", "l")
"""In this order: move forward, left, back, right; look up, left, down, right."""

TRACK = "camera"
SCRIPT = "lingbot.camera_actions.v1"
HELD = "realtime_omni.held_keys.v1"

MAX_KEYS = 2 * len(KEYS)

KEY_LIST = {"type": "array", "items": {"type": "string", "enum": list(KEYS)}, "maxItems": MAX_KEYS}


def schemas(frames_per_block: int) -> tuple[ControlSchema, ...]:
    """What a client may send, for discovery."""
    return (
        ControlSchema(
            TRACK,
            SCRIPT,
            {
                "type": "object",
                "properties": {
                    "mode": {"const": "script"},
                    "frames": {
                        "type": "array",
                        "items": KEY_LIST,
                        "minItems": frames_per_block,
                        "maxItems": frames_per_block,
                    },
                },
                "required": ["mode", "frames"],
                "additionalProperties": False,
            },
            f"Keys for each of the {frames_per_block} frames of one block: w a s d move, j l turn, i k look.",
        ),
        ControlSchema(
            TRACK,
            HELD,
            {
                "type": "object",
                "properties": {"keys": KEY_LIST, "t_ms": {"type": "number", "minimum": 0}},
                "required": ["keys"],
                "additionalProperties": False,
            },
            "The keys held from now on, until replaced.",
        ),
    )


def check_control(control: ControlInput, frames_per_block: int) -> None:
    """Raises ArgumentError: ``schema_unknown``, or ``control_invalid`` with the path."""
    if control.track != TRACK or control.schema not in (SCRIPT, HELD):
        raise ArgumentError(
            f"known are {TRACK}/{SCRIPT} and {TRACK}/{HELD}, not {control.track}/{control.schema}",
            code=ErrorCode.SCHEMA_UNKNOWN,
            path="controls",
        )
    data = control.data
    if control.schema == HELD:
        refuse_others(data, {"keys", "t_ms"})
        check_keys(data.get("keys"), "data.keys")
        t_ms = data.get("t_ms", 0)
        if isinstance(t_ms, bool) or not isinstance(t_ms, (int, float)) or t_ms < 0:
            raise invalid("t_ms must be a number of at least 0", "data.t_ms")
        return
    refuse_others(data, {"mode", "frames"})
    if data.get("mode") != "script":
        raise invalid('mode must be "script"', "data.mode")
    frames = data.get("frames")
    if not isinstance(frames, tuple) or len(frames) != frames_per_block:
        raise invalid(f"frames must be a list of {frames_per_block} key lists", "data.frames")
    for i, keys in enumerate(frames):
        check_keys(keys, f"data.frames[{i}]")


def refuse_others(data: Mapping[str, Any], known: set[str], path: str = "data") -> None:
    """Raises ArgumentError for a field that no schema knows."""
    for name in data:
        if name not in known:
            raise invalid(f"unknown field {name!r}", f"{path}.{name}")


def check_keys(keys: object, path: str) -> None:
    """Raises ArgumentError for what is no list of known keys."""
    if not isinstance(keys, tuple) or not all(isinstance(k, str) for k in keys):
        raise invalid("must be a list of keys", path)
    if len(keys) > MAX_KEYS:
        raise invalid(f"must have at most {MAX_KEYS} keys", path)
    for key in keys:
        if key.lower() not in KEYS:
            raise invalid(f"unknown key {key!r}; known: {' '.join(KEYS)}", path)


def invalid(message: str, path: str) -> ArgumentError:
    """What a control is refused with."""
    return ArgumentError(f"{path}: {message}", code=ErrorCode.CONTROL_INVALID, path=path)


def _key_set(keys: Sequence[str]) -> tuple[str, ...]:
    """Lower case, each once, in the canonical order."""
    held = {k.lower() for k in keys}
    return tuple(k for k in KEYS if k in held)


class KeyReducer:
    """One per session. Carries the held keys from block to block; a script is used once."""

    def __init__(self, frames_per_block: int) -> None:
        self._frames = frames_per_block
        self._held: tuple[str, ...] = ()

    def prepare(
        self, current: Mapping[str, ControlInput], events: Sequence[SessionEvent], chunk_index: int
    ) -> PreparedControls:
        held, sets, script = self._held, [], None
        for event in events:
            for control in event.controls:
                if control.schema == HELD:
                    held = _key_set(control.data["keys"])
                    sets.append(held)
                    script = None
                else:
                    script = [_key_set(keys) for keys in control.data["frames"]]
        frames = script if script is not None else self._spread(sets, held)
        control = ControlInput(TRACK, SCRIPT, {"mode": "script", "frames": [list(f) for f in frames]})
        return PreparedControls((control,), carried=(), private=held)

    def commit(self, prepared: PreparedControls) -> None:
        self._held = prepared.private

    def reset(self) -> None:
        self._held = ()

    def save(self) -> list[str]:
        """The held keys."""
        return list(self._held)

    def load(self, memory: Any) -> None:
        if not isinstance(memory, list):
            raise ArgumentError("the held keys must be a list", path="memory")
        check_keys(tuple(memory), "memory")
        self._held = _key_set(memory)

    def _spread(self, sets: list[tuple[str, ...]], held: tuple[str, ...]) -> list[tuple[str, ...]]:
        passing = sets[:-1]
        room = self._frames - 1
        dropped, kept = passing[: max(len(passing) - room, 0)], passing[max(len(passing) - room, 0) :]
        frames = [*kept, *[held] * (self._frames - len(kept))]
        for keys in dropped:
            frames[0] = _key_set((*frames[0], *keys))
        return frames


class OverriddenKeyReducer(KeyReducer):
    """Keys as :class:`KeyReducer` makes them; or, where it came last, a control of another schema that rules one block."""

    def __init__(self, frames_per_block: int, schema: str) -> None:
        super().__init__(frames_per_block)
        self._schema = schema

    def prepare(
        self, current: Mapping[str, ControlInput], events: Sequence[SessionEvent], chunk_index: int
    ) -> PreparedControls:
        controls = [control for event in events for control in event.controls]
        keys = [
            SessionEvent(event.event_id, controls=kept)
            for event in events
            if (kept := tuple(c for c in event.controls if c.schema != self._schema))
        ]
        prepared = super().prepare(current, keys, chunk_index)
        if not controls or controls[-1].schema != self._schema:
            return prepared
        return PreparedControls((controls[-1],), carried=(), private=prepared.private)
