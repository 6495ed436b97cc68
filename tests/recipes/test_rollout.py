"""The reference loop's kept rows: every layer sees its own window of them, at each row's own place in its clip."""

from __future__ import annotations

import dataclasses
import math

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from realtime_omni.models.common.keys import KEYS  # noqa: E402
from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet  # noqa: E402
from realtime_omni.models.tiny_world.places import place_index  # noqa: E402
from recipes.tiny_world.evaluate import WEIGHTS, load_net  # noqa: E402
from recipes.tiny_world.rollout import (  # noqa: E402
    CachedPass,
    KeptRows,
    ReferencePlay,
    clean,
    draw_noise,
    reference_rollout,
)
from recipes.tiny_world.teacher import TeacherPass, dense_attend, sources  # noqa: E402
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
            told = (x, torch.full((2, PER), 0.3), *kept.told(keys, place))
            picture, fine, k, v = CachedPass(net)(*told)
            for row in range(2):
                alone = [part[row : row + 1] for part in told[:-3]]
                plain = net(*alone, caches[row].attend)
                torch.testing.assert_close((picture[row], fine[row]), (plain[0][0], plain[1][0]), rtol=0, atol=1e-4)
                caches[row].blocks.append((k[:, row], v[:, row]))
            kept.write(k, v, told[2:], picture, fine)


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
            told = kept.told(keys, place)
            noise = draw_noise(shape, seed, number, 0, "cpu")
            expected, fine, *_ = CachedPass(net)(noise, torch.ones(rows, PER), *told)
            if number == 0:
                expected, fine = shown, torch.ones_like(fine)
            torch.testing.assert_close(shown, expected.clamp(-1, 1), rtol=0, atol=1e-4)
            kept.write(*CachedPass(net)(shown, torch.zeros(rows, PER), *clean(told))[2:], told, shown, fine)
        assert fine.min() < 1  # something was moved


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
            told = kept.told(keys[:, part], place[:, part])
            expected.append(CachedPass(net)(noised[:, part], torch.ones(1, PER), *told)[0])
            given = (clip[:, part], torch.ones_like(clip[:, part, :1]))
            kept.write(*CachedPass(net)(given[0], torch.zeros(1, PER), *clean(told))[2:], told, *given)
        level = torch.ones(1, (blocks - 1) * PER)
        model = TeacherPass(net, dense_attend(config, blocks, "cpu"))
        index, sights = sources(config, keys, place)
        before = clip[:, index[0] * PER + PER - 1]
        before = torch.cat((before, torch.ones_like(before[..., :1, :, :])), dim=-3)
        assert sights[0, 2:, 1, 4].any()  # something was recalled
        found, *_ = model(clip[:, :-PER], 0 * level, noised[:, PER:], level, keys, place, before, sights)
    torch.testing.assert_close(found, torch.cat(expected[1:], dim=1), rtol=0, atol=1e-4)


def network(small: int, near: int | None) -> TinyWorldNet:
    """A tiny network whose first layer sees `small` frames, the others its window, `near` frames of it whole."""
    torch.manual_seed(0)
    config = tiny_config()
    windows = (small, *[config.window_frames] * (config.layers - 1))
    net = TinyWorldNet(dataclasses.replace(config, layer_windows=windows, dense_frames=near)).eval()
    for layer in net.blocks:
        torch.nn.init.normal_(layer.out.weight, std=0.1)  # zero at birth: attention would not matter
    for part in (net.head.to_motion.weight, net.head.to_rgb.weight, net.recalled.weight):  # nor would other pictures
        torch.nn.init.normal_(part, std=0.1)
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


@pytest.mark.parametrize("turns", [["l"] * 72, ["l"] * 9 + ["j"] * 9], ids=["a full turn", "there and back"])
def test_who_turns_on_the_spot_sees_what_was_there_again(turns: list[str]):
    """The weights that ship, from their first start picture; a view of another place has 10 to 15 dB."""
    net = load_net(WEIGHTS, "cpu")
    config = net.config
    picture = Image.open(WEIGHTS / "starts" / "garden-1.png").convert("RGB")
    shown = np.array(picture.resize((config.image_size, config.image_size)))
    start = torch.from_numpy(shown).permute(2, 0, 1)[None, None] / 127.5 - 1
    keys = torch.zeros(1, PER + len(turns), 8)
    for frame, key in enumerate(turns):
        keys[0, PER + frame, KEYS.index(key)] = 1
    place = torch.full((1, keys.shape[1]), place_index("garden"))
    walk = reference_rollout(net)(start.expand(-1, PER, -1, -1, -1), keys, place, 0)
    error = (walk[:, -1] - start[:, 0]).square().mean()
    away = (walk[:, len(turns) // 2] - start[:, 0]).square().mean()
    assert 10 * math.log10(4 / error) > 25
    assert 10 * math.log10(4 / away) < 20
