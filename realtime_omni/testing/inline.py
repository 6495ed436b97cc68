"""InlineEngine: a whole engine without a thread, driven call by call, with a clock that the test moves.

Owns an inbox, an outbox and a :class:`ManualClock`. Everything else is the engine that a server runs, built the same way.

    engine = InlineEngine(TinyKVWorld())
    engine.create("a", seed=1)
    engine.accept("a", 0, prompt="red")
    chunk = engine.next("a")

    ticket = engine.send(Next(ticket=0, session_id="a"))      # or step by step
    engine.absorb(); engine.plan()
    engine.send(Close(ticket=0, session_id="a"))
    engine.run(); engine.settle()
    engine.result(ticket)                                     # raises SessionGoneError
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from realtime_omni.build import build_engine
from realtime_omni.clock import ManualClock
from realtime_omni.config import Config, EngineSection, KVSection, SessionSection
from realtime_omni.engine import commands as c
from realtime_omni.engine.consumer import TickConsumer
from realtime_omni.engine.inbox import Inbox
from realtime_omni.engine.outbox import Outbox
from realtime_omni.engine.runner import ModelRunner
from realtime_omni.ids import CountingMint
from realtime_omni.models.base import WorldModel
from realtime_omni.session.frame import Frame
from realtime_omni.session.journal import EventLog
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Chunk, ChunkIndex, ControlInput, EventAcceptance, SessionEvent, SessionId
from realtime_omni.snapshot.snapshot import Snapshot

KV_BYTES = 64 << 20
MOST_CYCLES = 1000
"""A command that was not answered after so many cycles never will be."""


def counting_request_id(session_id: SessionId, chunk_index: ChunkIndex) -> str:
    """The same tick has the same id, also when it runs again."""
    return f"ar-{session_id}-{chunk_index}"


def small_config(
    *,
    sessions: int = 4,
    max_batch: int = 4,
    policy: str = "refuse",
    on_failure: str = "keep",
    max_pending_events: int = 8,
    dtype: str = "float64",
    model: str = "null",
    rewind_blocks: int = 1,
) -> Config:
    """A configuration for tests; see the arguments."""
    return Config(
        model=model,
        dtype=dtype,  # type: ignore[arg-type]
        kv=KVSection(
            memory_bytes=KV_BYTES,
            requested_sessions=sessions,
            policy=policy,  # type: ignore[arg-type]
            rewind_blocks=rewind_blocks,
        ),
        engine=EngineSection(
            max_batch=max_batch,
            max_pending_events=max_pending_events,
            on_failure=on_failure,  # type: ignore[arg-type]
            threads=1,
        ),
        session=SessionSection(max_sessions=sessions),
    )


class InlineEngine:
    """See the module docstring."""

    def __init__(
        self,
        model: WorldModel | None = None,
        config: Config | None = None,
        *,
        consumer: TickConsumer | None = None,
        **settings: Any,
    ) -> None:
        """``settings`` are those of :func:`small_config`, for when no ``config`` is given. Without a model: ``null``."""
        self.config = config if config is not None else small_config(**settings)
        self.clock = ManualClock()
        self.inbox = Inbox(self.config.engine.inbox)
        self.outbox = Outbox()
        self.observe: Callable[[int], Observation | Frame | None] = lambda chunk_index: None
        """What ``next`` shows a policy, or lets a duplex model hear, before a chunk; a test with something else in mind sends
        ``Next`` itself."""
        self._notices: list[c.Notice] = []
        self._answers: dict[int, c.Answer] = {}
        self._tickets = 0
        self.engine = build_engine(
            self.config,
            self.inbox,
            self.outbox,
            clock=self.clock,
            mint=CountingMint(),
            request_ids=counting_request_id,
            model=model,
            consumer=consumer,
        )

    # ------------------------------------------------------------------ any command

    def send(self, command: c.Command) -> int:
        """Put a command into the inbox under a fresh ticket, which is returned. Nothing runs."""
        self._tickets += 1
        self.inbox.put(replace(command, ticket=self._tickets))
        return self._tickets

    def ask(self, command: c.Command) -> Any:
        """Send, cycle until it is answered, return the value or raise the error."""
        ticket = self.send(command)
        for _ in range(MOST_CYCLES):
            if self.answered(ticket):
                return self.result(ticket)
            self.cycle()
        raise AssertionError(f"{type(command).__name__} was never answered")

    def answers(self) -> dict[int, c.Answer]:
        """Every answer so far by ticket."""
        for entry in self.outbox.take():
            if isinstance(entry, c.Notice):
                self._notices.append(entry)
            else:
                assert entry.ticket not in self._answers, f"ticket {entry.ticket} was answered twice"
                self._answers[entry.ticket] = entry
        return self._answers

    def answered(self, ticket: int) -> bool:
        return ticket in self.answers()

    def result(self, ticket: int) -> Any:
        """The value of an answered ticket; raises its error, or AssertionError while there is no answer."""
        answer = self.answers().get(ticket)
        assert answer is not None, f"ticket {ticket} has no answer"
        if answer.error is not None:
            raise answer.error
        return answer.value

    def error(self, ticket: int) -> Exception | None:
        """The error of an answered ticket, None when it succeeded."""
        answer = self.answers().get(ticket)
        assert answer is not None, f"ticket {ticket} has no answer"
        return answer.error

    @property
    def notices(self) -> list[c.Notice]:
        """What the engine told unasked, so far."""
        self.answers()
        return self._notices

    def kinds(self, session_id: str) -> list[str]:
        """The kinds of the notices about a session, in order."""
        return [n.kind for n in self.notices if n.session_id == session_id]

    # ------------------------------------------------------------------ the street

    def cycle(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.cycle()
            self.engine.check()

    def rest(self) -> None:
        """Cycle until the engine has nothing left to do: every waiting call is answered, every block is history."""
        for _ in range(MOST_CYCLES):
            self.cycle()
            if not self.engine.has_work():
                return
        raise AssertionError("the engine never came to rest")

    def absorb(self) -> None:
        self.engine.absorb()

    def prefill(self) -> bool:
        return self.engine.prefill()

    def plan(self) -> bool:
        return self.engine.plan()

    def run(self) -> None:
        self.engine.run()

    def settle(self) -> None:
        self.engine.settle()

    def reap(self) -> None:
        self.engine.reap()

    def advance(self, seconds: float) -> None:
        """Move the clock and let the engine notice."""
        self.clock.advance(seconds)
        self.cycle()

    # ------------------------------------------------------------------ commands by name

    def create(
        self, session_id: str | None = None, *, prompt: str | None = None, seed: int = 0, **how: Any
    ) -> c.SessionView:
        outputs = how.pop("outputs", None)
        view = self.ask(
            c.Create(
                ticket=0,
                session_id=session_id,
                prompt=prompt,
                seed=seed,
                outputs=None if outputs is None else tuple(outputs),
                **how,
            )
        )
        assert isinstance(view, c.SessionView)
        return view

    def accept(
        self,
        session_id: str,
        event_id: int,
        *,
        prompt: str | None = None,
        controls: Sequence[ControlInput] = (),
        generation: int | None = None,
    ) -> EventAcceptance:
        event = SessionEvent(event_id, prompt, tuple(controls))  # type: ignore[arg-type]
        return self.ask(c.Accept(**_address(session_id, generation), event=event))  # type: ignore[no-any-return]

    def next(self, session_id: str, *, outputs: Sequence[str] | None = None, generation: int | None = None) -> Chunk:
        chunk: Chunk = self.ask(self._next(session_id, outputs, generation))
        chunk.fill()
        return chunk

    def next_all(self, session_ids: Sequence[str], *, outputs: Sequence[str] | None = None) -> list[Chunk | Exception]:
        """One ``next`` for each session, asked together, so that they share a batch; errors are returned."""
        tickets = [self.post_next(s, outputs=outputs) for s in session_ids]
        for _ in range(MOST_CYCLES):
            if all(self.answered(t) for t in tickets):
                break
            self.cycle()
        return [self.error(t) or self.result(t) for t in tickets]

    def post_next(self, session_id: str, *, outputs: Sequence[str] | None = None) -> int:
        """Ask for a chunk and let nothing run; the ticket."""
        return self.send(self._next(session_id, outputs))

    def _next(self, session_id: str, outputs: Sequence[str] | None, generation: int | None = None) -> c.Next:
        wanted, name = None if outputs is None else tuple(outputs), SessionId(session_id)
        index = self.engine.registry.get(name).session.chunk_index if name in self.engine.registry else 0
        given = self.observe(index)
        observation = given if isinstance(given, Observation) else None
        frame = given if isinstance(given, Frame) else None
        return c.Next(**_address(session_id, generation), outputs=wanted, observation=observation, frame=frame)

    def post_close(self, session_id: str) -> int:
        return self.send(c.Close(**_address(session_id)))

    def abort(self, session_id: str) -> int | None:
        return self.ask(c.Abort(**_address(session_id)))  # type: ignore[no-any-return]

    def rollback(self, session_id: str) -> None:
        self.ask(c.Rollback(**_address(session_id)))

    def log(self, session_id: str) -> EventLog:
        return self.ask(c.Log(**_address(session_id)))  # type: ignore[no-any-return]

    def replay(self, session_id: str, log: EventLog) -> list[Chunk]:
        """As ``Session.replay`` of the manager does."""
        self.ask(c.Return(**_address(session_id), log=log))
        recorded = {applied.chunk_index: applied.events for applied in log.chunks}
        chunks = []
        for index in range(log.first_chunk, log.next_chunk):
            for event in recorded.get(ChunkIndex(index), ()):
                event_id = self.view(session_id).event_floor + 1
                self.accept(session_id, event_id, prompt=event.prompt, controls=event.controls)
            chunks.append(self.next(session_id))
        return chunks

    def fork(self, session_id: str, name: str | None = None, *, generation: int | None = None) -> c.SessionView:
        return self.ask(c.Fork(**_address(session_id, generation), name=name))  # type: ignore[no-any-return]

    def rewind(self, session_id: str, chunk_index: int) -> c.SessionView:
        return self.ask(c.Rewind(**_address(session_id), chunk_index=chunk_index))  # type: ignore[no-any-return]

    def reset(self, session_id: str, **setup: Any) -> c.SessionView:
        return self.ask(c.Reset(**_address(session_id), **setup))  # type: ignore[no-any-return]

    def close(self, session_id: str, *, generation: int | None = None, reason: str = "client") -> None:
        self.ask(c.Close(**_address(session_id, generation), reason=reason))

    def snapshot(self, session_id: str) -> Snapshot:
        return self.ask(c.Save(**_address(session_id)))  # type: ignore[no-any-return]

    def restore(self, snapshot: Snapshot, session_id: str | None = None) -> c.SessionView:
        return self.ask(c.Restore(ticket=0, snapshot=snapshot, session_id=session_id))  # type: ignore[no-any-return]

    def detach(self, session_id: str, grace_s: float) -> None:
        self.ask(c.Detach(**_address(session_id), grace_s=grace_s))

    def attach(self, session_id: str) -> None:
        self.ask(c.Attach(**_address(session_id)))

    # ------------------------------------------------------------------ looking inside

    @property
    def runner(self) -> ModelRunner:
        runner = self.engine.consumer
        assert isinstance(runner, ModelRunner)
        return runner

    def view(self, session_id: str) -> c.SessionView:
        return self.engine._front.view(self.engine.registry.get(session_id))

    @property
    def free_pages(self) -> int:
        return self.runner.book.free_pages

    def kv_bits(self, session_id: str) -> bytes:
        """Every committed key and value of a session, all branches and layers, in frame order."""
        book, storage = self.runner.book, self.runner.storage
        parts = []
        for branch in book.spec.branches:
            frames = book.table(session_id, branch.name).retained()
            for layer in range(book.spec.num_layers):
                parts += [t.numpy().tobytes() for t in storage.read(layer, frames)]
        return b"".join(parts)

    def state_of(self, session_id: str) -> Any:
        """The model's own state of a session."""
        return self.runner.resident(SessionId(session_id)).state


def _address(session_id: str, generation: int | None = None) -> dict[str, Any]:
    return {"ticket": 0, "session_id": SessionId(session_id), "generation": generation}
