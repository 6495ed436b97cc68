"""Matrix-Game in the engine: the contract, history against a dense forward, actions, pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from models.matrix_game.tiny import tiny_matrix_game
from realtime_omni.engine import commands as c
from realtime_omni.errors import ArgumentError, TickError
from realtime_omni.models.base import PackedState, SessionSetup
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.wan import sampler
from realtime_omni.models.matrix_game.controls import LOOK
from realtime_omni.models.matrix_game.model import seen_actions
from realtime_omni.models.matrix_game.network import Acted
from realtime_omni.session.values import ControlInput, SessionId
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.inline import InlineEngine, small_config

FRAMES = 3
ACTIONS = "matrix_game.actions.v1"


def held(*names: str) -> ControlInput:
    return ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": list(names)})


def acted(*frames: dict[str, Any]) -> ControlInput:
    return ControlInput("camera", ACTIONS, {"frames": list(frames)})


def engine_of(**how: Any) -> InlineEngine:
    return InlineEngine(tiny_matrix_game(**how), small_config(dtype="float32"))


def walk(engine: InlineEngine, name: str, chunks: int, **how: Any) -> list[np.ndarray]:
    return [engine.next(name, **how).artifacts["latents"].data for _ in range(chunks)]


def test_the_contract_is_kept_without_an_autoencoder() -> None:
    report = check_model(tiny_matrix_game(labels=(1000, 500)), dtype="float32")
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_contract_is_kept_with_pictures() -> None:
    report = check_model(tiny_matrix_game(vae=True), dtype="float32")
    assert report.passed, str(report)


@torch.no_grad()
def test_five_chunks_across_the_window_are_those_of_a_dense_forward() -> None:
    """The network over explicitly selected clean latents of the blocks that are seen, all histories computed anew."""
    model = tiny_matrix_game(dtype=torch.float64)
    engine = InlineEngine(model, small_config(dtype="float64"))
    engine.create("a", seed=5)
    engine.accept("a", 0, controls=[held("w", "l")])
    got = walk(engine, "a", 5)
    pressed = ((1.0, 0.0, 0.0, 0.0), (0.0, LOOK))
    picture = torch.full((3, 32, 48), 128, dtype=torch.uint8)
    context = model.network.context_cache(model._pictures.encode(picture).double()[None])
    clean: list[torch.Tensor] = []
    for chunk in range(5):
        clean.append(dense_block(model, clean, context, [pressed] * (FRAMES * (chunk + 1)), seed=5))
        assert np.abs(got[chunk] - clean[-1].numpy()).max() <= 1e-5, f"chunk {chunk}"


def dense_block(model: Any, clean: list[torch.Tensor], context: Any, done: list[Any], seed: int) -> torch.Tensor:
    """One block. A block sees the one before it (six frames), whose keys and values rest on the one before that, and so on."""
    chunk, empty = len(clean), torch.zeros(FRAMES, 8, *model.latent_shape[2:])
    past: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    history = model.network.no_history(6)

    def run(x: torch.Tensor, block: int, t: float) -> tuple[torch.Tensor, Any, Any]:
        own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            own[layer] = (k, v)
            seen = [torch.cat((past[layer][i], part), dim=1) if past else part for i, part in enumerate((k, v))]
            parts = [part.transpose(1, 2) for part in (q, *seen)]
            return functional.scaled_dot_product_attention(*parts).transpose(1, 2)

        start = block * FRAMES
        keys, mouse = seen_actions(done[max(start - 3, 0) : start], done[start : start + FRAMES])
        flow, remembered = model.network(
            torch.cat((x, empty), dim=1)[None],
            torch.tensor([t]),
            torch.arange(start, start + FRAMES)[None],
            context,
            Acted(mouse[None], keys[None]),
            [history],
            attend,
        )
        return flow[0], own, remembered[0]

    for block, latents in enumerate(clean):
        _, past, remembered = run(latents, block, 0.0)
        history = history.then(remembered, FRAMES)
    levels = sampler.levels(model.settings.labels, model.settings.shift)
    x = block_noise(seed, chunk, 0, model.latent_shape)
    for index, level in enumerate(levels):
        x0 = sampler.clean(x, run(x, chunk, level.timestep)[0], level.sigma)
        if index + 1 < len(levels):
            x = sampler.renoised(x0, block_noise(seed, chunk, index + 1, model.latent_shape), levels[index + 1].renoise)
    return x0


def test_held_keys_and_the_actions_that_they_mean_are_the_same_walk() -> None:
    got = []
    for control in (held("w", "i", "l"), acted(*[{"keys": ["W"], "mouse": [LOOK, LOOK]}] * FRAMES)):
        engine = engine_of()
        engine.create("a", seed=1)
        engine.accept("a", 0, controls=[control])
        got.append(walk(engine, "a", 1)[0])
    assert np.array_equal(*got)


@pytest.mark.parametrize("other", [held("w"), held("d"), held("l"), held("k"), acted({}, {}, {"mouse": [0.02, 0]})])
def test_every_key_and_a_small_movement_act(other: ControlInput) -> None:
    engine = engine_of()
    for name in ("still", "acts"):
        engine.create(name, seed=2)
    engine.accept("acts", 0, controls=[other])
    still, acts = (walk(engine, name, 2) for name in ("still", "acts"))
    assert not np.allclose(still[1], acts[1], atol=1e-4)


def test_a_frame_sees_the_actions_of_twelve_pictures() -> None:
    """Of latent frame f: pictures 4 f - 12 to 4 f - 1; picture p belongs to latent frame ceil(p / 4), and is never before 0."""
    actions = [((float(n), 0.0, 0.0, 0.0), (0.0, n / 10)) for n in range(9)]
    for start in (0, 3, 6):
        keys, mouse = seen_actions(actions[max(start - 3, 0) : start], actions[start : start + FRAMES])
        for i in range(FRAMES):
            f = start + i
            expected = [-(-max(p, 0) // 4) for p in range(4 * f - 12, 4 * f)]
            assert keys[i, :, 0].tolist() == expected
            assert np.allclose(mouse[i, :, 1], np.array(expected) / 10)


BAD_ACTIONS = {
    "missing": ({}, "data.frames"),
    "too few": ({"frames": [{}]}, "data.frames"),
    "no object": ({"frames": [[], {}, {}]}, "data.frames[0]"),
    "unknown field": ({"frames": [{}, {"jump": 1}, {}]}, "data.frames[1].jump"),
    "unknown key": ({"frames": [{}, {}, {"keys": ["i"]}]}, "data.frames[2].keys"),
    "keys as text": ({"frames": [{"keys": "w"}, {}, {}]}, "data.frames[0].keys"),
    "half a movement": ({"frames": [{"mouse": [0.1]}, {}, {}]}, "data.frames[0].mouse"),
    "too fast": ({"frames": [{"mouse": [1.5, 0]}, {}, {}]}, "data.frames[0].mouse"),
    "a flag": ({"frames": [{"mouse": [True, 0]}, {}, {}]}, "data.frames[0].mouse"),
    "more": ({"frames": [{}, {}, {}], "fps": 1}, "data.fps"),
}


@pytest.mark.parametrize("name", BAD_ACTIONS)
def test_bad_actions_are_refused_by_the_name_of_their_field(name: str) -> None:
    data, path = BAD_ACTIONS[name]
    model = tiny_matrix_game()
    engine = InlineEngine(model, small_config(dtype="float32"))
    engine.create("a", seed=1)
    with pytest.raises(ArgumentError) as caught:
        engine.accept("a", 0, controls=[ControlInput("camera", ACTIONS, data)])
    assert (caught.value.code, caught.value.path) == ("control_invalid", path)


def test_a_prompt_is_refused_because_nobody_would_read_it() -> None:
    engine = engine_of()
    with pytest.raises(ArgumentError) as caught:
        engine.create("a", seed=1, prompt="a street")
    assert (caught.value.code, caught.value.path) == ("prompt_unknown", "prompt")
    engine.create("a", seed=1)
    with pytest.raises(ArgumentError, match="reads no prompt"):
        engine.accept("a", 0, prompt="a street")


def test_a_picture_begins_the_world_and_the_network_looks_at_it() -> None:
    engine = engine_of(vae=True)
    rng = np.random.default_rng(0)
    engine.create("grey", seed=1)
    engine.create("a", seed=1, image=rng.integers(0, 255, (40, 70, 3), dtype=np.uint8))
    grey, seen = engine.next("grey", outputs=("latents",)), engine.next("a", outputs=("frames", "latents"))
    assert seen.artifacts["frames"].data.shape == (9, 3, 32, 48)
    assert not np.allclose(grey.artifacts["latents"].data, seen.artifacts["latents"].data, atol=1e-3)
    with pytest.raises(ArgumentError, match="a side has 16 to 4096") as caught:
        engine.create("b", seed=1, image=np.zeros((8, 8, 3), dtype=np.uint8))
    assert caught.value.code == "image_invalid"


def test_a_block_that_is_not_finite_fails_alone() -> None:
    model = tiny_matrix_game()
    engine = InlineEngine(model, small_config(dtype="float32"))
    engine.create("bad", seed=1)
    engine.create("good", seed=1)
    noise = model._noise
    model._noise = lambda row, step: noise(row, step) * (np.nan if row.tick.session_id == "bad" else 1.0)  # type: ignore
    bad = engine.send(c.Next(ticket=0, session_id=SessionId("bad")))
    good = engine.send(c.Next(ticket=0, session_id=SessionId("good")))
    engine.rest()
    assert isinstance(engine.error(bad), TickError)
    assert np.isfinite(engine.result(good).artifacts["latents"].data).all()


def test_a_saved_state_whose_histories_disagree_is_refused() -> None:
    model = tiny_matrix_game()
    packed = model.pack(model.open(SessionSetup(SessionId("a"), seed=1, prompt=None)))
    assert model.unpack(packed).recent == ()
    longer = dict(packed.tensors) | {"keyboard": packed.tensors["keyboard"].new_zeros(1, 2, 2, 2, 16)}
    with pytest.raises(ArgumentError, match="belong together"):
        model.unpack(PackedState(longer, packed.values))
    beyond = dict(packed.tensors) | {"keyboard": packed.tensors["keyboard"].new_zeros(1, 2, 4, 2, 16)}
    with pytest.raises(ArgumentError, match="too long"):
        model.unpack(PackedState(beyond, packed.values))
