"""Prometheus metrics: one fixed table of names, units, labels and how to aggregate, and the registry built from it.

Owns the table (``protocols/metrics.md`` is printed from it) and its own registry. Invariant: label values come from the
closed sets of the table; a session id, request id, prompt or client text can never become one. Counters restart at zero
with the process. Numbers are kept here and become the library's samples at a scrape: its own counters take a lock and
look for exemplars, seven times a block. Only the event loop counts.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from realtime_omni.media import FORMATS
from realtime_omni.server.backend import EngineNumbers
from realtime_omni.server.kinds import KINDS, Kind
from realtime_omni_protocols.errors import WireCode
from realtime_omni_protocols.openpi import PolicyCode, Row

CLOSE_REASONS = ("client", "detached_expired", "stalled", "evicted", "shutdown", "failed", "taken_over", "operator")
CONNECTION_OUTCOMES = ("accepted", "capacity", "version")
EVENT_STATUSES = ("accepted", "duplicate", "discarded", "refused")
MEMORY_OWNERS = ("kv_pool", "scratch", "weights", "states", "caches")
RESUME_OUTCOMES = ("resumed", "taken_over", "refused", "gone", "busy")
ROBOT_ROWS = (*(row.value for row in Row), "stream")
ROBOT_STAGES = ("queue", "decode", "images", "prefix", "denoise", "encode")
VOICE_PROTOCOLS = ("live", "moshi", "realtime")
CONTROL_BUCKETS = (
    *(0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0008, 0.001, 0.00125, 0.0015, 0.002, 0.0025, 0.003, 0.004),
    *(0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1),
)
"""Fine around a millisecond: the bounds that the control plane is held to are 1 ms and 5 ms."""
TICK_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. ``labels`` maps each label to every value that it can take."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    aggregate: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = TICK_BUCKETS


_P = "realtime_omni_"
_FORMAT = {"format": FORMATS}
_MODEL = {"model": KINDS}
"""Every model has an engine of its own, and is told by its kind: a server has one of each at most."""
TABLE: tuple[MetricSpec, ...] = (
    MetricSpec(f"{_P}open_connections", "gauge", "connections", "Open WebSocket connections.", "sum"),
    MetricSpec(
        f"{_P}connections_total",
        "counter",
        "connections",
        "WebSocket upgrades that passed the key and origin checks.",
        "rate, sum",
        {"outcome": CONNECTION_OUTCOMES},
    ),
    MetricSpec(
        f"{_P}refusals_total",
        "counter",
        "requests",
        "Requests and upgrades refused for their key, origin or host.",
        "rate, sum",
        {"code": (WireCode.UNAUTHORIZED.value, WireCode.ORIGIN_REFUSED.value)},
    ),
    MetricSpec(
        f"{_P}wire_sessions",
        "gauge",
        "sessions",
        "Sessions with wire state, by whether a client is attached.",
        "sum",
        {"attached": ("yes", "no")},
    ),
    MetricSpec(
        f"{_P}sessions_closed_total",
        "counter",
        "sessions",
        "Sessions (or attachments) that ended, by reason.",
        "rate, sum",
        {"reason": CLOSE_REASONS},
    ),
    MetricSpec(
        f"{_P}resumes_total",
        "counter",
        "attempts",
        "Attempts to resume a session.",
        "rate, sum",
        {"outcome": RESUME_OUTCOMES},
    ),
    MetricSpec(
        f"{_P}errors_total",
        "counter",
        "messages",
        "Error messages sent, by code.",
        "rate, sum",
        {"code": tuple(code.value for code in WireCode)},
    ),
    MetricSpec(
        f"{_P}events_total",
        "counter",
        "events",
        "Client events, by what became of them on arrival.",
        "rate, sum",
        {"status": EVENT_STATUSES},
    ),
    MetricSpec(f"{_P}blocks_total", "counter", "blocks", "Blocks sent.", "rate, sum"),
    MetricSpec(f"{_P}frames_total", "counter", "frames", "Media frames sent, replays included.", "rate, sum", _FORMAT),
    MetricSpec(
        f"{_P}media_bytes_total", "counter", "bytes", "Media payload sent, replays included.", "rate, sum", _FORMAT
    ),
    MetricSpec(
        f"{_P}tick_seconds",
        "histogram",
        "seconds",
        "A block from planned to settled.",
        "histogram_quantile of the rate",
    ),
    MetricSpec(
        f"{_P}encode_seconds",
        "histogram",
        "seconds",
        "Encoding one block, waiting for a thread included.",
        "histogram_quantile of the rate",
        _FORMAT,
    ),
    MetricSpec(
        f"{_P}control_plane_seconds",
        "histogram",
        "seconds",
        "A block from the message that asked for it, or its earliest allowed start, to its last frame handed to the "
        "socket, less the time inside the model and inside the encoder.",
        "histogram_quantile of the rate",
        buckets=CONTROL_BUCKETS,
    ),
    MetricSpec(
        f"{_P}start_lateness_seconds",
        "histogram",
        "seconds",
        "How much later than planned a paced block was started.",
        "histogram_quantile of the rate",
    ),
    MetricSpec(
        f"{_P}voice_connections",
        "gauge",
        "connections",
        "Open voice connections, sidebands included, by protocol.",
        "sum",
        {"protocol": VOICE_PROTOCOLS},
    ),
    MetricSpec(
        f"{_P}voice_errors_total",
        "counter",
        "messages",
        "Errors sent to voice clients.",
        "rate, sum",
        {"protocol": VOICE_PROTOCOLS},
    ),
    MetricSpec(
        f"{_P}robot_connections",
        "gauge",
        "connections",
        "Open robot connections, by the form of answers they began with.",
        "sum",
        {"row": ROBOT_ROWS},
    ),
    MetricSpec(
        f"{_P}robot_chunks_total",
        "counter",
        "chunks",
        "Action chunks sent.",
        "rate, sum",
        {"row": ROBOT_ROWS},
    ),
    MetricSpec(
        f"{_P}robot_errors_total",
        "counter",
        "messages",
        "Errors sent to robots, by code.",
        "rate, sum",
        {"code": tuple(code.value for code in PolicyCode)},
    ),
    MetricSpec(
        f"{_P}robot_stage_seconds",
        "histogram",
        "seconds",
        "Stages of an answer: waiting, frame and observation, the policy's own, encoding.",
        "histogram_quantile of the rate",
        {"stage": ROBOT_STAGES},
        CONTROL_BUCKETS,
    ),
    MetricSpec(
        f"{_P}engine_ticks_total", "counter", "ticks", "Settled ticks (one tick serves a batch).", "rate, sum", _MODEL
    ),
    MetricSpec(
        f"{_P}engine_chunks_total",
        "counter",
        "blocks",
        "Blocks of single sessions, by result.",
        "rate, sum",
        _MODEL | {"result": ("committed", "failed", "aborted")},
    ),
    MetricSpec(f"{_P}engine_sessions", "gauge", "sessions", "Live sessions of the engine.", "sum", _MODEL),
    MetricSpec(
        f"{_P}engine_tombstones", "gauge", "sessions", "Sessions whose release failed and is retried.", "sum", _MODEL
    ),
    MetricSpec(
        f"{_P}engine_inbox_depth", "gauge", "commands", "Commands waiting for the engine thread.", "max", _MODEL
    ),
    MetricSpec(
        f"{_P}engine_progress_age_seconds",
        "gauge",
        "seconds",
        "Time since the engine last made progress.",
        "max",
        _MODEL,
    ),
    MetricSpec(
        f"{_P}engine_memory_bytes",
        "gauge",
        "bytes",
        "Memory by owner: the pool of KV pages, scratch pages, weights, model states with shared storage counted once, "
        "and what a model keeps for all sessions.",
        "sum",
        _MODEL | {"owner": MEMORY_OWNERS},
    ),
    MetricSpec(f"{_P}kv_pages", "gauge", "pages", "Pages of the KV pool.", "sum", _MODEL | {"state": ("free", "used")}),
)
_BY_NAME = {spec.name: spec for spec in TABLE}


class _Series:
    """One series: a counter's or a gauge's value, or a histogram's sum and how many values lie in each bucket alone."""

    __slots__ = ("bounds", "counts", "value")

    def __init__(self, bounds: tuple[float, ...] = ()) -> None:
        self.value = 0.0
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self.value += value
        self.counts[bisect_left(self.bounds, value)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, values at or below it), rising."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Metrics:
    """The server's metrics in a registry of their own (several servers can live in one process)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._series: dict[tuple[object, ...], _Series] = {}
        """By name and labels, as they are given; checked against the table once."""
        self._table: dict[str, dict[tuple[str, ...], _Series]] = {}
        """By full name and label values, in the table's order."""
        self._engines = _EngineCollector()
        for spec in TABLE:
            if not spec.name.startswith((f"{_P}engine_", f"{_P}kv_")):
                self._table[spec.name] = dict(_first_series(spec))
        self.registry.register(_TableCollector(self._table))

    def watch(self, kind: Kind, statistics: Callable[[], EngineNumbers]) -> None:
        """Read an engine's numbers at every scrape."""
        if not self._engines.sources:
            self.registry.register(self._engines)
        self._engines.sources[kind] = statistics

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise a counter. A value outside the table is a bug and raises ValueError."""
        self._at(name, labels).value += amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._at(name, labels).value = value

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Move a gauge."""
        self._at(name, labels).value += amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put one value into a histogram."""
        self._at(name, labels).observe(value)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    async def scrape(self) -> bytes:
        """:meth:`render` of this moment, for an event loop: the numbers are read on it, the text, which takes three times as
        long, is written in a thread."""
        return await asyncio.to_thread(generate_latest, _Collected(tuple(self.registry.collect())))

    def value(self, name: str, **labels: str) -> float:
        """The current value of one sample (for tests and statistics)."""
        return self.registry.get_sample_value(_P + name, labels) or 0.0

    def _at(self, name: str, labels: Mapping[str, str]) -> _Series:
        """The series; it is checked against the table once and found again afterwards."""
        key = (name, *labels.items())
        made = self._series.get(key)
        if made is None:
            made = self._series[key] = self._check(name, labels)
        return made

    def _check(self, name: str, labels: Mapping[str, str]) -> _Series:
        spec = _BY_NAME[_P + name]
        if set(labels) != set(spec.labels):
            raise ValueError(f"{spec.name} has the labels {sorted(spec.labels)}")
        for label, value in labels.items():
            if value not in spec.labels[label]:
                raise ValueError(f"{value!r} is not a value of {spec.name}.{label}")
        values = tuple(labels[label] for label in spec.labels)
        return self._table[spec.name].setdefault(values, _new_series(spec))


def _new_series(spec: MetricSpec) -> _Series:
    return _Series(spec.buckets if spec.kind == "histogram" else ())


def _first_series(spec: MetricSpec) -> Iterator[tuple[tuple[str, ...], _Series]]:
    """Series of one label at most exist from the start, so that a rate needs no first event."""
    if not spec.labels:
        yield (), _new_series(spec)
    elif len(spec.labels) == 1:
        for value in next(iter(spec.labels.values())):
            yield (value,), _new_series(spec)


class _TableCollector(Collector):
    """Turns the series into samples when asked."""

    def __init__(self, table: Mapping[str, Mapping[tuple[str, ...], _Series]]) -> None:
        self._table = table

    def collect(self) -> Iterable[Metric]:
        for name, series in self._table.items():
            spec = _BY_NAME[name]
            labels = tuple(spec.labels)
            if spec.kind == "histogram":
                histogram = HistogramMetricFamily(name, spec.help, labels=labels)
                for values, one in series.items():
                    histogram.add_metric(values, one.buckets(), one.value)
                yield histogram
                continue
            made = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            family = made(name, spec.help, labels=labels)
            for values, one in series.items():
                family.add_metric(values, one.value)
            yield family

    def describe(self) -> Iterable[Metric]:
        return ()


@dataclass(frozen=True, slots=True)
class _Collected(Collector):
    """The samples of one moment."""

    families: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


_ENGINE_GAUGES = {
    "engine_sessions": "sessions",
    "engine_tombstones": "tombstones",
    "engine_inbox_depth": "inbox_depth",
    "engine_progress_age_seconds": "progress_age_s",
}


class _EngineCollector(Collector):
    """Turns the managers' statistics into samples when asked."""

    def __init__(self) -> None:
        self.sources: dict[Kind, Callable[[], EngineNumbers]] = {}

    def collect(self) -> Iterable[Metric]:
        ticks = CounterMetricFamily(f"{_P}engine_ticks", _help("engine_ticks_total"), labels=["model"])
        chunks = CounterMetricFamily(f"{_P}engine_chunks", _help("engine_chunks_total"), labels=["model", "result"])
        gauges = {name: GaugeMetricFamily(_P + name, _help(name), labels=["model"]) for name in _ENGINE_GAUGES}
        pages = GaugeMetricFamily(f"{_P}kv_pages", _help("kv_pages"), labels=["model", "state"])
        memory = GaugeMetricFamily(f"{_P}engine_memory_bytes", _help("engine_memory_bytes"), labels=["model", "owner"])
        for kind, statistics in self.sources.items():
            numbers = statistics()
            ticks.add_metric([kind], numbers.ticks_settled)
            chunks.add_metric([kind, "committed"], numbers.chunks_committed)
            chunks.add_metric([kind, "failed"], numbers.chunks_failed)
            chunks.add_metric([kind, "aborted"], numbers.chunks_aborted)
            for name, field_name in _ENGINE_GAUGES.items():
                gauges[name].add_metric([kind], getattr(numbers, field_name))
            pages.add_metric([kind, "free"], numbers.pages_total - numbers.pages_used)
            pages.add_metric([kind, "used"], numbers.pages_used)
            for owner in MEMORY_OWNERS:
                memory.add_metric([kind, owner], getattr(numbers.memory, owner))
        return (ticks, chunks, *gauges.values(), pages, memory)

    def describe(self) -> Iterable[Metric]:
        return ()


def _help(name: str) -> str:
    return _BY_NAME[_P + name].help


def table_markdown() -> str:
    """The documentation page's table."""
    lines = [
        "| name | type | unit | labels (all values) | aggregate with | meaning |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for spec in TABLE:
        labels = "; ".join(f"`{label}`: {', '.join(values)}" for label, values in spec.labels.items()) or "—"
        lines.append(f"| `{spec.name}` | {spec.kind} | {spec.unit} | {labels} | {spec.aggregate} | {spec.help} |")
    return "\n".join(lines) + "\n"
