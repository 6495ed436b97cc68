"""Robots on the engine: the source documents' acceptance checks with nothing fake between the wire and the model."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect

from models.vla import checkpoints
from realtime_omni.config import Config, load
from realtime_omni.errors import ConfigError
from realtime_omni.manager import SessionManager
from realtime_omni.server.deployment import read_contract
from realtime_omni.server.engine_policy import EnginePolicy
from realtime_omni.server.openpi import PolicyHub
from realtime_omni.server.run import robot_backend
from realtime_omni.server.settings import ServerSettings
from realtime_omni.testing.faults import inject
from realtime_omni_protocols.openpi import PATH, PolicyServerError, Row, pack, unpack
from realtime_omni_protocols.openpi.stream_messages import ActionChunk, ErrorMessage, ResetDone
from server.robot_server import served
from server.robots import Robot, StreamRobot, observation

HANDSHAKE = {
    "image_resolution": [224, 224],
    "n_external_cameras": 1,
    "needs_wrist_camera": True,
    "needs_stereo_camera": False,
    "needs_session_id": False,
    "action_space": "joint_position",
    "action_horizon": 50,
    "action_dim": 32,
    "max_cameras": 3,
}
"""Written down again: what recipes/null-policy.yaml must send."""


@contextlib.asynccontextmanager
async def serving(*overrides: str) -> AsyncIterator[tuple[SessionManager, PolicyHub]]:
    """The hub of recipe ``null-policy``; afterwards no session and no page is left."""
    async with SessionManager(config=load("null-policy", {}, overrides)) as manager:
        backend = robot_backend(manager)
        assert backend is not None
        hub = PolicyHub(backend, ServerSettings())
        yield manager, hub
        await hub.shutdown(10)
        assert hub.live == set()
        statistics = manager.statistics()
        assert (statistics.sessions, statistics.tombstones, statistics.pages_used) == (0, 0, 0)
        assert statistics.memory.states == 0


@pytest.mark.req("AC-36")
async def test_the_first_frame_is_the_recipes_handshake_map() -> None:
    async with serving() as (_, hub):
        metadata = await Robot(hub).connect()
        assert metadata == HANDSHAKE


@pytest.mark.req("AC-37")
async def test_a_short_state_is_padded_and_a_second_observation_has_its_own_chunk() -> None:
    async with serving() as (manager, hub):
        robot = Robot(hub)
        await robot.connect()
        for state in (0.25, 0.75):
            actions = (await robot.infer(observation(state)))["actions"]
            assert (actions.shape, actions.dtype) == ((50, 32), np.float32)
            expected = np.arange(50, dtype=np.float32)[:, None] + np.array([state] * 14 + [0.0] * 18, np.float32)
            np.testing.assert_array_equal(actions, expected)
        assert manager.statistics().chunks_committed == 2
        await robot.drop()


@pytest.mark.req("AC-38")
async def test_a_malformed_observation_names_its_key_and_the_next_one_succeeds() -> None:
    async with serving() as (manager, hub):
        robot = Robot(hub)
        await robot.connect()
        with pytest.raises(PolicyServerError, match=re.escape("$.state")) as refused:
            await robot.infer(observation(state=np.nan))
        assert refused.value.code == "state_value"
        assert manager.statistics().sessions_created == 0
        assert (await robot.infer(observation()))["actions"].shape == (50, 32)
        await robot.drop()


async def test_openpis_reply_tells_every_stage_and_their_sum_is_the_time_inside() -> None:
    async with serving("options.policy_ms=20") as (_, hub):
        robot = Robot(hub, Row.OPENPI)
        await robot.connect()
        timing = (await robot.infer(observation()))["server_timing"]
        assert timing["denoise"] >= 20
        assert timing["images"] == timing["prefix"] == 0
        assert timing["infer_ms"] == pytest.approx(timing["denoise"])
        await robot.drop()


async def test_a_failed_tick_is_an_error_and_the_session_goes_on() -> None:
    async with serving() as (manager, hub):
        robot = Robot(hub)
        await robot.connect()
        await robot.infer(observation())
        inject(manager, "forward:3", error=RuntimeError("a kernel died"))
        with pytest.raises(PolicyServerError) as failed:
            await robot.infer(observation())
        assert failed.value.code == "policy_failed"
        assert "kernel" not in str(failed.value)
        assert (await robot.infer(observation(3.0)))["actions"][0, 0] == 3.0
        assert manager.statistics().sessions_created == 1
        await robot.drop()


async def test_robots_that_ask_together_share_a_batch() -> None:
    async with serving("options.policy_ms=30") as (manager, hub):
        robots = [Robot(hub) for _ in range(4)]
        for robot in robots:
            await robot.connect()
        for _ in range(3):
            replies = await asyncio.gather(*(robot.infer(observation(float(i))) for i, robot in enumerate(robots)))
            assert [reply["actions"][0, 0] for reply in replies] == [0.0, 1.0, 2.0, 3.0]
        assert manager.statistics().mean_batch > 1.5
        for robot in robots:
            await robot.drop()


async def test_a_full_pool_refuses_and_serves_again_when_a_robot_leaves() -> None:
    async with serving("session.max_sessions=1", "kv.requested_sessions=1") as (_, hub):
        first, second = Robot(hub), Robot(hub)
        await first.connect()
        await second.connect()
        await first.infer(observation())
        with pytest.raises(PolicyServerError) as refused:
            await second.infer(observation())
        assert refused.value.code == "capacity"
        await first.drop()
        assert (await second.infer(observation(2.0)))["actions"][0, 0] == 2.0
        await second.drop()


async def test_a_thousand_connects_kills_and_resets_on_a_pool_of_three_leave_nothing() -> None:
    """Answers are each robot's own: the first action is the state that it sent."""
    draw = random.Random(5)
    async with serving("session.max_sessions=3", "kv.requested_sessions=3", "options.steps=2") as (manager, hub):
        robots: list[Robot] = []
        served = refused = 0
        codes: set[str | None] = set()
        for number in range(1000):
            if len(robots) < 5 and (not robots or draw.random() < 0.3):
                robots.append(Robot(hub, draw.choice((Row.BARE, Row.ROBOARENA))))
                await robots[-1].connect()
            robot = draw.choice(robots)
            what = draw.random()
            if what < 0.5:
                try:
                    reply = await robot.infer(observation(float(number), session_id=f"label-{draw.randrange(3)}"))
                    assert reply["actions"][0, 0] == number
                    served += 1
                except PolicyServerError as error:
                    codes.add(error.code)
                    refused += 1
                    if robot.side.row is Row.ROBOARENA:
                        await robot.closed()
                        robots.remove(robot)
            elif what < 0.65 and robot.side.row is Row.ROBOARENA:
                await robot.reset()
            else:
                if what < 0.8:
                    robot.ask(observation(float(number)))  # and goes away while it is computed
                robots.remove(robot)
                await robot.drop()
            assert len(hub.live) <= 3
        for robot in robots:
            await robot.drop()
        assert served > 100
        assert refused > 0
        assert codes == {"capacity"}
        assert manager.health().ok


def contract_of(deploy: dict[str, Any]) -> Any:
    from realtime_omni.models.null.policy import NullPolicy

    policy = NullPolicy().spec.policy
    assert policy is not None
    return read_contract(deploy, "null-policy", policy)


@pytest.mark.parametrize(
    ("deploy", "words"),
    [
        ({"cameras": [{"name": "top"}]}, "no camera 'top'; it has base_0_rgb"),
        ({"cameras": [{"name": "base_0_rgb", "max_frames": 4}]}, "takes one picture"),
        ({"state": [{"dim": 33}]}, "deploy.state: 33 channels, but the policy reads 32"),
        ({"handshake": {"action_horizon": 16}}, "deploy.handshake.action_horizon: 16, but the policy's is 50"),
        ({"handshake": {"max_cameras": 2}}, "the policy's is 3"),
        ({"action_names": ["x"]}, "one name per dimension"),
        ({"control_hz": 0}, "control_hz"),
        ({"camera": []}, "camera"),
    ],
)
def test_a_deployment_that_does_not_fit_its_policy_is_refused(deploy: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        contract_of(deploy)


def test_without_a_handshake_map_the_contract_describes_itself() -> None:
    handshake = contract_of({"control_hz": 15.0}).handshake
    assert handshake["action_horizon"] == 50
    assert handshake["control_hz"] == 15.0
    assert handshake["cameras"] == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]


async def test_a_session_that_was_closed_elsewhere_is_opened_again_for_the_next_observation() -> None:
    async with serving() as (manager, hub):
        robot = Robot(hub)
        await robot.connect()
        await robot.infer(observation())
        backend = hub.backend
        assert isinstance(backend, EnginePolicy)
        await manager.close_session(next(iter(hub.live)), "operator")
        with pytest.raises(PolicyServerError) as gone:
            await robot.infer(observation())
        assert gone.value.code == "session_not_found"
        assert backend.sessions == 0
        assert (await robot.infer(observation(4.0)))["actions"][0, 0] == 4.0
        await robot.drop()


# ---------------------------------------------------------------------- a real network


@contextlib.asynccontextmanager
async def serving_pi0(**options: Any) -> AsyncIterator[PolicyHub]:
    given = {"checkpoint": str(checkpoints.GOLDEN / "pi0")} | options
    async with SessionManager(config=Config(model="pi0", options=given)) as manager:
        backend = robot_backend(manager)
        assert backend is not None
        hub = PolicyHub(backend, ServerSettings())
        yield hub
        await hub.shutdown(10)
        assert manager.statistics().memory.states == 0


def seen_by_pi0(state: float = 0.1, **fields: Any) -> dict[str, Any]:
    picture = np.full((30, 40, 3), 90, np.uint8)
    cameras = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
    pictures = {f"observation.images.{name}": picture for name in cameras}
    return pictures | {"state": np.full(6, state, np.float32), "prompt": "pick up"} | fields


@pytest.mark.req("AC-39")
async def test_a_seeded_observation_gets_the_same_actions_under_any_label_and_after_reset() -> None:
    async with serving_pi0() as hub:
        robot, other = Robot(hub, Row.ROBOARENA), Robot(hub)
        await robot.connect()
        await other.connect()
        first = (await robot.infer(seen_by_pi0(session_id="one", seed=4)))["actions"]
        assert first.shape == (6, 5)
        again = [(await robot.infer(seen_by_pi0(session_id="two", seed=4)))["actions"]]
        await robot.reset()
        again.append((await robot.infer(seen_by_pi0(session_id="two", seed=4)))["actions"])
        again.append((await other.infer(seen_by_pi0(seed=4)))["actions"])
        for actions in again:
            np.testing.assert_array_equal(actions, first)
        assert np.abs((await other.infer(seen_by_pi0(seed=5)))["actions"] - first).max() > 1e-3
        await robot.drop()
        await other.drop()


async def test_the_handshake_says_which_statistics_are_in_use_and_the_reply_every_stage() -> None:
    async with serving_pi0() as hub:
        robot = Robot(hub, Row.OPENPI)
        metadata = await robot.connect()
        statistics = metadata["statistics"]
        assert isinstance(statistics, dict)
        assert statistics["observation.state"].startswith("mean_std ")
        timing = (await robot.infer(seen_by_pi0()))["server_timing"]
        assert min(timing[stage] for stage in ("images", "prefix", "denoise")) > 0
        inside = timing["images"] + timing["prefix"] + timing["denoise"]
        assert inside == pytest.approx(timing["infer_ms"])
        await robot.drop()


async def test_a_prompt_beyond_the_policys_words_is_the_observations_fault() -> None:
    async with serving_pi0() as hub:
        robot = Robot(hub)
        await robot.connect()
        with pytest.raises(PolicyServerError) as refused:
            await robot.infer(seen_by_pi0(prompt="pick up " * 200))
        assert refused.value.code == "prompt_invalid"
        assert (await robot.infer(seen_by_pi0()))["actions"].shape == (6, 5)
        await robot.drop()


async def test_a_streaming_robots_chunks_continue_by_the_delay_it_measured() -> None:
    async with serving_pi0(rtc={"mode": "trained"}) as hub:
        robot = StreamRobot(hub)
        await robot.start()

        async def chunk_for(tick: int, consumed: int | None) -> ActionChunk:
            robot.say(robot.side.observe(seen_by_pi0(), tick, consumed=consumed))
            return await robot.until(ActionChunk)

        first = await chunk_for(10, None)
        assert (first.start_tick, first.valid_from, first.delay_used) == (10, 0, 0)
        second = await chunk_for(14, 2)  # of four ticks two had actions of the first chunk: it came after two
        assert (second.start_tick, second.valid_from, second.delay_used) == (14, 2, 2)
        np.testing.assert_allclose(second.actions[:2], first.actions[4:6], atol=2e-5)
        robot.say(robot.side.reset())
        await robot.until(ResetDone)
        third = await chunk_for(15, None)
        assert (third.valid_from, third.delay_used) == (0, 0)
        await robot.close()


@pytest.mark.parametrize(("came", "valid_from"), [(True, 2), (False, 0)])
async def test_a_chunk_that_was_lost_with_its_connection_is_not_continued(came: bool, valid_from: int) -> None:
    async with serving_pi0(rtc={"mode": "trained"}) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        for tick, consumed in ((10, None), (14, 2)):
            robot.say(robot.side.observe(seen_by_pi0(), tick, consumed=consumed))
            if tick == 10 or came:
                await robot.until(ActionChunk)
            else:
                await robot.receive()  # sent, and lost on its way
        await robot.drop()
        robot.side.disconnected()
        again = StreamRobot(hub, robot.side)
        await again.start()
        again.say(again.side.observe(seen_by_pi0(), 16, consumed=0))
        chunk = await again.until(ActionChunk)
        assert (chunk.start_tick, chunk.valid_from, chunk.delay_used) == (16, valid_from, valid_from)
        await again.close()


async def test_a_streaming_robot_chooses_how_a_chunk_continues_where_the_recipe_allows_it() -> None:
    async with serving_pi0(rtc={"mode": "trained", "allow": ["none"]}) as hub:
        robot = StreamRobot(hub)
        await robot.start()
        assert robot.side.hello is not None
        assert robot.side.hello.metadata["rtc_modes"] == ["trained", "none"]

        async def chunk_for(tick: int, consumed: int | None, rtc: str | None) -> ActionChunk:
            robot.say(robot.side.observe(seen_by_pi0(), tick, consumed=consumed, rtc=rtc))
            return await robot.until(ActionChunk)

        await chunk_for(10, None, None)
        plain = await chunk_for(14, 2, "none")
        assert (plain.valid_from, plain.delay_used) == (0, 0)
        joined = await chunk_for(16, 0, "trained")
        assert (joined.valid_from, joined.delay_used) == (2, 2)
        np.testing.assert_allclose(joined.actions[:2], plain.actions[2:4], atol=2e-5)
        robot.say(robot.side.observe(seen_by_pi0(), 18, consumed=0, rtc="vjp"))
        refused = await robot.until(ErrorMessage)
        assert (refused.code, refused.path) == ("bad_message", "$.rtc")
        assert (await chunk_for(20, 0, None)).valid_from == 2
        await robot.close()


async def test_pings_and_handshakes_are_answered_while_another_robots_policy_computes() -> None:
    """The policy holds the engine's thread for two seconds; a loop that it blocked would answer behind it."""
    config = load("null-policy", {}, ["options.policy_ms=2000", "options.steps=1"])
    async with SessionManager(config=config) as manager:
        backend = robot_backend(manager)
        assert backend is not None
        async with served(backend) as url, connect(url + PATH) as busy:
            await busy.recv()
            await busy.send(pack(observation()))
            waiting = asyncio.create_task(busy.recv())
            while manager.statistics().sessions == 0:
                await asyncio.sleep(0.01)
            async with asyncio.timeout(20):
                await (await busy.ping())
                async with connect(url + PATH) as other:
                    await other.recv()
            assert not waiting.done()
            assert isinstance(unpack(await waiting), np.ndarray)  # type: ignore[arg-type]


async def test_streaming_robots_that_come_go_and_reset_at_random_leave_nothing() -> None:
    """Observations are pushed without waiting; whatever arrives answers its own observation, of the present epoch."""
    draw = random.Random(8)
    async with serving("session.max_sessions=3", "kv.requested_sessions=3", "options.steps=3") as (manager, hub):
        robots: list[StreamRobot] = []
        chunks = resets = 0
        for tick in range(400):
            if len(robots) < 3 and (not robots or draw.random() < 0.3):
                robots.append(StreamRobot(hub))
                await robots[-1].start()
            robot = draw.choice(robots)
            what = draw.random()
            if what < 0.6:
                robot.observe(tick)
            elif what < 0.75:
                robot.observe(tick)
                chunk = await newest(robot, tick)
                assert chunk.actions[0, 0] == tick
                chunks += 1
            elif what < 0.85:
                robot.say(robot.side.reset())
                await robot.until(ResetDone)
                resets += 1
            else:
                robots.remove(robot)
                await robot.close()
        for robot in robots:
            await robot.close()
        assert min(chunks, resets) > 20
        assert manager.statistics().chunks_failed == 0


async def newest(robot: StreamRobot, tick: int) -> ActionChunk:
    while True:
        chunk = await robot.until(ActionChunk)
        if chunk.start_tick == tick:
            return chunk
