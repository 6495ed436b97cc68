"""The encode pool: order per stream, off the event loop, nothing left when it closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from realtime_omni.media import EncodePool


class GatedEncoder:
    """Waits in its thread until a test lets it go; writes down the order of calls."""

    codec = None
    is_quick = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.closed = False

    def encode(self, frame: np.ndarray) -> tuple[bytes, bool]:
        assert threading.current_thread() is not threading.main_thread()
        assert not self.closed
        self.entered.set()
        assert self.gate.wait(10)
        self.calls.append(str(frame))
        return str(frame).encode(), True

    def request_key(self) -> None:
        self.calls.append("key")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
async def pool() -> AsyncIterator[EncodePool]:
    pool = EncodePool(2)
    yield pool
    pool.close()
    assert pool.open_lanes == 0
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("encode", "media-setup"))]


async def gated(pool: EncodePool) -> tuple[GatedEncoder, object]:
    lane = await pool.lane("rgb24", 1, 1, 1.0)
    encoder = GatedEncoder()
    lane._encoder = encoder
    return encoder, lane


async def test_frames_of_one_call_keep_their_order(pool: EncodePool) -> None:
    encoder, lane = await gated(pool)
    encoder.gate.set()
    encoded = await lane.encode([np.int64(n) for n in range(5)], key=True)  # type: ignore[attr-defined]
    assert [frame.payload for frame in encoded] == [b"0", b"1", b"2", b"3", b"4"]
    assert encoder.calls == ["key", "0", "1", "2", "3", "4"]
    assert lane.worked_s > 0  # type: ignore[attr-defined]
    lane.close()  # type: ignore[attr-defined]


async def test_a_cancelled_call_finishes_before_the_next_one_of_its_lane(pool: EncodePool) -> None:
    encoder, lane = await gated(pool)
    first = asyncio.create_task(lane.encode([np.int64(1)]))  # type: ignore[attr-defined]
    await asyncio.to_thread(encoder.entered.wait, 10)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    second = asyncio.create_task(lane.encode([np.int64(2)], key=True))  # type: ignore[attr-defined]
    encoder.gate.set()
    assert [frame.payload for frame in await second] == [b"2"]
    assert encoder.calls == ["1", "key", "2"]
    lane.close()  # type: ignore[attr-defined]


class WhereEncoder:
    """Says in which thread it works."""

    codec = None

    def __init__(self, is_quick: bool) -> None:
        self.is_quick = is_quick

    def encode(self, frame: np.ndarray) -> tuple[bytes, bool]:
        return threading.current_thread().name.encode(), True

    def request_key(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize(("side", "quick"), [(128, True), (129, False)])
async def test_a_small_block_needs_no_thread_if_the_encoder_is_quick(
    pool: EncodePool, is_quick: bool, side: int, quick: bool
) -> None:
    lane = await pool.lane("rgb24", 1, 1, 1.0)
    lane._encoder = WhereEncoder(is_quick)
    encoded = await lane.encode([np.zeros((side, side, 3), np.uint8)] * 3)
    here = threading.current_thread().name.encode()
    assert {frame.payload == here for frame in encoded} == {quick and is_quick}
    assert lane.worked_s > 0
    lane.close()


async def test_a_lane_closed_while_it_encodes_frees_its_encoder_afterwards(pool: EncodePool) -> None:
    encoder, lane = await gated(pool)
    call = asyncio.create_task(lane.encode([np.int64(1)]))  # type: ignore[attr-defined]
    await asyncio.to_thread(encoder.entered.wait, 10)
    lane.close()  # type: ignore[attr-defined]
    lane.close()  # type: ignore[attr-defined]
    assert not encoder.closed
    encoder.gate.set()
    await call
    await asyncio.sleep(0)
    assert encoder.closed


async def test_lanes_do_not_wait_for_each_other_and_opening_does_not_wait_for_frames(pool: EncodePool) -> None:
    slow, slow_lane = await gated(pool)
    fast, fast_lane = await gated(pool)
    fast.gate.set()
    waiting = asyncio.create_task(slow_lane.encode([np.int64(1)]))  # type: ignore[attr-defined]
    await asyncio.to_thread(slow.entered.wait, 10)
    async with asyncio.timeout(10):
        assert (await fast_lane.encode([np.int64(2)]))[0].payload == b"2"  # type: ignore[attr-defined]
        third = await pool.lane("rgb24", 1, 1, 1.0)
    slow.gate.set()
    await waiting
    for lane in (slow_lane, fast_lane, third):
        lane.close()  # type: ignore[attr-defined]
