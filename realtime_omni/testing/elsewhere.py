"""Another process that goes on with a saved session: the part of :func:`check_model` that a process of its own is needed for.

    chunks = continue_elsewhere(config, snapshot, events)        # one dict of arrays per entry of ``events``

The child loads the model of ``config`` from scratch, so nothing that the parent's process holds can help it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from realtime_omni.config import Config
from realtime_omni.session.record import EventRecord
from realtime_omni.session.values import SessionEvent
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.observing import observer

TIMEOUT_S = 300.0
Pictures = dict[str, np.ndarray]
"""The artifacts of one chunk."""


class _Job(msgspec.Struct):
    config: Config
    events: list[EventRecord | None]


def continue_elsewhere(
    config: Config, snapshot: Snapshot, events: Sequence[SessionEvent | None]
) -> tuple[Pictures, ...]:
    """One chunk per entry of ``events``, after accepting that event. Raises RuntimeError with what the child wrote."""
    job = _Job(config, [None if event is None else EventRecord.of(event) for event in events])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        snapshot.save(folder / "saved")
        (folder / "job").write_bytes(msgspec.json.encode(job))
        path = os.pathsep.join(p for p in sys.path if p)
        child = subprocess.run(  # noqa: S603 - our own module, in our own interpreter
            [sys.executable, "-m", "realtime_omni.testing.elsewhere", name],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        if child.returncode:
            raise RuntimeError(f"the other process failed: {child.stderr.strip().splitlines()[-1:]}")
        with np.load(folder / "chunks.npz", allow_pickle=False) as arrays:
            return tuple(
                {key.partition(".")[2]: arrays[key] for key in arrays.files if key.startswith(f"{number}.")}
                for number in range(len(events))
            )


def pictures(chunk: Any) -> Pictures:
    """The artifacts of a chunk as arrays of their own; bfloat16 becomes float32, which holds it exactly."""
    return {name: np.array(_array(artifact.data)) for name, artifact in chunk.artifacts.items()}


def _array(data: Any) -> np.ndarray:
    if hasattr(data, "detach"):
        data = data.detach().cpu()
        data = data.float() if data.dtype.is_floating_point and data.dtype.itemsize == 2 else data
    return np.asarray(data)


def _main(folder: Path) -> None:
    from realtime_omni.models import catalog

    job = msgspec.json.decode((folder / "job").read_bytes(), type=_Job)
    engine = InlineEngine(catalog.build(job.config), job.config)
    engine.observe = observer(engine.runner.spec)
    name = engine.restore(Snapshot.load(folder / "saved"), "elsewhere").session_id
    arrays: dict[str, np.ndarray] = {}
    for number, record in enumerate(job.events):
        if record is not None:
            event = record.value()
            engine.accept(name, event.event_id, prompt=event.prompt, controls=event.controls)
        for artifact, array in pictures(engine.next(name)).items():
            arrays[f"{number}.{artifact}"] = array
    np.savez(folder / "chunks.npz", **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
