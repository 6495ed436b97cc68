"""Snapshot and restore: a session leaves the engine as a value and comes back as a session.

Owns the meaning of the two commands. Knows no file: what the executor holds passes through as it is. Refuse before change:
a restore that raises has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from realtime_omni.artifacts import resolve_outputs
from realtime_omni.clock import Clock
from realtime_omni.engine import commands as c
from realtime_omni.engine.consumer import TickConsumer
from realtime_omni.engine.entry import Entry
from realtime_omni.engine.front import Front
from realtime_omni.engine.openings import Openings
from realtime_omni.errors import ArgumentError, SnapshotError, StateError
from realtime_omni.models.base import SessionSetup
from realtime_omni.session.journal import Origin
from realtime_omni.session.registry import Registry
from realtime_omni.session.session import Session
from realtime_omni.session.values import Generation, SessionId
from realtime_omni.snapshot.header import IMAGE, Header, SetupRecord

if TYPE_CHECKING:
    from torch import Tensor

    from realtime_omni.snapshot.snapshot import Snapshot

NewSession = Callable[[SessionId, Generation, Origin], Session]
"""The machine of a session that begins so."""


class Saving:
    """Saves and restores sessions of one registry."""

    def __init__(
        self,
        registry: Registry[Entry],
        consumer: TickConsumer,
        front: Front,
        openings: Openings,
        clock: Clock,
        new_session: NewSession,
    ) -> None:
        self._registry = registry
        self._consumer = consumer
        self._front = front
        self._openings = openings
        self._clock = clock
        self._new_session = new_session
        self.restored = 0

    def take(self, entry: Entry) -> Snapshot:
        """The session at its last committed chunk, copied; a tick in flight goes on undisturbed.

        Raises StateError: neither ACTIVE nor FAILED with its state kept, or (``unsupported``) an executor whose state
        cannot be taken apart."""
        from realtime_omni.snapshot.snapshot import Snapshot

        session, setup = entry.session, entry.setup
        session.lifecycle.require("snapshot")
        if entry.released:
            raise StateError("worker state was released when the tick failed; there is nothing to save")
        if entry.flying and not self._consumer.spec.rollback_safe:
            raise StateError("a tick runs, and this model may edit state in a tick; ask again when it is over")
        worker, tensors = self._consumer.capture(session.id)
        # The executor may remember less: history that was written anew is not what earlier moments saw.
        record = session.save(self._consumer.spec.name, past=len(worker.past))
        began = SetupRecord(
            session_id=session.id, prompt=setup.prompt, seed=setup.seed, start=setup.start, outputs=entry.outputs
        )
        header = Header(identity=self._consumer.identity(), setup=began, session=record, worker=worker)
        return Snapshot(header, {**tensors, **_image_tensor(setup)})

    def restore(self, command: c.Restore) -> None:
        """Answer the view of a new session that goes on where the saved one was.

        Raises SnapshotError, StateError (``session_exists``, ``unsupported``), CapacityError, EventQueueFullError."""
        snapshot, header = command.snapshot, command.snapshot.header
        header.identity.require(self._consumer.identity())
        wanted = header.setup.session_id if command.session_id is None else command.session_id
        session_id, generation = self._registry.claim(wanted)
        tensors = {name: tensor for name, tensor in snapshot.tensors.items() if name != IMAGE}
        try:
            outputs = resolve_outputs(header.setup.outputs, self._consumer.spec.artifacts)
            setup = _setup(snapshot, session_id)
            session = self._new_session(session_id, generation, setup.origin)
            session.load(header.session, self._consumer.spec.name, self._consumer.new_reducer)
            if len(header.worker.past) != len(header.session.past):
                raise ArgumentError("the session and its state have not the same past", path="past")
            self._openings.take_place_of_saved(
                lambda: self._consumer.check_saved(header.worker, tensors),
                lambda: self._consumer.adopt(setup, header.worker, tensors, session.chunk_index),
            )  # last: from here on nothing can fail, so no place is lost
        except ArgumentError as error:
            raise SnapshotError(f"the snapshot is not valid: {error.message}", path=error.path) from error
        now_s = self._clock.now_s()
        entry = Entry(session, setup, outputs, created_at_s=now_s, last_used_at_s=now_s)
        self._registry.add(session_id, entry)
        self.restored += 1
        self._openings.go_on(entry, command.ticket)


def _setup(snapshot: Snapshot, session_id: SessionId) -> SessionSetup:
    """How the session began, under its new id. Raises SnapshotError for a start picture that is none."""
    setup, image = snapshot.header.setup, snapshot.tensors.get(IMAGE)
    if image is not None and (image.dim() != 3 or image.shape[2] != 3 or str(image.dtype) != "torch.uint8"):
        raise SnapshotError("the snapshot's start picture is not uint8 [H, W, 3]", path=IMAGE)
    return SessionSetup(session_id, setup.prompt, setup.seed, None if image is None else image.numpy(), setup.start)


def _image_tensor(setup: SessionSetup) -> Mapping[str, Tensor]:
    if setup.image is None:
        return {}
    import torch

    return {IMAGE: torch.from_numpy(setup.image.copy())}
