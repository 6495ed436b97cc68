"""The Python client against the real server (uvicorn, a fake manager behind it): both ends mean the same protocol."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import numpy as np
import pytest

from realtime_omni.manager import SessionManager
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import SCHEMA, TRACK, TinyKVWorld
from realtime_omni_client import (
    Control,
    EventRefusedError,
    Reconnect,
    RefusedError,
    WorldChunk,
    WorldClient,
    WorldError,
)
from realtime_omni_protocols.errors import WireCode

pytest.importorskip("uvicorn")
from server.fakes import FakeManager
from server.test_loopback import KEY, served

CONFIG = small_config()
REWINDABLE = msgspec.structs.replace(CONFIG, kv=msgspec.structs.replace(CONFIG.kv, rewind_blocks=3))
FAST = Reconnect(attempts=5, base_s=0.01, cap_s=0.05)


async def play(world: WorldClient, count: int) -> list[WorldChunk]:
    return [await world.next_chunk() for _ in range(count)]


@pytest.mark.parametrize("kind", ["rgb24", "jpeg", "h264"])
async def test_a_session_with_drops_events_and_a_reset(kind: str) -> None:
    async with served(FakeManager()) as url:
        async with WorldClient.connect(url, format=kind, fps=240, reconnect=FAST) as world:  # type: ignore[arg-type]
            chunks = await play(world, 3)
            for _ in range(3):
                transport = world._live._transport
                assert transport is not None
                transport._ws.transport.abort()  # type: ignore[attr-defined]
                chunks += await play(world, 4)
            assert [c.chunk_index for c in chunks] == list(range(15))
            assert all(b.first_frame == a.first_frame + a.frame_count for a, b in itertools.pairwise(chunks))
            shape = (world.session.frames_per_block, world.session.height, world.session.width, 3)
            assert {c.frames.shape for c in chunks} == {shape}
            assert world.statistics().resumes >= 1
            done = await world.reset(seed=5)
            assert (done.epoch, done.seed) == (1, 5)
            first = await world.next_chunk()
            assert (first.epoch, first.chunk_index, first.first_frame) == (1, 0, 0)


async def test_events_get_both_receipts_and_bad_ones_a_code() -> None:
    async with served(FakeManager()) as url:
        async with WorldClient.connect(url, format="rgb24", fps=240) as world:
            playing = asyncio.create_task(play(world, 200))
            receipt = await world.send(prompt=(world.session.prompts or ("hello",))[0])
            outcome = await receipt.outcome()
            assert (outcome.event_id, outcome.status) == (receipt.event_id, "applied")
            with pytest.raises(EventRefusedError) as caught:
                await world.send(prompt="nonsense")
            assert (caught.value.code, caught.value.path) == (WireCode.PROMPT_UNKNOWN, "$.prompt")
            playing.cancel()


async def test_branches_and_rewinds_of_a_real_engine_are_exact() -> None:
    """Same events, same frames, bit for bit: after a rewind, and in a branch; and neither branch disturbs the other."""
    async with SessionManager(TinyKVWorld(), REWINDABLE) as manager, served(manager) as url:
        async with WorldClient.connect(url, format="rgb24", cadence="on_demand", seed=3, prompt="red") as world:
            await walked(world, 1, 2)
            async with await world.fork() as branch:
                first, other = await walked(world, 3, 4), await walked(branch, 3, 5)
                assert [c.chunk_index for c in other] == [2, 3]
                np.testing.assert_array_equal(first[0].frames, other[0].frames)
                assert not np.array_equal(first[1].frames, other[1].frames)
                assert world.oldest_rewind is not None
                assert world.oldest_rewind <= 2
                rewound = await world.rewind(2)
                assert (rewound.epoch, rewound.next_frame, rewound.prompt) == (1, 2 * first[0].frame_count, "red")
                again = await walked(world, 3, 4)
                for one, two in zip(first, again, strict=True):
                    np.testing.assert_array_equal(one.frames, two.frames)
                await branch.rewind(3)
                np.testing.assert_array_equal((await walked(branch, 4))[0].frames, first[1].frames)
            with pytest.raises(RefusedError) as refused:
                await world.rewind(0)
            assert refused.value.code is WireCode.NOT_RETAINED


async def walked(client: WorldClient, *moves: int) -> list[WorldChunk]:
    chunks = []
    for dx in moves:
        await client.send(controls=[Control(track=TRACK, schema=SCHEMA, data={"dx": dx})])
        chunks.append(await client.next_chunk())
    return chunks


async def test_a_log_is_played_in_another_session_bit_for_bit_and_walked_on_from() -> None:
    async with SessionManager(TinyKVWorld(), REWINDABLE) as manager, served(manager) as url:
        async with WorldClient.connect(url, format="rgb24", cadence="on_demand", seed=3, prompt="red") as world:
            chunks = await walked(world, 1, 2, 3)
            await world.rewind(2)
            chunks = chunks[:2] + await walked(world, 4)
            log = await world.log()
        async with WorldClient.connect(url, format="rgb24", cadence="on_demand", seed=9, prompt="blue") as other:
            await walked(other, 7)
            again = [chunk async for chunk in other.replay(log)]
            assert [(c.epoch, c.chunk_index, c.applied_event_ids) for c in again] == [
                (1, 0, ()),
                (1, 1, ()),
                (1, 2, ()),
            ]
            assert [c.prompt for c in again] == ["red"] * 3
            for one, two in zip(chunks, again, strict=True):
                np.testing.assert_array_equal(one.frames, two.frames)
            (after,) = await walked(other, 5)  # its event has an id of its own, above those that the log used
            assert (after.chunk_index, len(after.applied_event_ids)) == (3, 1)
            assert after.applied_event_ids[0] >= 4


async def test_a_log_goes_on_where_the_session_stands_and_a_wrong_one_is_refused() -> None:
    async with SessionManager(TinyKVWorld(), REWINDABLE) as manager, served(manager) as url:
        async with WorldClient.connect(url, format="rgb24", cadence="on_demand", seed=3) as world:
            await walked(world, 1, 2)
            log = await world.log()
            for broken, code in (
                (b"{}", WireCode.INVALID_ARGUMENT),
                (log.replace(b"tiny-kv", b"tiny-xx"), WireCode.UNSUPPORTED),
                (log.replace(b'"first_chunk":0', b'"first_chunk":9'), WireCode.INVALID_ARGUMENT),
            ):
                with pytest.raises(RefusedError) as refused:
                    _ = [chunk async for chunk in world.replay(broken)]
                assert refused.value.code is code, broken
            for garbage in ("!!!", "AAAA"):
                with pytest.raises(RefusedError) as refused:
                    await world._request(lambda garbage=garbage: world._live.side.replay(garbage))  # type: ignore[misc]
                assert (refused.value.code, refused.value.path) == (WireCode.INVALID_ARGUMENT, "$.log")
            (chunk,) = await walked(world, 3)  # and the session goes on
            assert (chunk.epoch, chunk.chunk_index) == (0, 2)


async def test_nothing_else_is_taken_while_a_log_is_played_and_an_abort_ends_it() -> None:
    async with SessionManager(TinyKVWorld(), REWINDABLE) as manager, served(manager) as url:
        async with WorldClient.connect(url, format="rgb24", cadence="on_demand", seed=3) as world:
            await walked(world, 1, 2, 3)
            log = await world.log()
            playing = world.replay(log)
            assert (await anext(playing)).chunk_index == 0
            with pytest.raises(RefusedError) as refused:
                await world.send(prompt="green")
            assert refused.value.code is WireCode.SESSION_STATE
            with pytest.raises(RefusedError):
                await world.rewind(0)
            await world.abort()
            with pytest.raises(WorldError, match="to its end"):
                await anext(playing)
            (chunk,) = await walked(world, 3)
            assert (chunk.epoch, chunk.chunk_index) == (1, 1)


async def test_a_lost_connection_ends_a_replay_and_the_client_is_told() -> None:
    async with SessionManager(TinyKVWorld(), REWINDABLE) as manager, served(manager) as url:
        async with WorldClient.connect(url, format="rgb24", cadence="on_demand", seed=3, reconnect=FAST) as world:
            await walked(world, 1, 2, 3)
            playing = world.replay(await world.log())
            await anext(playing)
            world._live._transport._ws.transport.abort()  # type: ignore[union-attr]
            with pytest.raises(WorldError, match="to its end"):
                await anext(playing)
            assert (await walked(world, 3))[0].chunk_index == 1


async def test_the_key_is_asked_for() -> None:
    async with served(FakeManager(), api_key=KEY) as url:
        with pytest.raises(WorldError):
            async with WorldClient.connect(url, format="rgb24"):
                pass
