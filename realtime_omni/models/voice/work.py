"""Work that takes longer than a tick: pure functions of values, computed in threads and remembered.

A caller names its work by everything that decides the result, and asks again every tick until it is there. Nobody owns a
running computation: a call that goes back, forks or is restored elsewhere asks the same, and gets the same.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
MOST_KEPT = 256


class Workshop:
    """Threads and their results. With no threads, work is done when it is asked for: slow ticks, the same every time."""

    def __init__(self, threads: int, notice: Callable[[], None]) -> None:
        """``notice`` is called by a thread when it has done some work."""
        self._notice = notice
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="voice") if threads else None
        self._known: OrderedDict[Hashable, Future[Any]] = OrderedDict()

    def look(self, key: Hashable, work: Callable[[], T], otherwise: T) -> T | None:
        """The result of ``work``, None while it is being computed, ``otherwise`` where it failed. One thread at a time asks."""
        future = self._known.get(key)
        if future is None:
            future = self._known[key] = self._begin(work)
            while len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)[1].cancel()
        else:
            self._known.move_to_end(key)
        if not future.done():
            return None
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            return otherwise
        result: T = future.result()
        return result

    def close(self) -> None:
        """Wait for what runs, forget the rest."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        def logged() -> T:
            try:
                return work()
            except Exception:
                log.exception("a part of the voice failed")
                raise

        future: Future[T]
        if self._pool is not None:
            future = self._pool.submit(logged)
            future.add_done_callback(lambda _: self._notice())
            return future
        future = Future()
        try:
            future.set_result(logged())
        except Exception as error:
            future.set_exception(error)
        return future
