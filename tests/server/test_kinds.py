"""Several models on one server: a world, a voice and a policy, each on an engine of its own."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect

from realtime_omni.call import Calls
from realtime_omni.config import load
from realtime_omni.errors import ConfigError
from realtime_omni.manager import SessionManager
from realtime_omni.server.app import PAGE, create_app
from realtime_omni.server.kinds import by_kind
from realtime_omni.server.run import bind, robot_backend, running
from realtime_omni.server.settings import ServerSettings
from realtime_omni_protocols.live import PATH as LIVE_PATH
from realtime_omni_protocols.openpi import PATH as ROBOT_PATH
from realtime_omni_protocols.openpi import pack, unpack
from realtime_omni_protocols.world import PATH, PROTOCOL
from server.robots import observation
from server.voices import is_loud, pcm, speech
from server.wire import Client

LIVENESS_S = 20.0


@contextlib.asynccontextmanager
async def application(*recipes: str, **settings: Any) -> AsyncIterator[tuple[FastAPI, dict[str, SessionManager]]]:
    """The recipes' models on one application, put together as ``serve`` does."""
    async with contextlib.AsyncExitStack() as stack:
        managers = {name: SessionManager(config=load(name, {})) for name in recipes}
        for manager in managers.values():
            await stack.enter_async_context(manager)
        first, *beside = managers.values()
        models = by_kind([first, *beside])
        calls = await stack.enter_async_context(Calls(models["voice"])) if "voice" in models else None
        robots = robot_backend(models["policy"]) if "policy" in models else None
        yield create_app(first, ServerSettings(**settings), robots=robots, calls=calls, beside=beside), managers


@contextlib.asynccontextmanager
async def asking(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        yield client
    for hub in app.state.hubs:
        await hub.shutdown(LIVENESS_S)
        hub.close()


async def test_the_models_are_listed_world_first_whatever_their_order() -> None:
    async with application("puppet", "null-policy", "null") as (app, _), asking(app) as http:
        body = (await http.get("/v1/models")).json()
        assert [model["id"] for model in body["data"]] == ["null", "puppet", "null-policy"]
        told = [
            (model["formats"] != [], model["voice"] is not None, model["policy"] is not None)
            for model in body["models"]
        ]
        assert told == [(True, False, False), (False, True, False), (False, False, True)]
        assert (await http.get("/")).text == (PAGE / "index.html").read_text(encoding="utf-8")


async def test_the_page_at_the_root_of_a_server_with_a_voice_alone_is_for_talking() -> None:
    async with application("puppet") as (app, _), asking(app) as http:
        assert (await http.get("/")).text == (PAGE / "talk.html").read_text(encoding="utf-8")


async def test_each_endpoint_is_its_own_models() -> None:
    async with application("puppet", "null-policy", "null") as (app, managers), asking(app) as http:
        client = Client(app.state.hub)
        assert (await client.start(session_id="w", format="rgb24")).model == "null"
        await client.block()
        robot = await app.state.robots.backend.open()
        rows = {row["session_id"]: row["model"] for row in (await http.get("/v1/sessions")).json()["sessions"]}
        assert rows == {"w": "null", robot: "null-policy"}
        assert (await http.delete("/v1/sessions/w")).status_code == 204
        assert (await client.until("session.closed")).reason == "operator"
        await client.end()
        assert (await http.delete(f"/v1/sessions/{robot}")).status_code == 204
        assert not any(manager.sessions() for manager in managers.values())
        assert (await http.delete("/v1/sessions/w")).status_code == 410
        missing = await http.delete("/v1/sessions/nobody")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")


@pytest.mark.req("AC-50")
async def test_numbers_of_engines_are_told_apart_by_kind() -> None:
    async with application("null", "puppet") as (app, _), asking(app) as http:
        client = Client(app.state.hub)
        await client.start(format="rgb24")
        await client.block()
        text = (await http.get("/metrics")).text
        families = [family for family in text_string_to_metric_families(text) if "model" in str(family.samples)]
        assert len({family.name for family in families}) == len(families) >= 7
        sessions = next(family for family in families if family.name == "realtime_omni_engine_sessions")
        assert {sample.labels["model"]: sample.value for sample in sessions.samples} == {"world": 1, "voice": 0}
        client.send("session.close")
        await client.end()


@pytest.mark.parametrize("pair", [("null", "tiny-world"), ("puppet", "puppet"), ("null-policy", "null-policy")])
async def test_two_models_of_a_kind_are_refused_by_name(pair: Sequence[str]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        managers = [await stack.enter_async_context(SessionManager(config=load(name, {}))) for name in pair]
        with pytest.raises(
            ConfigError, match=f"{pair[0]} and {pair[1]}: a server has one (world|voice|policy) at most"
        ):
            create_app(managers[0], ServerSettings(), beside=managers[1:])


async def test_how_long_a_session_waits_for_its_client_is_its_models() -> None:
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(SessionManager(config=load("null", {}, ["session.grace_s=7"])))
        voice = await stack.enter_async_context(SessionManager(config=load("puppet", {}, ["session.grace_s=9"])))
        settings = ServerSettings.from_config(voice.config, {})
        app = create_app(voice, settings, calls=await stack.enter_async_context(Calls(voice)), beside=[world])
        assert [hub.settings.grace_s for hub in app.state.hubs] == [7, 9]
        app.state.hub.close()


@contextlib.asynccontextmanager
async def served(*recipes: str) -> AsyncIterator[tuple[str, dict[str, SessionManager]]]:
    settings = ServerSettings(port=0, shutdown_timeout_s=5.0)
    with bind(settings) as listener:
        async with application(*recipes) as (app, managers), running(app, settings, listener) as url:
            yield url, managers


async def _next(client: ClientConnection, kind: str) -> Any:
    async with asyncio.timeout(LIVENESS_S):
        while True:
            data = await client.recv()
            if isinstance(data, str) and (message := json.loads(data))["type"] == kind:
                return message


class _Walk:
    """A world session on a socket."""

    def __init__(self, client: ClientConnection) -> None:
        self.client = client

    async def start(self) -> None:
        await self.client.send(json.dumps({"type": "session.start", "format": "rgb24", "cadence": "on_demand"}))
        await _next(self.client, "session.started")

    async def step(self) -> None:
        await self.client.send(json.dumps({"type": "session.next"}))
        chunk = await _next(self.client, "chunk")
        shown = (chunk["chunk_index"] + 1) * chunk["frames"]
        await self.client.send(json.dumps({"type": "session.ack", "seq": chunk["seq"], "displayed": shown, "epoch": 0}))


class _Call:
    """A voice call on a socket: the puppet answers the tone with a tone."""

    def __init__(self, client: ClientConnection) -> None:
        self.client = client

    async def start(self) -> None:
        await self.client.send(json.dumps({"type": "session.start", "session": {"model": "puppet"}}))
        await _next(self.client, "session.started")

    async def step(self) -> None:
        """It says something new."""
        sound = base64.b64encode(pcm(speech(8))).decode()
        await self.client.send(json.dumps({"type": "session.input_audio.append", "audio": sound}))
        while not is_loud(base64.b64decode((await _next(self.client, "session.output_audio.delta"))["delta"])):
            pass


@contextlib.asynccontextmanager
async def _walking_and_talking(url: str) -> AsyncIterator[tuple[_Walk, _Call]]:
    base = url.replace("http", "ws")
    async with connect(base + PATH, subprotocols=[PROTOCOL]) as world, connect(base + LIVE_PATH) as voice:  # type: ignore[list-item]
        walk, call = _Walk(world), _Call(voice)
        await asyncio.gather(walk.start(), call.start())
        yield walk, call


async def test_a_walk_a_call_and_a_robot_at_the_same_time() -> None:
    async with served("null", "puppet", "null-policy") as (url, managers), _walking_and_talking(url) as (walk, call):

        async def walking() -> None:
            for _ in range(20):
                await walk.step()

        async def working() -> None:
            async with connect(url.replace("http", "ws") + ROBOT_PATH, compression=None) as robot:
                await robot.recv()
                for _ in range(5):
                    await robot.send(pack(observation(0.5)))
                    assert unpack(await robot.recv()).shape == (50, 32)  # type: ignore[arg-type, union-attr]

        await asyncio.gather(walking(), call.step(), working())
        ticks = {name: manager.statistics().ticks_settled for name, manager in managers.items()}
        assert ticks["null"] == 20
        assert ticks["null-policy"] == 5
        assert ticks["puppet"] > 8


@pytest.mark.parametrize("broken", ["null", "puppet"])
async def test_an_engine_that_stops_is_told_and_the_other_goes_on(broken: str) -> None:
    async with served("null", "puppet") as (url, managers), httpx.AsyncClient(base_url=url) as http:
        async with _walking_and_talking(url) as (walk, call):
            await asyncio.gather(walk.step(), call.step())
            assert (await http.get("/healthz")).json() == {"status": "ok", "reason": "ok"}

            def cycle() -> None:
                raise RuntimeError("a bug")

            managers[broken]._engine.cycle = cycle  # type: ignore[method-assign, assignment]
            managers[broken]._inbox.wake()
            async with asyncio.timeout(LIVENESS_S):
                while managers[broken].health().ok:
                    await asyncio.sleep(0.01)
            health = await http.get("/healthz")
            assert health.status_code == 503
            assert health.json()["reason"] == f"{broken}: the engine has stopped after an internal error"
            well = call if broken == "null" else walk
            await well.step()
            assert (await http.get("/metrics")).status_code == 200
            assert len((await http.get("/v1/models")).json()["models"]) == 2
            assert {row["model"] for row in (await http.get("/v1/sessions")).json()["sessions"]} >= {
                "null" if broken == "puppet" else "puppet"
            }
        async with connect(url.replace("http", "ws") + PATH, subprotocols=[PROTOCOL]) as again:  # type: ignore[list-item]
            await again.send(json.dumps({"type": "session.start", "format": "rgb24"}))
            kind = "error" if broken == "null" else "session.started"
            assert (await _next(again, kind)).get("code") in (None, "internal", "shutdown")
