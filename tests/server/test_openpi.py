"""The robot endpoint's alternating rows over an in-memory transport and a null policy."""

from __future__ import annotations

import asyncio
import io
import random
import re

import numpy as np
import pytest
from PIL import Image

from realtime_omni.server.policy import PolicyRequest
from realtime_omni.testing.null_policy import SOURCE_CONTRACT, NullPolicy
from realtime_omni_protocols.openpi import EncodedImage, PolicyServerError, Row, pack
from server.robots import Gate, Robot, hub_over, observation, settle

STAGES = {"queue", "decode", "images", "prefix", "denoise", "encode", "infer_ms"}


@pytest.mark.req("AC-36")
async def test_the_first_frame_is_the_deployments_handshake_map() -> None:
    async with hub_over(NullPolicy()) as hub:
        metadata = await Robot(hub).connect()
        assert metadata == SOURCE_CONTRACT.handshake
        assert (metadata["action_horizon"], metadata["action_dim"], metadata["max_cameras"]) == (50, 32, 3)
        assert metadata["image_resolution"] == [224, 224]


@pytest.mark.req("AC-37")
async def test_two_observations_on_one_connection_get_their_chunks() -> None:
    async with hub_over(NullPolicy()) as hub:
        robot = Robot(hub)
        await robot.connect()
        for state in (0.25, 0.75):
            actions = (await robot.infer(observation(state)))["actions"]
            assert (actions.shape, actions.dtype) == ((50, 32), np.float32)
            assert np.isfinite(actions).all()
            assert actions[0].tolist() == [state] * 14 + [0.0] * 18
        await robot.drop()
        assert hub.live == set()


@pytest.mark.req("AC-38")
async def test_a_bad_observation_takes_no_session_and_the_next_one_succeeds() -> None:
    policy = NullPolicy()
    async with hub_over(policy) as hub:
        robot = Robot(hub)
        await robot.connect()
        with pytest.raises(PolicyServerError, match=re.escape('$["observation.images.top"]')) as refused:
            await robot.infer(observation(**{"observation.images.top": np.zeros((8, 8, 3), np.uint8)}))
        assert refused.value.code == "camera_unknown"
        assert policy.sessions == 0
        assert (await robot.infer(observation()))["actions"].shape == (50, 32)


async def test_openpis_reply_tells_every_stage_and_the_total_of_the_call_before() -> None:
    async with hub_over(NullPolicy()) as hub:
        robot = Robot(hub, Row.OPENPI)
        await robot.connect()
        first, second = await robot.infer(observation()), await robot.infer(observation())
        assert first["server_timing"].keys() == STAGES
        assert second["server_timing"].keys() == STAGES | {"prev_send_ms", "prev_total_ms"}
        assert second["policy_timing"].keys() == {"infer_ms"}
        timing = second["server_timing"]
        inside_ms = sum(first["server_timing"][stage] for stage in STAGES - {"infer_ms"})
        assert inside_ms + timing["prev_send_ms"] <= timing["prev_total_ms"]
        assert all(value >= 0 for value in timing.values())
        assert timing["images"] + timing["prefix"] + timing["denoise"] == pytest.approx(timing["infer_ms"])


async def test_chunks_errors_and_connections_are_counted() -> None:
    async with hub_over(NullPolicy()) as hub:
        robot = Robot(hub)
        await robot.connect()
        assert hub.metrics.value("robot_connections", row="bare") == 1
        await robot.infer(observation())
        with pytest.raises(PolicyServerError):
            await robot.infer(observation(prompt=""))
        assert hub.metrics.value("robot_chunks_total", row="bare") == 1
        assert hub.metrics.value("robot_errors_total", code="prompt_invalid") == 1
        assert hub.metrics.value("robot_stage_seconds_count", stage="decode") == 1
        await robot.drop()
        assert hub.metrics.value("robot_connections", row="bare") == 0


async def test_an_error_of_an_openpi_connection_is_its_end() -> None:
    async with hub_over(NullPolicy()) as hub:
        robot = Robot(hub, Row.OPENPI)
        await robot.connect()
        with pytest.raises(PolicyServerError) as refused:
            await robot.infer({"prompt": "go"})
        assert refused.value.code == "camera_missing"
        assert await robot.closed() == (1011, "camera_missing")


async def test_a_reset_really_resets_and_keeps_the_session() -> None:
    policy = NullPolicy()
    async with hub_over(policy) as hub:
        robot = Robot(hub, Row.ROBOARENA)
        await robot.connect()
        await robot.reset()
        assert policy.resets == 0, "there was nothing to reset"
        await robot.infer(observation())
        await robot.reset()
        assert (policy.resets, policy.sessions) == (1, 1)
        assert len((await robot.infer(observation()))["actions"]) == 50


async def test_another_label_releases_the_session_before_it() -> None:
    policy = NullPolicy(capacity=1)
    async with hub_over(policy) as hub:
        robot = Robot(hub)
        await robot.connect()
        for label in ("a", "a", "b"):
            await robot.infer(observation(session_id=label))
        assert (policy.sessions, policy.closes) == (1, 1)


async def test_connections_that_use_one_label_do_not_share_a_session() -> None:
    policy = NullPolicy()
    async with hub_over(policy) as hub:
        robots = [Robot(hub), Robot(hub)]
        for robot in robots:
            await robot.connect()
            await robot.infer(observation(session_id="default"))
        assert policy.sessions == 2
        await robots[0].drop()
        assert policy.sessions == 1
        await robots[1].infer(observation(session_id="default"))


async def test_a_full_pool_is_an_error_and_not_the_end() -> None:
    async with hub_over(NullPolicy(capacity=1)) as hub:
        first, second = Robot(hub), Robot(hub)
        for robot in (first, second):
            await robot.connect()
        await first.infer(observation())
        with pytest.raises(PolicyServerError) as refused:
            await second.infer(observation())
        assert refused.value.code == "capacity"
        await first.drop()
        await second.infer(observation())


async def test_a_robot_that_goes_away_cancels_its_inference_and_frees_its_session() -> None:
    gate = Gate()
    policy = NullPolicy(think=gate)
    async with hub_over(policy) as hub:
        robot = Robot(hub)
        await robot.connect()
        robot.ask(observation())
        await gate.arrived.wait()
        await robot.drop()
        assert (gate.cancelled, policy.sessions) == (1, 0)


async def test_a_request_that_came_early_is_answered_in_its_turn() -> None:
    gate = Gate()
    async with hub_over(NullPolicy(think=gate)) as hub:
        robot = Robot(hub)
        await robot.connect()
        robot.ask(observation(1.0))
        await gate.arrived.wait()
        robot.transport.arrive(pack(observation(2.0)))
        await settle()
        gate.open.set()
        first = await robot.answer()
        robot.side.infer({})
        second = await robot.answer()
        assert (first["actions"][0, 0], second["actions"][0, 0]) == (1.0, 2.0)


async def test_who_sends_without_reading_is_cut_off() -> None:
    gate = Gate()
    async with hub_over(NullPolicy(think=gate)) as hub:
        robot = Robot(hub)
        await robot.connect()
        for _ in range(6):
            robot.transport.arrive(pack(observation()))
        assert await robot.closed() == (1011, "session_busy")


async def test_a_failing_policy_is_an_id_to_its_robot_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(_: str, request: PolicyRequest) -> None:
        raise FileNotFoundError("/secret/weights.bin")

    policy = NullPolicy(think=fail)
    async with hub_over(policy) as hub:
        robot = Robot(hub)
        await robot.connect()
        with pytest.raises(PolicyServerError) as refused:
            await robot.infer(observation())
        assert refused.value.code == "policy_failed"
        found = re.fullmatch(r"policy_failed: error ([0-9a-f]{12})", str(refused.value))
        assert found
        assert found[1] in caplog.text
        policy.think = None
        await robot.infer(observation())


async def test_an_action_that_is_not_finite_does_not_reach_the_robot(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(NullPolicy):
        async def infer(self, session_id: str, request: PolicyRequest):  # type: ignore[no-untyped-def]
            answer = await super().infer(session_id, request)
            answer.actions[3, 7] = np.nan
            return answer

    async with hub_over(Broken()) as hub:
        robot = Robot(hub)
        await robot.connect()
        with pytest.raises(PolicyServerError) as refused:
            await robot.infer(observation())
        assert refused.value.code == "bad_action"
        assert "bad_action" in caplog.text or "not finite" in caplog.text


async def test_an_evicted_session_is_said_once_and_opened_again() -> None:
    policy = NullPolicy()
    async with hub_over(policy) as hub:
        robot = Robot(hub)
        await robot.connect()
        await robot.infer(observation())
        policy.evict(next(iter(hub.live)))
        with pytest.raises(PolicyServerError) as refused:
            await robot.infer(observation())
        assert refused.value.code == "session_not_found"
        await robot.infer(observation())
        assert policy.sessions == 1


@pytest.mark.parametrize("format_", ["png", "jpeg"])
async def test_encoded_pictures_are_read(format_: str) -> None:
    seen: list[PolicyRequest] = []

    async def look(_: str, request: PolicyRequest) -> None:
        seen.append(request)

    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 100, 50)).save(buffer, format_)
    async with hub_over(NullPolicy(think=look)) as hub:
        robot = Robot(hub)
        await robot.connect()
        picture = EncodedImage(format_, memoryview(buffer.getvalue()))
        await robot.infer(observation(**{"observation.images.base_0_rgb": picture}))
        image = seen[0].observation.images["base_0_rgb"]
        assert image is not None
        assert np.abs(image.astype(int) - [200, 100, 50]).max() <= 3
        broken = EncodedImage(format_, memoryview(b"no picture"))
        with pytest.raises(PolicyServerError) as refused:
            await robot.infer(observation(**{"observation.images.base_0_rgb": broken}))
        assert refused.value.code == "image_invalid"


async def test_a_large_float_picture_is_converted_outside_the_event_loop() -> None:
    async with hub_over(NullPolicy()) as hub:
        robot = Robot(hub)
        await robot.connect()
        image = np.full((256, 256, 3), 0.5, np.float32)
        await robot.infer(observation(**{"observation.images.base_0_rgb": image}))


async def test_a_stopping_server_answers_who_waits_and_closes_everybody() -> None:
    gate = Gate()
    policy = NullPolicy(think=gate)
    async with hub_over(policy) as hub:
        waiting, idle = Robot(hub, Row.OPENPI), Robot(hub)
        for robot in (waiting, idle):
            await robot.connect()
        waiting.ask(observation())
        await gate.arrived.wait()
        await hub.shutdown(5)
        with pytest.raises(PolicyServerError, match="shutdown"):
            await waiting.answer()
        assert (await waiting.closed())[0] == (await idle.closed())[0] == 1001


@pytest.mark.parametrize("seed", range(4))
async def test_random_lives_on_a_pool_of_three_end_at_zero(seed: int) -> None:
    """250 lives each: connect, infer, change the label, reset, vanish in the middle of anything."""
    rng = random.Random(seed)
    gates: list[Gate] = []

    async def think(session_id: str, request: PolicyRequest) -> None:
        if rng.random() < 0.5:
            gate = Gate()
            gates.append(gate)
            await gate(session_id, request)

    policy = NullPolicy(capacity=3, think=think)
    async with hub_over(policy) as hub:
        robots: list[Robot] = []
        for _ in range(250):
            row = rng.choice((Row.BARE, Row.ROBOARENA))
            robot = Robot(hub, row)
            robots.append(robot)
            await robot.connect()
            for _ in range(rng.randrange(4)):
                label = {"session_id": rng.choice("ab")} if rng.random() < 0.5 else {}
                endpoint = {"endpoint": rng.choice(("infer", "reset"))} if row is Row.ROBOARENA else {}
                robot.transport.arrive(pack(observation(**label, **endpoint)))
            for _ in range(rng.randrange(12)):
                await settle_a_little(rng)
            while gates and rng.random() < 0.6:
                gates.pop(rng.randrange(len(gates))).open.set()
            while robots and (len(robots) > 5 or rng.random() < 0.4):
                robots.pop(rng.randrange(len(robots))).transport.drop()
            assert policy.sessions <= 3
        for robot in robots:
            await robot.drop()
        await settle()
        assert policy.sessions == 0
        for robot in [Robot(hub) for _ in range(3)]:
            await robot.connect()
            robot.ask(observation())
        await settle()
        assert policy.sessions == 3, "the whole pool is free again"


async def settle_a_little(rng: random.Random) -> None:
    for _ in range(rng.randrange(3)):
        await asyncio.sleep(0)
