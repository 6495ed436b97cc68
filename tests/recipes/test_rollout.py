"""The reference loop's kept rows: every layer sees its own window of them, at each row's own place in its clip."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from kv.dense_reference import DenseCache  # noqa: E402
from realtime_omni.models.tiny_world.network import TinyWorldNet  # noqa: E402
from recipes.tiny_world.rollout import CachedPass, KeptRows, ReferencePlay, draw_noise  # noqa: E402
from recipes.tiny_world.train import tiny_config  # noqa: E402

PER = 3


@pytest.mark.parametrize("small", [PER, 2 * PER])
def test_a_pass_sees_in_every_layer_what_a_dense_cache_of_its_window_sees(small: int):
    """Two rows, of which one begins later, until the ring has gone round."""
    net = network(small)
    config, windows = net.config, net.config.layer_windows
    kept = KeptRows.empty(config, 2, "cpu", torch.float32)
    caches = [[DenseCache(0, window, config.tokens_per_frame) for window in windows] for _ in range(2)]
    place = torch.zeros(2, PER, dtype=torch.long)
    with torch.inference_mode():
        for number in range(config.window_frames // PER + 2):
            if number == 2:
                kept.reset(torch.tensor([False, True]))
                caches[1] = [DenseCache(0, window, config.tokens_per_frame) for window in windows]
            x = torch.randn(2, PER, 3, config.image_size, config.image_size)
            keys = (torch.rand(2, PER, 8) < 0.2).float()
            pose = kept.pose(keys)
            told = (x, torch.full((2, PER), 0.3), keys, place, pose)
            picture, k, v = CachedPass(net)(*told, kept.k, kept.v, kept.valid)
            for row in range(2):
                alone = [part[row : row + 1] for part in told]
                plain = net(*alone, lambda layer, q, k, v, row=row: dense(caches[row][layer], q, k, v))
                torch.testing.assert_close(picture[row], plain[0], rtol=0, atol=1e-4)
                for layer, cache in enumerate(caches[row]):
                    cache.commit(k[layer, row], v[layer, row])
            kept.write(k, v, pose)


def test_a_play_is_the_pass_over_kept_rows_from_pure_noise():
    net = network(2 * PER)
    config, rows, seed = net.config, 2, 5
    play, kept = ReferencePlay(net, rows, seed), KeptRows.empty(config, rows, "cpu", torch.float32)
    place, shape = torch.ones(rows, PER, dtype=torch.long), (rows, PER, 3, config.image_size, config.image_size)
    with torch.inference_mode():
        for number in range(config.window_frames // PER + 2):
            keys = (torch.rand(rows, PER, 8) < 0.2).float()
            shown = play.block(keys, place, torch.zeros(shape) if number == 0 else None)
            told = (keys, place, kept.pose(keys), kept.k, kept.v, kept.valid)
            noise = draw_noise(shape, seed, number, 0, "cpu")
            expected = CachedPass(net)(noise, torch.ones(rows, PER), *told)[0].clamp(-1, 1) if number else shown
            torch.testing.assert_close(shown, expected, rtol=0, atol=1e-4)
            kept.write(*CachedPass(net)(shown, torch.zeros(rows, PER), *told)[1:], kept.pose(keys))


def network(small: int) -> TinyWorldNet:
    """A tiny network whose first layer sees `small` frames, the others its window."""
    torch.manual_seed(0)
    config = tiny_config()
    windows = (small, *[config.window_frames] * (config.layers - 1))
    net = TinyWorldNet(dataclasses.replace(config, layer_windows=windows)).eval()
    for layer in net.blocks:
        torch.nn.init.normal_(layer.out.weight, std=0.1)  # zero at birth: attention would not matter
    return net


def dense(cache: DenseCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return cache.attend(q[0], k[0], v[0])[None].to(q.dtype)
