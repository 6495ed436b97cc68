"""The rules of :func:`check_model` about saved sessions: completeness, and strict reading.

Complete means: whatever a session was in the middle of, saved, and restored among strangers (under another id, on pages that
others have used, where the model can be built again by another model object and by another process), it goes on bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import PackedState, SessionSetup
from realtime_omni.session.values import ControlInput, EventId, SessionEvent, SessionId
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.elsewhere import Pictures, continue_elsewhere, pictures
from realtime_omni.testing.faults import at
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.lab import Lab
from realtime_omni.testing.malformed import example

AFTER = 3
"""Chunks that are compared behind every snapshot."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot in the form in which it travels. ``said``: the event of the next chunk waits in it already."""

    when: str
    data: bytes
    chunk: int
    said: bool


def completeness(lab: Lab) -> str | None:
    """A saved session goes on among strangers bit for bit, whatever it was in the middle of."""
    expected = _never_saved(lab)
    saved = _saved(lab, expected)
    strangers = _strangers(lab)
    for number, each in enumerate(saved):
        name = f"restored-{number}"
        _poison(strangers)
        strangers.restore(Snapshot.from_bytes(each.data), name)
        for chunk, said in _following(each, expected):
            if not said:
                _say(lab, strangers, name, chunk)
            _same(lab, pictures(strangers.next(name)), expected[chunk], f"saved {each.when}: chunk {chunk}")
        strangers.close(name)
    where = ""
    if lab.can_rebuild:
        _in_another_process(lab, saved[-1], expected)
        where = ", and in another process"
    return f"{len(saved)} moments{where}"


def strictness(lab: Lab) -> str | None:
    """A packed state that was changed is refused."""
    model, refused = lab.model, 0
    state = model.open(SessionSetup(SessionId("a"), lab.prompt(0) or lab.spec.default_prompt, 0))
    engine = lab.engine("a", warm=True)
    for packed in (model.pack(state), model.pack(engine.state_of("a"))):
        for what, wrong in _changed(packed):
            try:
                model.unpack(wrong)
            except ArgumentError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__} instead of an ArgumentError") from error
            else:
                raise AssertionError(f"{what}: accepted")
    model.close(state)
    return f"{refused} ways of being wrong"


# ---------------------------------------------------------------------- the session that is saved


def _last(lab: Lab) -> int:
    """The chunk at which most snapshots are taken: late enough that the window has begun to roll, where there is one."""
    return max(lab.chunks - AFTER, 1)


def _event(lab: Lab, chunk: int) -> SessionEvent | None:
    """What the session hears before a chunk: prompts that change, controls that are given once and stay."""
    prompt = lab.prompt(chunk // 2) if chunk % 2 else None
    controls = [ControlInput(c.track, c.schema, example(c.json_schema)) for c in lab.spec.controls]
    known = {c.track: c for c in controls} if chunk % 3 == 1 else {}
    if prompt is None and not known:
        return None
    return SessionEvent(EventId(chunk), prompt, tuple(known.values()))


def _say(lab: Lab, engine: InlineEngine, name: str, chunk: int) -> None:
    event = _event(lab, chunk)
    if event is not None:
        engine.accept(name, event.event_id, prompt=event.prompt, controls=event.controls)


def _never_saved(lab: Lab) -> list[Pictures]:
    engine, out = lab.engine("a"), []
    for chunk in range(_last(lab) + AFTER):
        _say(lab, engine, "a", chunk)
        out.append(pictures(engine.next("a")))
    return out


def _saved(lab: Lab, expected: list[Pictures]) -> list[Saved]:
    """Snapshots at every kind of moment of one session, which is not disturbed by any of them."""
    engine, last = lab.engine("a"), _last(lab)
    out = [_save(engine, "before its first chunk", 0)]
    for chunk in range(last):
        _say(lab, engine, "a", chunk)
        _same(lab, pictures(engine.next("a")), expected[chunk], f"chunk {chunk} of a session that was saved before")
    out.append(_save(engine, "right after a chunk", last))
    engine.cycle()
    out.append(_save(engine, "between two chunks", last))
    _say(lab, engine, "a", last)
    out.append(_save(engine, "with an event waiting", last, said=True))
    if lab.spec.rollback_safe:
        out += _saved_in_a_tick(lab, engine, last)
        _same(
            lab, pictures(engine.next("a")), expected[last], f"chunk {last} of a session that was saved in its middle"
        )
    return out


def _saved_in_a_tick(lab: Lab, engine: InlineEngine, last: int) -> Iterator[Saved]:
    """At every checkpoint of one tick, each time in a tick that is aborted afterwards."""
    for point in lab.points():
        taken: list[Saved] = []

        def save(point: str = point, taken: list[Saved] = taken) -> None:
            snapshot = engine.engine.take_snapshot("a")
            taken.append(Saved(f"in a tick, at {point}", snapshot.to_bytes(), last, True))
            raise InterruptedError("the tick ends here")

        ticket = engine.post_next("a")
        with at(engine, point, save):
            while not engine.answered(ticket):
                engine.cycle()
        assert taken, f"the tick never came to {point}"
        engine.rollback("a")
        yield taken[0]


def _save(engine: InlineEngine, when: str, chunk: int, said: bool = False) -> Saved:
    return Saved(when, engine.snapshot("a").to_bytes(), chunk, said)


# ---------------------------------------------------------------------- where it goes on


def _strangers(lab: Lab) -> InlineEngine:
    """An engine with a past: a new model object if there can be one, others' sessions alive and gone."""
    engine = lab.rebuilt_engine()
    for number, name in enumerate(("x", "y")):
        engine.create(name, seed=100 + number, prompt=lab.prompt(number + 1))
        for _ in range(number + 2):
            engine.next(name)
    engine.close("x")
    return engine


def _poison(engine: InlineEngine) -> None:
    """Fill every page that nobody holds with NaN, as far as a frame can reach into it."""
    book, storage = engine.runner.book, engine.runner.storage
    size = storage.page_tokens
    reach = book.spec.tokens_per_frame % size or size
    free = [p for p in range(1, book.pool.statistics().total) if not book.pool.references(p)]
    for pool in (*storage.k, *storage.v):
        pool[free, :reach] = float("nan")


def _following(each: Saved, expected: list[Pictures]) -> Iterator[tuple[int, bool]]:
    for chunk in range(each.chunk, min(each.chunk + AFTER, len(expected))):
        yield chunk, each.said and chunk == each.chunk


def _in_another_process(lab: Lab, each: Saved, expected: list[Pictures]) -> None:
    steps = tuple(_following(each, expected))
    events = [None if said else _event(lab, chunk) for chunk, said in steps]
    got = continue_elsewhere(lab.config, Snapshot.from_bytes(each.data), events)
    for (chunk, _), found in zip(steps, got, strict=True):
        _same(lab, found, expected[chunk], f"saved {each.when}, another process: chunk {chunk}")


def _same(lab: Lab, got: Pictures, want: Pictures, what: str) -> None:
    """Bit for bit on the CPU; within the dtype's tolerance where kernels need not repeat themselves."""
    assert got.keys() == want.keys(), f"{what} has {sorted(got)} against {sorted(want)}"
    for name in want:
        if lab.config.device == "cpu":
            assert np.array_equal(got[name], want[name]), f"{what}: {name} differs"
        else:
            lab.close(got[name], want[name], f"{what}: {name}")


# ---------------------------------------------------------------------- states that were changed


def _changed(packed: PackedState) -> Iterator[tuple[str, PackedState]]:
    tensors, values = dict(packed.tensors), dict(packed.values)
    for name, tensor in tensors.items():
        rest = {n: t for n, t in tensors.items() if n != name}
        yield f"another shape of {name}", PackedState({**rest, name: tensor.new_zeros((*tensor.shape, 2))}, values)
        other = tensor.int() if tensor.is_floating_point() else tensor.float()
        yield f"another dtype of {name}", PackedState({**rest, name: other}, values)
    for name in values:
        yield f"{name} missing", PackedState(tensors, {n: v for n, v in values.items() if n != name})
        yield f"{name} of another type", PackedState(tensors, {**values, name: {"no": "such"}})
    yield "an unknown value", PackedState(tensors, {**values, "no_such_value": 1})
    import torch

    yield "an unknown tensor", PackedState({**tensors, "no_such_tensor": torch.zeros(1)}, values)
