"""The Python client against the real server (uvicorn, a fake manager behind it): both ends mean the same protocol."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from realtime_omni_client import EventRefusedError, Reconnect, WorldChunk, WorldClient, WorldError
from realtime_omni_protocols.errors import WireCode

pytest.importorskip("uvicorn")
from server.fakes import FakeManager
from server.test_loopback import KEY, served

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


async def test_the_key_is_asked_for() -> None:
    async with served(FakeManager(), api_key=KEY) as url:
        with pytest.raises(WorldError):
            async with WorldClient.connect(url, format="rgb24"):
                pass
