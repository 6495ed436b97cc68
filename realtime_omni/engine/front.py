"""The engine's voice: answers, notices and views, built in one place and put into the outbox."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from realtime_omni.engine.commands import Answer, Notice, SessionView
from realtime_omni.engine.consumer import TickConsumer
from realtime_omni.engine.entry import Entry
from realtime_omni.engine.outbox import Outbox
from realtime_omni.session.values import EventId


class Front:
    """Answers each ticket once and tells of sessions what happened to them."""

    def __init__(self, outbox: Outbox, consumer: TickConsumer) -> None:
        self._outbox = outbox
        self._consumer = consumer

    def together(self) -> AbstractContextManager[None]:
        """What is said inside is heard at once, at the end."""
        return self._outbox.together()

    def speak(self) -> None:
        """What was said up to now is heard now."""
        self._outbox.speak()

    def view(self, entry: Entry) -> SessionView:
        session = entry.session
        return SessionView(
            session_id=session.id,
            generation=session.generation,
            state=session.state,
            epoch=session.epoch,
            chunk_index=session.chunk_index,
            prompt=session.prompt,
            seed=entry.setup.seed,
            pending_event_count=session.intake.pending_count,
            event_floor=session.intake.floor,
            pages_used=self._consumer.pages_of(session.id),
            kv_bytes=self._consumer.kv_bytes(session.id),
            state_bytes=self._consumer.state_bytes(session.id),
            attached=entry.lease_until_s is None,
            can_rollback=entry.can_rollback,
            oldest_rewind=self._oldest_rewind(entry),
            created_at_s=entry.created_at_s,
            last_used_at_s=entry.last_used_at_s,
        )

    def _oldest_rewind(self, entry: Entry) -> int | None:
        if not self._consumer.rewind_blocks or not entry.can_rollback:
            return None
        return next(iter(self._consumer.retained(entry.session.id)), entry.session.chunk_index)  # they rise

    def ok(self, ticket: int, value: Any = None, entry: Entry | None = None) -> None:
        if ticket:
            self._outbox.put(Answer(ticket=ticket, value=value, view=self.view(entry) if entry else None))

    def fail(self, ticket: int, error: Exception, entry: Entry | None = None) -> None:
        if ticket:
            self._outbox.put(Answer(ticket=ticket, error=error, view=self.view(entry) if entry else None))

    def notice(
        self,
        kind: str,
        entry: Entry,
        *,
        reason: str = "",
        code: str | None = None,
        message: str = "",
        event_ids: tuple[EventId, ...] = (),
    ) -> None:
        session = entry.session
        self._outbox.put(
            Notice(
                kind=kind,
                session_id=session.id,
                generation=session.generation,
                view=self.view(entry),
                reason=reason,
                code=code,
                message=message,
                event_ids=event_ids,
            )
        )
