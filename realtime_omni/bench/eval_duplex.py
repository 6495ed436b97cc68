"""``realtime-omni eval duplex``: how a voice keeps time, from two recordings that begin at the same moment.

Owns reading sound, finding speech in it, and the report. The metrics are :mod:`realtime_omni.bench.floor`'s. Speech is
found by loudness, so recordings have to be clean: one speaker each, no music, noise below the threshold.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import av
import msgspec
import numpy as np
from numpy.typing import NDArray

from realtime_omni.bench import floor
from realtime_omni.bench.arguments import dbfs
from realtime_omni.errors import ConfigError

T = TypeVar("T")

FRAME_S = 0.01
"""Resolution of all times."""
BRIDGE_S = 0.1
"""Silence between sounds of one word; shorter sounds than ``SHORTEST_S`` are clicks."""
SHORTEST_S = 0.05


def read_sound(path: Path) -> tuple[NDArray[np.float32], int]:
    """Mono samples [N], -1..1, and their rate. Raises ConfigError."""
    try:
        with av.open(str(path)) as container:
            resampler = av.AudioResampler(format="flt", layout="mono")
            frames = [made for frame in container.decode(audio=0) for made in resampler.resample(frame)]
    except (OSError, IndexError, ValueError) as error:  # what PyAV raises is both an OSError or ValueError and its own
        raise ConfigError(f"{path} is not a sound file: {type(error).__name__}") from error
    if not frames:
        raise ConfigError(f"{path} holds no sound")
    return np.concatenate([frame.to_ndarray()[0] for frame in frames]), frames[0].sample_rate


def find_speech(samples: NDArray[np.float32], rate: int, threshold_dbfs: float) -> list[floor.Segment]:
    """Where frames of 10 ms are louder than the threshold (RMS, a full-scale sine is -3 dBFS)."""
    size = round(rate * FRAME_S)
    frames = samples[: len(samples) // size * size].reshape(-1, size).astype(np.float64)
    loud = np.sqrt(np.mean(frames**2, axis=1)) > 10 ** (threshold_dbfs / 20)
    edges = np.flatnonzero(np.diff(loud, prepend=False, append=False))
    seconds = edges * size / rate
    found = floor.merge(list(zip(seconds[::2].tolist(), seconds[1::2].tolist(), strict=True)), BRIDGE_S)
    return [segment for segment in found if segment[1] - segment[0] >= SHORTEST_S - 1e-9]


def read_list(path: Path | None, kind: type[T]) -> list[T] | None:
    """A JSON list of numbers, or of ``{"text", "start_s", "end_s"}``; None without a path. Raises ConfigError."""
    try:
        return None if path is None else msgspec.json.decode(path.read_bytes(), type=list[kind])  # type: ignore[valid-type]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not a list of {kind.__name__}: {error}") from error


def evaluate(
    user: Sequence[floor.Segment],
    agent: Sequence[floor.Segment],
    total_s: float,
    words: Sequence[floor.Word] | None = None,
    reference: Sequence[float] | None = None,
) -> dict[str, Any]:
    """The report of one conversation: numbers in seconds, rates 0 to 1; null where there is nothing to measure."""
    turns = floor.turns(user, agent, words)
    stops, responses = floor.stop_latencies(user, agent), floor.response_latencies(user, agent)
    short, takeover = floor.backchannels(agent, words)
    interruptions = [turn for turn in turns if turn.interrupts]
    return {
        "turn_taking": {
            "turns": len(turns),
            "take_turn_rate": _rate(turn.answered for turn in turns),
            "latency_s": _summary(turn.latency_s for turn in turns if turn.latency_s is not None),
        },
        "pauses": {"take_turn_rate": _rate(turn.in_pause for turn in turns)},
        "interruptions": {
            "count": len(interruptions),
            "take_turn_rate": _rate(turn.answered for turn in interruptions),
            "stop_s": _summary(turn.stop_s for turn in interruptions if turn.stop_s is not None),
            "latency_s": _summary(turn.latency_s for turn in interruptions if turn.latency_s is not None),
        },
        "overlap": {
            "stop_latency_s": _summary(end - start for start, end in stops),
            "response_latency_s": _summary(end - start for start, end in responses),
            "stop_latency_list": [_rounded(segment) for segment in stops],
            "response_latency_list": [_rounded(segment) for segment in responses],
        },
        "backchannels": {
            "count": len(short),
            "per_second": round(len(short) / total_s, 4) if total_s else None,
            "takeover": takeover,
            "js_distance": reference and round(floor.backchannel_distance(short, total_s, reference), 4),
        },
        "turns": [{name: _round(value) for name, value in asdict(turn).items()} for turn in turns],
        "user_segments": [_rounded(segment) for segment in user],
        "agent_segments": [_rounded(segment) for segment in agent],
    }


def _rate(values: Iterable[bool]) -> float | None:
    flags = list(values)
    return round(sum(flags) / len(flags), 4) if flags else None


def _summary(values: Iterable[float]) -> dict[str, float] | None:
    found = list(values)
    if not found:
        return None
    p50, p95 = np.percentile(found, [50, 95])
    numbers = {"mean": float(np.mean(found)), "p50": float(p50), "p95": float(p95), "max": max(found)}
    return {"n": len(found)} | {name: round(value, 4) for name, value in numbers.items()}


def _rounded(segment: floor.Segment) -> list[float]:
    return [round(segment[0], 4), round(segment[1], 4)]


def _round(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="realtime-omni eval duplex",
        description="Full-Duplex-Bench's timing metrics from two recordings that begin at the same moment.",
    )
    parser.add_argument("--user", type=Path, required=True, help="what the user said (WAV, FLAC, ...)")
    parser.add_argument("--agent", type=Path, required=True, help="what the agent said")
    parser.add_argument("--words", type=Path, help='the agent\'s words: a JSON list of {"text", "start_s", "end_s"}')
    parser.add_argument("--reference", type=Path, help="histogram of human backchannels: a JSON list of numbers")
    parser.add_argument("--threshold-dbfs", type=dbfs, default=-40.0, help="what is louder is speech (RMS of 10 ms)")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    (user, user_rate), (agent, agent_rate) = read_sound(args.user), read_sound(args.agent)
    total_s = max(len(user) / user_rate, len(agent) / agent_rate)
    report = evaluate(
        find_speech(user, user_rate, args.threshold_dbfs),
        find_speech(agent, agent_rate, args.threshold_dbfs),
        total_s,
        words := read_list(args.words, floor.Word),
        read_list(args.reference, float),
    )
    conditions = {
        "user": args.user.name,
        "agent": args.agent.name,
        "seconds": round(total_s, 3),
        "threshold_dbfs": args.threshold_dbfs,
        "resolution_s": FRAME_S,
        "words": words is not None,
    }
    report = {"conditions": conditions, **report}
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            print(f"{name}: {json.dumps(value)}")
    return 0


__all__ = ["evaluate", "find_speech", "main", "parse", "read_list", "read_sound"]
