"""Rules of ``check_model`` about sessions as values: what a reducer remembers, forks, rewinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import ControlReducer
from realtime_omni.session.values import Chunk, EventId
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.lab import REWIND_BLOCKS, Lab, Skip

NO_MEMORY = {"no reducer": ["saves this"]}


def _memory(lab: Lab) -> str | None:
    """What a reducer remembers is a JSON value, and a fresh reducer goes on with it."""
    reducer, saved = lab.model.new_reducer(), []
    for number, event in enumerate(lab.events()):
        reducer.commit(reducer.prepare({}, (event,), number))
        saved.append(json.dumps(reducer.save()))
        memory = reducer.save()
        fresh = lab.model.new_reducer()
        fresh.load(json.loads(saved[-1]))
        assert json.dumps(fresh.save()) == saved[-1], "a loaded reducer saves something else"
        assert _next(fresh, number + 1) == _next(reducer, number + 1), "a loaded reducer goes on otherwise"
        for other in lab.events():
            reducer.commit(reducer.prepare({}, (other,), number + 1))
        assert json.dumps(memory) == saved[-1], "a saved memory changes with the reducer"
        reducer = fresh
    try:
        lab.model.new_reducer().load(NO_MEMORY)
    except ArgumentError:
        return f"{len(set(saved))} memories after {len(saved)} events"
    raise AssertionError("a memory that no reducer saved was loaded")


def _next(reducer: ControlReducer, chunk_index: int) -> tuple[object, object]:
    prepared = reducer.prepare({}, (), chunk_index)
    return prepared.controls, prepared.after


def _fork(lab: Lab) -> str | None:
    """A fork goes on like its parent, and neither disturbs the other."""
    _require_values(lab)
    lab.model.forget()
    forked, twins = lab.engine(), lab.engine()
    forked.create("a", seed=1, prompt=lab.prompt(0))
    for name in "ab":
        twins.create(name, seed=1, prompt=lab.prompt(0))
    for number in range(2):
        first = _chunk(forked, lab, "a", number)
        for name in "ab":
            lab.same(_chunk(twins, lab, name, number), first, f"chunk {number} of equal sessions")
    forked.fork("a", "b")
    for number in range(2, max(lab.chunks // 2, 4)):
        for shift, name in enumerate("ab"):
            got, want = (_chunk(engine, lab, name, number + shift) for engine in (forked, twins))
            lab.same(got, want, f"chunk {number} of {'the fork' if shift else 'the parent'}")
    for name in "ab":
        lab.same_kv(forked, twins, name, "after both have gone on")
    forked.fork("b", "c")
    forked.close("b")
    lab.same(_chunk(forked, lab, "c", 0), _chunk(twins, lab, "b", 0), "a fork whose parent has ended")
    for engine in (forked, twins):
        for entry in engine.engine.registry:
            engine.close(entry.session.id)
        used, _ = engine.runner.pages()
        assert used == 0, f"{used} pages are still taken after all have ended"
    counts, expected = (lab.model.opened, lab.model.closed), (3, 5)  # two of the five sessions are forks
    assert counts == expected, f"{counts[0]} states opened and {counts[1]} closed, expected {expected}"
    return None


def _rewind(lab: Lab) -> str | None:
    """A rewound session runs again with the same result."""
    _require_values(lab)
    chunks = max(lab.chunks, REWIND_BLOCKS)
    engine, control = lab.engine("a"), lab.engine("a")
    first = [_chunk(engine, lab, "a", number) for number in range(chunks)]
    for number in range(chunks):
        _chunk(control, lab, "a", number)
    for back in (REWIND_BLOCKS, 1):
        engine.rewind("a", chunks - back)
        for number in range(chunks - back, chunks):
            lab.same(_chunk(engine, lab, "a", number), first[number], f"chunk {number}, after going back by {back}")
        lab.same_kv(engine, control, "a", f"after going back by {back}")
        got, want = engine.view("a"), control.view("a")
        assert (got.prompt, got.pages_used) == (want.prompt, want.pages_used), f"it differs after going back by {back}"
    return f"{REWIND_BLOCKS} blocks at once, then one"


def _require_values(lab: Lab) -> None:
    if not lab.spec.rollback_safe:
        raise Skip("the model does not declare itself rollback-safe")


def _chunk(engine: InlineEngine, lab: Lab, name: str, number: int) -> Chunk:
    """The next chunk, with the event that belongs to its number; every third has none."""
    events = lab.events()
    if events and number % 3 != 2:
        event = replace(events[number % len(events)], event_id=EventId(engine.view(name).event_floor + 1))
        engine.accept(name, event.event_id, prompt=event.prompt, controls=event.controls)
    return engine.next(name)


BRANCH_RULES: tuple[Callable[[Lab], str | None], ...] = (_memory, _fork, _rewind)
