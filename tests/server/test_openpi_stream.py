"""Our streaming subprotocol over an in-memory transport: newest wins, resets cancel, sessions survive a lost connection."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from realtime_omni.server.policy import PolicyRequest
from realtime_omni.testing.null_policy import NullPolicy
from realtime_omni_protocols.openpi import StreamClientSide, StreamState
from realtime_omni_protocols.openpi.stream_messages import (
    ActionChunk,
    Closed,
    ErrorMessage,
    Hello,
    Ping,
    Pong,
    ResetDone,
    Resume,
    Resumed,
    Started,
    Superseded,
    encode,
)
from server.manual_clock import ManualClock
from server.robots import Gate, StreamRobot, hub_over, settle


async def test_observations_are_answered_with_their_tick() -> None:
    policy = NullPolicy()
    async with hub_over(policy) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        for tick in (3, 9):
            robot.observe(tick)
            chunk = await robot.until(ActionChunk)
            assert (chunk.start_tick, chunk.epoch) == (tick, 0)
            assert chunk.actions[0, 0] == tick
            assert chunk.timing.keys() >= {"queue", "decode", "denoise", "infer_ms"}
        await robot.close()
        assert policy.sessions == 0


async def test_the_newest_observation_wins() -> None:
    gate = Gate()
    async with hub_over(NullPolicy(think=gate)) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        robot.observe(1)
        await gate.arrived.wait()
        for tick in (2, 3, 4):
            robot.observe(tick)
        assert (await robot.until(Superseded)) == Superseded(seq=2, by=3)
        assert (await robot.until(Superseded)) == Superseded(seq=3, by=4)
        gate.open.set()
        assert [(await robot.until(ActionChunk)).start_tick for _ in range(2)] == [1, 4]


async def test_a_flood_of_messages_is_read_more_slowly_and_loses_nothing() -> None:
    """A burst of five, then five a second; the start is the first."""
    async with hub_over(NullPolicy(), max_messages_per_s=5.0) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        assert isinstance(hub.clock, ManualClock)
        for number in range(12):
            robot.say(encode(Ping(t=float(number))))
        heard = []
        for expected in (4, 9, 12):
            await settle()
            while not robot.transport.outbound.empty():
                heard.append(robot.side.receive(await robot.receive()))
            assert len(heard) == expected
            hub.clock.advance(1.0)
        assert [pong.t for pong in heard if isinstance(pong, Pong)] == list(range(12))
        await robot.close()


async def test_a_reset_cancels_the_inference_and_nothing_of_it_is_sent() -> None:
    gate = Gate()
    policy = NullPolicy(think=gate)
    async with hub_over(policy) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        robot.observe(1)
        await gate.arrived.wait()
        robot.observe(2)
        robot.say(robot.side.reset())
        await settle()
        assert (gate.cancelled, policy.resets) == (1, 1)
        gate.open.set()
        while robot.side.state is not StreamState.LIVE:
            assert not isinstance(robot.side.receive(await robot.receive()), ActionChunk)
        robot.observe(7)
        chunk = await robot.until(ActionChunk)
        assert (chunk.epoch, chunk.start_tick) == (1, 7)


async def test_a_bad_observation_costs_that_observation_only() -> None:
    async with hub_over(NullPolicy()) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        robot.observe(1, state=np.full(14, np.nan, np.float32))
        error = await robot.until(ErrorMessage)
        assert (error.code, error.path, error.seq) == ("state_value", "$.observation.state", 1)
        robot.observe(2)
        assert (await robot.until(ActionChunk)).seq == 2


async def test_a_failing_reset_ends_the_session() -> None:
    class Stubborn(NullPolicy):
        async def reset(self, session_id: str) -> None:
            raise RuntimeError("no")

    policy = Stubborn()
    async with hub_over(policy) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        robot.say(robot.side.reset())
        assert await robot.until(Closed) == Closed(reason="failed")
        assert (await robot.closed())[0] == 1011
        assert policy.sessions == 0


async def test_an_eviction_ends_the_session_with_its_reason() -> None:
    policy = NullPolicy()
    async with hub_over(policy) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        policy.evict(next(iter(hub.live)))
        robot.observe(1)
        assert await robot.until(Closed) == Closed(reason="evicted")


@pytest.mark.parametrize("then", ["observation", "reset", "close"])
async def test_what_comes_while_an_evicted_session_ends_changes_nothing(then: str) -> None:
    class Slow(NullPolicy):
        ending, released = asyncio.Event(), asyncio.Event()

        async def close(self, session_id: str) -> None:
            self.ending.set()
            await self.released.wait()
            await super().close(session_id)

    policy = Slow()
    policy.ending.clear()
    policy.released.clear()
    async with hub_over(policy) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        policy.evict(next(iter(hub.live)))
        robot.observe(1)
        await policy.ending.wait()
        if then == "observation":
            robot.observe(2)
        else:
            robot.say(robot.side.reset() if then == "reset" else robot.side.close())
        assert (await robot.until(ErrorMessage)).code == "session_state"
        policy.released.set()
        assert await robot.until(Closed) == Closed(reason="evicted")


async def test_a_refused_start_does_not_buy_time() -> None:
    class Slow(NullPolicy):
        answered = asyncio.Event()

        async def open(self, *, label: str | None = None, control_hz: float | None = None) -> str:
            await self.answered.wait()
            return await super().open(label=label, control_hz=control_hz)

    policy = Slow(capacity=0)
    async with hub_over(policy, handshake_timeout_s=10.0) as hub:
        robot = StreamRobot(hub)
        await robot.until(Hello)
        robot.say(robot.side.start())
        await settle()
        assert isinstance(hub.clock, ManualClock)
        hub.clock.advance(11.0)
        await settle()
        policy.answered.set()
        assert (await robot.until(ErrorMessage)).code == "capacity"
        assert (await robot.until(ErrorMessage)).code == "handshake_timeout"
        assert (await robot.closed())[0] == 4408


async def test_who_never_starts_is_timed_out() -> None:
    async with hub_over(NullPolicy(), handshake_timeout_s=10.0) as hub:
        robot = StreamRobot(hub)
        await robot.until(Hello)
        await settle()
        assert isinstance(hub.clock, ManualClock)
        hub.clock.advance(10.0)
        assert (await robot.until(ErrorMessage)).code == "handshake_timeout"
        assert (await robot.closed())[0] == 4408


async def test_a_full_pool_refuses_the_start_and_it_may_be_tried_again() -> None:
    async with hub_over(NullPolicy(capacity=1)) as hub:
        first, second = StreamRobot(hub), StreamRobot(hub)
        await first.start()
        await second.until(Hello)
        second.say(second.side.start())
        assert (await second.until(ErrorMessage)).code == "capacity"
        await first.close()
        second.say(second.side.start())
        assert isinstance(await second.until(Started), Started)


# ---- losing and resuming a connection


async def test_a_session_survives_its_connection_for_the_grace() -> None:
    policy = NullPolicy()
    async with hub_over(policy, grace_s=30.0) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        robot.observe(1)
        await robot.until(ActionChunk)
        await robot.drop()
        assert robot.side.disconnected()
        assert isinstance(hub.clock, ManualClock)
        hub.clock.advance(29.0)
        await settle()
        again = StreamRobot(hub, robot.side)
        resumed = await again.start()
        assert isinstance(resumed, Resumed)
        assert (resumed.epoch, resumed.last_seq) == (0, 1)
        hub.clock.advance(60.0)
        await settle()
        again.observe(2)
        assert (await again.until(ActionChunk)).seq == 2
        assert (policy.sessions, len(hub.streams)) == (1, 1)


async def test_a_reset_that_a_takeover_cut_short_is_owed() -> None:
    class Slow(NullPolicy):
        begun = asyncio.Event()

        async def reset(self, session_id: str) -> None:
            self.begun.set()
            await asyncio.Event().wait()

    policy = Slow()
    async with hub_over(policy) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        robot.say(robot.side.reset())
        await policy.begun.wait()
        robot.side.disconnected()
        again = StreamRobot(hub, robot.side)
        resumed = await again.start()
        assert resumed.epoch == 0
        assert again.side.owes_reset


async def test_the_grace_ends_the_session_and_its_token() -> None:
    policy = NullPolicy()
    async with hub_over(policy, grace_s=30.0) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        await robot.drop()
        robot.side.disconnected()
        await settle()
        assert isinstance(hub.clock, ManualClock)
        hub.clock.advance(30.0)
        await settle()
        assert policy.sessions == 0
        again = StreamRobot(hub, robot.side)
        await again.until(Hello)
        again.say(again.side.start())
        assert (await again.until(ErrorMessage)).code == "session_not_found"


async def test_an_inference_of_a_lost_connection_is_cancelled() -> None:
    gate = Gate()
    async with hub_over(NullPolicy(think=gate)) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        robot.observe(1)
        await gate.arrived.wait()
        await robot.drop()
        assert gate.cancelled == 1


async def test_a_resume_takes_the_session_over_from_a_connection_that_hangs() -> None:
    gate = Gate()
    async with hub_over(NullPolicy(think=gate)) as hub:
        old = StreamRobot(hub)
        started = await old.start()
        assert isinstance(started, Started)
        old.observe(1)
        await gate.arrived.wait()
        side = StreamClientSide()
        new = StreamRobot(hub, side)
        await new.until(Hello)
        side.state = StreamState.STARTING
        new.say(encode(Resume(session_id=started.session_id, resume_token=started.resume_token)))
        resumed = await new.until(Resumed)
        assert resumed.last_seq == 1
        assert gate.cancelled == 1
        assert await old.until(Closed) == Closed(reason="taken_over")
        assert (await old.closed())[0] == 4409
        gate.open.set()
        new.observe(5)
        assert (await new.until(ActionChunk)).start_tick == 5


@pytest.mark.parametrize("token", ["", "wrong"])
async def test_a_wrong_token_is_as_an_unknown_session(token: str) -> None:
    async with hub_over(NullPolicy()) as hub:
        owner, thief = StreamRobot(hub), StreamRobot(hub)
        started = await owner.start()
        assert isinstance(started, Started)
        await thief.until(Hello)
        for session_id in (started.session_id, "unknown"):
            thief.side.state = StreamState.STARTING
            thief.say(encode(Resume(session_id=session_id, resume_token=token or started.resume_token[:-1])))
            error = await thief.until(ErrorMessage)
            assert (error.code, error.message) == ("session_not_found", "no such session, or it is over")


async def test_a_token_works_once() -> None:
    async with hub_over(NullPolicy()) as hub:
        robot = StreamRobot(hub)
        started = await robot.start()
        assert isinstance(started, Started)
        await robot.drop()
        robot.side.disconnected()
        again = StreamRobot(hub, robot.side)
        await again.start()
        thief = StreamRobot(hub)
        await thief.until(Hello)
        thief.side.state = StreamState.STARTING
        thief.say(encode(Resume(session_id=started.session_id, resume_token=started.resume_token)))
        assert (await thief.until(ErrorMessage)).code == "session_not_found"


async def test_a_stopping_server_ends_attached_and_detached_sessions() -> None:
    policy = NullPolicy()
    async with hub_over(policy) as hub:
        attached, detached, greeted = StreamRobot(hub), StreamRobot(hub), StreamRobot(hub)
        await attached.start()
        await detached.start()
        await greeted.until(Hello)
        await detached.drop()
        await hub.shutdown(5)
        assert await attached.until(Closed) == Closed(reason="shutdown")
        assert (await greeted.until(ErrorMessage)).code == "shutdown"
        assert policy.sessions == 0


@pytest.mark.parametrize("seed", range(4))
async def test_random_lives_end_at_zero(seed: int) -> None:
    """Start, observe, reset, close, vanish, come back, in random order on a pool of three."""
    rng = random.Random(seed)

    async def think(_: str, request: PolicyRequest) -> None:
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)

    policy = NullPolicy(capacity=3, think=think)
    async with hub_over(policy, grace_s=5.0) as hub:
        robots: list[StreamRobot] = []
        assert isinstance(hub.clock, ManualClock)
        for _ in range(150):
            robots.append(StreamRobot(hub))
            for robot in list(robots):
                await step(robot, rng)
                if rng.random() < 0.15:
                    robots.remove(robot)
                    await robot.drop()
                    if robot.side.disconnected() and rng.random() < 0.6:
                        robots.append(StreamRobot(hub, robot.side))
            hub.clock.advance(rng.choice((0.0, 1.0)))
            while len(robots) > 6:
                await robots.pop(0).drop()
            assert policy.sessions <= 3
        for robot in robots:
            await robot.drop()
        await settle()
        hub.clock.advance(6.0)
        await settle()
        assert policy.sessions == 0


async def step(robot: StreamRobot, rng: random.Random) -> None:
    """Read what is there, then do something the state allows."""
    for _ in range(rng.randrange(4)):
        await asyncio.sleep(0)
    while not robot.transport.outbound.empty():
        frame = robot.transport.outbound.get_nowait()
        if frame is None:
            return
        robot.side.receive(frame)
    match robot.side.state:
        case StreamState.OPEN:
            robot.say(robot.side.start())
        case StreamState.LIVE if rng.random() < 0.1:
            robot.say(robot.side.close())
        case StreamState.LIVE if rng.random() < 0.2:
            robot.say(robot.side.reset())
        case StreamState.LIVE:
            robot.observe(rng.randrange(100))
        case _:
            pass


async def test_a_reset_that_comes_right_behind_an_observation_leaves_the_session_usable() -> None:
    """The observation's task is cancelled before it has run at all."""
    async with hub_over(NullPolicy()) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        robot.observe(1)
        robot.say(robot.side.reset())
        await robot.until(ResetDone)
        robot.observe(2)
        assert (await robot.until(ActionChunk)).start_tick == 2
        await robot.close()
