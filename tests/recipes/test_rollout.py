"""The reference loop's kept rows: every layer sees its own window of them, at each row's own place in its clip."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet  # noqa: E402
from recipes.tiny_world.rollout import CachedPass, KeptRows, ReferencePlay, draw_noise  # noqa: E402
from recipes.tiny_world.teacher import TeacherPass, dense_attend  # noqa: E402
from recipes.tiny_world.train import tiny_config  # noqa: E402

PER = 3


@pytest.mark.parametrize(
    ("small", "near"), [(PER, None), (2 * PER, None), (2 * PER, PER), (3 * PER, 2 * PER), (PER, 2 * PER)]
)
def test_a_pass_sees_in_every_layer_what_a_dense_cache_of_its_window_sees(small: int, near: int | None):
    """Two rows, of which one begins later, until the ring has gone round."""
    net = network(small, near)
    config = net.config
    kept = KeptRows.empty(config, 2, "cpu", torch.float32)
    caches = [fresh(config), fresh(config)]
    place = torch.zeros(2, PER, dtype=torch.long)
    with torch.inference_mode():
        for number in range(config.window_frames // PER + 2):
            if number == 2:
                kept.reset(torch.tensor([False, True]))
                caches[1] = fresh(config)
            x = torch.randn(2, PER, 3, config.image_size, config.image_size)
            keys = (torch.rand(2, PER, 8) < 0.2).float()
            pose = kept.pose(keys)
            told = (x, torch.full((2, PER), 0.3), keys, place, pose)
            picture, k, v = CachedPass(net)(*told, kept.k, kept.v, kept.valid)
            for row in range(2):
                alone = [part[row : row + 1] for part in told]
                plain = net(*alone, caches[row].attend)
                torch.testing.assert_close(picture[row], plain[0], rtol=0, atol=1e-4)
                caches[row].blocks.append((k[:, row], v[:, row]))
            kept.write(k, v, pose)


@pytest.mark.parametrize("near", [None, PER, 2 * PER])
def test_a_play_is_the_pass_over_kept_rows_from_pure_noise(near: int | None):
    net = network(2 * PER, near)
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


@pytest.mark.parametrize("near", [None, 2 * PER])
def test_the_masks_of_training_show_a_block_what_a_session_shows_it(near: int | None):
    """Every noised block of a clip, predicted at once, is what the pass over kept rows predicts block by block."""
    net, blocks = network(2 * PER, near), 6
    config, size = net.config, net.config.image_size
    clip, noised = torch.randn(2, 1, blocks * PER, 3, size, size).unbind(0)
    keys, place = (torch.rand(1, blocks * PER, 8) < 0.2).float(), torch.zeros(1, blocks * PER, dtype=torch.long)
    kept, expected = KeptRows.empty(config, 1, "cpu", torch.float32), []
    with torch.inference_mode():
        for number in range(blocks):
            part = slice(number * PER, (number + 1) * PER)
            told = (keys[:, part], place[:, part], kept.pose(keys[:, part]), kept.k, kept.v, kept.valid)
            expected.append(CachedPass(net)(noised[:, part], torch.ones(1, PER), *told)[0])
            kept.write(*CachedPass(net)(clip[:, part], torch.zeros(1, PER), *told)[1:], told[2])
        level = torch.ones(1, (blocks - 1) * PER)
        model = TeacherPass(net, dense_attend(config, blocks, "cpu"))
        found = model(clip[:, :-PER], 0 * level, noised[:, PER:], level, keys, place)
    torch.testing.assert_close(found, torch.cat(expected[1:], dim=1), rtol=0, atol=1e-4)


def network(small: int, near: int | None) -> TinyWorldNet:
    """A tiny network whose first layer sees `small` frames, the others its window, `near` frames of it whole."""
    torch.manual_seed(0)
    config = tiny_config()
    windows = (small, *[config.window_frames] * (config.layers - 1))
    net = TinyWorldNet(dataclasses.replace(config, layer_windows=windows, dense_frames=near)).eval()
    for layer in net.blocks:
        torch.nn.init.normal_(layer.out.weight, std=0.1)  # zero at birth: attention would not matter
    return net


def fresh(config: NetworkConfig) -> History:
    return History(config, [])


@dataclasses.dataclass
class History:
    """All blocks of one row, and the rule of what a layer sees, frame by frame."""

    config: NetworkConfig
    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of all layers, each [layers, T, heads, head_dim]."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        config, now = self.config, len(self.blocks) * PER
        near = config.window_frames if config.dense_frames is None else config.dense_frames
        frames = [
            frame
            for frame in range(now)
            if frame >= now + PER - config.layer_windows[layer]
            and (frame >= now + PER - near or frame % PER == PER - 1)
        ]
        seen = []
        for kind, own in enumerate((k, v)):
            parts = [self.blocks[f // PER][kind][layer].unflatten(0, (PER, -1))[f % PER] for f in frames]
            seen.append(torch.cat((*parts, own[0]))[None].transpose(1, 2))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *seen).transpose(1, 2)
