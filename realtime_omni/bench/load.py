"""The clients of ``bench world``: many sessions over real sockets, in a process of their own. Prints one JSON object.

Each session paces itself (``on_demand`` with ``--hz``: one event and one ``session.next`` per period; ``paced``: the
server's media clock), holds a random key that changes now and then, and checks what it gets: sequence numbers without
a gap, chunk indices in order, every event applied exactly once, frames of the declared size. A stopwatch that finds
something wrong reports no number for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import websockets
from websockets.typing import Subprotocol

from realtime_omni_protocols.world_frames import unpack_frame

SUBPROTOCOL = Subprotocol("realtime-omni.world.v1")
HELD = "realtime_omni.held_keys.v1"
KEYS = ("w", "w", "w", "a", "d", "j", "l", "i", "k", "")


@dataclass(slots=True)
class Record:
    """What one process measured; times in milliseconds."""

    first_chunk_ms: list[float] = field(default_factory=list)
    turnaround_ms: list[float] = field(default_factory=list)
    control_ms: list[float] = field(default_factory=list)
    chunk_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    key_to_chunk_ms: list[float] = field(default_factory=list)
    resume_ms: list[float] = field(default_factory=list)
    deadlines: int = 0
    met: int = 0
    chunks: int = 0
    frames: int = 0
    bytes: int = 0
    sessions: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Client:
    """One session after another on one socket each, until ``chunks`` chunks have come."""

    def __init__(self, args: argparse.Namespace, record: Record, number: int) -> None:
        self._args = args
        self._record = record
        self._random = random.Random(args.seed * 1000 + number)
        self._number = number

    async def run(self) -> None:
        left = self._args.chunks
        while left > 0:
            part = min(left, self._args.churn or left)
            await self._session(part)
            left -= part

    async def _session(self, chunks: int) -> None:
        args, record = self._args, self._record
        start: dict[str, Any] = {
            "type": "session.start",
            "format": args.format,
            "cadence": args.cadence,
            "seed": self._random.randrange(2**31),
        }
        if args.fps:
            start["fps"] = args.fps
        async with contextlib.AsyncExitStack() as self._connections:
            ws = await self._connect()
            self._sock = _Socket(ws, record)
            await self._sock.text("hello")
            began = time.perf_counter()
            await ws.send(json.dumps(start))
            hello = await self._sock.text("session.started")
            record.sessions += 1
            self._token, self._session_id = hello["resume_token"], hello["session_id"]
            self._frames = hello["frames_per_block"]
            self._period_s = self._frames / hello["fps"]
            self._event = self._held = 0
            self._asked: dict[int, float] = {}
            if args.cadence == "on_demand":
                await self._on_demand(ws, chunks, began)
            else:
                await self._paced(ws, chunks, began)

    async def _connect(self) -> Any:
        """A connection that is closed with its session, as is the one that it resumes."""
        return await self._connections.enter_async_context(
            websockets.connect(
                self._args.url, subprotocols=[SUBPROTOCOL], max_size=None, compression=None, ping_interval=None
            )
        )

    async def _send_keys(self, ws: Any) -> None:
        key = self._random.choice(KEYS)
        event = {
            "type": "session.event",
            "event_id": self._event,
            "controls": [{"track": "camera", "schema": HELD, "data": {"keys": [key] if key else []}}],
        }
        self._asked[self._event] = time.perf_counter()
        self._event += 1
        await ws.send(json.dumps(event))

    async def _on_demand(self, ws: Any, chunks: int, began: float) -> None:
        """One event and one next per period; the clock starts at a random phase."""
        record = self._record
        period_s = 1.0 / self._args.hz
        due = time.perf_counter() + self._random.random() * period_s
        for index in range(chunks):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due = max(due + period_s, time.perf_counter())
            asked = time.perf_counter()
            await self._send_keys(ws)
            await ws.send(json.dumps({"type": "session.next"}))
            chunk = await self._sock.chunk(self._frames, self._args.format)
            got = time.perf_counter()
            turnaround_ms = (got - asked) * 1000
            timings = chunk["timings_ms"]
            record.turnaround_ms.append(turnaround_ms)
            record.control_ms.append(turnaround_ms - timings["tick"] - timings["encode"])
            record.deadlines += 1
            record.met += turnaround_ms <= period_s * 1000
            self._check(chunk, index)
            if index == 0:
                record.first_chunk_ms.append((got - began) * 1000)
            await self._ack(ws, (index + 1) * self._frames)
        await self._close(ws)

    async def _paced(self, ws: Any, chunks: int, began: float) -> None:
        """Watch like a player: a frame is shown when it is due, and acknowledged then."""
        record = self._record
        origin = previous = 0.0
        cut_at = chunks // 2 if self._args.resume else -1
        next_key = time.perf_counter()
        player: asyncio.Task[None] | None = None
        for index in range(chunks):
            if time.perf_counter() >= next_key:
                next_key = time.perf_counter() + self._random.uniform(0.5, 2.0) * self._period_s
                asyncio.get_running_loop().call_later(
                    self._random.random() * self._period_s,
                    self._press,
                    ws,
                )
            chunk = await self._sock.chunk(self._frames, self._args.format)
            got = self._sock.first_frame_at
            timings = chunk["timings_ms"]
            if index == 0:
                record.first_chunk_ms.append((got - began) * 1000)
                origin = got
            else:
                record.gap_ms.append((got - previous) * 1000)
                record.chunk_ms.append(timings["wait"] + timings["tick"] + timings["encode"])
                if index != cut_at:
                    record.deadlines += 1
                    record.met += got <= origin + (index + 1) * self._period_s
            previous = got
            for event_id in chunk["applied_event_ids"]:
                record.key_to_chunk_ms.append((got - self._asked[event_id]) * 1000)
            self._check(chunk, index)
            if player is not None:
                await player
            player = asyncio.create_task(self._show(ws, index, max(origin + index * self._period_s, got)))
            if index + 1 == cut_at:
                await player
                player = None
                ws = await self._cut(ws)
                origin += time.perf_counter() - previous
        if player is not None:
            player.cancel()
        await self._close(ws)

    def _press(self, ws: Any) -> None:
        self._pressing = asyncio.ensure_future(self._quiet_keys(ws))

    async def _quiet_keys(self, ws: Any) -> None:
        try:
            await self._send_keys(ws)
        except websockets.ConnectionClosed:
            self._asked.pop(self._event - 1, None)

    async def _show(self, ws: Any, index: int, at: float) -> None:
        """Acknowledge the frames of a block one by one, as a player that shows them does."""
        for frame in range(self._frames):
            await asyncio.sleep(max(0.0, at + frame * self._period_s / self._frames - time.perf_counter()))
            await self._ack(ws, index * self._frames + frame + 1)

    async def _cut(self, ws: Any) -> Any:
        """Lose the socket without a word, come back with the token, time the next frame."""
        ws.transport.abort()
        last_seq = self._sock.seq
        began = time.perf_counter()
        fresh = await self._connect()
        sock = _Socket(fresh, self._record)
        await sock.text("hello")
        resume = {
            "type": "session.resume",
            "session_id": self._session_id,
            "resume_token": self._token,
            "last_seq": last_seq,
            "takeover": True,
        }
        await fresh.send(json.dumps(resume))
        resumed = await sock.text("session.resumed")
        self._token = resumed["resume_token"]
        sock.seq = last_seq
        self._sock = sock

        def frame_came(at: float) -> None:
            self._record.resume_ms.append((at - began) * 1000)

        sock.on_frame = frame_came
        return fresh

    async def _ack(self, ws: Any, displayed: int) -> None:
        ack = {"type": "session.ack", "seq": self._sock.seq, "displayed": displayed, "epoch": 0}
        await ws.send(json.dumps(ack))

    async def _close(self, ws: Any) -> None:
        await ws.send(json.dumps({"type": "session.close"}))
        await self._sock.text("session.closed")

    def _check(self, chunk: dict[str, Any], index: int) -> None:
        self._record.chunks += 1
        self._record.frames += chunk["frames"]
        if chunk["chunk_index"] != index:
            self._record.wrong.append(f"chunk {chunk['chunk_index']} came where {index} was due")
        for event_id in chunk["applied_event_ids"]:
            if event_id != self._held:
                self._record.wrong.append(f"event {event_id} was applied where {self._held} was due")
            self._held = event_id + 1


class _Socket:
    """Reads one connection and checks its sequence numbers and frames."""

    def __init__(self, ws: Any, record: Record) -> None:
        self._ws = ws
        self._record = record
        self.seq = 0
        self.first_frame_at = 0.0
        self.on_frame: Any = None

    async def text(self, wanted: str) -> dict[str, Any]:
        """The next message of a type; others of the session are counted and passed over."""
        while True:
            data = await self._ws.recv()
            if isinstance(data, bytes):
                header, _ = unpack_frame(data)
                self._number(header.seq)
                continue
            message: dict[str, Any] = json.loads(data)
            if message.get("seq") is not None:
                self._number(message["seq"])
            if message["type"] == "error":
                raise RuntimeError(f"{message['code']}: {message['message']}")
            if message["type"] == wanted:
                return message

    async def chunk(self, frames: int, wire_format: str) -> dict[str, Any]:
        """The next chunk with all its frames."""
        chunk = await self.text("chunk")
        expected = 1 if wire_format == "latent" else frames
        for index in range(expected):
            data = await self._ws.recv()
            if not isinstance(data, bytes):
                self._record.wrong.append("text between the frames of a chunk")
                break
            header, payload = unpack_frame(data)
            self._number(header.seq)
            self._record.bytes += len(data)
            if index == 0:
                self.first_frame_at = time.perf_counter()
                if self.on_frame is not None:
                    self.on_frame(self.first_frame_at)
                    self.on_frame = None
            if header.last != (index == expected - 1) or header.chunk_index != chunk["chunk_index"]:
                self._record.wrong.append("a frame that does not belong where it came")
            if wire_format == "jpeg" and bytes(payload[:2]) != b"\xff\xd8":
                self._record.wrong.append("a frame that is no JPEG")
        return chunk

    def _number(self, seq: int) -> None:
        if seq != self.seq + 1 and self.seq:
            self._record.wrong.append(f"seq {seq} after {self.seq}")
        self.seq = seq


async def load(args: argparse.Namespace) -> Record:
    record = Record(started_s=time.perf_counter())
    clients = [Client(args, record, number) for number in range(args.sessions)]
    await asyncio.gather(*(c.run() for c in clients))
    record.ended_s = time.perf_counter()
    return record


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=100, help="per session")
    parser.add_argument("--hz", type=float, default=12.0)
    parser.add_argument("--fps", type=float)
    parser.add_argument("--format", default="jpeg")
    parser.add_argument("--cadence", choices=("paced", "on_demand"), default="on_demand")
    parser.add_argument("--churn", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        record = asyncio.run(load(args))
    except (RuntimeError, OSError, websockets.WebSocketException) as error:  # a refusal, no server, a lost one
        raise SystemExit(str(error) or type(error).__name__) from None
    except KeyboardInterrupt:  # the terminal tells it the whole group; the benchmark ends by its own
        raise SystemExit(130) from None
    out = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    out["client_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    json.dump(out, sys.stdout)


if __name__ == "__main__":
    main()
