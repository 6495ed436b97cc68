"""The network of tiny-world: causality, rows, positions, configuration and sampler."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from realtime_omni.models.common.keys import KEYS  # noqa: E402
from realtime_omni.models.tiny_world import sampler  # noqa: E402
from realtime_omni.models.tiny_world.network import (  # noqa: E402
    COARSE,
    FINE,
    KEPT,
    NetworkConfig,
    TinyWorldNet,
    gelu,
    poses,
    rotate,
)
from realtime_omni.models.tiny_world.places import PLACES, place_index  # noqa: E402
from realtime_omni.models.tiny_world.recall import SOURCES  # noqa: E402

SMALL = NetworkConfig(
    image_size=32,
    patch=8,
    width=64,
    layers=3,
    heads=2,
    mlp_width=96,
    refine_channels=8,
    detail_channels=8,
    window_frames=9,
)
WINDOW_BLOCKS = SMALL.window_frames // SMALL.frames_per_block


def small_net(seed: int = 0) -> TinyWorldNet:
    """A net whose zero-initialised parts are filled, so that every path matters."""
    torch.manual_seed(seed)
    net = TinyWorldNet(SMALL).eval()
    for parameter in net.parameters():
        if parameter.abs().max() == 0:
            torch.nn.init.normal_(parameter, std=0.1)
    return net


def inputs(rows: int, frames: int, first_frame: int = 0, seed: int = 1) -> list[torch.Tensor]:
    """Of `TinyWorldNet.forward`, all but `attend`; the blocks' sources are random pictures from near where they look."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, frames, 3, SMALL.image_size, SMALL.image_size, generator=generator)
    t = torch.rand(rows, frames, generator=generator)
    keys = torch.randint(0, 2, (rows, frames, SMALL.num_keys), generator=generator).float()
    place = torch.randint(0, SMALL.num_places, (rows, frames), generator=generator)
    first, heading = torch.full((rows,), first_frame), torch.zeros(rows, 2, dtype=torch.long)
    pose = poses(first, heading, keys, SMALL.look_limit)
    blocks = frames // SMALL.frames_per_block
    before = torch.rand(rows, blocks, SOURCES, 4, SMALL.image_size, SMALL.image_size, generator=generator)
    before[..., 3, :, :] = 1  # as fine as drawn
    headings = pose[:, :: SMALL.frames_per_block, None, 1:].float() + torch.tensor([[0.0, 0.0], [-2.0, 1.0]])
    way = torch.tensor([[0.0, 0.0, 1.0, 1.0], [3.0, -1.0, 1.0, 0.0]]).expand(rows, blocks, -1, -1)
    return [x, t, keys, place, pose, before, torch.cat((headings, way), dim=-1)]


def plain(layer, q, k, v):
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def play(net: TinyWorldNet, *given) -> torch.Tensor:
    """The pictures and, as a fourth channel, how fine they are."""
    return torch.cat(net(*given), dim=2)


def masked(frames: int):
    """Block i sees blocks i - WINDOW_BLOCKS + 1 .. i, as one dense mask over the clip."""
    block = torch.arange(frames * SMALL.tokens_per_frame) // (SMALL.frames_per_block * SMALL.tokens_per_frame)
    behind = block[:, None] - block[None]
    mask = (behind >= 0) & (behind < WINDOW_BLOCKS)

    def attend(layer, q, k, v):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

    return attend


def cached(history: list[tuple[torch.Tensor, torch.Tensor]]):
    """Attend to a list of (k, v) per layer and append the block's own."""

    def attend(layer, q, k, v):
        past = history[layer][-(WINDOW_BLOCKS - 1) :]
        history[layer].append((k, v))
        k, v = (torch.cat([pair[i] for pair in past] + [own], dim=1) for i, own in enumerate((k, v)))
        return plain(layer, q, k, v)

    return attend


@torch.inference_mode()
def test_a_block_by_block_rollout_with_a_cache_equals_one_masked_pass_over_the_clip():
    net, frames = small_net(), 6 * SMALL.frames_per_block
    given = inputs(2, frames)
    whole = play(net, *given, masked(frames))
    history = [[] for _ in range(SMALL.layers)]
    for block in range(6):
        part = slice(block * SMALL.frames_per_block, (block + 1) * SMALL.frames_per_block)
        one = [value[:, part] for value in given[:5]] + [value[:, block : block + 1] for value in given[5:]]
        got = play(net, *one, cached(history))
        torch.testing.assert_close(got, whole[:, part], atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_batch_of_rows_at_different_frames_equals_each_row_alone():
    net = small_net()
    given = inputs(4, SMALL.frames_per_block)
    apart = torch.tensor([[0, 0, 0], [3, 5, 1], [300, -9, -2], [99_999, 1000, 0]])[:, None]
    given[4], given[6][..., :2] = given[4] + apart, given[6][..., :2] + apart[:, None, :, 1:]
    together = play(net, *given, plain)
    for row in range(4):
        alone = play(net, *[value[row : row + 1] for value in given], plain)
        part = slice(row, row + 1)
        torch.testing.assert_close(alone, together[part], atol=1e-5, rtol=0)


@torch.inference_mode()
def test_a_session_at_frame_100_000_sees_what_one_at_frame_0_sees():
    """Positions are relative: moving or turning the whole window changes nothing but rounding."""
    net = small_net()
    given, apart = inputs(1, 2 * SMALL.frames_per_block), torch.tensor([100_000, 10_007, 0])
    near = play(net, *given, plain)
    given[4], given[6][..., :2] = given[4] + apart, given[6][..., :2] + apart[1:]
    far = play(net, *given, plain)
    assert torch.isfinite(far).all()
    torch.testing.assert_close(far, near, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_full_turn_is_no_turn_and_a_small_one_is_seen():
    net = small_net()
    x, t, keys, place, pose, *before = inputs(1, 2 * SMALL.frames_per_block)
    later = torch.zeros_like(pose)
    later[:, SMALL.frames_per_block :, 1] = 1
    shown = play(net, x, t, keys, place, pose, *before, plain)
    around = play(net, x, t, keys, place, pose + SMALL.turn_steps * later, *before, plain)
    torch.testing.assert_close(around, shown, atol=1e-4, rtol=0)
    assert (play(net, x, t, keys, place, pose + later, *before, plain) - shown).abs().max() > 1e-3


def test_where_the_moved_picture_is_trusted_it_is_what_is_shown():
    net, given = small_net(), inputs(1, SMALL.frames_per_block)
    with torch.no_grad():
        for part in (net.head.to_motion, net.head.to_rgb):
            part.weight.zero_()
            part.bias.zero_()
        given[4][..., 1:] = 0  # it looks where it looked
        given[6][..., :2] = 0
        for source in range(SOURCES):
            net.head.to_rgb.bias[12:] = -30.0
            net.head.to_rgb.bias[12 + 4 * source : 16 + 4 * source] = 30.0
            shown, fine = net(*given, plain)
            torch.testing.assert_close(shown, given[5][:, :, source, :3].expand(1, 3, -1, -1, -1), atol=1e-5, rtol=0)
            torch.testing.assert_close(fine, torch.full_like(fine, KEPT), atol=1e-5, rtol=0)
        given[6][:, :, 1, 4] = 0  # and what is none is not shown
        assert (net(*given, plain)[0] - given[5][:, :, 1, :3]).abs().max() > 0.1


@torch.inference_mode()
def test_what_was_moved_too_often_is_drawn_anew_and_what_nobody_walks_past_is_not():
    net, given = small_net(), inputs(1, SMALL.frames_per_block)
    net.head.to_rgb.weight.zero_()
    net.head.to_rgb.bias[:12], net.head.to_rgb.bias[12:] = -0.5, 30.0
    for part in (net.head.to_motion.weight, net.head.to_motion.bias, given[2]):
        part.zero_()
    given[2][..., KEYS.index("w")] = 1
    given[4][..., 1:], given[6][..., :2] = 0, 0
    given[6][:, :, 1] = 0  # the last picture alone
    last = given[5][0, 0, 0, :3].expand(3, -1, -1, -1)
    for was, share in ((FINE / KEPT, 1.0), ((COARSE + FINE) / 2 / KEPT, 0.5), (COARSE / KEPT, 0.0)):
        given[5][..., 3, :, :] = was
        shown, fine = (part[0] for part in net(*given, plain))
        torch.testing.assert_close(shown, share * last - (1 - share) * 0.5, atol=1e-5, rtol=0)
        torch.testing.assert_close(fine, torch.full_like(fine, share * was * KEPT + 1 - share), atol=1e-5, rtol=0)
    given[2].zero_()
    given[5][..., 3, :, :] = FINE
    shown, fine = (part[0] for part in net(*given, plain))
    torch.testing.assert_close(shown, last, atol=1e-5, rtol=0)
    torch.testing.assert_close(fine, torch.full_like(fine, FINE), atol=1e-5, rtol=0)


@torch.inference_mode()
def test_who_comes_back_without_a_step_sees_what_was_there_and_not_what_the_last_picture_has_of_it():
    net, given = small_net(), inputs(1, SMALL.frames_per_block)
    net.head.to_rgb.weight.zero_()
    net.head.to_rgb.bias[:12], net.head.to_rgb.bias[12:] = 0.0, 10.0  # both are trusted alike
    net.head.to_motion.bias.fill_(0.4)  # and a motion is guessed
    given[2].zero_()
    given[4][..., 1:], given[6][..., :2] = 0, 0
    last, earlier = given[5][0, 0, :, :3]
    given[6][:, :, 1, 5] = 1
    torch.testing.assert_close(net(*given, plain)[0][0], earlier.expand(3, -1, -1, -1), atol=1e-2, rtol=0)
    given[2][:, 1, KEYS.index("w")] = 1
    shown = net(*given, plain)[0][0]
    torch.testing.assert_close(shown[0], earlier, atol=1e-2, rtol=0)
    assert min((shown[1:] - one).abs().mean() for one in (last, earlier)) > 0.1


def test_poses_follow_the_keys_and_looking_stops_at_its_limit():
    keys = torch.zeros(1, 9, 8)
    keys[0, :3, KEYS.index("l")] = keys[0, 3, KEYS.index("j")] = 1
    keys[0, :8, KEYS.index("i")] = keys[0, 8, KEYS.index("k")] = 1
    got = poses(torch.tensor([30]), torch.tensor([[-2, 1]]), keys, look_limit=6)
    assert got[0, :, 0].tolist() == list(range(30, 39))
    assert got[0, :, 1].tolist() == [-1, 0, 1, 0, 0, 0, 0, 0, 0]
    assert got[0, :, 2].tolist() == [2, 3, 4, 5, 6, 6, 6, 6, 5]


def test_rotation_by_a_right_angle_swaps_the_pair():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0])  # pairs (channel 0, channel 2) and (1, 3)
    cos, sin = torch.zeros(4), torch.tensor([-1.0, -1.0, 1.0, 1.0])
    assert rotate(x, cos, sin).tolist() == [0.0, -1.0, 1.0, 0.0]


def test_gelu_is_torch_s_tanh_form():
    x = torch.linspace(-9, 9, 1001)
    torch.testing.assert_close(gelu(x), functional.gelu(x, approximate="tanh"), atol=1e-6, rtol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("changed", ["keys", "place", "t", "before", "sights"])
def test_every_condition_reaches_the_picture(changed):
    net = small_net()
    values = dict(
        zip(("x", "t", "keys", "place", "pose", "before", "sights"), inputs(1, SMALL.frames_per_block), strict=True)
    )
    before = play(net, *values.values(), plain)
    other = {name: 1 - values[name] for name in ("keys", "t", "before")}
    other["sights"] = values["sights"] + torch.tensor([0.0, 0.0, 5.0, 5.0, 0.0, 0.0])
    other["place"] = (values["place"] + 1) % SMALL.num_places
    after = play(net, *(values | {changed: other[changed]}).values(), plain)
    assert (after - before).abs().max() > 1e-3


@torch.inference_mode()
def test_the_commit_pass_shows_attend_the_same_keys_and_values_as_the_full_pass():
    net = small_net()
    full, commit = ([[] for _ in range(SMALL.layers)] for _ in range(2))
    given = inputs(1, SMALL.frames_per_block)
    given[6][:, :, 1] = 0  # nothing recalled: a clean pass is told of nothing
    play(net, *given, cached(full))
    net.commit(*given[:5], cached(commit), lambda layer, k, v: commit[layer].append((k, v)))
    for a, b in zip(full, commit, strict=True):
        assert torch.equal(a[0][0], b[0][0])
        assert torch.equal(a[0][1], b[0][1])


def test_a_configuration_survives_json_and_refuses_unknown_fields():
    assert NetworkConfig.from_json(SMALL.to_json()) == SMALL
    with pytest.raises(TypeError):
        NetworkConfig.from_json('{"layers": 2, "colour": 1}')
    with pytest.raises(ValueError, match="patch"):
        NetworkConfig(image_size=100)


def test_the_default_network_fits_fifteen_megabytes_of_float16():
    assert sum(p.numel() for p in TinyWorldNet(NetworkConfig()).parameters()) * 2 < 15e6


def test_the_schedule_falls_from_one_to_zero_and_is_shifted_towards_noise():
    assert sampler.schedule(1, 2.0) == (1.0, 0.0)
    assert sampler.schedule(2, 2.0) == pytest.approx((1.0, 2 * 0.5 / 1.5, 0.0))
    assert sampler.schedule(4, 1.0) == pytest.approx((1.0, 0.75, 0.5, 0.25, 0.0))
    with pytest.raises(ValueError, match="steps"):
        sampler.schedule(0, 1.0)


def test_a_sampler_that_knows_the_picture_arrives_at_it_from_any_noise():
    picture, x = torch.full((1, 3, 3, 4, 4), 0.25), torch.randn(1, 3, 3, 4, 4)
    noise, levels = x.clone(), sampler.schedule(5, 3.0)
    for level, following in itertools.pairwise(levels):
        x = sampler.step(x, picture, level, following)
        expected = sampler.add_noise(picture, noise, torch.full((1, 3), following))
        torch.testing.assert_close(x, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(x, picture)


def test_places_have_distinct_names_and_words_and_the_keys_are_the_eight_of_the_protocol():
    words = [word for place in PLACES for word in place.words]
    assert len(PLACES) == NetworkConfig().num_places >= 6
    assert len(set(words)) == len(words)
    assert [place_index(place.name) for place in PLACES] == list(range(len(PLACES)))
    assert "".join(KEYS) == "wasdijkl"
