"""The Python client plays against the fake server over loopback, through drops, failures and refusals."""

from __future__ import annotations

import asyncio
import itertools
import random

import numpy as np
import pytest

from client.fake_world_picture import Picture
from client.fake_world_server import FakeServer, fake_world
from realtime_omni_client import (
    ConnectError,
    ConnectionLostError,
    Control,
    EventRefusedError,
    Outcome,
    Reconnect,
    RefusedError,
    SessionClosedError,
    SessionFailedError,
    StartRefusedError,
    WorldChunk,
    WorldClient,
)
from realtime_omni_client.link import StartOptions, WorldLink
from realtime_omni_client.world import world_url
from realtime_omni_protocols.errors import WireCode
from realtime_omni_protocols.world import WireState

FAST = Reconnect(attempts=5, base_s=0.01, cap_s=0.05)


async def play(world: WorldClient, count: int) -> list[WorldChunk]:
    chunks: list[WorldChunk] = []
    async for chunk in world:
        chunks.append(chunk)
        if len(chunks) == count:
            break
    return chunks


def check_contiguous(chunks: list[WorldChunk]) -> None:
    """No chunk lost, none twice, frames numbered without a gap."""
    assert [c.chunk_index for c in chunks] == list(range(chunks[0].chunk_index, chunks[0].chunk_index + len(chunks)))
    for before, after in itertools.pairwise(chunks):
        assert after.first_frame == before.first_frame + before.frame_count


@pytest.mark.parametrize("kind", ["jpeg", "rgb24", "h264"])
async def test_every_format_arrives_as_uint8_pictures(kind: str) -> None:
    async with fake_world(width=32, height=48) as (_, url):
        async with WorldClient.connect(url, prompt="a maze", seed=3, format=kind, fps=200) as world:
            assert (world.session.width, world.session.height, world.session.seed) == (32, 48, 3)
            chunks = await play(world, 4)
    check_contiguous(chunks)
    expected = Picture(32, 48)
    for chunk in chunks:
        assert chunk.frames.shape == (3, 48, 32, 3)
        assert chunk.frames.dtype == np.uint8
        truth = np.stack(expected.block([], "a maze", 3)).astype(int)
        error = np.abs(chunk.frames.astype(int) - truth).mean()
        assert error == 0 if kind == "rgb24" else error < 12


async def test_a_chunk_is_printed_without_its_pixels() -> None:
    async with fake_world(width=32, height=48) as (_, url), WorldClient.connect(url, format="rgb24") as world:
        (chunk,) = await play(world, 1)
    size = 3 * chunk.frame_count * 32 * 48
    assert f"frames=<uint8 [{chunk.frame_count}, 48, 32, 3], {size} bytes>, latents=None" in str(chunk)
    assert "\n" not in str(chunk)


async def test_an_event_is_accepted_then_applied_by_the_chunk_that_names_it() -> None:
    async with fake_world() as (_, url), WorldClient.connect(url, fps=200, format="rgb24") as world:
        receipt = await world.send(prompt="a green garden", keys={"w", "l"})
        assert (receipt.event_id, receipt.status, receipt.prompt) == (0, "accepted", "a green garden")
        chunks = [await world.next_chunk()]
        while 0 not in chunks[-1].applied_event_ids:
            chunks.append(await world.next_chunk())
        outcome = await receipt.outcome()
        assert outcome == Outcome(0, "applied", chunks[-1].chunk_index, chunks[-1].first_frame)
        assert chunks[-1].prompt == "a green garden"
        second = await world.hold(set())
        assert second.event_id == 1


async def test_on_demand_yields_one_block_per_ask() -> None:
    async with fake_world() as (server, url), WorldClient.connect(url, cadence="on_demand", format="rgb24") as world:
        await asyncio.sleep(0.05)
        assert world.statistics().chunks == 0
        await world.next_chunk()
        await world.next_chunk()
        await asyncio.sleep(0.05)
        assert world.statistics().chunks == 2
        assert next(iter(server.sessions.values())).stream.generated == 6


async def test_generation_holds_when_nobody_takes_chunks() -> None:
    async with fake_world() as (server, url), WorldClient.connect(url, format="rgb24", fps=240, lead_frames=3) as world:
        stream = next(iter(server.sessions.values())).stream
        async with asyncio.timeout(20):
            while stream.generated < 6:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert stream.generated == 6  # 6 - 0 > 3: no third block
        await play(world, 3)


@pytest.mark.parametrize("kind", ["rgb24", "h264"])
async def test_drops_lose_and_repeat_nothing(kind: str) -> None:
    """Cut the connection five times, in the middle of whatever is going on; the pictures are those of an unbroken session."""
    async with fake_world() as (server, url):
        async with WorldClient.connect(url, seed=1, prompt="x", format=kind, fps=240, reconnect=FAST) as world:
            chunks: list[WorldChunk] = []
            for _ in range(5):
                chunks += await play(world, 2)
                server.drop_all()
            chunks += await play(world, 2)
            statistics = world.statistics()
    check_contiguous(chunks)
    assert chunks[0].chunk_index == 0
    assert statistics.resumes >= 1
    expected = Picture(64, 64)
    for chunk in chunks:
        truth = np.stack(expected.block([], "x", 1)).astype(int)
        assert np.abs(chunk.frames.astype(int) - truth).mean() < (1 if kind == "rgb24" else 12)


async def test_events_sent_while_disconnected_are_applied_once() -> None:
    async with (
        fake_world() as (server, url),
        WorldClient.connect(url, format="rgb24", fps=100, reconnect=FAST) as world,
    ):
        await world.next_chunk()
        player = asyncio.create_task(play(world, 40))
        receipts = []
        for number in range(10):
            if number % 3 == 0:
                server.drop_all()
            receipts.append(await world.send(prompt=f"prompt {number}"))
        outcomes = [await receipt.outcome() for receipt in receipts]
        player.cancel()
        stream = next(iter(server.sessions.values())).stream
        stream.check()
        assert [o.status for o in outcomes] == ["applied"] * 10
        assert stream.statistics().events_applied == 10


async def test_the_server_can_cut_right_after_a_block() -> None:
    async with fake_world() as (_, url), WorldClient.connect(url, fps=200, format="jpeg", reconnect=FAST) as world:
        await world.send(prompt="drop")
        chunks = await play(world, 8)
        check_contiguous(chunks)
        assert world.statistics().resumes == 1


async def test_a_session_that_is_gone_cannot_be_resumed() -> None:
    async with fake_world(grace_s=0.0) as (server, url):
        async with WorldClient.connect(url, fps=200, format="rgb24", reconnect=Reconnect(3, 0.05, 0.1)) as world:
            await world.next_chunk()
            next(iter(server.sessions.values())).stream.closed("operator")
            server.drop_all()
            with pytest.raises(ConnectionLostError) as caught:
                await play(world, 100)
            assert caught.value.code is WireCode.SESSION_GONE


async def test_a_server_that_never_comes_back_is_given_up() -> None:
    async with fake_world() as (server, url):
        client = WorldClient.connect(url, fps=200, format="rgb24", reconnect=Reconnect(2, 0.01, 0.01))
        async with client as world:
            await world.next_chunk()

            async def refuse() -> object:
                raise ConnectError("no route")

            world._live.connector = refuse  # type: ignore[assignment]
            server.drop_all()
            with pytest.raises(ConnectionLostError, match="2 attempts"):
                await play(world, 100)
            with pytest.raises(ConnectionLostError):
                await world.send(prompt="late")


async def test_pause_play_reset_abort() -> None:
    async with fake_world() as (_, url), WorldClient.connect(url, fps=200, format="rgb24", seed=9) as world:
        await play(world, 2)
        await world.pause()
        assert world.state.value == "paused"
        await world.play()
        await play(world, 2)
        done = await world.reset(prompt="again", seed=10)
        assert (done.epoch, done.prompt, done.seed) == (1, "again", 10)
        chunk = await world.next_chunk()
        assert (chunk.epoch, chunk.chunk_index, chunk.first_frame) == (1, 0, 0)
        await world.abort()
        await play(world, 2)


async def test_a_failed_block_is_told_and_rollback_goes_on() -> None:
    async with fake_world() as (_, url), WorldClient.connect(url, fps=200, format="rgb24") as world:
        await world.send(prompt="fail")
        with pytest.raises(SessionFailedError) as caught:
            await play(world, 100)
        assert caught.value.code is WireCode.TICK_FAILED
        assert "rollback" in caught.value.can
        with pytest.raises(RefusedError) as refused:
            await world.send(prompt="more")
        assert refused.value.code is WireCode.SESSION_FAILED
        assert await world.rollback() == caught.value.chunk_index
        check_contiguous(await play(world, 3))


@pytest.mark.parametrize(
    ("control", "code", "path"),
    [
        (Control(track="arm", schema="x", data={}), WireCode.CONTROL_INVALID, "$.controls[0].track"),
        (Control(track="camera", schema="x", data={}), WireCode.SCHEMA_UNKNOWN, "$.controls[0].schema"),
    ],
)
async def test_a_refused_event_raises_with_code_and_path(control: Control, code: WireCode, path: str) -> None:
    async with fake_world() as (_, url), WorldClient.connect(url, fps=100, format="rgb24") as world:
        with pytest.raises(EventRefusedError) as caught:
            await world.send(controls=[control])
        assert (caught.value.code, caught.value.path, caught.value.event_id) == (code, path, 0)
        await play(world, 2)


async def test_a_wrong_value_is_refused_before_it_leaves() -> None:
    async with fake_world() as (_, url), WorldClient.connect(url, fps=100, format="rgb24") as world:
        with pytest.raises(RefusedError) as caught:
            await world.send(prompt="   ")
        assert (caught.value.code, caught.value.path) == (WireCode.BAD_MESSAGE, "$.prompt")
        assert world.statistics().events_sent == 0


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"model": "nothing"}, WireCode.MODEL_UNKNOWN), ({"format": "latent"}, WireCode.UNSUPPORTED_FORMAT)],
)
async def test_a_refused_start_raises(settings: dict[str, str], code: WireCode) -> None:
    async with fake_world() as (_, url):
        with pytest.raises(StartRefusedError) as caught:
            async with WorldClient.connect(url, **settings):  # type: ignore[arg-type]
                pass
        assert caught.value.code is code


async def test_a_wrong_key_is_told() -> None:
    async with fake_world(api_key="right") as (_, url):
        with pytest.raises(ConnectError) as caught:
            async with WorldClient.connect(url, api_key="wrong", format="rgb24"):
                pass
        assert (caught.value.status, caught.value.code) == (401, WireCode.UNAUTHORIZED)
        assert "api_key=" in str(caught.value)
        async with WorldClient.connect(url, api_key="right", format="rgb24") as world:
            await world.next_chunk()


async def test_nobody_listening_is_a_connect_error() -> None:
    with pytest.raises(ConnectError):
        async with WorldClient.connect("ws://127.0.0.1:9", format="rgb24"):
            pass


async def test_a_takeover_ends_the_first_client() -> None:
    async with fake_world() as (server, url), WorldClient.connect(url, fps=100, format="rgb24") as first:
        await first.pause()
        await asyncio.sleep(0.1)  # a block in flight may still be made
        stream = next(iter(server.sessions.values())).stream
        async with asyncio.timeout(20):
            while first._live.side.next_frame < stream.generated:  # and then both ends know the same
                await asyncio.sleep(0.01)
        link = WorldLink(first._connector, StartOptions(format="rgb24"), FAST, random.Random(0))
        mine, theirs = link.side, first._live.side
        mine.started, mine._token, mine.format = theirs.started, theirs._token, "rgb24"
        mine.last_seq, mine.next_frame, mine.next_chunk = theirs.last_seq, theirs.next_frame, theirs.next_chunk
        task = asyncio.create_task(link.run())
        with pytest.raises(SessionClosedError) as caught:
            await play(first, 1000)
        assert caught.value.reason == "taken_over"
        while link.side.state is not WireState.PAUSED:
            link.changed.clear()
            await link.changed.wait()
        assert link.side.statistics().resumes == 1
        task.cancel()
        await asyncio.wait([task])


async def test_events_tells_what_happened_and_ends() -> None:
    async with fake_world() as (_, url):
        async with WorldClient.connect(url, fps=200, format="rgb24") as world:
            await world.send(prompt="a")
            await world.pause()
        kinds = [type(message).__name__ async for message in world.events()]
    assert kinds[:2] == ["SessionStarted", "EventAccepted"]
    assert kinds[-1] == "SessionClosed"
    assert "SessionPaused" in kinds


async def test_leaving_closes_the_session_on_the_server() -> None:
    server: FakeServer
    async with fake_world() as (server, url):
        async with WorldClient.connect(url, fps=100, format="rgb24") as world:
            await world.next_chunk()
        session = next(iter(server.sessions.values()))
        assert session.stream.terminal is not None
        assert session.stream.terminal.reason == "client"
        await world.close()


async def test_a_stalled_reader_is_closed() -> None:
    async with fake_world(stall_timeout_s=0.1) as (_, url), WorldClient.connect(url, fps=240, format="rgb24") as world:
        await asyncio.sleep(0.4)
        with pytest.raises(SessionClosedError) as caught:
            await play(world, 100)
        assert caught.value.reason == "stalled"


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("http://localhost:8000", "ws://localhost:8000/v1/realtime/world"),
        ("https://example.org/", "wss://example.org/v1/realtime/world"),
        ("ws://h:1/other", "ws://h:1/other"),
        ("127.0.0.1:8000", "ws://127.0.0.1:8000/v1/realtime/world"),
    ],
)
def test_what_a_user_types_becomes_the_url(typed: str, url: str) -> None:
    assert world_url(typed) == url


async def test_a_branch_goes_on_beside_its_parent_and_diverges_with_another_prompt() -> None:
    async with fake_world() as (_, url):
        async with WorldClient.connect(url, prompt="a maze", format="rgb24", fps=200) as world:
            await world.hold({"w"})
            before = await play(world, 3)
            async with await world.fork() as branch:
                assert branch.session.session_id != world.session.session_id
                await branch.send(prompt="a green garden")
                there, here = await play(branch, 3), await play(world, 6)
                check_contiguous(before + here)
                check_contiguous(there)
                assert there[0].chunk_index > before[0].chunk_index
                twins = {chunk.chunk_index: chunk for chunk in before + here}
                assert {chunk.prompt for chunk in there} == {"a maze", "a green garden"} or there[
                    0
                ].prompt == "a green garden"
                assert not np.array_equal(there[-1].frames, twins[there[-1].chunk_index].frames)
            assert world.state is WireState.PLAYING
            await play(world, 1)


async def test_a_branch_survives_a_drop_as_any_session_does() -> None:
    async with fake_world() as (server, url):
        async with WorldClient.connect(url, format="rgb24", fps=200, reconnect=FAST) as world:
            await play(world, 2)
            async with await world.fork("what-if") as branch:
                chunks = await play(branch, 2)
                server.drop_all()
                chunks += await play(branch, 2)
                check_contiguous(chunks)
                with pytest.raises(RefusedError) as refused:
                    await world.fork("what-if")
                assert refused.value.code is WireCode.SESSION_EXISTS


async def test_the_same_events_after_a_rewind_give_the_same_chunks() -> None:
    async with fake_world() as (_, url):
        async with WorldClient.connect(url, prompt="a maze", format="rgb24", cadence="on_demand", fps=200) as world:
            first = await play(world, 4)
            assert world.oldest_rewind == 0
            rewound = await world.rewind(2)
            assert (rewound.epoch, rewound.chunk_index, rewound.next_frame) == (1, 2, 6)
            again = await play(world, 2)
            assert [(c.epoch, c.chunk_index, c.first_frame) for c in again] == [(1, 2, 6), (1, 3, 9)]
            for one, two in zip(first[2:], again, strict=True):
                np.testing.assert_array_equal(one.frames, two.frames)
            with pytest.raises(RefusedError) as refused:
                await world.rewind(99)
            assert refused.value.code is WireCode.INVALID_ARGUMENT
