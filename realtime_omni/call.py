"""Calls: duplex sessions of a manager, with a clock. The in-process API of voices.

Owns the one clock of all calls, and which there are; one of them is :mod:`realtime_omni.call_handle`'s. What a call says and
when it stops is :class:`~realtime_omni.duplex.session.DuplexSession`'s, which is pure; what the model remembers is the
engine's. Everything here runs on one event loop.

    async with SessionManager.from_recipe("puppet") as manager, Calls(manager) as calls:
        call = await calls.open()
        call.direct(Say("greeting", "Hello, who is there?"))
        call.append(microphone)                      # float32 [N] at call.spec.input_rate_hz, whenever it comes
        async for seq, output in call.outputs():
            match output:
                case Tick(): speaker(output.audio)   # float32 [N] at call.spec.output_rate_hz, 12.5 times a second
                case Interrupted(): ...              # nothing of what was said before is heard any more
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from realtime_omni.call_handle import Call
from realtime_omni.duplex.outputs import DuplexOptions
from realtime_omni.duplex.session import DuplexSession
from realtime_omni.errors import ConfigError, OmniError, SessionGoneError
from realtime_omni.handle import Session
from realtime_omni.ids import random_token
from realtime_omni.manager import SessionManager
from realtime_omni.session.values import SessionId

if TYPE_CHECKING:
    from realtime_omni.snapshot.snapshot import Snapshot


class Calls:
    """All calls of one manager. Use as an async context manager, inside the manager's; leaving it closes them."""

    def __init__(self, manager: SessionManager, *, clocked: bool = True) -> None:
        """``clocked=False``: whoever holds it calls :meth:`pulse` (tests, with a clock of their own)."""
        duplex = manager.describe().duplex
        if duplex is None:
            raise ConfigError(f"model {manager.describe().name!r} is no duplex model", path="model")
        self.spec = duplex
        self.lateness_ms: list[float] | None = None
        """A measurement puts a list here: how late each tick was, from its instant of the clock to its outputs."""
        self._manager = manager
        self._calls: dict[SessionId, Call] = {}
        self._load = [0] * duplex.phases
        self._clocked = clocked
        self._busy = asyncio.Event()
        self._releases: set[asyncio.Task[None]] = set()
        self._clock: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Calls:
        if self._clocked:
            self._clock = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._clock is not None:
            self._clock.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._clock
        for call in tuple(self._calls.values()):
            with contextlib.suppress(OmniError):
                await call.close("shutdown")
        await asyncio.gather(*self._releases)

    async def open(
        self,
        options: DuplexOptions | None = None,
        *,
        session_id: str | None = None,
        seed: int | None = None,
        **setup: Any,
    ) -> Call:
        """A new call; ``setup`` is :meth:`SessionManager.create_session`'s. Raises what that raises."""
        session = await self._manager.create_session(session_id, seed=seed, **setup)
        return self._adopt(session, options if options is not None else DuplexOptions())

    def get(self, session_id: str) -> Call:
        """Raises SessionGoneError: it has ended (``session_gone``) or was never known (``session_not_found``)."""
        call = self._calls.get(SessionId(session_id))
        if call is not None:
            return call
        self._manager.get_session(session_id)  # says which of the two
        raise SessionGoneError(f"session {session_id!r} is ending")

    async def resume(self, session_id: str, token: str) -> tuple[Call, str]:
        """A lost or taken over call: its holder is the caller from now on, the grace of :meth:`Call.detach` ends, and whoever
        held it until now reads ``Ended("taken_over")``. Returns the call and the token for the next time; what the holder
        missed is ``call.outputs(after=...)``.

        Raises SessionGoneError: it has ended (``session_gone``), or none has this id and token (``session_not_found``)."""
        call = self.get(session_id)
        fresh = random_token()
        call.attachment.resume(token, fresh)
        call.resume_token = None
        call.changed()
        await call.attach()
        return call, fresh

    async def fork(self, call: Call, session_id: str | None = None) -> Call:
        """A second call that remembers what this one does, up to its last frame; its clock goes on from there.

        Raises what :meth:`Session.fork` raises."""
        session = await call.session.fork(session_id)
        return self._adopt(session, call.duplex.options)

    async def restore(
        self, snapshot: Snapshot, session_id: str | None = None, options: DuplexOptions | None = None
    ) -> Call:
        """A call that remembers what a saved one did; its clock goes on from there. Raises what
        :meth:`SessionManager.restore` raises."""
        session = await self._manager.restore(snapshot, session_id)
        return self._adopt(session, options if options is not None else DuplexOptions())

    def __len__(self) -> int:
        return len(self._calls)

    def now_s(self) -> float:
        return self._manager.now_s()

    def pulse(self, now_s: float, phase: int | None = None) -> None:
        """An instant of the clock: every call (of one phase) hands over what is due."""
        for call in tuple(self._calls.values()):
            if phase is None or call.phase == phase:
                call.pulse(now_s)

    def observe(self, due_s: float) -> None:
        """A tick that was due then is told."""
        if self.lateness_ms is not None:
            self.lateness_ms.append((self.now_s() - due_s) * 1000)

    def release(self, session: Session) -> None:
        """Close a session that its call gave up; it is retried by the engine when that fails."""

        async def close() -> None:
            with contextlib.suppress(OmniError):
                await session.close("failed")

        task = asyncio.get_running_loop().create_task(close())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def postpone(self, call: Call) -> None:
        """Its frame was not there at its instant: from now on it has the next phase's, which is soon. So the instants of each
        call come to lie a little behind its client's packets, and packets that come a little late change nothing."""
        self._load[call.phase] -= 1
        call.phase = (call.phase + 1) % self.spec.phases
        self._load[call.phase] += 1

    def forget(self, call: Call) -> None:
        if self._calls.pop(call.id, None) is not None:
            self._load[call.phase] -= 1

    def _adopt(self, session: Session, options: DuplexOptions) -> Call:
        duplex = DuplexSession(self.spec, options, now_s=self.now_s(), first_frame=session.chunk_index)
        phase = min(range(self.spec.phases), key=self._load.__getitem__)
        call = Call(self, session, duplex, phase)
        self._calls[call.id] = call
        self._load[phase] += 1
        self._busy.set()
        return call

    async def _run(self) -> None:
        """Instants are a phase apart, by the clock, so being late once does not add up. Whoever is late by more than a frame
        leaves out whole frames: each call then hands over all that is due."""
        phases = self.spec.phases
        step_s = self.spec.frame_ms / 1000 / phases
        began_s, instant = self.now_s(), 0
        while True:
            if not self._calls:
                self._busy.clear()
                await self._busy.wait()
            behind = int((self.now_s() - began_s) / step_s) - instant
            instant += 1 + max(0, behind // phases) * phases
            while self._calls and not self._load[instant % phases]:
                instant += 1  # nobody's
            due_s = began_s + instant * step_s
            await asyncio.sleep(max(0.0, due_s - self.now_s()))
            self.pulse(due_s, instant % phases)


__all__ = ["Call", "Calls"]
