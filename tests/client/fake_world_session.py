"""One session of the fake world server: events in, synthetic blocks out."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import hashlib
import secrets
import sys
import time
from pathlib import Path
from typing import Protocol

import msgspec

sys.path.insert(0, str(Path(__file__).parent))  # run as a script or imported by a test: the picture is beside us
from fake_world_picture import Picture

from realtime_omni_protocols.errors import WireCode, WireError
from realtime_omni_protocols.world import Entry, ServerLimits, StreamLimits, WorldSessionStream
from realtime_omni_protocols.world_messages import (
    AnyServerMessage,
    Control,
    ControlInfo,
    Format,
    KvUse,
    Limits,
    SessionEvent,
    SessionFork,
    SessionReset,
    SessionRewind,
    SessionStart,
    Timings,
)

MODEL = "tiny-world"
FRAMES_PER_BLOCK = 3
REWIND_BLOCKS = 8
MAX_PENDING = 16
KEYS = ["w", "a", "s", "d", "i", "j", "k", "l"]
HELD_KEYS, SCRIPT = "realtime_omni.held_keys.v1", "lingbot.camera_actions.v1"
CONTROLS = (
    ControlInfo(
        track="camera",
        schema=HELD_KEYS,
        json_schema={
            "type": "object",
            "required": ["keys"],
            "additionalProperties": False,
            "properties": {
                "keys": {"type": "array", "items": {"enum": KEYS}, "maxItems": 8},
                "t_ms": {"type": "number", "minimum": 0},
            },
        },
        description="The set of keys held from now on, until replaced.",
    ),
    ControlInfo(
        track="camera",
        schema=SCRIPT,
        json_schema={
            "type": "object",
            "required": ["mode", "frames"],
            "properties": {
                "mode": {"const": "script"},
                "frames": {
                    "type": "array",
                    "items": {"type": "array", "items": {"enum": KEYS}},
                    "minItems": 3,
                    "maxItems": 3,
                },
            },
        },
        description="One list of keys per frame of the block, used for one block.",
    ),
)
PROMPTS = ("a lantern maze at night", "a green garden", "slow", "fail", "drop")


class Connection(Protocol):
    """What a session needs of its connection; None in the queue cuts it."""

    queue: asyncio.Queue[Entry | AnyServerMessage | None]


class FakeSession:
    """One session: its stream, its picture, and the connection it is attached to now."""

    def __init__(self, start: SessionStart, session_id: str, options: argparse.Namespace) -> None:
        self.options = options
        self.fps = start.fps or 20.0
        self.format: Format = start.format
        self.stream = WorldSessionStream(
            session_id=session_id,
            fps=self.fps,
            frames_per_block=FRAMES_PER_BLOCK,
            lead_frames=start.lead_frames,
            cadence=start.cadence,
            limits=StreamLimits(grace_s=options.grace_s, stall_timeout_s=options.stall_timeout_s),
            now=time.monotonic(),
        )
        self.picture = Picture(options.width, options.height)
        self.start = start
        self.past: dict[int, tuple[Picture, str | None]] = {}  # as it was before each of the last chunks
        self.prompt: str | None = start.prompt
        self.seed = start.seed if start.seed is not None else secrets.randbelow(2**31)
        self.pending: dict[int, SessionEvent] = {}
        self.seen: dict[int, bytes] = {}  # payload digests by event id, the last 256
        self.connection: Connection | None = None
        self.changed = asyncio.Event()
        self.abort = False
        self.due = 0.0

    def limits(self, side: ServerLimits) -> Limits:
        return Limits(
            max_pending_events=MAX_PENDING,
            max_message_bytes=side.max_message_bytes,
            max_events_per_s=side.max_events_per_s,
            grace_s=self.stream.limits.grace_s,
            stall_timeout_s=self.stream.limits.stall_timeout_s,
            horizon_frames=None,
        )

    def push(self, *entries: Entry) -> None:
        if self.connection is not None:
            for entry in entries:
                self.connection.queue.put_nowait(entry)

    def event(self, event: SessionEvent) -> None:
        """Accept one event, or raise `WireError`."""
        digest = hashlib.sha256(msgspec.json.encode([event.prompt, event.controls], order="sorted")).digest()
        if event.event_id in self.seen:
            if self.seen[event.event_id] != digest:
                raise WireError(WireCode.EVENT_CONFLICT, "this id was used with another payload")
            self.push(
                self.stream.event_accepted(event.event_id, status="duplicate", pending=len(self.pending), re=event.id)
            )
            return
        if event.event_id < self.stream.next_event_id:
            raise WireError(WireCode.STALE, "the id is below the highest accepted one")
        for index, control in enumerate(event.controls or ()):
            check_control(control, f"$.controls[{index}]")
        if len(self.pending) >= MAX_PENDING:
            raise WireError(WireCode.QUEUE_FULL, "too many pending events")
        self.pending[event.event_id] = event
        self.seen[event.event_id] = digest
        while len(self.seen) > 256:
            del self.seen[next(iter(self.seen))]
        self.push(
            self.stream.event_accepted(event.event_id, pending=len(self.pending), prompt=event.prompt, re=event.id)
        )

    def reset(self, message: SessionReset) -> None:
        if self.pending:
            self.push(self.stream.event_discarded(tuple(self.pending)))
            self.pending.clear()
        self.prompt = message.prompt if message.prompt is not None else self.prompt
        self.seed = message.seed if message.seed is not None else self.seed
        self.picture = Picture(self.options.width, self.options.height)
        self.past.clear()
        self.due = time.monotonic()
        self.push(self.stream.reset_done(prompt=self.prompt, seed=self.seed, re=message.id))

    @property
    def oldest_rewind(self) -> int | None:
        return None if self.options.no_branches else min(self.past, default=self.stream.next_chunk)

    def fork(self, message: SessionFork) -> FakeSession:
        """A branch, which the caller makes known; or `WireError`."""
        self._branches()
        twin = FakeSession(self.start, message.session_id or secrets.token_hex(8), self.options)
        stream = self.stream
        twin.stream = stream.branch(
            twin.stream.session_id,
            epoch=stream.epoch,
            chunk_index=stream.next_chunk,
            next_frame=stream.generated,
            next_event_id=stream.next_event_id,
            now=time.monotonic(),
        )
        twin.picture, twin.prompt, twin.seed = copy.copy(self.picture), self.prompt, self.seed
        twin.past = {index: (copy.copy(picture), prompt) for index, (picture, prompt) in self.past.items()}
        self.push(
            stream.forked(
                twin.stream,
                resume_token=secrets.token_urlsafe(24),
                prompt=twin.prompt,
                seed=twin.seed,
                oldest_rewind=twin.oldest_rewind,
                grace_s=self.stream.limits.grace_s,
                re=message.id,
            )
        )
        return twin

    def rewind(self, message: SessionRewind) -> None:
        index, oldest = message.chunk_index, self._branches()
        if index > self.stream.next_chunk:
            raise WireError(WireCode.INVALID_ARGUMENT, "still to come", path="$.chunk_index")
        if index < oldest:
            raise WireError(WireCode.NOT_RETAINED, "too long ago", path="$.chunk_index")
        if self.pending:
            self.push(self.stream.event_discarded(tuple(self.pending), reason="rewind"))
            self.pending.clear()
        if index < self.stream.next_chunk:
            self.picture, self.prompt = self.past[index]
        self.past = {old: moment for old, moment in self.past.items() if old < index}
        self.due = time.monotonic()
        self.push(
            self.stream.rewound(
                chunk_index=index,
                next_frame=index * FRAMES_PER_BLOCK,
                prompt=self.prompt,
                oldest_rewind=min(self.past, default=index),
                re=message.id,
            )
        )

    def _branches(self) -> int:
        if self.oldest_rewind is None:
            raise WireError(WireCode.UNSUPPORTED, "not in this world")
        return self.oldest_rewind

    async def generate(self) -> None:
        """Blocks for as long as the session lives."""
        while self.stream.terminal is None:
            now = time.monotonic()
            if not self.stream.may_start_block():
                await self._wait(self._next_deadline())
                self._expire(time.monotonic())
            elif self.stream.cadence == "paced" and now < self.due:
                await self._wait(self.due)
            else:
                await self._block(now)

    async def _block(self, started: float) -> None:
        snapshot = dict(self.pending)
        prompt = next((e.prompt for e in reversed(list(snapshot.values())) if e.prompt is not None), self.prompt)
        epoch, self.abort = self.stream.epoch, False
        await asyncio.sleep(0.5 if prompt == "slow" else 0.002)
        if self.stream.terminal is not None or self.stream.epoch != epoch:
            return  # fenced: what was computed for a dead epoch is dropped
        if self.abort:
            self.push(self.stream.chunk_aborted(self.stream.next_chunk))
            return
        if prompt == "fail":
            self.prompt = "recovered"
            self.push(self.stream.event_discarded(tuple(snapshot))) if snapshot else None
            self.pending = {k: v for k, v in self.pending.items() if k not in snapshot}
            self.push(
                self.stream.failed(
                    code=WireCode.TICK_FAILED,
                    message="the model failed (on request)",
                    chunk_index=self.stream.next_chunk,
                    can=("rollback", "reset", "close"),
                )
            )
            return
        self.past[self.stream.next_chunk] = (copy.copy(self.picture), self.prompt)
        self.past.pop(self.stream.next_chunk - REWIND_BLOCKS, None)
        self.prompt = prompt
        media: list[object] = list(
            self.picture.block([c for e in snapshot.values() for c in e.controls or ()], prompt, self.seed)
        )
        self.pending = {k: v for k, v in self.pending.items() if k not in snapshot}
        now = time.monotonic()
        entries = self.stream.chunk(
            now,
            chunk_index=self.stream.next_chunk,
            media=media,
            applied_event_ids=tuple(snapshot),
            prompt=prompt,
            timings_ms=Timings(tick=(now - started) * 1000, encode=0, wait=max(0.0, started - self.due) * 1000),
            kv=KvUse(pages_used=min(12, self.stream.next_chunk + 1), pages_total=64),
            oldest_rewind=self.oldest_rewind,
        )
        self.due = max(self.due, now - FRAMES_PER_BLOCK / self.fps) + FRAMES_PER_BLOCK / self.fps
        self.push(*entries)
        if prompt == "drop":
            self.prompt = "a green garden"
            if self.connection is not None:
                self.connection.queue.put_nowait(None)

    def _next_deadline(self) -> float | None:
        deadlines = [d for d in (self.stream.grace_deadline(), self.stream.stall_deadline()) if d is not None]
        return min(deadlines, default=None)

    def _expire(self, now: float) -> None:
        grace, stall = self.stream.grace_deadline(), self.stream.stall_deadline()
        if grace is not None and now >= grace:
            self.stream.closed("detached_expired")
        elif stall is not None and now >= stall:
            self.push(*self.stream.closed("stalled", code=WireCode.STALLED))

    async def _wait(self, until: float | None) -> None:
        self.changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), None if until is None else max(0.0, until - time.monotonic()))


def check_control(control: Control, where: str) -> None:
    if control.track != "camera":
        raise WireError(WireCode.CONTROL_INVALID, "the tracks are: camera", path=f"{where}.track")
    if control.schema not in (HELD_KEYS, SCRIPT):
        raise WireError(WireCode.SCHEMA_UNKNOWN, f"the schemas are: {HELD_KEYS}, {SCRIPT}", path=f"{where}.schema")
    keys = control.data.get("keys") if control.schema == HELD_KEYS else control.data.get("frames")
    if not isinstance(keys, list):
        raise WireError(WireCode.CONTROL_INVALID, "data does not fulfil the schema", path=f"{where}.data")
    flat = [key for item in keys for key in (item if isinstance(item, list) else [item])]
    if any(key not in KEYS for key in flat):
        raise WireError(WireCode.CONTROL_INVALID, f"the keys are {' '.join(KEYS)}", path=f"{where}.data")
