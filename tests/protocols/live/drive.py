"""A session driven by a list of steps, and a judge of what its connections were sent.

The judge knows the wire and what was asked, not the machine: it reads frames as a client does.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

from realtime_omni_protocols.live import (
    PRIMARY,
    Append,
    Close,
    Command,
    End,
    GoOn,
    Inject,
    LiveCode,
    LiveError,
    LiveServerSide,
    LiveState,
    PlayFixture,
    Send,
    Start,
    ToolOutput,
    UseTools,
)

Step = tuple[str, int]
"""An action by name, and a number that chooses the connection and other details."""

TICK_MS = 80
PCM = base64.b64encode(bytes(3840)).decode()
CONTEXTS = ("instructions", "thinking", "commentary")
UNANSWERED = ("session.input_audio.append", "response.item.create")
ANSWERS = {
    "session.start": "session.started",
    "session.update": "session.updated",
    "session.input_audio.mute": "session.input_audio.muted",
    "session.input_audio.unmute": "session.input_audio.unmuted",
    "session.output_audio.fixture.play": "session.output_audio.fixture.playing",
    "session.close": "session.closed",
    "response.create": "response.event",
} | {f"session.{kind}.append": f"session.{kind}.appended" for kind in CONTEXTS}


class Judge:
    """Reads the frames of every connection; an AssertionError is a broken promise."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._asked: dict[str, tuple[int, str]] = {}
        self._answered: set[str] = set()
        self._seen: dict[int, list[str]] = {PRIMARY: []}
        self._ids: dict[int, set[str]] = {PRIMARY: set()}
        self._gone: set[int] = set()
        self._started = self._closed = self._ending = False
        self._seconds = 0
        self._fixture = False

    def asks(self, peer: int, event: dict[str, Any]) -> None:
        if "event_id" in event:
            self._asked[event["event_id"]] = (peer, event["type"])

    def attached(self, peer: int) -> None:
        self._seen[peer], self._ids[peer] = [], set()

    def lost(self, peer: int) -> None:
        self._gone.add(peer)

    def ending(self) -> None:
        assert not self._ending, "a session ends once"
        self._ending = True

    def reads(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Send):
                self._read(command.peer, json.loads(command.data))
            elif isinstance(command, Close):
                assert command.peer not in self._gone, "a connection is closed once"
                self._gone.add(command.peer)

    def _read(self, peer: int, event: dict[str, Any]) -> None:
        kind = event["type"]
        assert peer not in self._gone, "nothing is sent to a connection that is gone"
        self.events.append(event)
        before = self._seen[peer]
        assert "session.closed" not in before, f"{kind} after session.closed"
        before.append(kind)
        assert not self._ending or kind in ("error", "session.closed"), f"{kind} while the session ends"
        if kind != "error" and peer == PRIMARY and not self._started:
            assert kind == "session.started", f"{kind} before session.started"
            self._started = True
        if kind in ("session.output_audio.delta", "session.input_audio.append"):
            self._read_audio(peer, kind, event)
            return
        assert event["event_id"] not in self._ids[peer], "ids of events are unique"
        self._ids[peer].add(event["event_id"])
        self._check_answer(peer, event)
        self._check_content(peer, event)

    def _read_audio(self, peer: int, kind: str, event: dict[str, Any]) -> None:
        assert "event_id" not in event
        assert len(base64.b64decode(event["delta" if "delta" in event else "audio"])) > 0
        if peer == PRIMARY:
            assert event.keys() == {"type", "delta"}, "the primary connection gets no times and no reflection"
        elif kind == "session.output_audio.delta":
            assert event["end_ms"] - event["start_ms"] == TICK_MS

    def _check_answer(self, peer: int, event: dict[str, Any]) -> None:
        error = event.get("error", {})
        client_id = event.get("client_event_id") or error.get("client_event_id")
        if client_id is None:
            return
        asker, asked = self._asked[client_id]
        assert asker == peer, "an answer is on the connection that asked"
        if event["type"] == "session.output_audio.fixture.played":
            assert asked == "session.output_audio.fixture.play"
            return
        assert client_id not in self._answered, "a command is answered once"
        self._answered.add(client_id)
        assert event["type"] in ("error", ANSWERS.get(asked)), f"{event['type']} answers {asked}"

    def _check_content(self, peer: int, event: dict[str, Any]) -> None:
        if "usage" in event:
            assert event["usage"]["seconds"] >= self._seconds, "usage is cumulative"
            self._seconds = event["usage"]["seconds"]
        if "start_ms" in event:
            assert 0 <= event["start_ms"] <= event["end_ms"]
        if event["type"] == "session.closed":
            self._closed = True
        if peer == PRIMARY and ".fixture." in event["type"]:
            playing = event["type"].endswith("playing")
            assert playing is not self._fixture, "one fixture at a time"
            self._fixture = playing

    def over(self) -> None:
        """The session is over and every command had its chance."""
        if self._started or self._closed:
            for peer, seen in self._seen.items():
                if "session.closed" in seen:
                    assert seen[-1] == "session.closed"
                    assert peer in self._gone, "a connection is closed after session.closed"
        for client_id, (peer, asked) in self._asked.items():
            if client_id not in self._answered and asked not in UNANSWERED:
                left = "session.closed" not in self._seen[peer] and peer in self._gone
                late = asked == "session.close"  # a second close joins the first
                assert left or late, f"{asked} {client_id} was never answered"


class Driver:
    """Carries out steps and the machine's commands; the model is a counter of ticks."""

    def __init__(self, side: LiveServerSide | None = None) -> None:
        self.side = side or LiveServerSide()
        self.judge = Judge()
        self.tickets: list[int] = []
        self.heard: list[bool] = []
        self.peers = [PRIMARY]
        self.ticks = 0
        self.count = 0

    def run(self, steps: Iterable[Step]) -> Judge:
        for name, number in steps:
            getattr(self, f"do_{name}")(number)
        self.finish()
        return self.judge

    def finish(self) -> None:
        if self.side.state is LiveState.STARTING:
            self.do_started(0)
        if self.side.state is LiveState.ACTIVE:
            self.carry_out(self.side.end("expired"))
        if self.side.state is LiveState.CLOSING:
            self.do_closed(0)
        self.judge.over()

    def send(self, number: int, event: dict[str, Any]) -> None:
        peer = self.peers[number % len(self.peers)]
        self.count += 1
        if number % 5:
            event["event_id"] = f"c{self.count}"
        gone = peer in self.judge._gone
        if not gone and self.side.state is not LiveState.CLOSED:
            self.judge.asks(peer, event)
        self.carry_out(self.side.receive(peer, json.dumps(event)))

    def carry_out(self, commands: list[Command]) -> None:
        self.judge.reads(commands)
        for command in commands:
            match command:
                case Inject(ticket=ticket):
                    self.tickets.append(ticket)
                case Append(heard=heard):
                    assert heard is not (self.side.muted or self.side.fixture_active)
                    self.heard.append(heard)
                case End():
                    self.judge.ending()
                case Start() | UseTools() | ToolOutput() | GoOn() | PlayFixture() | Send() | Close():
                    pass

    # ---- what clients do

    def do_start(self, number: int) -> None:
        delegation = {"type": "responses", "responses": {"model": "b"}} if number % 7 == 6 else {"type": "client"}
        self.send(number, {"type": "session.start", "session": {"model": "m", "delegation": delegation}})

    def do_bad_start(self, number: int) -> None:
        self.send(number, {"type": "session.start", "session": {"model": "m", "voice": "x"}})

    def do_update(self, number: int) -> None:
        delegation = {"type": "client", "acknowledgement_delay_ms": number * 10}
        self.send(number, {"type": "session.update", "session": {"delegation": delegation}})

    def do_append(self, number: int) -> None:
        self.send(number, {"type": "session.input_audio.append", "audio": PCM})

    def do_bad_append(self, number: int) -> None:
        self.send(number, {"type": "session.input_audio.append", "audio": "?"})

    def do_mute(self, number: int) -> None:
        self.send(number, {"type": "session.input_audio.mute"})

    def do_unmute(self, number: int) -> None:
        self.send(number, {"type": "session.input_audio.unmute"})

    def do_inject(self, number: int) -> None:
        kind = CONTEXTS[number % 3]
        delegation = f"d{number % 4}" if number % 2 else None
        self.send(number, {"type": f"session.{kind}.append", "content": "x", "delegation_id": delegation})

    def do_fixture(self, number: int) -> None:
        self.send(number, {"type": "session.output_audio.fixture.play", "audio": PCM})

    def do_close(self, number: int) -> None:
        self.send(number, {"type": "session.close"})

    def do_unsupported(self, number: int) -> None:
        self.send(number, {"type": "decision.create"})

    def do_tools(self, number: int) -> None:
        tools = [{"type": "function", "name": "f"}, {"type": "web_search"}]
        responses = {"tools": tools if number % 3 else "none", "tool_choice": {"type": "function", "name": "f"}}
        self.send(
            number, {"type": "session.update", "session": {"delegation": {"type": "responses", "responses": responses}}}
        )

    def do_output(self, number: int) -> None:
        item = {"type": "function_call_output", "call_id": f"d{number % 4}", "output": "1"}
        self.send(number, {"type": "response.item.create", "item": item})

    def do_go_on(self, number: int) -> None:
        self.send(number, {"type": "response.create"})

    def do_nonsense(self, number: int) -> None:
        peer = self.peers[number % len(self.peers)]
        frames = ["", "[]", "{", '{"type":1}', '{"type":"session.begin"}', "{" * 100, '{"event_id":7}', "\ud800"]
        self.carry_out(self.side.receive(peer, frames[number % len(frames)]))

    def do_attach(self, number: int) -> None:
        try:
            peer = self.side.attach()
        except LiveError:
            return
        assert self.side.state is LiveState.ACTIVE
        self.judge.attached(peer)
        self.peers.append(peer)

    def do_lose(self, number: int) -> None:
        peer = self.peers[number % len(self.peers)]
        if peer in self.judge._gone:
            return
        self.judge.lost(peer)
        self.carry_out(self.side.lost(peer))

    # ---- what the session does

    def do_started(self, number: int) -> None:
        if self.side.state is LiveState.STARTING:
            started = self.side.started("live_1", expires_at=99, model="m", voice="v", takes_tools=number % 2 == 1)
            self.carry_out(started)

    def do_refused(self, number: int) -> None:
        if self.side.state is LiveState.STARTING:
            self.carry_out(self.side.refuse_start(LiveError(LiveCode.CAPACITY, "full")))

    def do_tick(self, number: int) -> None:
        start, self.ticks = self.ticks * TICK_MS, self.ticks + 1
        self.carry_out(self.side.output_audio(bytes(3840), start, start + TICK_MS, bytes(3840)))
        self.carry_out(self.side.reflect_input(bytes(3840)))
        if number % 3 == 0:
            self.carry_out(self.side.input_transcript("a", start, start + TICK_MS))
            self.carry_out(self.side.output_transcript("b", start, start + TICK_MS))
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            if number % 4 == 3:
                error = LiveError(LiveCode.UNSUPPORTED_EVENT, "this model takes no text")
                self.carry_out(self.side.refuse_injection(ticket, error))
            else:
                self.carry_out(self.side.injected(ticket, start, start + TICK_MS))

    def do_delegated(self, number: int) -> None:
        self.carry_out(self.side.called(f"d{number % 4}", "f", "{}", self.ticks * TICK_MS))

    def do_fixture_played(self, number: int) -> None:
        if self.side.fixture_active:
            self.carry_out(self.side.fixture_played())

    def do_usage(self, number: int) -> None:
        self.carry_out(self.side.usage(self.ticks // 12 + (number == 2), None if number % 2 else 0.5))

    def do_complain(self, number: int) -> None:
        self.carry_out(self.side.complain(LiveError(LiveCode.INPUT_OVERRUN, "audio comes faster than real time")))

    def do_expire(self, number: int) -> None:
        self.carry_out(self.side.end("expired"))

    def do_closed(self, number: int) -> None:
        if self.side.state is LiveState.CLOSING:
            self.carry_out(self.side.closed(self.ticks // 12))


ACTIONS = [name.removeprefix("do_") for name in dir(Driver) if name.startswith("do_")]
_OFTEN = ["tick", "append", "inject", "delegated", "mute", "fixture", "fixture_played", "attach", "usage"]


def random_steps(seed: int, count: int = 60) -> list[Step]:
    """A session that usually starts and lives for a while."""
    rng = random.Random(seed)
    calm = [name for name in ACTIONS if name not in ("expire", "close", "closed", "lose")]
    pool = [*calm, *_OFTEN, *_OFTEN]
    steps = [(rng.choice(pool), rng.randrange(12)) for _ in range(count)]
    start: list[Step] = [("nonsense", seed), ("start", 6 if seed % 3 == 0 else 1), ("started", seed % 2)]
    end = [(rng.choice(["expire", "close", "lose", "closed"]), rng.randrange(12)), ("inject", 1), ("tick", 1)]
    return [*start, *steps, *end]


def faulty(driver: Callable[[], Driver], seeds: Iterable[int]) -> str | None:
    """The first broken promise among the seeds; None when all are kept."""
    for seed in seeds:
        try:
            driver().run(random_steps(seed))
        except AssertionError as broken:
            return str(broken) or "broken"
    return None
