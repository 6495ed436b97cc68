"""Random walks through the protocol: whatever order things happen in, the rules of every client hold.

Checked after every walk: numbers without a gap over all connections, exactly one terminal receipt per accepted event, every
frame exactly once and in order per epoch, one terminal message, nothing left in the server. Faults that were put in on
purpose and that this test found: a replay left out; a takeover that does not wait for the running tick; no first receipt for
an event whose sender was lost; a reset that holds the driver for ever; an aborted first block that the media clock waits for.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from realtime_omni.errors import TickError
from realtime_omni_protocols.world import WireState
from server.fakes import FakeManager
from server.wire import Client, eventually, make_hub, type_of


class Walk:
    """One session, many connections, one random player."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.manager = FakeManager()
        self.manager.commits_although_cancelled = self.random.random() < 0.5
        self.hub = make_hub(self.manager, max_events_per_s=1e6, max_messages_per_s=1e6)
        self.format = self.random.choice(["rgb24", "jpeg", "h264"])
        self.client = Client(self.hub)
        self.messages: dict[int, Any] = {}
        self.event_id = -1
        self.unanswered: list[int] = []
        self.pings = 0

    async def run(self, steps: int) -> None:
        await self.client.start(format=self.format, session_id="s")
        actions = [self.press, self.press, self.tick, self.tick, self.tick, self.ack, self.ack, self.play, self.pause]
        actions += [self.reset, self.rewind, self.fork, self.abort, self.fail, self.drop, self.take_over, self.hold]
        for _ in range(steps):
            await self.random.choice(actions)()
        await self.make_progress()
        self.client.send("session.close")
        await self.client.end()
        self.keep()
        self.manager.clock.advance(60)  # the grace of branches that nobody opened
        await eventually(lambda: not self.manager.live)

    async def make_progress(self) -> None:
        """Whatever happened: a player who does what the state asks for gets a block when its time has come."""
        self.manager.failures.clear()
        self.manager.release()
        while True:
            await self.settle()
            stream = next(iter(self.hub.sessions)).stream
            side = next(iter(self.hub.connections)).side
            if side.state is not stream.state:
                continue  # something is still on its way
            if stream.state is WireState.PLAYING:
                break
            self.client.send("session.rollback" if stream.state is WireState.FAILED else "session.resume_play")
        self.client.ack()
        await self.settle()
        self.manager.clock.advance(1)
        while type_of(await self.client.until_any("chunk", "session.failed")) != "chunk":
            self.client.send("session.rollback")

    # -- what a player does ----------------------------------------------------------------------------------------

    async def press(self) -> None:
        self.event_id += self.random.choice([1, 1, 1, 2])
        self.client.press(self.event_id)
        self.unanswered.append(self.event_id)
        if self.random.random() < 0.5:
            await self.settle()

    async def tick(self) -> None:
        self.manager.release(self.random.choice([1, 1, None]))
        self.manager.clock.advance(self.random.choice([0.0, 0.1, 0.35]))
        await self.settle()

    async def ack(self) -> None:
        self.client.ack()
        await self.settle()

    async def play(self) -> None:
        self.client.send("session.resume_play")

    async def pause(self) -> None:
        if self.random.random() < 0.4:
            self.client.send("session.pause")

    async def reset(self) -> None:
        if self.random.random() < 0.5:
            self.client.send("session.reset", seed=self.random.randrange(100))

    async def rewind(self) -> None:
        stream = next(iter(self.hub.sessions)).stream
        self.client.send("session.rewind", chunk_index=max(0, stream.next_chunk - self.random.choice([0, 1, 1, 2, 5])))
        if self.random.random() < 0.5:
            await self.settle()

    async def fork(self) -> None:
        """A branch that nobody opens: it must be gone in the end, and must not disturb its parent."""
        if self.random.random() < 0.3:
            self.client.send("session.fork")

    async def abort(self) -> None:
        self.client.send("session.abort")

    async def hold(self) -> None:
        self.manager.hold()

    async def fail(self) -> None:
        if self.random.random() < 0.3:
            self.manager.failures.append(TickError("broken"))
            await self.settle()
        self.client.send("session.rollback")

    async def drop(self) -> None:
        """Cut the line in the middle of whatever is on it; come back knowing only what was received."""
        if self.random.random() < 0.5:
            await self.settle()
        await self.client.drop()
        self.keep()
        await self.come_back(takeover=False)

    async def take_over(self) -> None:
        old = self.client
        await self.come_back(takeover=True)
        assert (await old.end())[0] == 4409

    async def come_back(self, *, takeover: bool) -> None:
        old, self.client = self.client, Client(self.hub)
        self.keep_of(old)
        if self.random.random() < 0.3:
            self.manager.clock.advance(1)
        last_seq, epoch, displayed = old.last_seq, old.epoch, old.displayed
        await self.client.resume("s", old.token, last_seq, takeover=takeover)
        self.client.epoch, self.client.displayed = epoch, displayed
        answered = {
            item.event_id
            for item in self.messages.values()
            if not isinstance(item, tuple) and type_of(item) == "event.accepted"
        }
        self.unanswered = [event_id for event_id in self.unanswered if event_id not in answered]
        for event_id in self.unanswered:
            self.client.press(event_id)
        await self.settle()
        first = next((item for item in self.client.seen if isinstance(item, tuple)), None)
        assert first is None or first[0].key, "the first frame after a resume is a key frame"

    # -- what is checked -------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Receive everything that was said up to now."""
        self.pings += 1
        self.client.send("ping", id=f"settle-{self.pings}")
        await self.client.until("pong", re=f"settle-{self.pings}")
        for record in self.hub.sessions:
            record.stream.check()

    def keep(self) -> None:
        self.keep_of(self.client)

    def keep_of(self, client: Client) -> None:
        for item in client.seen:
            seq = item[0].seq if isinstance(item, tuple) else getattr(item, "seq", None)
            if seq is None:
                continue
            known = self.messages.setdefault(seq, item)
            if isinstance(item, tuple):
                assert (known[0].epoch, known[0].frame) == (item[0].epoch, item[0].frame)
            else:
                assert type_of(known) == type_of(item)

    def check(self) -> None:
        assert sorted(self.messages) == list(range(1, len(self.messages) + 1))
        accepted, settled, frames, starts = set(), [], {}, {}
        for _, item in sorted(self.messages.items()):
            if isinstance(item, tuple):
                frames.setdefault(item[0].epoch, []).append(item[0].frame)
            elif type_of(item) == "event.accepted" and item.status == "accepted":
                assert item.event_id not in accepted
                accepted.add(item.event_id)
            elif type_of(item) == "session.rewound":
                starts[item.epoch] = item.next_frame
            elif type_of(item) in ("event.applied", "event.discarded"):
                settled += item.event_ids
        assert sorted(settled) == sorted(accepted)
        for epoch, numbers in frames.items():
            start = starts.get(epoch, 0)
            assert numbers == list(range(start, start + len(numbers))), epoch
        closed = [i for i in self.messages.values() if not isinstance(i, tuple) and type_of(i) == "session.closed"]
        assert [message.reason for message in closed] == ["client"]
        assert not self.manager.live
        assert len(self.hub.sessions) == 0
        assert not self.hub.connections
        assert self.hub.pool.open_lanes == 0


@pytest.mark.parametrize("seed", range(40))
async def test_a_random_walk_keeps_every_rule(seed: int) -> None:
    walk = Walk(seed)
    await walk.run(60)
    walk.check()
    walk.hub.close()
