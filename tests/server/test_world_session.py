"""A session over the wire, against a fake manager on a manual clock."""

from __future__ import annotations

from realtime_omni.server.hub import WorldHub
from server.fakes import FakeManager
from server.wire import Client


async def test_a_session_starts_and_its_first_block_follows_with_a_key_frame(
    manager: FakeManager, hub: WorldHub
) -> None:
    client = Client(hub)
    started = await client.start(seed=5, id="a")
    assert (started.seq, started.re, started.seed, started.width) == (1, "a", 5, 16)
    chunk, frames = await client.block()
    assert (chunk.epoch, chunk.chunk_index, chunk.first_frame, chunk.frames) == (0, 0, 0, 3)
    assert [len(payload) for _, payload in frames] == [16 * 16 * 3] * 3
    assert frames[0][0].key
    await client.drop()
