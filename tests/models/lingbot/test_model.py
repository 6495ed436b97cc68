"""LingBot in the engine: the contract, history against a dense forward, prompts, cameras, pictures, horizon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from models.lingbot.tiny import tiny_lingbot
from realtime_omni.engine import commands as c
from realtime_omni.errors import ArgumentError, OmniError, TickError
from realtime_omni.models.base import PackedState, SessionSetup
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.wan import sampler
from realtime_omni.models.lingbot.camera import Camera, default_intrinsics, fold, motions, move, rays
from realtime_omni.session.values import ControlInput, SessionId
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.inline import InlineEngine, small_config

FRAMES = 3


def held(*names: str) -> ControlInput:
    return ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": list(names)})


def walk(engine: InlineEngine, name: str, chunks: int, **how: Any) -> list[np.ndarray]:
    return [engine.next(name, **how).artifacts["latents"].data for _ in range(chunks)]


def test_the_contract_is_kept_without_an_autoencoder() -> None:
    report = check_model(tiny_lingbot(), dtype="float32")
    assert report.passed, str(report)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_contract_is_kept_with_pictures() -> None:
    report = check_model(tiny_lingbot(vae=True), dtype="float32")
    assert report.passed, str(report)


@pytest.mark.req("AC-27")
@torch.no_grad()
def test_seven_chunks_across_sink_and_window_are_those_of_a_dense_forward() -> None:
    """The same network over explicitly selected clean latents of all earlier blocks, without any cache."""
    model = tiny_lingbot(dtype=torch.float64)
    engine = InlineEngine(model, small_config(dtype="float64"))
    engine.create("a", seed=5)
    got = walk(engine, "a", 7)
    text = model.network.text_cache(model._text.encode(model.settings.default_prompt).double()[None])
    clean: list[torch.Tensor] = []
    for chunk in range(7):
        clean.append(dense_block(model, clean, chunk, text, seed=5))
        assert np.abs(got[chunk] - clean[-1].numpy()).max() <= 1e-5, f"chunk {chunk}"


def dense_block(model: Any, clean: list[torch.Tensor], chunk: int, text: Any, seed: int) -> torch.Tensor:
    """One block, with the keys and values of every earlier block computed anew from its clean latents."""
    settings = model.settings
    history: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
    still = still_camera(model).to(torch.float64)[None]
    camera = model.network.camera_cache(still)
    empty = torch.zeros(FRAMES, 8, *model.latent_shape[2:])

    def visible(layer: int, upto: int, current: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Sink frames and the latest of the window, the current block included, of blocks 0..upto-1."""
        per_frame = [[], []]
        for past in history[:upto]:
            for part in range(2):
                per_frame[part] += list(past[layer][part].chunk(FRAMES, dim=1))
        total = len(per_frame[0]) + FRAMES
        first = max(total - settings.window_frames, settings.sink_frames)
        keep = [*range(min(settings.sink_frames, len(per_frame[0]))), *range(first, len(per_frame[0]))]
        return [torch.cat([*(per_frame[part][i] for i in keep), current[part]], dim=1) for part in range(2)]

    def run(x: torch.Tensor, block: int, t: float, store: bool) -> torch.Tensor:
        own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            own[layer] = (k, v)
            keys, values = visible(layer, block, (k, v))
            parts = [part.transpose(1, 2) for part in (q, keys, values)]
            return functional.scaled_dot_product_attention(*parts).transpose(1, 2)

        frames = torch.arange(block * FRAMES, (block + 1) * FRAMES)[None]
        latents = torch.cat((x, empty), dim=1)[None]
        flow = model.network(latents, torch.tensor([t]), frames, text, attend, camera=camera)
        if store:
            history.append(own)
        return flow[0]

    for block, latents in enumerate(clean):
        run(latents, block, 0.0, store=True)
    levels = sampler.levels(settings.labels, settings.shift)
    x = block_noise(seed, chunk, 0, model.latent_shape)
    for index, level in enumerate(levels):
        x0 = sampler.clean(x, run(x, chunk, level.timestep, store=False), level.sigma)
        if index + 1 < len(levels):
            x = sampler.renoised(x0, block_noise(seed, chunk, index + 1, model.latent_shape), levels[index + 1].renoise)
    return x0


def still_camera(model: Any) -> torch.Tensor:
    height, width = model.settings.height, model.settings.width
    motion = motions(np.eye(4), [np.eye(4)] * FRAMES)
    return fold(rays(motion, default_intrinsics(height, width), height, width))


def test_keys_and_the_poses_that_they_make_are_the_same_walk() -> None:
    script = [["w"], ["w", "l"], ["i"]]
    camera, poses = Camera.start(), []
    for names in script:
        camera = move(camera, names)
        poses.append(camera.pose.tolist())
    got = []
    for schema, data in (
        ("lingbot.camera_actions.v1", {"mode": "script", "frames": script}),
        ("lingbot.camera_trajectory.v1", {"poses": poses}),
    ):
        engine = InlineEngine(tiny_lingbot(), small_config(dtype="float32"))
        engine.create("a", seed=1)
        engine.accept("a", 0, controls=[ControlInput("camera", schema, data)])
        first = walk(engine, "a", 1)
        engine.accept("a", 1, controls=[held("j")])
        got.append([*first, *walk(engine, "a", 2)])
    for keys, trajectory in zip(*got, strict=True):
        assert np.allclose(keys, trajectory, atol=1e-5)


def test_a_camera_acts_and_so_does_a_prompt() -> None:
    engine = InlineEngine(tiny_lingbot(), small_config(dtype="float32"))
    for name in ("still", "moves", "talks"):
        engine.create(name, seed=2)
    engine.accept("moves", 0, controls=[held("w")])
    engine.accept("talks", 0, prompt="a red room")
    still, moves, talks = (walk(engine, name, 2) for name in ("still", "moves", "talks"))
    assert not np.allclose(still[0], moves[0], atol=1e-4)
    assert not np.allclose(still[0], talks[0], atol=1e-4)


BAD_TRAJECTORIES = {
    "too few": ({"poses": [np.eye(4).tolist()]}, "data.poses"),
    "not a matrix": ({"poses": [np.eye(4).tolist()[:3]] * 3}, "data.poses[0]"),
    "mirrored": ({"poses": [np.diag([-1.0, 1, 1, 1]).tolist()] * 3}, "data.poses[0]"),
    "text": ({"poses": [[["a"] * 4] * 4] * 3}, "data.poses[0][0]"),
    "focal": ({"poses": [np.eye(4).tolist()] * 3, "intrinsics": [[0, 1, 1, 1]] * 3}, "data.intrinsics[0]"),
    "far": ({"poses": [*[np.eye(4).tolist()] * 2, [[1, 0, 0, -1e7], *np.eye(4).tolist()[1:]]]}, "data.poses[2]"),
    "farther": ({"poses": [[[1, 0, 0, 1e300], *np.eye(4).tolist()[1:]]] * 3}, "data.poses[0]"),
    "wide": ({"poses": [np.eye(4).tolist()] * 3, "intrinsics": [[500, 1e-308, 1, 1]] * 3}, "data.intrinsics[0]"),
    "unknown": ({"poses": [np.eye(4).tolist()] * 3, "fov": 1}, "data.fov"),
}


@pytest.mark.parametrize("name", BAD_TRAJECTORIES)
def test_a_bad_trajectory_is_refused_by_the_name_of_its_field(name: str) -> None:
    data, path = BAD_TRAJECTORIES[name]
    engine = InlineEngine(tiny_lingbot(), small_config(dtype="float32"))
    engine.create("a", seed=1)
    with pytest.raises(ArgumentError) as caught:
        engine.accept("a", 0, controls=[ControlInput("camera", "lingbot.camera_trajectory.v1", data)])
    assert caught.value.path == path
    walk(engine, "a", 1)


def test_a_block_that_is_not_finite_fails_alone_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_lingbot()
    engine = InlineEngine(model, small_config(dtype="float32"))
    for name in ("bad", "good", "alone"):
        engine.create(name, seed=1)
    expected = walk(engine, "alone", 2)
    noise = model._noise
    with monkeypatch.context() as broken:
        broken.setattr(
            model, "_noise", lambda row, step: noise(row, step) * (np.nan if row.tick.session_id == "bad" else 1.0)
        )
        bad = engine.send(c.Next(ticket=0, session_id=SessionId("bad")))
        good = engine.send(c.Next(ticket=0, session_id=SessionId("good")))
        engine.rest()
    assert isinstance(engine.error(bad), TickError)
    first = engine.result(good).artifacts["latents"].data
    assert np.allclose(first, expected[0], atol=1e-5)
    assert np.allclose(walk(engine, "good", 1)[0], expected[1], atol=1e-5)
    engine.ask(c.Rollback(ticket=0, session_id=SessionId("bad")))
    for got, wanted in zip(walk(engine, "bad", 2), expected, strict=True):
        assert np.allclose(got, wanted, atol=1e-5)


def test_a_saved_prompt_is_checked_like_any_other() -> None:
    model = tiny_lingbot()
    packed = model.pack(model.open(SessionSetup(SessionId("a"), seed=1, prompt="a street")))
    assert model.unpack(packed).prompt == "a street"
    crafted = PackedState(packed.tensors, {**packed.values, "prompt": "a" * 201})
    with pytest.raises(ArgumentError, match="too long"):
        model.unpack(crafted)


def test_a_horizon_of_117_pictures_ends_at_the_tenth_block() -> None:
    engine = InlineEngine(tiny_lingbot(horizon=117), small_config(dtype="float32"))
    engine.create("a", seed=1)
    walk(engine, "a", 10)
    with pytest.raises(OmniError) as caught:
        engine.next("a")
    assert caught.value.code == "horizon"


def test_pictures_are_nine_and_then_twelve_and_a_hole_in_the_asking_keeps_the_count() -> None:
    engine = InlineEngine(tiny_lingbot(vae=True), small_config(dtype="float32"))
    rng = np.random.default_rng(0)
    engine.create("a", seed=1, image=rng.integers(0, 255, (40, 70, 3), dtype=np.uint8))
    chunks = [engine.next("a", outputs=("frames",)) for _ in range(2)]
    skipped = engine.next("a", outputs=("latents",))
    chunks.append(engine.next("a", outputs=("frames",)))
    shapes = [c.artifacts["frames"].data.shape for c in chunks]
    assert shapes == [(9, 3, 32, 48), (12, 3, 32, 48), (12, 3, 32, 48)]
    assert [(c.first_frame, c.frames) for c in (*chunks[:2], skipped, chunks[2])] == [
        (0, 9),
        (9, 12),
        (21, 12),
        (33, 12),
    ]
    assert "frames" not in skipped.artifacts


def test_the_last_probe_can_be_what_is_committed() -> None:
    """A fifth fewer passes, and another world from the second block on."""
    clean, probe = (
        InlineEngine(tiny_lingbot(clean_pass=flag), small_config(dtype="float32")) for flag in (True, False)
    )
    for engine in (clean, probe):
        engine.create("a", seed=1)
    (first, second), (same, other) = walk(clean, "a", 2), walk(probe, "a", 2)
    assert np.array_equal(first, same)
    assert not np.allclose(second, other, atol=1e-4)
