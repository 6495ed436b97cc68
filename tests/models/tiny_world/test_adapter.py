"""tiny-world behind the model contract, with a small random network and without the packaged weights."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from PIL import Image

from kv.dense_reference import DenseCache
from realtime_omni.config import Config
from realtime_omni.errors import ArgumentError, ConfigError, SnapshotError
from realtime_omni.models.common.keys import HELD, KEYS, TRACK
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.tiny_world import model as adapter
from realtime_omni.models.tiny_world import sampler
from realtime_omni.models.tiny_world.model import CONTEXT_NOISE_STEP, Options, TinyWorld
from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet, poses
from realtime_omni.models.tiny_world.places import PLACES
from realtime_omni.models.tiny_world.recall import Past, recall, walked
from realtime_omni.session.values import ControlInput
from realtime_omni.snapshot.snapshot import Snapshot
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.inline import InlineEngine

SMALL = NetworkConfig(
    image_size=32,
    patch=8,
    width=64,
    layers=2,
    heads=2,
    mlp_width=96,
    refine_channels=8,
    detail_channels=8,
    window_frames=9,
)
FRAMES = SMALL.frames_per_block


def small_net(config: NetworkConfig = SMALL, seed: int = 0) -> TinyWorldNet:
    """Nothing in it is zero, so every path matters."""
    torch.manual_seed(seed)
    net = TinyWorldNet(config).eval().requires_grad_(False)
    for parameter in net.parameters():
        if parameter.abs().max() == 0:
            torch.nn.init.normal_(parameter, std=0.1)
    return net


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, np.ndarray]:
    """Two start pictures per place instead of the packaged ones."""
    folder = tmp_path / "weights" / "starts"
    folder.mkdir(parents=True)
    pictures = {}
    rng = np.random.default_rng(5)
    for place in PLACES:
        for number in (1, 2):
            name = f"{place.name}-{number}"
            pictures[name] = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pictures[name]).save(folder / f"{name}.png")
    monkeypatch.setattr(adapter, "files", lambda package: tmp_path)
    return pictures


def keys_event(*keys: str) -> ControlInput:
    return ControlInput(TRACK, HELD, {"keys": list(keys)})


def engine_of(net: TinyWorldNet, **how: Any) -> InlineEngine:
    return InlineEngine(TinyWorld(net, **how), dtype="float32")


class PlainWorld:
    """Network, sampler and dense attention in one loop: no pages, no engine, one session."""

    def __init__(self, net: TinyWorldNet, start: torch.Tensor, place: int, seed: int) -> None:
        self.net, self.config, self.seed, self.place = net, net.config, seed, place
        c = net.config
        windows = c.layer_windows or (c.window_frames,) * c.layers
        self.caches = [DenseCache(c.sink_frames, window, c.tokens_per_frame, c.dense_frames) for window in windows]
        self.frame, self.heading, self.at = 0, torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 3).double()
        self.past: list[tuple[torch.Tensor, ...]] = []
        still = torch.zeros(1, FRAMES, len(KEYS))
        shown = start.expand(1, FRAMES, -1, -1, -1)
        self._write(shown, torch.ones_like(shown[:, :, :1]), still, chunk=-1)
        self.chunk = 0

    def block(self, keys: torch.Tensor) -> torch.Tensor:
        """The clean picture [F, 3, H, W] of the next block."""
        c = self.config
        shape = (FRAMES, 3, c.image_size, c.image_size)
        x = block_noise(self.seed, self.chunk, 0, shape)[None]
        levels = sampler.schedule(c.sampler_steps, c.sampler_shift)
        for number, level in enumerate(levels[:-1]):
            told = (keys, self._places(), self._pose(keys), *self._sources(keys))
            x0, fine = self.net(x, torch.full((1, FRAMES), level), *told, self._look)
            x = sampler.step(x, x0, level, levels[number + 1])
        x = x.clamp(-1, 1)
        self._write(x, fine, keys, chunk=self.chunk)
        self.chunk += 1
        return x[0]

    def _write(self, x: torch.Tensor, fine: torch.Tensor, keys: torch.Tensor, *, chunk: int) -> None:
        self.at = self._walked(keys)
        seen = torch.cat((x, fine), dim=2)[:, -1]
        self.past.append((seen, self._pose(keys)[:, -1, 1:], self.at, torch.tensor([self.place])))
        level = self.config.context_noise
        if level:
            noise = block_noise(self.seed, chunk, CONTEXT_NOISE_STEP, x.shape[1:])
            x = (1 - level) * x + level * noise
        written: list[tuple[torch.Tensor, torch.Tensor]] = []

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            written.append((k[0], v[0]))
            return self._look(layer, q, k, v)

        def write(layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            written.append((k[0], v[0]))

        self.net.commit(x, torch.full((1, FRAMES), level), keys, self._places(), self._pose(keys), attend, write)
        for cache, (k, v) in zip(self.caches, written, strict=True):
            cache.commit(k, v)
        self.heading = self._pose(keys)[:, -1, 1:]
        self.frame += FRAMES

    def _look(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.caches[layer].attend(q[0], k[0], v[0])[None].to(q.dtype)

    def _walked(self, keys: torch.Tensor) -> torch.Tensor:
        return walked(self.at, keys, self._pose(keys)[..., 1], self.config.turn_steps)[:, -1]

    def _sources(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pictures, *ends = zip(*self.past[-(self.config.window_frames // FRAMES) :], strict=True)
        past = Past(*(torch.stack(part, 1) for part in ends), torch.arange(len(pictures), 0, -1)[None])
        end = (self._pose(keys)[:, -1, 1:], self._walked(keys), torch.tensor([self.place]))
        index, sights = recall(past, *end, self.config.turn_steps)
        return torch.cat([pictures[i] for i in index[0].tolist()])[None, None], sights[:, None]

    def _places(self) -> torch.Tensor:
        return torch.full((1, FRAMES), self.place)

    def _pose(self, keys: torch.Tensor) -> torch.Tensor:
        return poses(torch.tensor([self.frame]), self.heading, keys, self.config.look_limit)


def to_float(picture: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(picture.copy()).permute(2, 0, 1).float() / 127.5 - 1


def held(*keys: str) -> torch.Tensor:
    vector = torch.zeros(1, FRAMES, len(KEYS))
    for key in keys:
        vector[:, :, KEYS.index(key)] = 1
    return vector


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sink_frames": 3, "window_frames": 6},
        {"context_noise": 0.1},
        {"layer_windows": (3, 9)},
        {"dense_frames": 3},
        {"dense_frames": 3, "layer_windows": (6, 9)},
        {"dense_frames": 3, "sink_frames": 3, "window_frames": 12},
    ],
    ids=str,
)
def test_a_rollout_through_the_engine_equals_a_plain_loop_with_dense_attention(
    starts: dict[str, np.ndarray], changes: dict[str, Any]
) -> None:
    """Three sessions share every batch; each is compared with a loop that knows nothing of sessions, pages or batches."""
    from dataclasses import replace

    net = small_net(replace(SMALL, **changes))
    engine = engine_of(net)
    plain = {}
    for seed, name in enumerate("abc"):
        place = PLACES[seed]
        engine.create(name, prompt=place.title, seed=seed)
        start = to_float(starts[f"{place.name}-{seed % 2 + 1}"])
        plain[name] = PlainWorld(net, start, seed, seed)
    pressed: dict[str, tuple[str, ...]] = dict.fromkeys("abc", ())
    for number in range(6):  # the window of three blocks rolls three times
        mover = "abc"[number % 3]
        pressed[mover] = (KEYS[number % 8], KEYS[(3 * number) % 8])
        engine.accept(mover, number, controls=[keys_event(*pressed[mover])])
        if number == 3:
            engine.accept("a", 100, prompt=PLACES[5].title)
            plain["a"].place = 5
        chunks = engine.next_all("abc")
        for name, chunk in zip("abc", chunks, strict=True):
            want = ((plain[name].block(held(*pressed[name])) + 1) * 127.5).round().clamp(0, 255)
            got = chunk.artifacts["frames"].data  # type: ignore[union-attr]
            assert got.dtype == np.uint8
            assert int(np.abs(got.astype(int) - want.numpy().astype(int)).max()) <= 1, (number, name)
    book, storage = engine.runner.book, engine.runner.storage
    for name in "abc":
        frames = book.table(name, "main").retained()
        at = torch.tensor([f.index * SMALL.tokens_per_frame + t for f in frames for t in range(SMALL.tokens_per_frame)])
        for layer, cache in enumerate(plain[name].caches):
            k, v = storage.read(layer, frames)
            assert cache.k is not None
            assert cache.v is not None
            torch.testing.assert_close(k.double(), cache.k[at], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(v.double(), cache.v[at], atol=1e-4, rtol=1e-4)


def test_the_adapter_keeps_the_model_contract(starts: dict[str, np.ndarray]) -> None:
    report = check_model(TinyWorld(small_net()))
    assert report.passed, str(report)


def test_keys_place_seed_and_start_change_the_picture(starts: dict[str, np.ndarray]) -> None:
    def first(
        keys: tuple[str, ...] = (), prompt: str = PLACES[0].title, seed: int = 0, start: str | None = None
    ) -> bytes:
        engine = engine_of(small_net())
        engine.create("a", prompt=prompt, seed=seed, start=start)
        if keys:
            engine.accept("a", 0, controls=[keys_event(*keys)])
        return bytes(engine.next("a").artifacts["frames"].data.tobytes())

    worlds = [first(), first(("w",)), first(prompt=PLACES[1].title), first(seed=2), first(start="dungeon-2")]
    assert len(set(worlds)) == 5


PICTURE_BYTES = 4 * 4 * SMALL.image_size**2
"""What a session keeps of every block beside its keys and values: its last picture, and how fine it is."""


def test_the_start_block_is_given_up_once_it_is_history(starts: dict[str, np.ndarray]) -> None:
    engine = engine_of(small_net())
    view = engine.create("a")
    assert (view.state_bytes, view.pages_used) == (PICTURE_BYTES, FRAMES)


def test_a_session_carries_at_most_what_the_model_declares(starts: dict[str, np.ndarray]) -> None:
    engine, blocks = engine_of(small_net()), SMALL.window_frames // FRAMES
    engine.create("a")
    for _ in range(blocks + 2):
        engine.next("a")
    spec = engine.runner.spec
    past = spec.past_state_bytes  # of the state that a rewind goes back to
    assert engine.view("a").state_bytes == spec.kv.model_owned_bytes_per_session + past
    engine.cycle()
    assert engine.view("a").state_bytes == blocks * PICTURE_BYTES + past


def test_a_saved_session_has_every_picture_once_and_holds_no_more_when_it_is_back(
    starts: dict[str, np.ndarray],
) -> None:
    blocks, back = SMALL.window_frames // FRAMES, 4
    engine = InlineEngine(TinyWorld(small_net()), dtype="float32", rewind_blocks=back)
    engine.create("a")
    for _ in range(blocks + back + 2):
        engine.next("a")
    engine.cycle()
    saved = Snapshot.from_bytes(engine.snapshot("a").to_bytes())
    pictures = [tensor for name, tensor in saved.tensors.items() if ".past." in name]
    assert len(pictures) == blocks + back  # each boundary that can be gone back to has one that the next has not
    held = engine.view("a").state_bytes
    engine.restore(saved, "b")
    engine.cycle()
    assert engine.view("b").state_bytes == held == (blocks + back) * PICTURE_BYTES
    for name in "ab":
        engine.rewind(name, engine.view(name).chunk_index - back)
    went, came = (engine.next(name).artifacts["frames"].data for name in "ab")
    assert np.array_equal(went, came)


@pytest.mark.parametrize(
    "shared",
    [
        {"past.0": "state.9.past.0"},
        {"past.0": "kv.0.0.k"},
        {"past.9": "state.1.past.0"},
        {"pictures": "state.1.past.0"},
    ],
    ids=str,
)
def test_a_saved_session_that_shares_what_it_cannot_is_refused(
    starts: dict[str, np.ndarray], shared: dict[str, str]
) -> None:
    engine = engine_of(small_net())
    engine.create("a")
    engine.next("a")
    engine.next("a")
    saved = engine.snapshot("a")
    worker = saved.header.worker
    present = changed(worker.present, shared=worker.present.shared | shared)
    forged = Snapshot(changed(saved.header, worker=changed(worker, present=present)), saved.tensors)
    with pytest.raises(SnapshotError) as refused:
        engine.restore(forged, "b")
    assert refused.value.code == "snapshot_corrupt"
    engine.next("a")


@pytest.mark.parametrize("shape", [(32, 32, 3), (40, 24, 3), (24, 40, 3), (8, 8, 3), (301, 97, 3)])
def test_a_users_picture_of_any_size_is_cropped_to_its_middle_and_resized(
    starts: dict[str, np.ndarray], shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    smooth = np.add.outer(np.linspace(0, 120, shape[0]), np.linspace(0, 120, shape[1]))[..., None]
    image = (smooth + rng.integers(0, 10, shape)).astype(np.uint8)
    engine = engine_of(small_net())
    engine.create("a", image=image)
    assert engine.next("a").chunk_index == 0
    side = min(shape[:2])
    top, left = (shape[0] - side) // 2, (shape[1] - side) // 2
    crop = Image.fromarray(image[top : top + side, left : left + side])
    want = to_float(np.asarray(crop.resize((32, 32), Image.Resampling.BILINEAR)))
    got = TinyWorld(small_net())._fit(image)
    assert float((got - want).abs().max()) < 2.1 / 127.5  # Pillow rounds to integers after each axis


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((32, 32, 3), np.float32),
        np.zeros((32, 32), np.uint8),
        np.zeros((32, 32, 4), np.uint8),
        np.zeros((7, 32, 3), np.uint8),
        np.zeros((0, 0, 3), np.uint8),
        np.zeros((1, 32, 32, 3), np.uint8),
        [[0, 0, 0]],
        b"\x89PNG",
        "snow-1",
    ],
    ids=lambda i: f"{type(i).__name__}{getattr(i, 'shape', '')}",
)
def test_a_picture_that_is_none_is_refused_and_takes_no_place(starts: dict[str, np.ndarray], image: Any) -> None:
    engine = engine_of(small_net())
    with pytest.raises(ArgumentError) as refused:
        engine.create("a", image=image)
    assert (refused.value.code, refused.value.path) == ("image_invalid", "image")
    assert engine.runner.book.sessions == ()


def test_a_start_is_known_by_name_and_not_given_together_with_an_image(starts: dict[str, np.ndarray]) -> None:
    engine = engine_of(small_net())
    assert engine.create("a", start="snow-2").prompt == PLACES[1].title
    with pytest.raises(ArgumentError, match="known: dungeon-1") as unknown:
        engine.create("b", start="moon-1")
    assert unknown.value.path == "start"
    with pytest.raises(ArgumentError, match="not both"):
        engine.create("b", start="snow-1", image=np.zeros((32, 32, 3), np.uint8))
    assert TinyWorld(small_net()).spec.starts == tuple(starts)
    png = TinyWorld(small_net()).start_image("snow-2")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png))), starts["snow-2"])
    for wrong in ("../config", "snow-9", ""):
        with pytest.raises(KeyError):
            TinyWorld(small_net()).start_image(wrong)


def test_without_bundled_pictures_a_world_starts_from_grey(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(adapter, "files", lambda package: tmp_path)
    model = TinyWorld(small_net())
    assert model.spec.starts == ()
    engine = InlineEngine(model, dtype="float32")
    engine.create("a", prompt="snow")
    assert engine.next("a").chunk_index == 0


def test_an_event_is_understood_by_title_or_refused(starts: dict[str, np.ndarray]) -> None:
    engine = engine_of(small_net())
    engine.create("a")
    assert engine.accept("a", 0, prompt="winter").understood_prompt == "Snowy valley"
    with pytest.raises(ArgumentError) as refused:
        engine.accept("a", 1, prompt="a spaceship")
    assert refused.value.code == "prompt_unknown"
    assert engine.accept("a", 1, controls=[keys_event("w")]).understood_prompt is None


@pytest.mark.parametrize("steps", [0, 65, -1])
def test_the_number_of_steps_has_bounds(starts: dict[str, np.ndarray], steps: int) -> None:
    with pytest.raises(ConfigError):
        TinyWorld(small_net(), options=Options(steps=steps))


@pytest.mark.parametrize("fps", [0, -8.0, 1000])
def test_the_frame_rate_has_bounds(fps: float) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(model="tiny-world", options={"fps": fps}).options_as(Options)
    assert refused.value.path == "options.fps"


@pytest.mark.parametrize("steps", [1, 3])
def test_the_number_of_steps_is_the_number_of_passes(starts: dict[str, np.ndarray], steps: int) -> None:
    seen: list[str] = []
    engine = engine_of(small_net(), options=Options(steps=steps, fps=5.0))
    engine.create("a")
    engine.runner.faults = lambda point, sessions: seen.append(point)
    chunk = engine.next("a")
    assert seen == [*(f"forward:{n + 1}" for n in range(steps)), "decode", "sync", "commit"]
    seen.clear()
    engine.rest()
    assert seen == ["prefill:1", "sync", "commit"]
    assert chunk.artifacts["frames"].fps == 5.0
