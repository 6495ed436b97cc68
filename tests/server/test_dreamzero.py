"""One DreamZero behind both endpoints: worlds imagine in the same engine in which robots are answered."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from models.dreamzero.tiny import seen, tiny_dreamzero
from realtime_omni.config import Config, load
from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.manager import SessionManager
from realtime_omni.server.app import create_app
from realtime_omni.server.deployment import read_contract
from realtime_omni.server.policy import PolicyBackend, PolicyRequest
from realtime_omni.server.run import robot_backend
from realtime_omni.server.settings import ServerSettings
from realtime_omni_protocols.openpi import Observation, PolicyError
from server.wire import Client


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[FastAPI, SessionManager]]:
    async with SessionManager(tiny_dreamzero(), Config()) as manager:
        app = create_app(manager, ServerSettings(), robots=robot_backend(manager))
        yield app, manager
        for hub in app.state.hubs:
            await hub.shutdown(20.0)
            hub.close()


def request(number: int, prompt: str | None = "push", **more: Any) -> PolicyRequest:
    view = seen(number)
    return PolicyRequest(Observation(images=dict(view.images), state=view.state, prompt=prompt), **more)


async def actions(robots: PolicyBackend, robot: str, *prompts: str | None) -> list[np.ndarray]:
    """Of one observation after the other, with their prompts."""
    return [
        (await robots.infer(robot, request(number, prompt, seed=5))).actions for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("refused", [{"prompt": "x" * 500}, {"prompt": "pull", "rtc": "guided"}], ids=["long", "mode"])
async def test_a_refused_observation_under_another_instruction_does_not_cost_the_episode(refused: Any) -> None:
    async with serving() as (app, _):
        robots = app.state.robots.backend
        undisturbed, other = await robots.open(), await robots.open()
        expected = await actions(robots, undisturbed, "push", "push")
        found = await actions(robots, other, "push")
        with pytest.raises((ArgumentError, PolicyError)):
            await robots.infer(other, request(1, **refused))
        found.append((await robots.infer(other, request(1, seed=5))).actions)
        np.testing.assert_array_equal(found, expected)


async def test_the_first_instruction_after_none_is_another_one() -> None:
    async with serving() as (app, _):
        robots = app.state.robots.backend
        fresh, silent = await robots.open(), await robots.open()
        await actions(robots, silent, None)
        np.testing.assert_array_equal(
            await actions(robots, silent, "push", "push"), await actions(robots, fresh, "push", "push")
        )


async def test_the_space_around_an_instruction_does_not_make_it_another_one() -> None:
    async with serving() as (app, _):
        robots = app.state.robots.backend
        spaced, same, other = [await robots.open() for _ in range(3)]
        expected = await actions(robots, same, "push", "push")
        np.testing.assert_array_equal(await actions(robots, spaced, "push", " push\n"), expected)
        assert np.abs(np.subtract(await actions(robots, other, "pull", "push"), expected)[1]).max() > 0


@pytest.mark.parametrize("format_name", ["rgb24", "latent"])
async def test_a_world_client_sees_what_is_imagined_while_a_robot_gets_actions(format_name: str) -> None:
    async with serving() as (app, manager):
        robots = app.state.robots.backend
        robot = await robots.open()
        answer = await robots.infer(robot, request(0))
        assert answer.actions.shape == (5, 4)
        client = Client(app.state.hub)
        started = await client.start(session_id="w", format=format_name, prompt="push", seed=1)
        assert (started.model, started.width, started.height) == ("tiny-dreamzero", 64, 32)
        assert {row.session_id for row in manager.sessions()} == {"w", robot}
        chunk, frames = await client.block()
        assert chunk.frames == 8
        assert len(frames) == (1 if format_name == "latent" else 8)
        again = await robots.infer(robot, request(1))
        assert np.isfinite(again.actions).all()
        client.send("session.close")
        await client.end()
        await robots.close(robot)
        assert manager.statistics().sessions == 0


async def test_it_is_one_model_with_pictures_and_a_policy() -> None:
    async with serving() as (app, _):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            (model,) = (await http.get("/v1/models")).json()["models"]
            assert model["policy"]["action_horizon"] == 5
            assert {"rgb24", "latent"} <= set(model["formats"])
            assert [control["schema"] for control in model["controls"]] == ["robot.state.v1"]
            numbers = (await http.get("/metrics")).text
            assert 'realtime_omni_engine_sessions{model="world"} 0.0' in numbers
            assert 'realtime_omni_engine_sessions{model="policy"}' not in numbers


async def test_no_other_world_and_no_other_policy_fits_beside_it() -> None:
    for name in ("null", "null-policy"):
        async with (
            SessionManager(tiny_dreamzero(), Config()) as manager,
            SessionManager(config=load(name, {})) as other,
        ):
            with pytest.raises(ConfigError, match="a server has one"):
                create_app(manager, ServerSettings(), beside=[other])


def test_the_recipes_robot_is_roboarenas_with_six_fields() -> None:
    deploy = load("dreamzero", {}).deploy
    facts: Any = tiny_dreamzero().spec.policy
    from dataclasses import replace

    facts = replace(facts, cameras=("wrist", "exterior_0", "exterior_1"), state_dim=8, action_dim=8, horizon=24)
    contract = read_contract(deploy, "dreamzero", facts)
    assert contract.roboarena_metadata() == {
        "image_resolution": [180, 320],
        "needs_wrist_camera": True,
        "n_external_cameras": 2,
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": "joint_position",
    }
    assert [camera.rule for camera in contract.cameras] == ["required", "required", "optional"]
    with pytest.raises(ConfigError, match="4 pictures at most"):
        read_contract(deploy, "dreamzero", replace(facts, max_frames=4))
