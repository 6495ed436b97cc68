"""Between two frames: the next part begins as soon as the one before it is ready, instead of at the next frame.

Owns what the last frame of each call left to wait for, and the thread that asks for it again whenever some work is done.
Nothing is told and nothing becomes state here: a rehearsal asks for what the next frame would ask for, and that frame takes
it over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from realtime_omni.models.voice.state import VoiceState

log = logging.getLogger(__name__)


class Rehearsal(Protocol):
    """Goes on from ``begins``. ``state`` is that with the guess that was begun since."""

    begins: VoiceState

    @property
    def state(self) -> VoiceState: ...

    def go_on(self) -> None:
        """Ask for everything that can be asked for now."""

    def give_up(self) -> None:
        """Nobody goes on from here: drop what was begun."""


class Rehearsals:
    """One for each call that waits for something. Frames and the thread take turns by a lock."""

    def __init__(self, *, threaded: bool) -> None:
        """With ``threaded=False`` work is done when it is asked for, and there is nothing to wait for."""
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closed = False
        self._left: dict[str, Rehearsal] = {}
        if threaded:
            threading.Thread(target=self._run, name="voice-rehearsals", daemon=True).start()

    def notice(self) -> None:
        """Some work is done. From any thread, with any lock held."""
        self._news.set()

    @contextmanager
    def frame(self, call: str, state: VoiceState) -> Iterator[VoiceState]:
        """A frame of ``call`` goes on from ``state``, which the body has with what was begun since; it is alone meanwhile.

        What was begun from another state, as before the call went back, is given up. A frame that fails changes nothing."""
        with self._lock:
            left = self._left.get(call)
            if left is not None and left.begins is not state:
                del self._left[call]
                left.give_up()
                left = None
            yield state if left is None else left.state

    def leave(self, call: str, rehearsal: Rehearsal | None) -> None:
        """What the frame leaves to wait for. Called within :meth:`frame`."""
        if rehearsal is None:
            self._left.pop(call, None)
        else:
            self._left[call] = rehearsal

    def forget(self, state: VoiceState) -> None:
        """Its call has ended."""
        with self._lock:
            for call in [call for call, left in self._left.items() if left.begins is state]:
                self._left.pop(call).give_up()

    def close(self) -> None:
        """The thread ends soon."""
        self._closed = True
        self._news.set()

    def _run(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            if self._closed:
                return
            with self._lock:
                for call, rehearsal in list(self._left.items()):
                    self._go_on(call, rehearsal.go_on)

    def _go_on(self, call: str, go_on: Callable[[], None]) -> None:
        try:
            go_on()
        except Exception:
            log.exception("what comes between two frames failed session_id=%s", call)
            del self._left[call]
