"""Where the rules of ``check_model`` put a model: engines made alike, and comparisons to the tolerance of the dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from realtime_omni.config import Config
from realtime_omni.errors import ArgumentError
from realtime_omni.models import catalog
from realtime_omni.models.base import ModelSpec
from realtime_omni.session.values import Chunk, ControlInput, EventId, SessionEvent
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.malformed import example
from realtime_omni.testing.observing import observer
from realtime_omni.testing.watch import WatchedModel

ROWS = 3
MOST_CHUNKS = 9
"""Enough for most windows to roll, few enough for a model on a CPU."""
REWIND_BLOCKS = 3
"""More than one, so that the frames kept for it are needed."""
TOLERANCE = {"float64": 0.0, "float32": 1e-5, "bfloat16": 3e-2, "float16": 1e-2}
"""Largest difference between a batch and its members, relative to the largest value. Float64 is bit for bit."""
LEVELS = {"float64": 0, "float32": 1, "bfloat16": 16, "float16": 8}
"""The same for uint8 pictures, in levels: rounding may fall to the other side."""


class Skip(Exception):
    """The model does not claim what this rule is about."""


class Lab:
    """A model and the engines that the rules put it into. Sessions are called a, b, c."""

    def __init__(self, model: WatchedModel, config: Config, *, can_rebuild: bool = False) -> None:
        """``can_rebuild``: ``config`` names the model, so that another object of it can be made, here or elsewhere."""
        self.model = model
        self.can_rebuild = can_rebuild
        self.spec: ModelSpec = model.spec
        rows = 1 if self.spec.serial else ROWS
        replace = msgspec.structs.replace
        self.config = replace(
            config,
            kv=replace(config.kv, requested_sessions=ROWS + 1, policy="refuse", rewind_blocks=REWIND_BLOCKS),
            engine=replace(config.engine, max_batch=rows, on_failure="keep"),
            session=replace(config.session, max_sessions=ROWS + 1, horizon_frames=None),
        )
        blocks = (self.spec.kv.sink_frames + self.spec.kv.window_frames) // self.spec.frames_per_block
        self.chunks = min(blocks + 1, MOST_CHUNKS)
        if self.spec.duplex is not None:
            self.chunks = MOST_CHUNKS
        if self.spec.horizon_frames is not None:
            self.chunks = min(self.chunks, self.spec.horizon_frames // self.spec.frames_per_block - ROWS)
        self.names = "abc"[:rows]

    def engine(self, sessions: str = "", *, warm: bool = False, **changes: Any) -> InlineEngine:
        """A fresh engine at rest; ``warm``: session number i has i + 1 chunks of history, of prompts of its own."""
        config = self.config
        if changes:
            config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, **changes))
        engine = InlineEngine(self.model, config)
        engine.observe = observer(self.spec)
        for number, name in enumerate(sessions):
            engine.create(name, seed=number, prompt=self.prompt(number))
            for _ in range(number + 1 if warm else 0):
                engine.next(name)
        engine.rest()
        return engine

    def rebuilt_engine(self) -> InlineEngine:
        """A fresh engine with a fresh model where there can be one."""
        engine = InlineEngine(catalog.build(self.config) if self.can_rebuild else self.model, self.config)
        engine.observe = observer(self.spec)
        return engine

    def events(self) -> tuple[SessionEvent, ...]:
        """Events that the model accepts: prompts, and controls of every schema, the plainest and a full one."""
        made = [SessionEvent(EventId(0), prompt=prompt) for prompt in self.spec.prompts[:3]]
        for schema in self.spec.controls:
            data = [example(schema.json_schema), example(schema.json_schema, full=True)]
            made += [SessionEvent(EventId(0), controls=(ControlInput(schema.track, schema.schema, d),)) for d in data]
        return tuple(event for event in made if self._accepts(event))

    def _accepts(self, event: SessionEvent) -> bool:
        try:
            self.model.understand(event)
        except ArgumentError:
            return False
        return True

    def prompt(self, number: int) -> str | None:
        return self.spec.prompts[number % len(self.spec.prompts)] if self.spec.prompts else None

    def points(self) -> tuple[str, ...]:
        """Every named piece of work of one tick, in order."""
        seen: list[str] = []
        engine = self.engine("a")
        engine.runner.faults = lambda point, sessions: seen.append(point)
        engine.next("a")
        return tuple(p for p in seen if p != "release")

    def same(self, one: Chunk, two: Chunk, what: str) -> None:
        """Two chunks have equal pictures, to the tolerance of the dtype."""
        assert one.chunk_index == two.chunk_index, f"{what}: chunk {one.chunk_index} against {two.chunk_index}"
        assert one.signals == two.signals, f"{what}: signals {one.signals} against {two.signals}"
        for name, artifact in one.artifacts.items():
            self.close(array(artifact.data), array(two.artifacts[name].data), f"{what}: {name}")

    def ran_together(self, engine: InlineEngine) -> None:
        """No batch had to be run again row by row: that would hide a model that cannot run batches."""
        assert not engine.engine.counters.isolated_reruns, "a batch failed as a whole and was run again row by row"

    def same_kv(self, one: InlineEngine, two: InlineEngine, name: str, what: str) -> None:
        """Once everything is written, a session has the same keys and values in both engines."""
        one.rest()
        two.rest()
        for got, want in zip(keys_and_values(one, name), keys_and_values(two, name), strict=True):
            self.close(got, want, f"{what}: keys and values of {name}")

    def close(self, got: np.ndarray, want: np.ndarray, what: str) -> None:
        assert got.shape == want.shape, f"{what} has shape {got.shape} against {want.shape}"
        if got.dtype == np.uint8:
            worst = int(np.abs(got.astype(int) - want.astype(int)).max(initial=0))
            assert worst <= LEVELS[self.config.dtype], f"{what} differs by {worst} levels"
            return
        difference = float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max(initial=0))
        scale = max(float(np.abs(want.astype(np.float64)).max(initial=0)), 1.0)
        limit = TOLERANCE[self.config.dtype] * scale
        assert difference <= limit, f"{what} differs by {difference:.3g}, allowed {limit:.3g}"


def array(data: Any) -> np.ndarray:
    """A numpy array of whatever holds an artifact; bfloat16 becomes float32."""
    if hasattr(data, "detach"):
        data = data.detach().cpu()
        data = data.float() if data.dtype.is_floating_point and data.dtype.itemsize == 2 else data
    return np.asarray(data)


def keys_and_values(engine: InlineEngine, name: str) -> Iterator[np.ndarray]:
    book, storage = engine.runner.book, engine.runner.storage
    for branch in book.spec.branches:
        frames = book.table(name, branch.name).retained()
        for layer in range(book.spec.num_layers):
            yield from (array(t) for t in storage.read(layer, frames))
