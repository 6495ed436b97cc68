"""Policies behind the engine: equal to the plain path, rows that never mix, exact reuse, chunks that continue each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from models.vla import checkpoints
from realtime_omni.config import Config
from realtime_omni.engine import commands as c
from realtime_omni.errors import ArgumentError, ConfigError, TickError
from realtime_omni.models import catalog
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.vla.network import encode, sample
from realtime_omni.models.common.vla.serving import VLAModel
from realtime_omni.rtc.modes import Mode, Settings, step_rule
from realtime_omni.rtc.previous import Previous
from realtime_omni.session.observation import Join, Observation
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.faults import at
from realtime_omni.testing.inline import InlineEngine

FAMILIES = {"pi0": "pi0", "pi0.5": "pi05", "smolvla": "smolvla"}
HORIZON, WIDTH = 6, 8
NOISE = np.random.default_rng(0).standard_normal((HORIZON, WIDTH)).astype(np.float32)


def build(name: str, folder: Path | None = None, **options: Any) -> VLAModel:
    given = {"checkpoint": str(folder or checkpoints.GOLDEN / FAMILIES[name]), "cache_mib": 0} | options
    return cast(VLAModel, catalog.build(Config(model=name, options=given)))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> VLAModel:
    return build(request.param)


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (30, 40, 3), np.uint8)


def observation(model: VLAModel, number: int = 0, cameras: int = 2, **fields: Any) -> Observation:
    names = model.policy.processing.cameras[:cameras]
    state = np.random.default_rng(number).uniform(-1, 1, model.policy.processing.state_channels).astype(np.float32)
    given = {
        "images": {name: picture(10 * number + i) for i, name in enumerate(names)},
        "state": state,
        "prompt": "pick up the cube" if number % 2 else "push",
        "noise": NOISE,
    }
    return Observation(**(given | fields))


def serve(model: VLAModel, *sessions: str, **settings: Any) -> InlineEngine:
    engine = InlineEngine(model, dtype="float32", **settings)
    for session in sessions or ("a",):
        engine.create(session, seed=3)
    return engine


def ask(engine: InlineEngine, seen: Observation, session: str = "a") -> Chunk:
    chunk = engine.ask(c.Next(ticket=0, session_id=SessionId(session), observation=seen))
    assert isinstance(chunk, Chunk)
    return chunk


def actions(chunk: Chunk) -> np.ndarray:
    data: np.ndarray = chunk.artifacts["actions"].data
    return data


def plain(model: VLAModel, seen: Observation) -> np.ndarray:
    """Without engine, batch, state or reuse."""
    processing = model.policy.processing
    inputs = processing.inputs(seen.images, seen.state, seen.prompt or "")
    with torch.no_grad():
        chunk = sample(model.network, encode(model.network, inputs), torch.from_numpy(NOISE)[None], steps=seen.steps)
    return processing.robot_actions(chunk[0], seen.state)


@pytest.mark.req("AC-40")
def test_a_served_chunk_is_the_plain_one(model: VLAModel) -> None:
    engine = serve(model)
    for seed in range(3):
        seen = observation(model, seed)
        assert np.abs(actions(ask(engine, seen)) - plain(model, seen)).max() <= 1e-6
    engine.engine.check()


@pytest.mark.req("AC-39")
def test_with_fixed_noise_actions_are_the_same_in_any_session_and_after_reset(model: VLAModel) -> None:
    engine = serve(model, "a", "b")
    for noise in ({"noise": NOISE}, {"noise": None, "seed": 7}):
        seen = observation(model, 1, **noise)
        first = actions(ask(engine, seen))
        ask(engine, observation(model, 2))
        engine.ask(c.Reset(ticket=0, session_id=SessionId("a")))
        for session in ("a", "b", "b"):
            np.testing.assert_array_equal(actions(ask(engine, seen, session)), first)


def test_without_noise_the_session_and_the_chunk_decide(model: VLAModel) -> None:
    engine = serve(model, "a", "b")
    seen = observation(model, 1, noise=None)
    first, second = actions(ask(engine, seen)), actions(ask(engine, seen))
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(actions(ask(engine, seen, "b")), first)


def test_a_batch_of_unequal_rows_is_its_members(model: VLAModel) -> None:
    """Other pictures, fewer cameras, longer prompts, more steps: each row is what it is alone."""
    names = ("a", "b", "c", "d")
    engine = serve(model, *names)
    seen = [observation(model, i, cameras=1 + i % 2, steps=4 if i == 2 else None) for i in range(4)]
    ask(engine, seen[1], "b")  # this row takes its prefix from its state
    tickets = [
        engine.send(c.Next(ticket=0, session_id=SessionId(name), observation=one))
        for name, one in zip(names, seen, strict=True)
    ]
    engine.rest()
    for ticket, one in zip(tickets, seen, strict=True):
        chunk = engine.result(ticket)
        assert chunk.timings.batch_size == 4
        assert np.abs(actions(chunk) - plain(model, one)).max() <= 1e-5


def test_who_leaves_between_two_denoise_steps_changes_nobody(model: VLAModel) -> None:
    engine = serve(model, "a", "b", "c")
    seen = [observation(model, i) for i in range(3)]
    tickets = [
        engine.send(c.Next(ticket=0, session_id=SessionId(name), observation=one))
        for name, one in zip("abc", seen, strict=True)
    ]
    at(engine, "forward:4", lambda: engine.send(c.Close(ticket=0, session_id=SessionId("b"))))
    engine.rest()
    for i in (0, 2):
        assert np.abs(actions(engine.result(tickets[i])) - plain(model, seen[i])).max() <= 1e-5
    assert engine.error(tickets[1]) is not None
    engine.engine.check()


@pytest.mark.parametrize("mode", ["none", "identity", "vjp", "trained", "overlap"])
def test_who_joins_a_running_batch_changes_nobody_and_is_what_it_is_alone(model: VLAModel, mode: str) -> None:
    """Every member joins at another step; all have other times in the steps that they share."""
    rules = {} if mode == "none" else {"rtc": {"mode": mode}}
    joining = build(model.spec.name, **rules)
    alone, together = serve(joining, *"abc"), serve(joining, *"abc")
    for turn in range(2):
        seen = {
            name: joined(joining, 3 * turn + i, 2 * turn, turn - 1 if turn else None) for i, name in enumerate("abc")
        }
        expected = {name: actions(ask(alone, one, name)) for name, one in seen.items()}
        tickets = {}
        for name, one in seen.items():
            tickets[name] = together.send(c.Next(ticket=0, session_id=SessionId(name), observation=one))
            together.cycle(4)
        together.rest()
        for name, ticket in tickets.items():
            assert np.abs(actions(together.result(ticket)) - expected[name]).max() <= 1e-5
        assert max(together.result(ticket).timings.batch_size for ticket in tickets.values()) > 1


def test_several_samples_are_drawn_over_one_prefix(model: VLAModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is the chunk that one sample gives; each is what its noise gives alone."""
    engine = serve(model, "a", "b")
    seen = observation(model, 1, noise=None, seed=7)
    alone = actions(ask(engine, seen, "b"))
    counted = Counted(model, monkeypatch)
    several = observation(model, 1, noise=None, seed=7, samples=3)
    outputs = ("actions", "samples")
    chunk = engine.ask(c.Next(ticket=0, session_id=SessionId("a"), observation=several, outputs=outputs))
    assert counted.pictures == 2
    samples = chunk.artifacts["samples"].data
    assert samples.shape == (3, *alone.shape)
    np.testing.assert_array_equal(samples[0], actions(chunk))
    assert np.abs(samples[0] - alone).max() <= 1e-5
    shape = (HORIZON, WIDTH)
    for number in range(3):
        one = observation(model, 1, noise=block_noise(7, 0, number, shape).numpy())
        assert np.abs(samples[number] - actions(ask(engine, one, "b"))).max() <= 1e-5
    assert np.abs(samples[1] - samples[2]).max() > 1e-3


@pytest.mark.parametrize("fields", [{"samples": 0}, {"samples": 17}, {"samples": 2}])
def test_samples_are_bounded_and_have_noises_of_their_own(model: VLAModel, fields: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as refused:
        observation(model, 1, **fields)
    assert refused.value.path == "samples"


class Counted:
    """How many pictures a network encodes."""

    def __init__(self, model: VLAModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pictures = 0
        inner = model.network.embed_images

        def counting(images: torch.Tensor) -> torch.Tensor:
            self.pictures += len(images)
            return inner(images)

        monkeypatch.setattr(model.network, "embed_images", counting)


def test_the_same_pictures_and_words_are_not_computed_again(model: VLAModel, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(model, monkeypatch)
    engine = serve(model)
    seen = observation(model, 1)
    ask(engine, seen)
    assert counted.pictures == 2
    ask(engine, seen)
    assert counted.pictures == 2
    moved = observation(model, 1, state=seen.state + np.float32(0.3))
    state_in_prefix = (
        model.network.shape.state_in_prefix or model.spec.name == "pi0.5"
    )  # which writes it into the prompt
    assert np.abs(actions(ask(engine, moved)) - plain(model, moved)).max() <= 1e-6
    assert counted.pictures == (2 + 2 if state_in_prefix else 2) + 2  # the plain path encodes them too


@pytest.mark.parametrize("change", ["picture", "prompt", "camera", "reset"])
def test_whatever_a_prefix_depends_on_makes_it_new(
    model: VLAModel, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    engine = serve(model)
    seen = observation(model, 1)
    ask(engine, seen)
    other = seen
    if change == "picture":
        changed = {name: image.copy() for name, image in seen.images.items()}
        next(iter(changed.values()))[0, 0, 0] ^= 1
        other = observation(model, 1, images=changed)
    elif change == "prompt":
        other = observation(model, 1, prompt="push")
    elif change == "camera":
        other = observation(model, 1, cameras=1)
    else:
        engine.ask(c.Reset(ticket=0, session_id=SessionId("a")))
    expected = plain(model, other)
    counted = Counted(model, monkeypatch)
    assert np.abs(actions(ask(engine, other)) - expected).max() <= 1e-6
    assert counted.pictures > 0


def test_reuse_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("pi0", reuse=False)
    counted = Counted(model, monkeypatch)
    engine = serve(model)
    for _ in range(2):
        ask(engine, observation(model, 1))
    assert counted.pictures == 4
    assert engine.engine.consumer.state_bytes(SessionId("a")) == 0


def test_a_state_stays_within_what_was_planned_for(model: VLAModel) -> None:
    """The longest prompt and every camera; the engine fails the tick of a state that is larger."""
    engine = serve(model)
    chunk = ask(engine, observation(model, 1, cameras=3, prompt="pick up the cube " * 2))
    assert chunk.chunk_index == 0
    held = engine.engine.consumer.state_bytes(SessionId("a"))
    assert 0 < held <= model.spec.kv.model_owned_bytes_per_session


def test_actions_that_are_not_finite_fail_their_tick_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("pi0")
    engine = serve(model)
    inner = model.network.denoise_step
    monkeypatch.setattr(model.network, "denoise_step", lambda *a: inner(*a) * torch.nan)
    with pytest.raises(TickError, match="not finite"):
        ask(engine, observation(model, 1))
    monkeypatch.undo()
    engine.ask(c.Rollback(ticket=0, session_id=SessionId("a")))
    assert np.isfinite(actions(ask(engine, observation(model, 1)))).all()


@pytest.mark.parametrize(
    ("fields", "path"),
    [({"noise": NOISE[:, :5]}, "noise"), ({"prompt": None}, "prompt"), ({"prompt": "a " * 500}, "prompt")],
)
def test_what_a_policy_cannot_read_is_named(model: VLAModel, fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        ask(serve(model), observation(model, 1, **fields))
    assert refused.value.path == path


# ---------------------------------------------------------------------- real-time chunking


def joined(model: VLAModel, seed: int, tick: int, follows: int | None, delay: int = 2, **fields: Any) -> Observation:
    return observation(model, seed, join=Join(tick, delay, follows), **fields)


@pytest.mark.parametrize("mode", ["identity", "vjp", "auto", "trained", "overlap"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_chunk_continues_the_one_before_by_its_rule(name: str, mode: str) -> None:
    model = build(name, rtc={"mode": mode})
    engine = serve(model)
    first = ask(engine, joined(model, 1, 10, None))
    latest = joined(model, 2, 12, first.chunk_index)
    got = actions(ask(engine, latest))
    state = engine.engine.consumer.resident(SessionId("a")).moments[1].state  # type: ignore[attr-defined]
    left = state.planned[-1].model[2:]
    inputs = model.policy.processing.inputs(latest.images, latest.state, latest.prompt or "")
    with torch.no_grad():
        rule = step_rule(Settings(mode=Mode(mode)), Previous.of([left], HORIZON, WIDTH), [2])
        chunk = sample(model.network, encode(model.network, inputs), torch.from_numpy(NOISE)[None], rule=rule)
    assert np.abs(got - model.policy.processing.robot_actions(chunk[0], latest.state)).max() <= 1e-5
    assert np.abs(got - plain(model, latest)).max() > 1e-4


@pytest.mark.parametrize("mode", ["none", "identity", "trained"])
def test_an_observation_may_ask_for_another_mode_and_gets_what_that_deployment_gives(mode: str) -> None:
    """From one observation to the next, in one session; what it executes is remembered in every mode."""
    asked, there = (build("pi0", rtc=rtc) for rtc in ({"mode": "vjp", "allow": [mode]}, {"mode": mode}))
    engines = [serve(model) for model in (asked, there)]
    first = [ask(engine, joined(asked, 1, 10, None)) for engine in engines]
    by_mode = Join(12, 2, first[0].chunk_index, mode)
    second = ask(engines[0], observation(asked, 2, join=by_mode))
    expected = actions(ask(engines[1], joined(asked, 2, 12, first[1].chunk_index)))
    np.testing.assert_array_equal(actions(second), expected)
    by_default = actions(ask(engines[0], joined(asked, 3, 14, second.chunk_index)))
    assert np.abs(by_default - plain(asked, observation(asked, 3))).max() > 1e-4


def test_a_mode_that_the_deployment_does_not_offer_is_refused() -> None:
    model = build("pi0", rtc={"mode": "trained", "allow": ["none"]})
    assert model.spec.policy is not None
    assert model.spec.policy.rtc_modes == ("trained", "none")
    with pytest.raises(ArgumentError, match="offers trained, none"):
        model.check_observation(observation(model, 1, join=Join(1, 0, None, "vjp")))
    with pytest.raises(ConfigError, match="ensemble"):
        build("pi0", rtc={"mode": "trained", "allow": ["ensemble"]})


def test_what_a_robot_does_not_execute_is_not_continued() -> None:
    """Another chunk than the last (that one never arrived), a reset, a tick beyond the chunk's end: the plain rule."""
    model = build("pi0", rtc={"mode": "identity"})
    engine = serve(model)
    ask(engine, joined(model, 1, 10, None))
    for latest in (
        joined(model, 2, 12, 7),
        joined(model, 2, 12, None),
        joined(model, 2, 9, 2),
        joined(model, 2, 99, 3),
    ):
        assert np.abs(actions(ask(engine, latest)) - plain(model, latest)).max() <= 1e-6
    engine.ask(c.Reset(ticket=0, session_id=SessionId("a")))
    latest = joined(model, 2, 100, 4)
    assert np.abs(actions(ask(engine, latest)) - plain(model, latest)).max() <= 1e-6


def test_rows_with_and_without_an_old_chunk_share_a_batch() -> None:
    model = build("pi0", rtc={"mode": "auto"})
    alone, together = serve(model, "a", "b", "c"), serve(model, "a", "b", "c")
    seen = {
        "a": [joined(model, 1, 0, None), joined(model, 2, 2, 0, delay=1)],
        "b": [joined(model, 3, 0, None), joined(model, 4, 2, 0, delay=4)],
        "c": [joined(model, 5, 0, None), observation(model, 6)],
    }
    for turn in range(2):
        expected = {name: actions(ask(alone, seen[name][turn], name)) for name in seen}
        tickets = {
            name: together.send(c.Next(ticket=0, session_id=SessionId(name), observation=seen[name][turn]))
            for name in seen
        }
        together.rest()
        for name, ticket in tickets.items():
            assert np.abs(actions(together.result(ticket)) - expected[name]).max() <= 1e-5


def relative_checkpoint(target: Path) -> Path:
    folder = checkpoints.copy("pi0", target)

    def enable(content: Any) -> None:
        steps = {step["registry_name"]: step for step in content["steps"]}
        steps["relative_actions_processor"]["config"]["enabled"] = True

    checkpoints.edit_json(folder / "policy_preprocessor.json", enable)
    return folder


def test_actions_relative_to_the_state_are_anchored_again(tmp_path: Path) -> None:
    """A trained prefix repeats the old actions in robot units, however far the robot has moved since."""
    model = build("pi0", relative_checkpoint(tmp_path), rtc={"mode": "trained"})
    assert model.spec.policy is not None
    assert model.spec.policy.relative
    engine = serve(model)
    first = joined(model, 1, 10, None)
    old = actions(ask(engine, first))
    moved = joined(model, 1, 12, 0, state=first.state + np.float32(0.25))
    new = actions(ask(engine, moved))
    np.testing.assert_allclose(new[:2], old[2:4], atol=2e-5)


def test_an_ensemble_is_the_weighted_mean_of_what_the_chunks_say() -> None:
    model = build("pi0", rtc={"mode": "ensemble"})
    engine = serve(model)
    seen = [joined(model, 1, 0, None), joined(model, 2, 1, 0), joined(model, 3, 2, 1)]
    said = [plain(model, one) for one in seen]
    got = [actions(ask(engine, one)) for one in seen][-1]
    weights = np.exp(-0.01 * np.arange(3))
    expected = (weights[:, None] * np.stack([said[0][2], said[1][1], said[2][0]])).sum(0) / weights.sum()
    np.testing.assert_allclose(got[0], expected, atol=1e-5)
    np.testing.assert_allclose(got[-1], said[2][-1], atol=1e-5)


def test_a_saved_session_goes_on_with_the_chunk_it_planned() -> None:
    model = build("pi0", rtc={"mode": "identity"})
    engine = serve(model)
    ask(engine, joined(model, 1, 10, None))
    saved = engine.ask(c.Save(ticket=0, session_id=SessionId("a")))
    latest = joined(model, 2, 12, 0)
    expected = actions(ask(engine, latest))
    other = InlineEngine(model, dtype="float32")
    other.ask(c.Restore(ticket=0, snapshot=saved, session_id="z"))
    np.testing.assert_array_equal(actions(ask(other, latest, "z")), expected)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("pi0", {"checkpoint": ""}, "name the folder of the checkpoint"),
        ("pi0", {"checkpoint": "/nowhere"}, "is no folder"),
        ("pi0", {"checkpoint": str(checkpoints.GOLDEN / "pi05")}, "a pi05 checkpoint, not pi0"),
        ("pi0.5", {"checkpoint": str(checkpoints.GOLDEN / "pi0")}, "a pi0 checkpoint, not pi05"),
        ("smolvla", {"layout": "openpi"}, "LeRobot's layout alone"),
        ("pi0", {"layout": "openpi"}, "options.robot"),
        ("pi0", {"rtc": {"mode": "fast"}}, "rtc.mode"),
        ("pi0", {"checkpoints": "x"}, "unknown field"),
    ],
)
def test_options_that_cannot_be_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(name, **options)


def test_openpis_layout_loads_with_the_robot_named(tmp_path: Path) -> None:
    robot = {"state_channels": 6, "action_channels": 5}
    model = build("pi0", checkpoints.openpi("pi0", tmp_path), layout="openpi", robot=robot)
    assert actions(ask(serve(model), observation(model, 1))).shape == (HORIZON, 5)


def test_bfloat16_serves(model: VLAModel) -> None:
    folder = str(checkpoints.GOLDEN / FAMILIES[model.spec.name])
    half = cast(
        VLAModel, catalog.build(Config(model=model.spec.name, dtype="bfloat16", options={"checkpoint": folder}))
    )
    assert next(cast(nn.Module, half.network).parameters()).dtype is torch.bfloat16
    engine = InlineEngine(half, dtype="bfloat16")
    engine.create("a", seed=1)
    got = actions(ask(engine, observation(half, 1)))
    assert got.dtype == np.float32
    assert np.isfinite(got).all()


def test_a_fork_and_a_rewind_continue_the_chunk_of_their_line() -> None:
    model = build("pi0", rtc={"mode": "identity"})
    engine = serve(model)
    ask(engine, joined(model, 1, 10, None))
    engine.fork("a", "twin")
    latest = joined(model, 2, 12, 0)
    expected = actions(ask(engine, latest))
    np.testing.assert_array_equal(actions(ask(engine, latest, "twin")), expected)
    engine.rewind("a", 1)
    np.testing.assert_array_equal(actions(ask(engine, latest)), expected)
    engine.engine.check()
