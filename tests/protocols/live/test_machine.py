"""Whatever clients do and whenever the model answers, the promises of live.md hold.

Seeded faults, each of which `Judge` has to find: an id twice; an answer that goes to everybody, or twice, or never;
`session.closed` twice; an event after it; audio with times on the primary connection; two fixtures at once; an
injection left without an answer at the end; usage that goes back.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.live.drive import ACTIONS, Driver, Step, faulty, random_steps
from protocols.live.make_vectors import TAKEN
from realtime_omni_protocols.live import LiveError, LiveServerSide, LiveState, parse_client
from realtime_omni_protocols.live import audience as audience_module
from realtime_omni_protocols.live import server_side as machine
from realtime_omni_protocols.live.audience import Audience, Origin
from realtime_omni_protocols.live.client_events import InputAudioAppend, PlainAppend
from realtime_omni_protocols.live.server_events import AnyServerEvent, OutputAudioDelta, encode

SEEDS = range(60)
STEPS: st.SearchStrategy[list[Step]] = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11)), max_size=50)
Patch = pytest.MonkeyPatch


@settings(max_examples=80, deadline=None)
@given(st.booleans(), STEPS)
def test_promises_hold(begun: bool, steps: list[Step]) -> None:
    before: list[Step] = [("start", 1), ("started", 0)] if begun else []
    Driver().run([*before, *steps])


def test_promises_hold_for_long_sessions() -> None:
    assert faulty(Driver, SEEDS) is None


def test_every_event_is_reached() -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        seen |= {event["type"] for event in Driver().run(random_steps(seed)).events}
    assert len(seen) == 19


def one_id(patch: Patch) -> None:
    patch.setattr(Audience, "new_id", lambda self: "event_1")


def answer_to_all(patch: Patch) -> None:
    tell = Audience.tell

    def shout(self: Audience, event: object, origin: Origin | None = None) -> object:
        return [
            sent
            for peer in list(self._peers)
            for sent in tell(self, event, origin and Origin(peer, origin.client_event_id))  # type: ignore[arg-type]
            if getattr(sent, "peer", None) == peer
        ]

    patch.setattr(Audience, "tell", shout)


def answer_twice(patch: Patch) -> None:
    update = LiveServerSide._update
    patch.setattr(LiveServerSide, "_update", lambda self, *a: [*update(self, *a), *update(self, *a)])


def answer_never(patch: Patch) -> None:
    def swallow(self: LiveServerSide, ticket: int, *times: int) -> list[object]:
        self._waiting.pop(ticket, None)
        return []

    patch.setattr(LiveServerSide, "injected", swallow)


def close_twice(patch: Patch) -> None:
    closed = LiveServerSide.closed

    def again(self: LiveServerSide, seconds: int) -> object:
        sent = closed(self, seconds)
        return [*sent[: len(sent) // 2], *sent]

    patch.setattr(LiveServerSide, "closed", again)


def talk_after_close(patch: Patch) -> None:
    closed = LiveServerSide.closed

    def talk(self: LiveServerSide, seconds: int) -> object:
        sent = closed(self, seconds)
        return [*sent[: len(sent) // 2], *sent[: len(sent) // 2], *sent[len(sent) // 2 :]]

    patch.setattr(LiveServerSide, "closed", talk)


def times_for_all(patch: Patch) -> None:
    def timed(event: AnyServerEvent) -> str:
        if isinstance(event, OutputAudioDelta) and event.start_ms is None:
            event = OutputAudioDelta(delta=event.delta, start_ms=0, end_ms=80)
        return encode(event)

    patch.setattr(audience_module, "encode", timed)


def two_fixtures(patch: Patch) -> None:
    play = LiveServerSide._play

    def any_time(self: LiveServerSide, *args: object) -> object:
        self._fixture = None
        return play(self, *args)  # type: ignore[arg-type]

    patch.setattr(LiveServerSide, "_play", any_time)


def forget_waiting(patch: Patch) -> None:
    patch.setattr(LiveServerSide, "_refuse_waiting", lambda self: [])


def usage_goes_back(patch: Patch) -> None:
    patch.setattr(LiveServerSide, "_usage", lambda self, seconds: machine.Usage(seconds=seconds))


FAULTS: list[Callable[[Patch], None]] = [
    one_id,
    answer_to_all,
    answer_twice,
    answer_never,
    close_twice,
    talk_after_close,
    times_for_all,
    two_fixtures,
    forget_waiting,
    usage_goes_back,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_seeded_fault_is_found(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    fault(monkeypatch)
    assert faulty(Driver, range(200)) is not None


def test_a_session_without_a_start_says_nothing() -> None:
    side = LiveServerSide()
    assert side.lost(0) == []
    assert side.state is LiveState.NEW
    assert side.statistics().events_sent == 0


@given(st.one_of(st.text(), st.binary(), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps)))
def test_whatever_a_frame_holds_it_is_an_event_or_a_coded_refusal(frame: str | bytes) -> None:
    with contextlib.suppress(LiveError):
        parse_client(frame)


@given(st.sampled_from(TAKEN), st.data())
def test_an_event_with_one_changed_value_is_an_event_or_a_coded_refusal(vector: dict[str, Any], data: Any) -> None:
    event = json.loads(vector["wire"])
    target = event
    while isinstance(target, dict) and target:
        key = data.draw(st.sampled_from(sorted(target)))
        if isinstance(target[key], dict) and data.draw(st.booleans()):
            target = target[key]
            continue
        target[key] = data.draw(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just([{}])
        )
        break
    with contextlib.suppress(LiveError):
        parse_client(json.dumps(event), fork=vector["fork"])


SOUND = st.binary(min_size=2, max_size=300).map(lambda data: base64.b64encode(data[: len(data) // 2 * 2]).decode())


@given(st.one_of(SOUND, st.text(alphabet="AB+/= \\\u00e9", max_size=12)))
def test_sound_that_is_read_the_short_way_is_what_the_long_way_reads(text: str) -> None:
    event = {"type": "session.input_audio.append", "event_id": "e1", "audio": text}
    short, long = parse_client(json.dumps(event)), parse_client(json.dumps({**event, "more": 1}))
    assert isinstance(long, InputAudioAppend)
    assert short.event_id == long.event_id
    if isinstance(short, PlainAppend):
        assert short.audio == binascii.a2b_base64(long.audio, strict_mode=True)
    else:
        assert short == long


@given(SOUND)
def test_what_clients_send_takes_the_short_way(text: str) -> None:
    assert isinstance(parse_client(json.dumps({"type": "session.input_audio.append", "audio": text})), PlainAppend)


@pytest.mark.parametrize("opening", ["[", '{"x":'])
@pytest.mark.parametrize("before", ['{"type":', '{"audio":"AAA=","type":', '{"x":', ""])
def test_what_is_nested_without_end_is_no_json(before: str, opening: str) -> None:
    with pytest.raises(LiveError) as refused:
        parse_client(before + opening * 100_000)
    assert refused.value.code == "invalid_json"
