"""The desk: one command at a time becomes a change of one session, or a refusal.

Owns the meaning of every command. It changes sessions through their machines and asks the engine to ``withdraw`` a session
from a running batch; it never computes. Refuse before change: a command that raises has changed nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from realtime_omni.artifacts import resolve_outputs
from realtime_omni.clock import Clock
from realtime_omni.engine import commands as c
from realtime_omni.engine.branches import Branches
from realtime_omni.engine.consumer import TickConsumer
from realtime_omni.engine.endings import Endings
from realtime_omni.engine.entry import MAX_WAITERS, Entry, Waiter
from realtime_omni.engine.front import Front
from realtime_omni.engine.openings import Openings
from realtime_omni.engine.saving import Saving
from realtime_omni.engine.scheduler import PATIENCE_S
from realtime_omni.errors import (
    AbortedError,
    ArgumentError,
    CapacityError,
    ErrorCode,
    EventQueueFullError,
    OmniError,
    SessionGoneError,
    StateError,
    SupersededError,
)
from realtime_omni.models.base import SessionSetup
from realtime_omni.session.journal import EventLog, Origin
from realtime_omni.session.lifecycle import Trigger
from realtime_omni.session.observation import Observation
from realtime_omni.session.registry import Registry
from realtime_omni.session.session import RequestIdFactory, Session
from realtime_omni.session.values import MAX_EVENT_ID, Generation, SessionId, check_event_id, check_prompt

if TYPE_CHECKING:
    from realtime_omni.snapshot.snapshot import Snapshot

log = logging.getLogger(__name__)

Withdraw = Callable[[Entry, Exception, bool], None]


class Desk:
    """Handles the commands of one engine."""

    def __init__(
        self,
        registry: Registry[Entry],
        consumer: TickConsumer,
        front: Front,
        openings: Openings,
        endings: Endings,
        clock: Clock,
        withdraw: Withdraw,
        *,
        request_ids: RequestIdFactory,
        max_pending_events: int,
        horizon_frames: int | None,
        budget_s: float | None,
    ) -> None:
        self._registry = registry
        self._consumer = consumer
        self._front = front
        self._openings = openings
        self._endings = endings
        self._clock = clock
        self._withdraw = withdraw
        self._request_ids = request_ids
        self._max_pending_events = max_pending_events
        self._horizon_frames = horizon_frames
        self._budget_s = budget_s
        self._branches = Branches(registry, consumer, front, openings, clock, self._stop)
        self._saving = Saving(registry, consumer, front, openings, clock, self._new_session)
        self._arrivals = 0
        self._created = 0

    def handle(self, command: c.Command) -> None:
        """Never raises: whatever is wrong with a command is the answer to that command."""
        try:
            if isinstance(command, c.Create):
                self._create(command)
            elif isinstance(command, c.Restore):
                self._saving.restore(command)
            elif isinstance(command, c.SessionCommand):
                self._session_command(self._find(command), command)
        except OmniError as error:
            known = self._registry.find(command.session_id) if isinstance(command, c.SessionCommand) else None
            self._front.fail(command.ticket, error, known)
        except Exception:  # our bug or a model's: this command fails, nobody else
            log.exception("command failed command=%s", type(command).__name__)
            refused = StateError(f"{type(command).__name__.lower()} failed", code=ErrorCode.INTERNAL)
            self._front.fail(command.ticket, refused)

    @property
    def created(self) -> int:
        """Sessions so far, forks and restored ones included."""
        return self._created + self._branches.forked + self._saving.restored

    def snapshot(self, entry: Entry) -> Snapshot:
        """See ``Saving.take``."""
        return self._saving.take(entry)

    def close(self, entry: Entry, reason: str, ticket: int = 0) -> None:
        """Out of the running batch first, then the one close path."""
        self._withdraw(entry, SessionGoneError(f"session {entry.session.id!r} was closed: {reason}"), True)
        self._endings.close(entry, reason, ticket)

    def _find(self, command: c.SessionCommand) -> Entry:
        entry = self._registry.get(command.session_id)
        if command.generation is not None and entry.session.generation != command.generation:
            raise SessionGoneError(f"session {command.session_id!r} is a later one of the same name")
        return entry

    def _session_command(self, entry: Entry, command: c.SessionCommand) -> None:
        match command:
            case c.Accept():
                receipt = entry.session.accept_event(command.event, self._consumer.understand)
                entry.last_used_at_s = self._clock.now_s()
                self._front.ok(command.ticket, receipt, entry)
            case c.Next():
                self._ask(entry, command)
            case c.Save():
                self._front.ok(command.ticket, self.snapshot(entry), entry)
            case c.Cancel():
                self._cancel(entry, command.target)
            case c.Abort():
                self._front.ok(command.ticket, self._abort(entry), entry)
            case c.Rollback():
                self._rollback(entry)
                self._front.ok(command.ticket, None, entry)
            case c.Log():
                session = entry.session
                self._front.ok(
                    command.ticket, session.journal.log(self._consumer.spec.name, session.chunk_index), entry
                )
            case c.Return():
                self._return(entry, command)
            case c.Fork():
                self._branches.fork(entry, command)
            case c.Rewind():
                self._branches.rewind(entry, command)
            case c.Reset():
                self._reset(entry, command)
            case c.Close():
                self.close(entry, command.reason, command.ticket)
            case c.Detach():
                self._detach(entry, command)
            case c.Attach():
                entry.session.lifecycle.require("attach")
                entry.lease_until_s = None
                self._front.ok(command.ticket, None, entry)
            case _:
                raise StateError(f"unknown command {type(command).__name__}", code=ErrorCode.INTERNAL)

    def _create(self, command: c.Create) -> None:
        spec = self._consumer.spec
        outputs = resolve_outputs(command.outputs, spec.artifacts)
        seed = int(check_event_id(command.seed, "seed"))
        self._check_image(command.image)
        session_id, generation = self._registry.claim(command.session_id)
        prompt = self._prompt(command.prompt, command.start, spec.default_prompt)
        setup = SessionSetup(session_id, prompt, seed, command.image, command.start)
        session = self._new_session(session_id, generation, setup.origin)
        self._openings.take_place(setup)  # last: from here on nothing can fail, so no place is lost
        now_s = self._clock.now_s()
        entry = Entry(session, setup, outputs, created_at_s=now_s, last_used_at_s=now_s)
        self._registry.add(session_id, entry)
        self._created += 1
        self._openings.begin(entry, command.ticket)

    def _new_session(self, session_id: SessionId, generation: Generation, origin: Origin) -> Session:
        spec = self._consumer.spec
        return Session(
            session_id,
            generation,
            origin=origin,
            reducer=self._consumer.new_reducer(),
            max_pending_events=self._max_pending_events,
            request_ids=self._request_ids,
            frames_per_block=spec.frames_per_block,
            horizon_frames=spec.horizon_frames if self._horizon_frames is None else self._horizon_frames,
            rewind_blocks=self._consumer.rewind_blocks,
        )

    def _prompt(self, given: str | None, start: str | None, otherwise: str | None) -> str | None:
        """The client's prompt, else the one that belongs to its start picture, else ``otherwise``."""
        if given is not None:
            return check_prompt(given)
        return self._consumer.spec.start_prompts.get(self._start(start) or "", otherwise)

    def _ask(self, entry: Entry, command: c.Next) -> None:
        cancelled, entry.cancelled = entry.cancelled, {t for t in entry.cancelled if t > command.ticket}
        if command.ticket in cancelled:
            raise AbortedError("the caller went away")
        entry.session.require_tick()
        if len(entry.waiters) >= MAX_WAITERS:
            raise CapacityError(f"{MAX_WAITERS} calls of next_chunk wait already")
        outputs = entry.outputs
        if command.outputs is not None:
            outputs = resolve_outputs(command.outputs, self._consumer.spec.artifacts)
        self._check_input(command)
        self._arrivals += 1
        entry.last_used_at_s = now_s = self._clock.now_s()
        asked_at_s = now_s if command.asked_at_s is None else command.asked_at_s
        waiter = Waiter(
            command.ticket, outputs, self._arrivals, asked_at_s, frame=command.frame, due_s=now_s + PATIENCE_S
        )
        if command.observation is not None:
            self._see(entry, waiter, command.observation)
        entry.waiters.append(waiter)

    def _see(self, entry: Entry, waiter: Waiter, observation: Observation) -> None:
        """The newest observation wins: one that still waits is answered so, and the newest inherits its turn."""
        waiter.observation = observation
        budget_s = self._budget_s if observation.budget_s is None else observation.budget_s
        if budget_s is not None:
            waiter.due_s, waiter.urgent = waiter.asked_at_s + budget_s, True
        if not entry.waiters:
            return
        old = entry.waiters.popleft()
        self._front.fail(old.ticket, SupersededError("a newer observation came before this one was begun"), entry)
        waiter.order, waiter.due_s = old.order, min(old.due_s, waiter.due_s)

    def _check_input(self, command: c.Next) -> None:
        """A policy's tick carries an observation, a duplex session's a frame, a world's neither. Raises ArgumentError."""
        duplex, frame = self._consumer.spec.duplex, command.frame
        if (duplex is None) != (frame is None):
            needed = "this model takes no frames of sound" if duplex is None else "a duplex model takes frames of sound"
            raise ArgumentError(needed, path="frame")
        if duplex is not None and frame is not None:
            duplex.check(frame)
        self._check_observation(command.observation)

    def _check_observation(self, observation: Observation | None) -> None:
        policy = self._consumer.spec.policy
        if observation is not None:
            if policy is None:
                raise ArgumentError("this model takes no observations", path="observation")
            self._consumer.check_observation(observation)
        elif policy is not None and not policy.imagines:
            raise ArgumentError("a policy computes from an observation", path="observation")

    def _cancel(self, entry: Entry, ticket: int) -> None:
        gone = AbortedError("the caller went away")
        for waiter in entry.waiters:
            if waiter.ticket == ticket:
                entry.waiters.remove(waiter)
                self._front.fail(ticket, gone, entry)
                return
        if entry.flying and entry.flying_ticket == ticket:
            self._withdraw(entry, gone, False)
        else:
            entry.cancelled.add(ticket)  # it waits in the work lane, which this command has overtaken, or is answered

    def _detach(self, entry: Entry, command: c.Detach) -> None:
        grace_s = command.grace_s
        if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not math.isfinite(grace_s):
            raise ArgumentError("grace_s must be a finite number of seconds", path="grace_s")
        if grace_s <= 0:
            self.close(entry, "detached_expired", command.ticket)
            return
        entry.lease_until_s = self._clock.now_s() + grace_s
        self._front.ok(command.ticket, None, entry)

    def _start(self, name: str | None) -> str | None:
        known = self._consumer.spec.starts
        if name is not None and name not in known:
            raise ArgumentError(f"no start picture {name!r}; known: {', '.join(known) or 'none'}", path="start")
        return name

    def _check_image(self, image: object) -> None:
        if image is not None and not self._consumer.spec.takes_image:
            raise ArgumentError("this model starts from no picture", code=ErrorCode.IMAGE_INVALID, path="image")
        if image is not None and not (isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3):
            raise ArgumentError("an image is uint8 [H, W, 3]", code=ErrorCode.IMAGE_INVALID, path="image")

    def _abort(self, entry: Entry) -> int | None:
        """Roll the running chunk back; returns its index, or None when nothing runs."""
        entry.session.lifecycle.require("abort")
        if entry.session.in_flight is None:
            return None
        index = int(entry.session.chunk_index)
        self._withdraw(entry, AbortedError(f"chunk {index} was aborted on request"), False)
        return index

    def _rollback(self, entry: Entry) -> None:
        entry.session.lifecycle.require("rollback")
        if not entry.can_rollback:
            raise StateError("worker state was released when the tick failed; reset or close the session")
        entry.session.lifecycle.move(Trigger.ROLLBACK)
        entry.needs_prefill = self._consumer.needs_prefill(entry.session.id)

    def _reset(self, entry: Entry, command: c.Reset) -> None:
        entry.session.lifecycle.require("reset")
        if command.observation is not None:
            self._check_observation(command.observation)
        old = entry.setup
        self._check_image(command.image)
        fresh_picture = command.image is not None or command.start is not None
        setup = replace(
            old,
            prompt=self._prompt(command.prompt, command.start, old.prompt),
            seed=old.seed if command.seed is None else int(check_event_id(command.seed, "seed")),
            image=command.image if fresh_picture else old.image,
            start=self._start(command.start) if fresh_picture else old.start,
        )
        self._restart(entry, setup, command.ticket)

    def _return(self, entry: Entry, command: c.Return) -> None:
        """Where the log begins, so that its events can be played. The line that leads there decides, not the number alone."""
        entry.session.lifecycle.require("reset")
        log, session = command.log, entry.session
        if log.model != self._consumer.spec.name:
            raise ArgumentError(f"the log is of model {log.model!r}", code=ErrorCode.UNSUPPORTED, path="log.model")
        self._check_events(log, session)
        if session.is_at(log):
            if entry.waiters or session.in_flight is not None or session.intake.pending_count:
                raise StateError("chunks or events of this session wait; a log is played alone")
            self._front.ok(command.ticket, None, entry)
            return
        if log.first_chunk:
            raise ArgumentError(
                f"the log begins before chunk {log.first_chunk} of a line that this session is not on",
                code=ErrorCode.NOT_RETAINED,
                path="log.first_chunk",
            )
        origin = log.origin
        image = None if origin.image is None else entry.setup.image
        setup = replace(
            entry.setup, prompt=origin.prompt, seed=origin.seed, start=self._start(origin.start), image=image
        )
        if setup.origin != origin:
            raise ArgumentError(
                "the log began with a picture that this session did not",
                code=ErrorCode.IMAGE_INVALID,
                path="log.origin",
            )
        self._restart(entry, setup, command.ticket)

    def _check_events(self, log: EventLog, session: Session) -> None:
        """The events of each chunk need places in the queue, and all of them ids. Raises EventQueueFullError, ArgumentError."""
        counts = [len(applied.events) for applied in log.chunks]
        if max(counts, default=0) > self._max_pending_events:
            raise EventQueueFullError(
                f"a chunk of the log has more events than the {self._max_pending_events} that may wait"
            )
        if session.intake.floor + sum(counts) > MAX_EVENT_ID:
            raise ArgumentError("there are not enough event ids left for the events of the log", path="log.chunks")

    def _restart(self, entry: Entry, setup: SessionSetup, ticket: int) -> None:
        self._consumer.check_setup(setup)  # a refused reset does not cost the running tick
        self._stop(entry, AbortedError("the session was reset"))
        self._openings.reset(entry, setup, ticket)

    def _stop(self, entry: Entry, stopped: Exception) -> None:
        """No tick of the session runs or waits any more; whoever asked for one gets ``stopped``."""
        self._withdraw(entry, stopped, True)
        for waiter in entry.waiters:
            self._front.fail(waiter.ticket, stopped, entry)
        entry.waiters.clear()
