"""The shadow proxy: a robot notices nothing of it, whatever our server does, and the report says what differed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from realtime_omni.errors import ConfigError
from realtime_omni.server.policy import PolicyAnswer, PolicyRequest
from realtime_omni.shadow import MAX_BEHIND, ShadowProxy, ShadowReport, actions_of, run
from realtime_omni.testing.null_policy import NullPolicy
from realtime_omni_protocols.openpi import PATH, pack, unpack
from server.robot_server import served
from server.robots import Gate, observation

ONE, TWO = np.zeros((2, 3), np.float32), np.array([[0, 0.5, 0], [0, 0, -2]], np.float32)


class Offset(NullPolicy):
    """Differs from the null policy by 0.25 in one joint."""

    async def infer(self, session_id: str, request: PolicyRequest) -> PolicyAnswer:
        answer = await super().infer(session_id, request)
        answer.actions[:, 4] += 0.25
        return answer


@contextlib.asynccontextmanager
async def shadowed(ours: NullPolicy, upstream_row: str = "") -> AsyncIterator[tuple[ShadowProxy, str]]:
    async with served(NullPolicy(), api_key="theirs") as theirs, served(ours, api_key="ours") as mine:
        proxy = ShadowProxy(theirs + upstream_row, f"{mine}{PATH}?reply=openpi", api_key="ours")
        async with proxy.serving("127.0.0.1", 0) as url:
            yield proxy, url


HEADERS = {"Authorization": "Api-Key theirs"}


async def until(proxy: ShadowProxy, answers: int) -> None:
    async with asyncio.timeout(10):
        while len(proxy.report.ours_ms) < answers:
            await asyncio.sleep(0.01)


async def ask(socket: Any, message: dict[str, Any]) -> Any:
    await socket.send(pack(message))
    return await socket.recv()


@pytest.mark.parametrize("row", ["/", PATH])
async def test_the_report_has_the_largest_difference_and_both_latencies(row: str) -> None:
    async with shadowed(Offset()) as (proxy, url), connect(url + row, additional_headers=HEADERS) as robot:
        await robot.recv()
        for state in (0.0, 1.0, 2.0):
            actions, _ = actions_of(await ask(robot, observation(state)))
            assert actions is not None
            assert actions[0, 4] == state, "the robot gets the upstream's actions"
        await until(proxy, 3)
        report = proxy.report.as_dict()
        assert (report["compared"], report["skipped"], report["not_comparable"]) == (3, 0, {})
        assert report["max_abs_delta"] == pytest.approx(0.25)
        assert [i for i, delta in enumerate(report["max_abs_delta_by_dim"]) if delta] == [4]  # type: ignore[arg-type]
        assert report["latency_ms"]["ours"]["p50"] > 0  # type: ignore[index]


async def test_frames_closes_and_errors_pass_unchanged() -> None:
    async with shadowed(NullPolicy()) as (_, url), connect(url + "/", additional_headers=HEADERS) as robot:
        assert isinstance(unpack(await robot.recv()), dict)  # type: ignore[arg-type]
        assert str(await ask(robot, {"prompt": "go"})).startswith("camera_missing: ")
        with pytest.raises(ConnectionClosed):
            await robot.recv()
        assert robot.close_code == 1011


async def test_a_robot_does_not_wait_for_our_server() -> None:
    gate = Gate()
    ours = NullPolicy(think=gate)
    async with shadowed(ours) as (proxy, url), connect(url + "/", additional_headers=HEADERS) as robot:
        await robot.recv()
        for _ in range(MAX_BEHIND + 4):
            assert isinstance(await ask(robot, observation()), bytes)
        assert proxy.report.skipped >= 1
        gate.open.set()
        await until(proxy, 1)


async def test_without_our_server_the_robot_works_and_the_report_says_so() -> None:
    async with served(NullPolicy()) as theirs:
        proxy = ShadowProxy(theirs, "ws://127.0.0.1:9/")
        async with proxy.serving("127.0.0.1", 0) as url, connect(url + "/") as robot:
            await robot.recv()
            for _ in range(3):
                assert isinstance(await ask(robot, observation()), bytes)
            assert proxy.report.compared == 0
            assert proxy.report.not_comparable["ours: no connection"] >= 1


async def test_an_upstream_that_is_away_closes_the_robot() -> None:
    proxy = ShadowProxy("ws://127.0.0.1:9", "ws://127.0.0.1:9/")
    async with proxy.serving("127.0.0.1", 0) as url, connect(url + "/") as robot:
        with pytest.raises(ConnectionClosed):
            await robot.recv()
        assert robot.close_code == 1011


async def test_an_upstream_that_dies_does_not_end_the_robot_as_if_all_were_well() -> None:
    async def dies(socket: ServerConnection) -> None:
        await socket.send(pack({}))
        await socket.recv()
        socket.transport.abort()

    async with serve(dies, "127.0.0.1", 0) as server:
        proxy = ShadowProxy(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}", "ws://127.0.0.1:9/")
        async with proxy.serving("127.0.0.1", 0) as url, connect(url + "/") as robot:
            await robot.recv()
            with pytest.raises(ConnectionClosed):
                await ask(robot, observation())
            assert robot.close_code == 1011


@pytest.mark.parametrize("address", ["", "x", "http://127.0.0.1", "ws://", "ws://127.0.0.1:99999", "ws://["])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    for upstream, ours in ((address, "ws://127.0.0.1:9"), ("ws://127.0.0.1:9", address)):
        with pytest.raises(ConfigError, match="is no ws:// address"):
            run(upstream, ours, "127.0.0.1", 0, None, as_json=True)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", -1), ("127.0.0.1", 99_999), ("", 0)])
def test_a_place_where_nobody_can_listen_is_refused(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:|--host is empty"):
        run("ws://127.0.0.1:9", "ws://127.0.0.1:9", host, port, None, as_json=True)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        run("ws://127.0.0.1:9", "ws://127.0.0.1:9", "127.0.0.1", taken.getsockname()[1], None, as_json=True)


def test_actions_that_are_no_numbers_are_not_called_equal() -> None:
    report = ShadowReport()
    report.add(pack({"actions": ONE}), pack({"actions": ONE * np.nan}), 1.0, 1.0)
    assert (report.compared, dict(report.not_comparable)) == (0, {"ours: actions that are not finite": 1})


def test_what_cannot_be_compared_is_counted_by_its_reason() -> None:
    report = ShadowReport()
    report.add(pack(ONE), pack({"actions": TWO}), 5.0, 3.0)
    report.add(pack(ONE), "policy_failed: error 1", 5.0, 3.0)
    report.add(pack({"type": "error", "code": "capacity"}), pack(ONE), 5.0, 3.0)
    report.add(pack(ONE), pack(ONE[:1]), 5.0, 3.0)
    report.add(pack({"x": 1}), pack(ONE), 5.0, 3.0)
    report.add("reset successful", "reset successful", 5.0, 3.0)
    assert report.as_dict() == {
        "compared": 1,
        "skipped": 0,
        "not_comparable": {
            "ours: a text frame": 1,
            "upstream: capacity": 1,
            "shapes: [2, 3] and [1, 3]": 1,
            "upstream: no array of actions": 1,
        },
        "max_abs_delta": 2.0,
        "max_abs_delta_by_dim": [0.0, 0.5, 2.0],
        "latency_ms": {"upstream": {"p50": 5.0, "p99": 5.0}, "ours": {"p50": 3.0, "p99": 3.0}},
    }
