"""Who holds the floor: timing metrics of a conversation from when each side speaks.

Owns the definitions, which are Full-Duplex-Bench's (v1: take-turn rate, latency, backchannels; v1.5: stop and response
latency; https://github.com/DanielLin94144/Full-Duplex-Bench), generalised from one user turn to many. Knows segments of
speech in seconds; no sound, no model. Two differences from its scripts, both where they have one user turn per recording: an
answer belongs to the user turn it follows; one takeover among the agent's segments makes a recording a takeover, not only
the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Segment: TypeAlias = tuple[float, float]
"""From and until, in seconds."""

USER_PAUSE_S = 0.6
"""A shorter pause does not end the user's turn."""
AGENT_PAUSE_S = 0.5
TURN_S = 1.0
TURN_WORDS = 3
"""The agent took the turn when it spoke for so long, or said more words."""
LONG_BACKCHANNEL_S = 3.0
BACKCHANNEL_WORDS = 2
BIN_S = 0.2


@dataclass(frozen=True, slots=True)
class Word:
    """One word of the agent and when it is said."""

    text: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the user and what the agent did with it.

    Args:
        answered: the agent took the turn: from the turn's beginning to the next one's it spoke for at least 1 s, or more
            than 3 words.
        latency_s: from the user's end to the agent's first word of the answer, 0 where that came earlier; None without one.
        in_pause: the agent took the turn while the user had not finished.
        interrupts: the agent was speaking when the user began.
        stop_s: how long it went on; None where it does not interrupt.
    """

    start_s: float
    end_s: float
    answered: bool
    latency_s: float | None
    in_pause: bool
    interrupts: bool
    stop_s: float | None


def merge(segments: Sequence[Segment], pause_s: float) -> list[Segment]:
    """Segments in order, joined where the pause between them is at most ``pause_s``."""
    merged: list[Segment] = []
    for start, end in sorted(segments):
        if merged and start - merged[-1][1] <= pause_s + 1e-9:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def turns(user: Sequence[Segment], agent: Sequence[Segment], words: Sequence[Word] | None = None) -> list[Turn]:
    """Every user turn, in order. ``words``: of the agent; without them only durations decide."""
    users, agents = merge(user, USER_PAUSE_S), merge(agent, AGENT_PAUSE_S)
    starts = [start for start, _ in users] + [float("inf")]
    return [_turn(turn, starts[index + 1], agents, words) for index, turn in enumerate(users)]


def _turn(turn: Segment, until: float, agents: Sequence[Segment], words: Sequence[Word] | None) -> Turn:
    start, end = turn
    speaking = next((a for a in agents if a[0] < start < a[1]), None)
    answer = [a for a in agents if start <= a[0] < until]
    answered = bool(answer) and takes_turn((answer[0][0], answer[-1][1]), words)
    early = [a for a in answer if a[0] < end]
    return Turn(
        start_s=start,
        end_s=end,
        answered=answered,
        latency_s=max(0.0, answer[0][0] - end) if answered else None,
        in_pause=any(takes_turn(a, words) for a in early),
        interrupts=speaking is not None,
        stop_s=None if speaking is None else min(speaking[1], end) - start,
    )


def takes_turn(speech: Segment, words: Sequence[Word] | None = None) -> bool:
    """At least 1 s, or more than 3 words."""
    return speech[1] - speech[0] >= TURN_S - 1e-9 or _count(speech, words) > TURN_WORDS


def stop_latencies(user: Sequence[Segment], agent: Sequence[Segment]) -> list[Segment]:
    """v1.5's stop latencies: where both speak. Of overlaps with the same end (to the millisecond) the shortest counts."""
    best: dict[int, Segment] = {}
    for user_start, user_end in merge(user, USER_PAUSE_S):
        for agent_start, agent_end in merge(agent, AGENT_PAUSE_S):
            start, end = max(user_start, agent_start), min(user_end, agent_end)
            if end <= start:
                continue
            key = round(end * 1000)
            if key not in best or start > best[key][0]:
                best[key] = (start, end)
    return [best[key] for key in sorted(best)]


def response_latencies(user: Sequence[Segment], agent: Sequence[Segment]) -> list[Segment]:
    """v1.5's response latencies: from a user turn's end to the agent's next start. Of two turns before the same start the
    later one counts."""
    starts = [start for start, _ in merge(agent, AGENT_PAUSE_S)]
    best: dict[float, float] = {}
    for _, end in merge(user, USER_PAUSE_S):
        start = next((start for start in starts if start > end), None)
        if start is not None:
            best[start] = max(end, best.get(start, 0.0))
    return [(end, start) for start, end in sorted(best.items())]


def backchannels(agent: Sequence[Segment], words: Sequence[Word] | None = None) -> tuple[list[Segment], bool]:
    """The agent's short segments, and whether any segment is a takeover: above 3 s, from 1 s on, or more than 2 words."""
    short = [segment for segment in agent if segment[1] - segment[0] <= LONG_BACKCHANNEL_S]
    takeover = len(short) < len(agent) or any(
        segment[1] - segment[0] >= TURN_S - 1e-9 or _count(segment, words) > BACKCHANNEL_WORDS for segment in short
    )
    return short, takeover


def backchannel_distance(segments: Sequence[Segment], total_s: float, reference: Sequence[float]) -> float:
    """Jensen-Shannon distance (natural logarithm, square root) between where backchannels are, in bins of 200 ms, and a
    reference histogram, which is stretched to as many bins. 1 where there are none, as the benchmark has it."""
    if not segments:
        return 1.0
    counts = np.full(int(total_s / BIN_S) + 1, 1e-10)
    for start, end in segments:
        counts[int(start / BIN_S) : int(end / BIN_S) + 1] += 1
    stretched = np.interp(np.linspace(0, 1, len(counts)), np.linspace(0, 1, len(reference)), np.asarray(reference))
    return jensen_shannon(counts, stretched)


def jensen_shannon(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Distance between two histograms of the same length, 0 to sqrt(ln 2)."""
    p, q = p / p.sum(), q / q.sum()
    middle = (p + q) / 2
    return float(np.sqrt(max(0.0, (_divergence(p, middle) + _divergence(q, middle)) / 2)))


def _divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    some = p > 0
    return float(np.sum(p[some] * np.log(p[some] / q[some])))


def _count(segment: Segment, words: Sequence[Word] | None) -> int:
    """Words that touch the segment."""
    return sum(word.start_s <= segment[1] and word.end_s > segment[0] for word in words or ())


__all__ = [
    "Segment",
    "Turn",
    "Word",
    "backchannel_distance",
    "backchannels",
    "jensen_shannon",
    "merge",
    "response_latencies",
    "stop_latencies",
    "takes_turn",
    "turns",
]
