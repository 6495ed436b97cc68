"""check_model: hold a model against the model contract, rule by rule.

    realtime-omni check-model null
    print(check_model(MyWorld(), dtype="float32"))

Every rule runs the model behind a whole engine (:class:`~realtime_omni.testing.inline.InlineEngine`), and says in one line what
it found. A rule that the model does not claim (rollback, a decoder) is skipped and says so. Policies and duplex models keep
the same rules; what they are shown and what they hear is made up (:mod:`realtime_omni.testing.observing`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from realtime_omni.artifacts import DECODED_LAYOUTS
from realtime_omni.config import Config, load
from realtime_omni.engine import commands as c
from realtime_omni.errors import ArgumentError, OmniError
from realtime_omni.models import catalog
from realtime_omni.models.base import SessionSetup, WorldModel
from realtime_omni.session.values import (
    Chunk,
    ControlInput,
    EventId,
    Representation,
    SessionEvent,
    SessionId,
)
from realtime_omni.testing.branch_rules import BRANCH_RULES
from realtime_omni.testing.deferred_rules import DEFERRED_RULES
from realtime_omni.testing.duplex_rules import DUPLEX_RULES
from realtime_omni.testing.faults import at, inject
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.lab import Lab, Skip, array
from realtime_omni.testing.malformed import example, malformed
from realtime_omni.testing.saved_rules import completeness, strictness
from realtime_omni.testing.snapshot import changed, snapshot
from realtime_omni.testing.watch import WatchedModel


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule. ``passed`` is None when it was skipped."""

    rule: str
    passed: bool | None
    detail: str = ""

    def __str__(self) -> str:
        mark = {True: "ok  ", False: "FAIL", None: "skip"}[self.passed]
        return f"{mark}  {self.rule}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Report:
    """What :func:`check_model` found."""

    model: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(f.passed is not False for f in self.findings)

    @property
    def verdict(self) -> str:
        failed = sum(f.passed is False for f in self.findings)
        said = "keeps the model contract" if self.passed else f"breaks {failed} of {len(self.findings)} rules"
        return f"{self.model} {said}"

    def __str__(self) -> str:
        return "\n".join([f"model {self.model}", *map(str, self.findings), self.verdict])


def check_model(
    target: WorldModel | Config | str,
    *,
    dtype: str = "float32",
    found: Callable[[Finding], None] = lambda finding: None,
) -> Report:
    """Check a model object (of ``dtype``), the model of a configuration, or one by catalog name or ``package.module:Class``.

    ``found`` is called with each rule's finding as soon as the rule is done.

    Raises ConfigError when there is no such model, its recipe is refused or it cannot be loaded; everything else is in the
    report.
    """
    if isinstance(target, str):
        target = load(target, {})
    if isinstance(target, Config):
        config, model = target, catalog.build(target)
    else:
        config, model = small_config(dtype=dtype), target
        if missing := catalog.missing_members(model):
            lacks = Finding(_name(_spec), False, f"lacks {', '.join(missing)}; no other rule was tried")
            found(lacks)
            return Report(type(model).__name__, (lacks,))
    lab = Lab(WatchedModel(model), config, can_rebuild=model is not target)
    findings: list[Finding] = []
    with _quiet():
        for rule in (*RULES, *(DUPLEX_RULES if model.spec.duplex is not None else ())):
            findings.append(_apply(rule, lab))
            found(findings[-1])
    return Report(model.spec.name, tuple(findings))


@contextmanager
def _quiet() -> Iterator[None]:
    """The engine logs every failed tick; here they fail on purpose."""
    log = logging.getLogger("realtime_omni")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _name(rule: Callable[[Lab], str | None]) -> str:
    return (rule.__doc__ or rule.__name__).rstrip(".")


def _apply(rule: Callable[[Lab], str | None], lab: Lab) -> Finding:
    name = _name(rule)
    try:
        return Finding(name, True, rule(lab) or "")
    except Skip as reason:
        return Finding(name, None, str(reason))
    except AssertionError as broken:
        return Finding(name, False, str(broken).split("\n")[0])
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}".split("\n")[0])


# ---------------------------------------------------------------------- rules


def _spec(lab: Lab) -> str | None:
    """The declaration is complete and consistent."""
    spec = lab.spec
    names = [a.name for a in spec.artifacts]
    assert len(set(names)) == len(names), f"artifact names repeat: {names}"
    assert sum(a.primary for a in spec.artifacts) == 1, "exactly one artifact must be primary"
    for artifact in spec.artifacts:
        if artifact.representation is Representation.DECODED:
            layouts = DECODED_LAYOUTS[artifact.modality]
            assert artifact.layout in layouts, f"{artifact.name}: layout {artifact.layout} is not one of {layouts}"
    assert spec.kv.frames_per_block == spec.frames_per_block, "kv.frames_per_block is not frames_per_block"
    assert spec.fps > 0, "fps must be positive"
    if spec.duplex is None:
        assert min(spec.height, spec.width) > 0, "height and width must be positive"
    assert set(spec.start_prompts) <= set(spec.starts), "start_prompts names a start that does not exist"
    if spec.horizon_frames is not None:
        assert spec.horizon_frames >= spec.frames_per_block, "the horizon is shorter than one block"
    return None


def _prompts(lab: Lab) -> str | None:
    """Every declared prompt and start picture is accepted, and unknown controls are refused."""
    model = lab.model
    for prompt in lab.spec.prompts:
        event = SessionEvent(EventId(0), prompt=prompt)
        assert model.understand(event) is not None, f"prompt {prompt!r} is not understood"
    for known in {*lab.spec.prompts, lab.spec.default_prompt}:
        model.close(model.open(SessionSetup(SessionId("a"), known, 0)))
    for start in lab.spec.starts:
        assert model.start_image(start).startswith(b"\x89PNG"), f"start picture {start!r} is not PNG"
        model.close(model.open(SessionSetup(SessionId("a"), lab.spec.start_prompts.get(start), 0, start=start)))
    strange = SessionEvent(EventId(0), controls=(ControlInput("no-such-track", "no.such.schema.v1", {}),))
    try:
        model.understand(strange)
    except ArgumentError:
        return f"{len(lab.spec.prompts)} prompts, {len(lab.spec.starts)} start pictures"
    raise AssertionError("a control of an unknown schema was accepted")


def _controls(lab: Lab) -> str | None:
    """A control as declared acts, and a malformed one is refused with a code."""
    if not lab.spec.controls:
        raise Skip("the model takes no controls")
    engine, refused = lab.engine("a"), 0
    for number, known in enumerate(lab.spec.controls):
        name, data = f"{known.track}/{known.schema}", example(known.json_schema)
        engine.accept("a", number, controls=(ControlInput(known.track, known.schema, data),))
        engine.next("a")
        for what, wrong in malformed(known.json_schema, data):
            try:
                control = ControlInput(known.track, known.schema, wrong)
                lab.model.understand(SessionEvent(EventId(0), controls=(control,)))
            except ArgumentError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{name}: {what}: {type(error).__name__} instead of an ArgumentError") from error
            else:
                raise AssertionError(f"{name}: {what}: accepted")
    return f"{refused} ways of being wrong"


def _batch(lab: Lab) -> str | None:
    """A batch of N equals N batches of one."""
    if lab.spec.serial:
        raise Skip("the model is serial")
    together, alone = lab.engine(lab.names, warm=True), lab.engine(lab.names, warm=True)
    for number in range(lab.chunks):
        batch = together.next_all(lab.names)
        for name, got in zip(lab.names, batch, strict=True):
            if isinstance(got, Exception):
                raise got
            assert got.timings.batch_size == len(lab.names), "the rows did not share a batch"
            lab.same(got, alone.next(name), f"chunk {number} of {name}")
    for name in lab.names:
        lab.same_kv(together, alone, name, "after the rollout")
    lab.ran_together(together)
    return f"{len(lab.names)} rows, {lab.chunks} chunks, {lab.config.dtype}"


def _points(lab: Lab) -> str | None:
    """Every pass has a checkpoint before it."""
    points = lab.points()
    assert any(p.startswith("forward:") for p in points), "no forward checkpoint in a tick"
    return " ".join(points)


def _drops(lab: Lab) -> str | None:
    """A row that leaves at any checkpoint disturbs nobody, and its session goes on."""
    victim, rest = lab.names[-1], lab.names[:-1]
    engine, control = lab.engine(lab.names, warm=True), lab.engine(lab.names, warm=True)

    def leave() -> None:
        engine.send(c.Abort(ticket=0, session_id=SessionId(victim)))

    for point in lab.points():
        if point == "commit":
            continue
        engine.rest()  # a deferred clean pass has checkpoints of the same names
        with at(engine, point, leave):
            results = engine.next_all(lab.names)
        for name, got in zip(rest, results, strict=False):
            assert isinstance(got, Chunk), f"{name} failed when {victim} left at {point}: {got}"
            lab.same(got, control.next(name), f"{victim} left at {point}; {name}")
        lab.same(engine.next(victim), control.next(victim), f"{victim} after it left at {point}")
        lab.ran_together(engine)
    return None


def _failed_tick(lab: Lab) -> str | None:
    """A failed tick leaves committed keys and values as they were, and runs again as if nothing had happened."""
    if not lab.spec.rollback_safe:
        raise Skip("the model does not declare itself rollback-safe")
    engine, control = lab.engine("a", warm=True), lab.engine("a", warm=True)
    for point in lab.points():
        before = engine.kv_bits("a")
        with inject(engine, point):
            try:
                engine.next("a")
            except OmniError:
                pass
            else:
                raise AssertionError(f"the fault at {point} was swallowed")
        assert engine.kv_bits("a") == before, f"a tick that failed at {point} changed committed keys or values"
        engine.rollback("a")
        lab.same(engine.next("a"), control.next("a"), f"after a failure at {point}")
        lab.same_kv(engine, control, "a", f"after a failure at {point}")
    return None


def _nothing_on_the_model(lab: Lab) -> str | None:
    """Sessions leave nothing on the model object."""
    warm = lab.engine("a")
    warm.next("a")
    warm.close("a")
    before = snapshot(lab.model.inner)
    engine = lab.engine(lab.names)
    for name in lab.names:
        engine.next(name)
    where = changed(before, snapshot(lab.model.inner))
    assert not where, f"changed by running sessions: {', '.join(where[:4])}"
    return None


def _artifacts(lab: Lab) -> str | None:
    """Every artifact can be had alone, typed as declared, and nothing is decoded that nobody asked for."""
    decoded = {a.name for a in lab.spec.artifacts if a.representation is Representation.DECODED}
    for artifact in lab.spec.artifacts:
        seen: list[str] = []
        engine = lab.engine("a")
        engine.runner.faults = lambda point, sessions, seen=seen: seen.append(point)
        chunk = engine.next("a", outputs=(artifact.name,))
        assert tuple(chunk.artifacts) == (artifact.name,), f"asked for {artifact.name}, got {tuple(chunk.artifacts)}"
        assert artifact.name in decoded or "decode" not in seen, f"the decoder ran for {artifact.name} alone"
    engine.next("a", outputs=tuple(a.name for a in lab.spec.artifacts))
    return ", ".join(a.name for a in lab.spec.artifacts)


def _reset(lab: Lab) -> str | None:
    """A reset world runs again as the first time."""
    engine = lab.engine("a")
    first = [engine.next("a") for _ in range(2)]
    engine.reset("a")
    for chunk in first:
        lab.same(engine.next("a"), chunk, "after a reset")
    return None


def _seeds(lab: Lab) -> str | None:
    """Another seed is another world."""
    engine = lab.engine()
    for seed in (1, 2):
        engine.create(f"s{seed}", seed=seed, prompt=lab.prompt(0))
    one, two = (array(engine.next(s).artifacts[lab.spec.primary].data) for s in ("s1", "s2"))
    if np.array_equal(one, two):
        raise Skip("the seed changes nothing: fine for a model without chance")
    return None


def _gives_back(lab: Lab) -> str | None:
    """Closed sessions hold no page, no bytes, and every opened state was closed once."""
    lab.model.forget()
    engine = lab.engine(lab.names)
    for name in lab.names:
        engine.next(name)
    engine.reset("a")
    for name in lab.names:
        engine.close(name)
    used, _ = engine.runner.pages()
    assert used == 0, f"{used} pages are still taken"
    states = engine.runner.memory().states
    assert states == 0, f"{states} bytes of states are still held"
    assert lab.model.opened == lab.model.closed, f"{lab.model.opened} states opened, {lab.model.closed} closed"
    return None


RULES: tuple[Callable[[Lab], str | None], ...] = (
    _spec,
    _prompts,
    _controls,
    _points,
    _batch,
    _drops,
    _failed_tick,
    *DEFERRED_RULES,
    _nothing_on_the_model,
    _artifacts,
    _reset,
    *BRANCH_RULES,
    _seeds,
    _gives_back,
    completeness,
    strictness,
)
