"""What sessions share by content: equal to the plain path, a full key, an off switch, a bound, nothing left behind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.vla.test_serving import FAMILIES, Counted, actions, ask, build, observation, plain, serve
from realtime_omni.engine import commands as c
from realtime_omni.models.common.vla.reuse import ContentCache, Identity, PictureKey, digest
from realtime_omni.models.common.vla.serving import VLAModel
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import SessionId
from realtime_omni.testing.faults import inject


@pytest.fixture(params=FAMILIES)
def sharing(request: pytest.FixtureRequest) -> VLAModel:
    return build(request.param, cache_mib=16)


def changed(seen: Observation, camera: int) -> Observation:
    """One bit of one picture is another."""
    images = {name: image.copy() for name, image in seen.images.items()}
    images[sorted(images)[camera]][0, 0, 0] ^= 1
    return replace(seen, images=images)


def test_a_prefix_that_another_session_computed_gives_the_same_chunk(
    sharing: VLAModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = serve(sharing, "a", "b"), observation(sharing, 1)
    expected = plain(sharing, seen)
    counted = Counted(sharing, monkeypatch)
    for session in ("a", "b", "a"):
        assert np.abs(actions(ask(engine, seen, session)) - expected).max() <= 1e-6
    assert counted.pictures == 2
    engine.ask(c.Reset(ticket=0, session_id=SessionId("a")))
    assert np.abs(actions(ask(engine, seen)) - expected).max() <= 1e-6
    assert counted.pictures == 2
    assert sharing.shared.prefixes.statistics().hits == 2


def test_one_other_bit_of_one_camera_costs_one_picture_and_the_prefix(
    sharing: VLAModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = serve(sharing, "a", "b"), observation(sharing, 1)
    other = changed(seen, 1)
    expected = plain(sharing, other)
    ask(engine, seen)
    counted = Counted(sharing, monkeypatch)
    assert np.abs(actions(ask(engine, other, "b")) - expected).max() <= 1e-6
    assert counted.pictures == 1
    assert sharing.shared.prefixes.statistics().hits == 0


def test_a_picture_that_several_robots_see_at_once_is_encoded_once(
    sharing: VLAModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = serve(sharing, "a", "b", "c"), observation(sharing, 1)
    expected = plain(sharing, seen)
    counted = Counted(sharing, monkeypatch)
    tickets = [engine.send(c.Next(ticket=0, session_id=SessionId(name), observation=seen)) for name in "abc"]
    engine.rest()
    assert counted.pictures == 2
    for ticket in tickets:
        assert np.abs(actions(engine.result(ticket)) - expected).max() <= 1e-5


def test_a_new_state_shares_the_prefix_only_where_the_prefix_does_not_read_it(sharing: VLAModel) -> None:
    engine, seen = serve(sharing, "a", "b"), observation(sharing, 1)
    moved = replace(seen, state=seen.state + np.float32(0.3))
    ask(engine, seen)
    assert np.abs(actions(ask(engine, moved, "b")) - plain(sharing, moved)).max() <= 1e-6
    reads_state = (
        sharing.network.shape.state_in_prefix or sharing.spec.name == "pi0.5"
    )  # which writes it into the prompt
    assert sharing.shared.prefixes.statistics().hits == (0 if reads_state else 1)


@pytest.mark.parametrize("part", Identity._fields)
def test_every_part_of_the_identity_is_part_of_the_keys(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("pi0", cache_mib=16)
    engine, seen = serve(model, "a", "b"), observation(model, 1)
    ask(engine, seen)
    model.shared.identity = model.shared.identity._replace(**{part: "another"})
    counted = Counted(model, monkeypatch)
    ask(engine, seen, "b")
    assert counted.pictures == 2
    assert model.shared.prefixes.statistics().hits == 0


@pytest.mark.parametrize("change", ["slots", "prompt", "camera"])
def test_the_same_pictures_otherwise_are_another_prefix(change: str) -> None:
    model = build("pi0", cache_mib=16)
    engine, seen = serve(model, "a", "b"), observation(model, 1)
    ask(engine, seen)
    first, second = seen.images
    other = {
        "slots": replace(seen, images={first: seen.images[second], second: seen.images[first]}),
        "prompt": replace(seen, prompt="push"),
        "camera": replace(seen, images={first: seen.images[first]}),
    }[change]
    assert np.abs(actions(ask(engine, other, "b")) - plain(model, other)).max() <= 1e-6
    assert model.shared.prefixes.statistics().hits == 0
    assert model.shared.pictures.statistics().hits > 0


def test_nothing_is_shared_when_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("pi0", cache_mib=0)
    engine, seen = serve(model, "a", "b"), observation(model, 1)
    counted = Counted(model, monkeypatch)
    for session in ("a", "b"):
        ask(engine, seen, session)
    assert counted.pictures == 4
    assert model.shared.pictures.statistics().entries == model.shared.prefixes.statistics().entries == 0


def test_what_is_shared_is_told_as_memory_apart_from_what_states_hold_too() -> None:
    model = build("pi0", cache_mib=16)
    engine, seen = serve(model, "a"), observation(model, 1)
    assert engine.runner.memory().caches == 0
    ask(engine, seen)
    memory = engine.runner.memory()
    pictures, prefixes = model.shared.pictures.statistics(), model.shared.prefixes.statistics()
    assert memory.caches == pictures.nbytes > 0
    assert memory.states >= prefixes.nbytes > 0
    engine.close("a")
    assert engine.runner.memory().caches == pictures.nbytes + prefixes.nbytes
    model.shared.clear()
    assert engine.runner.memory().caches == 0


def test_what_is_shared_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("pi0", cache_mib=16)
    engine, seen = serve(model, "a", "b"), observation(model, 1)
    ask(engine, seen)
    model.shared.clear()
    counted = Counted(model, monkeypatch)
    ask(engine, seen, "b")
    assert counted.pictures == 2


def test_a_tick_that_failed_leaves_values_that_are_right(sharing: VLAModel) -> None:
    """Its prefix was computed before it failed; whoever finds it gets the same chunk."""
    engine, seen = serve(sharing, "a", "b"), observation(sharing, 1)
    inject(engine, "commit", session_id="a")
    failed = engine.send(c.Next(ticket=0, session_id=SessionId("a"), observation=seen))
    engine.rest()
    assert engine.error(failed) is not None
    assert np.abs(actions(ask(engine, seen, "b")) - plain(sharing, seen)).max() <= 1e-6


def test_a_shared_picture_keeps_no_batch_alive() -> None:
    model = build("pi0", cache_mib=16)
    ask(serve(model), observation(model, 1, cameras=3))
    for value, nbytes in model.shared.pictures._held.values():
        assert value.untyped_storage().nbytes() == nbytes


def test_bytes_stay_bounded_while_robots_come_and_go() -> None:
    model = build("pi0", cache_mib=1)
    model.shared.pictures.capacity_bytes = 3 * 4096
    model.shared.prefixes.capacity_bytes = 64 * 1024
    for number in range(12):
        engine = serve(model)
        seen = observation(model, number)
        assert np.abs(actions(ask(engine, seen)) - plain(model, seen)).max() <= 1e-6
        engine.close("a")
        for cache in (model.shared.pictures, model.shared.prefixes):
            assert cache.statistics().nbytes <= cache.capacity_bytes


def test_the_least_recently_used_leave_first_and_bytes_stay_bounded() -> None:
    cache: ContentCache[str] = ContentCache(10)
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    assert cache.get("a") == "A"
    cache.put("c", "C", 5)
    assert (cache.get("b"), cache.get("a"), cache.get("c")) == (None, "A", "C")
    cache.put("huge", "H", 11)
    assert cache.get("huge") is None
    assert cache.statistics().nbytes == 9
    cache.put("a", "A2", 1)
    assert cache.statistics().nbytes == 6
    cache.clear()
    assert (cache.statistics().entries, cache.statistics().nbytes) == (0, 0)


def test_a_digest_tells_shape_and_dtype_apart() -> None:
    zeros = np.zeros((2, 2, 3), np.uint8)
    others = (zeros, zeros.reshape(1, 4, 3), zeros.astype(np.int8), np.zeros((2, 2, 3), np.float32))
    assert len({digest(image) for image in others}) == 4
    assert digest(np.zeros((4, 2, 3), np.uint8)[::2]) == digest(zeros)


def test_the_identity_is_of_the_loaded_model(sharing: VLAModel) -> None:
    identity = sharing.shared.identity
    assert identity.model == sharing.spec.name
    assert identity.statistics == sharing.policy.processing.statistics_id()
    assert (identity.dtype, identity.device) == ("torch.float32", "cpu")
    assert identity.fit == sharing.policy.processing.fit.value
    half = build(sharing.spec.name, cache_mib=16)
    half.network.to(torch.bfloat16)  # type: ignore[attr-defined]
    assert PictureKey(half._identity(), b"") != PictureKey(identity, b"")
