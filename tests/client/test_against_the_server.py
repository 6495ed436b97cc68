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

            async def walk(client: WorldClient, *moves: int) -> list[WorldChunk]:
                chunks = []
                for dx in moves:
                    await client.send(controls=[Control(track=TRACK, schema=SCHEMA, data={"dx": dx})])
                    chunks.append(await client.next_chunk())
                return chunks

            await walk(world, 1, 2)
            async with await world.fork() as branch:
                first, other = await walk(world, 3, 4), await walk(branch, 3, 5)
                assert [c.chunk_index for c in other] == [2, 3]
                np.testing.assert_array_equal(first[0].frames, other[0].frames)
                assert not np.array_equal(first[1].frames, other[1].frames)
                assert world.oldest_rewind is not None
                assert world.oldest_rewind <= 2
                rewound = await world.rewind(2)
                assert (rewound.epoch, rewound.next_frame, rewound.prompt) == (1, 2 * first[0].frame_count, "red")
                again = await walk(world, 3, 4)
                for one, two in zip(first, again, strict=True):
                    np.testing.assert_array_equal(one.frames, two.frames)
                await branch.rewind(3)
                np.testing.assert_array_equal((await walk(branch, 4))[0].frames, first[1].frames)
            with pytest.raises(RefusedError) as refused:
                await world.rewind(0)
            assert refused.value.code is WireCode.NOT_RETAINED


async def test_the_key_is_asked_for() -> None:
    async with served(FakeManager(), api_key=KEY) as url:
        with pytest.raises(WorldError):
            async with WorldClient.connect(url, format="rgb24"):
                pass
