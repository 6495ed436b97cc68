"""Rules of ``check_model`` about deferred clean passes: the prefill of a block that was delivered before it was history."""

from __future__ import annotations

from collections.abc import Callable

from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.lab import Lab, Skip, keys_and_values


def _points(lab: Lab) -> tuple[str, ...]:
    """Every named piece of work of a deferred clean pass, in order. Raises Skip when the model defers none, or only a
    session's first."""
    engine = lab.engine("a", warm=True)
    engine.next("a")
    if not lab.model.needs_prefill(engine.state_of("a")):
        raise Skip("the clean pass is part of the tick")
    seen: list[str] = []
    engine.runner.faults = lambda point, sessions: seen.append(point)
    engine.rest()
    return tuple(seen)


def _failed_prefill(lab: Lab) -> str | None:
    """A deferred clean pass that fails leaves its chunk and the history as they were, and runs again with the same result."""
    points = _points(lab)
    if not lab.spec.rollback_safe:
        raise Skip("the model does not declare itself rollback-safe")
    for point in points:
        engine, control = lab.engine("a", warm=True), lab.engine("a", warm=True)
        before = engine.kv_bits("a")
        for e in (engine, control):
            e.next("a")
        with inject(engine, point):
            engine.rest()
        view = engine.view("a")
        assert (view.state, view.chunk_index) == ("failed", 2), f"the fault at {point} was swallowed"
        assert engine.kv_bits("a") == before, f"a clean pass that failed at {point} changed committed keys or values"
        engine.rollback("a")
        lab.same(engine.next("a"), control.next("a"), f"after a failure at {point}")
        lab.same_kv(engine, control, "a", f"after a failure at {point}")
    return " ".join(points)


def _dropped_prefill(lab: Lab) -> str | None:
    """A row that leaves a deferred clean pass disturbs nobody."""
    points, victim, rest = _points(lab), lab.names[-1], lab.names[:-1]
    control = lab.engine(lab.names, warm=True)
    control.next_all(lab.names)
    control.rest()
    kept = {name: list(keys_and_values(control, name)) for name in rest}
    following = {name: control.next(name) for name in rest}
    for point in points:
        if point == "commit":
            continue
        engine = lab.engine(lab.names, warm=True)
        engine.next_all(lab.names)
        with at(engine, point, lambda engine=engine: engine.post_close(victim)):  # type: ignore[misc]
            engine.rest()
        assert victim not in engine.engine.registry, f"{victim} was not closed at {point}"
        for name in rest:
            for got, want in zip(keys_and_values(engine, name), kept[name], strict=True):
                lab.close(got, want, f"{victim} left at {point}: keys and values of {name}")
            lab.same(engine.next(name), following[name], f"{victim} left at {point}; {name}")
        lab.ran_together(engine)
    return None


DEFERRED_RULES: tuple[Callable[[Lab], str | None], ...] = (_failed_prefill, _dropped_prefill)
