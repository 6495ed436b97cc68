"""The demonstration's robot: it solves a task over a real socket however late its chunks are, and does what its page asks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")

from realtime_omni.config import load as load_config  # noqa: E402
from realtime_omni.errors import ConfigError  # noqa: E402
from realtime_omni.manager import SessionManager  # noqa: E402
from realtime_omni.server.run import robot_backend  # noqa: E402
from realtime_omni_client import PolicyStream  # noqa: E402
from realtime_omni_client.policy import policy_url  # noqa: E402
from realtime_omni_client.transport import websocket_connector  # noqa: E402
from realtime_omni_protocols.openpi import STREAM_PROTOCOL  # noqa: E402
from recipes.tiny_policy.demo import Show, listening, policy_server, setup_of  # noqa: E402
from recipes.tiny_policy.robot import Latency, Phase, Robot, SlowTransport, slow  # noqa: E402
from recipes.tiny_policy.table import EPISODE_TICKS, INSTRUCTIONS  # noqa: E402
from server.robot_server import served  # noqa: E402

RED_LEFT, BLUE_LEFT = 1, 3


@contextlib.asynccontextmanager
async def stream_on_the_policy(latency: Latency) -> AsyncIterator[PolicyStream]:
    async with SessionManager(config=load_config("tiny-policy", {}, [])) as manager:
        backend = robot_backend(manager)
        assert backend is not None
        async with served(backend) as url:
            connector = websocket_connector(policy_url(url), api_key=None, open_timeout_s=10, protocol=STREAM_PROTOCOL)
            async with PolicyStream(slow(connector, latency), control_hz=10) as stream:
                yield stream


class InStep:
    """Steps without a clock: the robot waits ``delay`` steps after each observation, then for its chunk."""

    def __init__(self, robot: Robot, stream: PolicyStream, delay: int) -> None:
        self.robot, self.stream, self.delay = robot, stream, delay
        self.asked, self.seq = 0, 0

    async def step(self) -> None:
        await self.robot.step()
        if self.stream.side.seq != self.seq:
            self.seq, self.asked = self.stream.side.seq, self.robot.tick - 1
        while self.stream.side.answered < self.seq and self.robot.tick - self.asked >= self.delay:
            await asyncio.sleep(0.001)

    async def until_the_episode_is_over(self) -> Phase:
        while self.robot.phase is Phase.RUNNING:
            await self.step()
        return self.robot.phase


async def test_it_solves_a_task_with_chunks_that_come_late_and_takes_other_words_on_the_way():
    latency = Latency()
    async with stream_on_the_policy(latency) as stream:
        assert setup_of(stream).joinings == ("trained", "auto", "none")
        robot = Robot(stream, latency, joining="trained", task=RED_LEFT, seed=1)
        steps = InStep(robot, stream, delay=4)
        assert await steps.until_the_episode_is_over() is Phase.SOLVED
        assert (robot.score.solved, robot.score.episodes) == (1, 1)
        assert robot.score.switches >= 2
        assert robot.answer is not None
        assert (robot.answer.delay, robot.answer.planned_delay) == (4, 4)
        assert robot.episode_tick < EPISODE_TICKS

        while robot.phase is not Phase.RUNNING or robot.episode_tick < 10:  # the rest, and the next episode's beginning
            await steps.step()
        robot.set_task(BLUE_LEFT)
        await steps.step()
        assert robot.past[-1].action is not None  # it does not stop for that
        assert await steps.until_the_episode_is_over() is Phase.SOLVED
        assert robot.instruction == INSTRUCTIONS[BLUE_LEFT]

        robot.set_joining("none")
        while robot.answer.planned_delay != 0 or robot.tick - robot.answer.start_tick > 8:
            await steps.step()
        assert robot.answer.delay == 4
        assert (robot.score.episodes, robot.score.joining) == (0, "none")


async def test_without_a_plan_it_stands_still():
    latency = Latency()
    async with stream_on_the_policy(latency) as stream:
        robot = Robot(stream, latency, joining="trained", seed=1)
        began = robot.scene.tool.clone()
        await robot.step()
        assert [done.action for done in robot.past] == [None]
        assert torch.equal(robot.scene.tool, began)
        assert robot.plan() == []


async def test_nothing_arrives_sooner_than_the_latency_after_what_was_sent():
    class Echo:
        async def send(self, data: str | bytes) -> None: ...

        async def receive(self) -> str | bytes:
            return b"here"

        async def close(self) -> None: ...

    transport = SlowTransport(Echo(), Latency(0.05))
    before_s = time.perf_counter()
    await transport.send(b"")
    assert await transport.receive() == b"here"
    assert time.perf_counter() - before_s > 0.045


def unconnected() -> Show:
    stream = PolicyStream.connect("ws://127.0.0.1:9")
    robot = Robot(stream, Latency(), joining="trained", task=RED_LEFT)
    return Show(robot, setup_of(stream))


def test_the_page_asks_and_the_robot_changes():
    show = unconnected()
    show.carry_out('{"type": "delay", "delay": 7}')
    show.carry_out('{"type": "task", "task": 7}')
    assert (show.robot.delay, show.robot.instruction) == (7, INSTRUCTIONS[7])
    show.carry_out('{"type": "task", "task": null}')
    show.carry_out('{"type": "new_scene"}')
    assert show.report().chosen is None


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "delay", "delay": 8}',
        '{"type": "delay", "delay": -1}',
        '{"type": "task", "task": 9}',
        '{"type": "joining", "joining": "vjp"}',
        '{"type": "new_scene", "seed": 1}',
        '{"type": "fly"}',
        "{",
    ],
)
def test_what_no_page_of_ours_asks_changes_nothing(text: str):
    show = unconnected()
    before = show.report()
    with pytest.raises(ValueError):
        show.carry_out(text)
    assert show.report() == before


async def test_a_port_that_is_taken_and_a_policy_that_does_not_start_are_said_in_a_line():
    with listening("127.0.0.1", 0) as listener, pytest.raises(ConfigError, match="name another with --port"):
        listening(*listener.getsockname())
    for host, port in (("127.0.0.1", -1), ("127.0.0.1", 99_999), ("", 0)):
        with pytest.raises(ConfigError):
            listening(host, port)
    with pytest.raises(ConfigError, match="did not start"):
        async with policy_server("tiny-policy", ["no.such=field"]):
            pass
