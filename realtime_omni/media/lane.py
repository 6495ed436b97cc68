"""Encoding off the event loop, except where a thread would cost more than the work: one small thread pool per process, one
ordered lane per stream.

Owns the worker threads and each lane's encoder. Invariant: the frames of one lane are encoded in the order of the calls,
one call at a time; a cancelled call finishes in its thread before the next one of that lane starts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from realtime_omni.media.encoder import EncodedFrame, Encoder, open_encoder

_T = TypeVar("_T")

QUICK_SAMPLES = 3 * 3 * 128 * 128
"""A block of three frames of 128 x 128: 0.3 ms of JPEG, and the way to a thread and back costs as much."""


class EncodePool:
    """The process's encoder threads."""

    def __init__(self, threads: int | None = None) -> None:
        threads = threads or max(2, min(4, (os.cpu_count() or 2) - 1))
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        # Opening encoders and reading pictures must not queue behind somebody's frames.
        self._setup = ThreadPoolExecutor(1, thread_name_prefix="media-setup")
        self._lanes = 0

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run short blocking work that is not encoding: opening an encoder, decoding a picture."""
        return await asyncio.get_running_loop().run_in_executor(self._setup, work)

    async def lane(self, format_name: str, width: int, height: int, fps: float) -> EncodeLane:
        """A lane with its own encoder, opened in the pool. Raises ArgumentError (``unsupported``)."""
        encoder = await self.run(lambda: open_encoder(format_name, width, height, fps))
        self._lanes += 1
        return EncodeLane(self, encoder)

    @property
    def open_lanes(self) -> int:
        return self._lanes

    def close(self) -> None:
        """Wait for running work, then end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._setup.shutdown(wait=True, cancel_futures=True)

    def _lane_closed(self) -> None:
        self._lanes -= 1


class EncodeLane:
    """The encoder of one stream, used from the event loop."""

    def __init__(self, pool: EncodePool, encoder: Encoder) -> None:
        self._pool = pool
        self._encoder = encoder
        self._running: asyncio.Future[list[EncodedFrame]] | None = None
        self._closed = False
        self.worked_s = 0.0
        """How long the latest call worked in its thread; the wait for a thread is not in it."""

    async def encode(self, frames: Sequence[npt.NDArray[np.generic]], *, key: bool = False) -> list[EncodedFrame]:
        """Encode the frames in order; ``key`` makes the first of them a key frame.

        Cancelling the wait does not stop the thread: the encoder has then moved on, so the caller asks for a key frame
        when it encodes these frames again."""
        if self._running is not None and not self._running.done():
            await asyncio.wait([self._running])
        if self.is_quick(frames):
            return self.encode_now(frames, key=key)
        assert not self._closed
        loop = asyncio.get_running_loop()
        self._running = loop.run_in_executor(self._pool._executor, self._work, tuple(frames), key)
        self._running.add_done_callback(_retrieve)
        return await asyncio.shield(self._running)

    def is_quick(self, frames: Sequence[npt.NDArray[np.generic]]) -> bool:
        """Whether a thread would cost more than the work, and none has to be waited for."""
        if not self._encoder.is_quick or (self._running is not None and not self._running.done()):
            return False
        return sum(frame.size for frame in frames) <= QUICK_SAMPLES

    def encode_now(self, frames: Sequence[npt.NDArray[np.generic]], *, key: bool = False) -> list[EncodedFrame]:
        """:meth:`encode` without waiting; for frames of which :meth:`is_quick` is true."""
        assert not self._closed
        return self._work(tuple(frames), key)

    def _work(self, frames: tuple[npt.NDArray[np.generic], ...], key: bool) -> list[EncodedFrame]:
        began_s = time.perf_counter()
        if key:
            self._encoder.request_key()
        encoded = [EncodedFrame(*self._encoder.encode(frame)) for frame in frames]
        self.worked_s = time.perf_counter() - began_s
        return encoded

    def close(self) -> None:
        """Free the encoder, after the call that is still running. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._pool._lane_closed()
        if self._running is not None and not self._running.done():
            self._running.add_done_callback(lambda _: self._encoder.close())
        else:
            self._encoder.close()


def _retrieve(future: asyncio.Future[list[EncodedFrame]]) -> None:
    """Look at the result, so that a failure nobody waits for any more is not reported by the garbage collector."""
    if not future.cancelled():
        future.exception()
