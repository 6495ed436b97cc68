"""Faults on purpose: make a named piece of an engine's work fail, or stop there and do something else.

Points, in the order in which one tick meets them::

    reducer.prepare                the session's reducer, when the tick is frozen
    prefill:1, prefill:2, ...      before the k-th forward pass of a prefill: a start, or a deferred clean pass
    forward:1, forward:2, ...      before the k-th forward pass of a tick; a clean pass that is not deferred is the last
    decode                         before the decoder
    sync                           the device, after the last pass; of a prefill too
    commit                         the last moment at which a row can fail; of a prefill too
    reducer.commit                 the session's reducer, when the tick becomes true
    release                        worker clean-up: close, reset, eviction, ``on_failure: release``

    with inject(engine, "forward:2", session_id="a"):
        ...                        # the second pass of session a's next tick raises

A fault may be armed from any thread; it acts on the engine's thread.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from realtime_omni.engine.engine import Engine
from realtime_omni.engine.runner import ModelRunner
from realtime_omni.session.controls import ControlReducer, PreparedControls
from realtime_omni.session.values import ControlInput, SessionEvent, SessionId

POINT = re.compile(r"(forward|prefill):[1-9][0-9]*|decode|sync|commit|release|reducer\.(prepare|commit)")


class InjectedFault(RuntimeError):
    """What an injected fault raises unless told otherwise."""


class Fault:
    """One armed fault; also a context manager that disarms it. ``hits`` counts how often it acted."""

    def __init__(self, point: str, session_id: str | None, times: int | None, action: Callable[[], None]) -> None:
        if POINT.fullmatch(point) is None:
            raise ValueError(f"there is no point {point!r}; see the module's table")
        self.point = point
        self.session_id = session_id
        self.hits = 0
        self._left = times
        self._action = action
        self._undo: Callable[[], None] = lambda: None

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Disarm; harmless to repeat."""
        self._undo()

    def reach(self, point: str, sessions: Sequence[str]) -> None:
        """The engine is at ``point`` for ``sessions``: act if that is meant."""
        if point != self.point or self._left == 0:
            return
        if self.session_id is not None and self.session_id not in sessions:
            return
        if self._left is not None:
            self._left -= 1
        self.hits += 1
        self._action()


class Gate:
    """An action that stops the engine's thread: ``reached`` tells the test, ``open`` lets the engine go on."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()
        self._timeout_s = timeout_s

    def __call__(self) -> None:
        self.reached.set()
        if not self._open.wait(self._timeout_s):
            raise TimeoutError("nobody opened the gate")

    def open(self) -> None:
        self._open.set()


def inject(
    target: Any,
    point: str,
    session_id: str | None = None,
    times: int | None = 1,
    error: BaseException | None = None,
) -> Fault:
    """Make ``point`` raise ``error`` (default: :class:`InjectedFault`) for the next ``times`` times; None: always.

    Args:
        target: a SessionManager, InlineEngine, Engine or ModelRunner (``reducer.*`` needs one of the first three).
        session_id: only when this session takes part; None: any session.
    """

    def fail() -> None:
        raise error if error is not None else InjectedFault(f"injected at {point}")

    return at(target, point, fail, session_id, times)


def at(
    target: Any, point: str, action: Callable[[], None], session_id: str | None = None, times: int | None = 1
) -> Fault:
    """Call ``action`` on the engine's thread at ``point``; see :func:`inject`."""
    fault = Fault(point, session_id, times, action)
    if point.startswith("reducer."):
        _arm_reducers(_engine(target), fault)
    else:
        _arm_runner(target if isinstance(target, ModelRunner) else _engine(target).consumer, fault)
    return fault


def _engine(target: Any) -> Engine:
    for name in ("engine", "_engine"):
        target = target if isinstance(target, Engine) else getattr(target, name, target)
    if not isinstance(target, Engine):
        raise TypeError(f"no engine in {type(target).__name__}")
    return target


class _Board:
    """The hook of a runner once faults were armed on it."""

    def __init__(self) -> None:
        self.armed: tuple[Fault, ...] = ()

    def __call__(self, point: str, sessions: Sequence[SessionId]) -> None:
        for fault in self.armed:
            fault.reach(point, sessions)


def _arm_runner(runner: Any, fault: Fault) -> None:
    if not isinstance(runner, ModelRunner):
        raise TypeError(f"{type(runner).__name__} has no fault points")
    board = runner.faults
    if not isinstance(board, _Board):
        board = runner.faults = _Board()
    board.armed = (*board.armed, fault)

    def undo() -> None:
        board.armed = tuple(f for f in board.armed if f is not fault)

    fault._undo = undo


class _FaultyReducer:
    """A session's reducer with fault points in front of it."""

    def __init__(self, inner: ControlReducer, fault: Fault, session_id: str) -> None:
        self.inner = inner
        self._fault = fault
        self._session = (session_id,)

    def prepare(
        self, current: Mapping[str, ControlInput], events: Sequence[SessionEvent], chunk_index: int
    ) -> PreparedControls:
        self._fault.reach("reducer.prepare", self._session)
        return self.inner.prepare(current, events, chunk_index)

    def commit(self, prepared: PreparedControls) -> None:
        self._fault.reach("reducer.commit", self._session)
        self.inner.commit(prepared)

    def reset(self) -> None:
        self.inner.reset()

    def save(self) -> Any:
        return self.inner.save()

    def load(self, memory: Any) -> None:
        self.inner.load(memory)


def _arm_reducers(engine: Engine, fault: Fault) -> None:
    """Wrap the reducers of the sessions that live now."""
    wrapped = []
    for entry in engine.registry:
        if fault.session_id in (None, entry.session.id):
            session = entry.session
            session._reducer = _FaultyReducer(session._reducer, fault, session.id)
            wrapped.append(session)

    def undo() -> None:
        while wrapped:
            session = wrapped.pop()
            if isinstance(session._reducer, _FaultyReducer):
                session._reducer = session._reducer.inner

    fault._undo = undo
