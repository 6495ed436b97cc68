"""What a client sends becomes frames, at its pace: order, gaps, lateness, and clocks that differ. All on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from realtime_omni.duplex.intake import IDLE_AFTER_S, IntakeLimits, SoundIntake
from realtime_omni.errors import ArgumentError, EventQueueFullError

RATE = 1000
FRAME = 80
FRAME_S = 0.08


def intake(**how: Any) -> SoundIntake:
    return SoundIntake(FRAME, RATE, 0.0, **how)


def ramp(start: int, length: int) -> NDArray[np.float32]:
    """Samples that say where they belong; never zero."""
    return np.arange(start + 1, start + 1 + length).astype(np.float32)


def taken(box: SoundIntake, now_s: float) -> list[tuple[NDArray[np.float32], str]]:
    def frames() -> Iterator[tuple[NDArray[np.float32], str]]:
        while (frame := box.take(now_s)) is not None:
            yield frame

    found = list(frames())
    box.check()
    return found


def test_packets_of_any_size_become_frames_in_order() -> None:
    box = intake(pace="free")
    for start, length in ((0, 30), (30, 100), (130, 1), (131, 29)):
        box.append(ramp(start, length), 0.0)
    frames = taken(box, 0.0)
    assert [source for _, source in frames] == ["heard", "heard"]
    np.testing.assert_array_equal(np.concatenate([audio for audio, _ in frames]), ramp(0, 160))


def test_a_packet_that_comes_twice_is_taken_once() -> None:
    box = intake(pace="free")
    assert box.append(ramp(0, 40), 0.0, 7)
    assert not box.append(ramp(0, 40), 0.0, 7)
    assert not box.append(ramp(99, 40), 0.0, 3)
    assert box.append(ramp(40, 40), 0.0, 8)
    ((audio, _),) = taken(box, 0.0)
    np.testing.assert_array_equal(audio, ramp(0, 80))
    assert box.statistics.duplicates == 2


def test_packets_that_are_missing_become_silence_and_are_marked() -> None:
    box = intake(pace="free")
    box.append(ramp(0, 40), 0.0, 1)
    box.append(ramp(80, 40), 0.0, 3)
    box.append(ramp(120, 40), 0.0, 4)
    (first, made_up), (second, whole) = taken(box, 0.0)
    np.testing.assert_array_equal(first, [*ramp(0, 40), *np.zeros(40)])
    np.testing.assert_array_equal(second, ramp(80, 80))
    assert (made_up, whole) == ("concealed", "heard")
    assert box.statistics.concealed == 40


def test_a_number_that_jumps_far_is_a_pause_and_no_silence() -> None:
    box = intake(pace="free")
    box.append(ramp(0, 80), 0.0, 1)
    box.append(ramp(80, 80), 0.0, 1000)
    assert len(taken(box, 0.0)) == 2


def test_more_than_may_wait_is_refused_whole() -> None:
    box = intake(pace="free", limits=IntakeLimits(max_ms=200))
    box.append(ramp(0, 150), 0.0, 1)
    with pytest.raises(EventQueueFullError):
        box.append(ramp(150, 51), 0.0, 2)
    assert box.append(ramp(150, 50), 0.0, 2), "a refused packet has not used up its number"
    box.check()


def test_at_the_pace_of_speech_the_oldest_gives_way() -> None:
    box = intake(limits=IntakeLimits(max_live_ms=160))
    box.append(ramp(0, 200), 0.0)
    assert (box.statistics.overrun, box.statistics.behind) == (40, 0)
    ((audio, _),) = taken(box, 0.08)
    np.testing.assert_array_equal(audio, ramp(40, 80))


def test_what_an_engine_that_is_late_left_waiting_is_not_the_clients_fault() -> None:
    box = intake(limits=IntakeLimits(max_live_ms=160))
    for number in range(30):  # in time, and nobody takes a frame
        box.append(ramp(10 * number, 10), 0.01 * number)
    assert (box.statistics.overrun, box.statistics.behind) == (0, 140)
    box.append(ramp(300, 200), 0.3)  # and then too much at once
    assert (box.statistics.overrun, box.statistics.behind) == (200, 140)
    box.check()


@pytest.mark.parametrize("audio", [np.zeros(4), np.zeros((2, 2), np.float32)])
def test_other_arrays_are_refused(audio: Any) -> None:
    with pytest.raises(ArgumentError):
        intake().append(audio, 0.0)


def test_what_is_late_is_replaced_and_then_dropped_as_it_comes() -> None:
    box = intake(limits=IntakeLimits(late_ms=160))
    box.append(ramp(0, 80), 0.0)
    assert [s for _, s in taken(box, 0.08)] == ["heard"]
    assert taken(box, 0.16) == [], "late by one frame: waited for"
    assert [s for _, s in taken(box, 0.32)] == ["concealed"]
    box.append(ramp(80, 240), 0.34)
    sources = [taken(box, 0.40), taken(box, 0.48), taken(box, 0.56)]
    audio = np.concatenate([a for frames in sources for a, _ in frames])
    np.testing.assert_array_equal(audio[:160], ramp(160, 160))
    assert box.statistics.late == 80, "the concealed frame's sound was dropped when it came"


def test_a_client_that_stops_sending_is_idle_and_time_goes_on() -> None:
    box = intake()
    box.append(ramp(0, 80), 0.0)
    taken(box, 0.08)
    sources = [s for k in range(2, 40) for _, s in taken(box, k * FRAME_S)]
    assert sources[-1] == "idle"
    assert len(sources) == pytest.approx(38, abs=2)


def test_time_stands_still_where_it_is_held_until_something_wants_a_frame() -> None:
    box = intake(idle="hold")
    assert taken(box, 10.0) == []
    assert box.take(10.0, wanted=True) is not None
    box.append(ramp(0, 80), 20.0)
    assert [s for _, s in taken(box, 20.0)] == ["heard"], (
        "it goes on at once, and makes nothing up for the time it stood"
    )
    assert taken(box, 20.0 + 2 * IDLE_AFTER_S) == []


def test_idle_time_is_not_counted_as_written() -> None:
    box = intake(pace="free")
    box.append(ramp(0, 160), 0.0)
    taken(box, 0.0)
    idle = sum(len(taken(box, k * FRAME_S)) for k in range(1, 30))
    box.append(ramp(160, 80), 30 * FRAME_S)
    taken(box, 30 * FRAME_S)
    assert box.written_ms(100.0) == 100.0
    assert box.written_ms(160.0 + 40.0) == 160.0
    assert box.written_ms(160.0 + idle * 80.0 + 50.0) == 210.0


def test_a_session_that_goes_on_from_another_begins_to_count_anew() -> None:
    box = intake(pace="free", first_frame=10)
    box.append(ramp(0, 80), 0.0)
    taken(box, 0.0)
    assert box.written_ms(10 * 80.0 + 30.0) == 30.0


@pytest.mark.parametrize("drift", [-1e-3, 1e-3], ids=["slow", "fast"])
@pytest.mark.parametrize("packet", [40, 200], ids="{}ms".format)
def test_an_hour_of_a_clock_that_drifts_neither_starves_nor_grows(drift: float, packet: int) -> None:
    """A client's clock is off by a thousandth, the server's instants are 80 ms apart: no sound is made up or lost, and what
    waits stays where it was."""
    box = intake()
    hour, sent, worst_ms = 3600.0, 0, 0.0
    silence = np.full(packet, 0.1, np.float32)
    frames = {"heard": 0, "concealed": 0, "idle": 0}
    interval_s = packet / RATE / (1 + drift)
    for k in range(1, int(hour / FRAME_S)):
        now_s = k * FRAME_S
        while sent * interval_s <= now_s:
            box.append(silence, sent * interval_s)
            sent += 1
        while (frame := box.take(now_s)) is not None:
            frames[frame[1]] += 1
        worst_ms = max(worst_ms, box.waiting_ms)
    box.check()
    assert (frames["concealed"], frames["idle"]) == (0, 0)
    assert frames["heard"] * FRAME == pytest.approx(sent * packet, abs=1000)
    assert (box.statistics.overrun, box.statistics.late) == (0, 0)
    assert worst_ms <= packet + 3 * FRAME


def stalled(packet: int, stall_s: float) -> list[float]:
    """What waits in the box after every instant of 30 s, in ms; after 5 s nothing comes for a while, then all of it."""
    box = intake()
    arrivals = [(k + 0.5) * packet / RATE for k in range(30 * RATE // packet)]
    arrivals = [5 + stall_s if 5 <= at < 5 + stall_s else at for at in arrivals]
    events = sorted([(at, 0) for at in arrivals] + [(k * FRAME_S, 1) for k in range(1, round(30 / FRAME_S))])
    waits: list[float] = []
    for at, is_instant in events:
        if is_instant:
            taken(box, at)
            waits.append(box.waiting_ms)
        else:
            box.append(ramp(0, packet), at)
    return waits


@pytest.mark.parametrize("packet", [20, 40, 80, 100])
def test_what_a_pause_of_the_network_left_is_gone_after_a_while(packet: int) -> None:
    waits = stalled(packet, 0.3)
    before, after = max(waits[20:60]), max(waits[-60:])
    assert max(waits[60:80]) >= before + FRAME, "the pause did leave something"
    assert after <= before + FRAME / 4


def test_a_client_that_sends_a_second_at_a_time_keeps_what_it_needs() -> None:
    box = intake(limits=IntakeLimits(max_live_ms=2_000.0))
    sources: list[str] = []
    for instant in range(1, 375):
        at = instant * FRAME_S
        if round(at * RATE) % 1000 < FRAME:
            box.append(ramp(0, 1000), at)
        sources += [source for _, source in taken(box, at)]
    assert sources[30:].count("concealed") == 0
    assert box.statistics.overrun == 0
