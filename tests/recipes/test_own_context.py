"""Stage C of tiny-world: what is played, what is asked of it, and which weights count as better."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from realtime_omni.models.tiny_world.network import TinyWorldNet  # noqa: E402
from recipes.tiny_world.candidates import blends, goodness  # noqa: E402
from recipes.tiny_world.own_context import Balance, Play, block_weights, own_context_loss  # noqa: E402
from recipes.tiny_world.rollout import CachedPass  # noqa: E402
from recipes.tiny_world.teacher import TeacherPass, dense_attend  # noqa: E402
from recipes.tiny_world.train import tiny_config  # noqa: E402

PER, BLOCKS, ROWS = 3, 5, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def net() -> TinyWorldNet:
    torch.manual_seed(0)
    net = TinyWorldNet(tiny_config())
    for layer in net.blocks:
        torch.nn.init.normal_(layer.out.weight, std=0.1)  # zero at birth: attention would not matter
    return net


@pytest.fixture(scope="module")
def clip() -> tuple:
    torch.manual_seed(1)
    size = tiny_config().image_size
    truth = torch.rand(ROWS, BLOCKS * PER, 3, size, size) * 2 - 1
    keys = (torch.rand(ROWS, BLOCKS * PER, 8) < 0.2).float()
    return truth, keys, torch.zeros(ROWS, BLOCKS * PER, dtype=torch.long)


def test_a_row_follows_the_truth_for_its_given_blocks_and_is_its_own_after(net: TinyWorldNet, clip: tuple):
    truth, keys, place = clip
    played = Play(CachedPass(net), net.config, ROWS, CPU).clip(truth, keys, place, torch.tensor([1, 4]))
    same = [[torch.equal(played[row, f], truth[row, f]) for f in range(BLOCKS * PER)] for row in range(ROWS)]
    assert same == [[f < given * PER for f in range(BLOCKS * PER)] for given in (1, 4)]


def test_the_truth_has_full_weight_for_five_own_blocks_and_three_tenths_less_each_after():
    weights = block_weights(torch.tensor([1, 3]), 9)
    assert weights[0].tolist() == pytest.approx([1, 1, 1, 1, 1, 0.7, 0.49, 0.343, 0.2401])
    assert weights[1].tolist() == pytest.approx([1, 1, 1, 1, 1, 1, 1, 0.7, 0.49])


def test_the_loss_trains_the_clean_pass_over_own_pictures(net: TinyWorldNet, clip: tuple, monkeypatch):
    """A noised block is predicted from the played context: another context, another loss, and a gradient into it."""
    truth, keys, place = clip
    monkeypatch.setattr("recipes.tiny_world.own_context.TRUE_ROWS", 0.0)
    model = TeacherPass(net, dense_attend(net.config, BLOCKS, CPU))
    losses = []
    for played in (truth, -truth):
        context = played.clone().requires_grad_()
        torch.manual_seed(2)
        loss, _ = own_context_loss(model, truth, context, keys, place, torch.tensor([1, 1]), PER, 1.0)
        losses.append(loss.item())
        (into,) = torch.autograd.grad(loss, context)
        reached = into.abs().sum((0, 2, 3, 4)) > 0
        assert reached[: -2 * PER].all(), "blocks that a later block sees"
        assert not reached[-PER:].any(), "the last block is never context"
    assert losses[0] != losses[1]


def test_a_shortfall_from_a_goal_weighs_more_than_what_lies_above_it():
    def scores(six: float, twelve: float, sharp: float) -> dict:
        return {"psnr_db": {"6": six, "12": twelve}, "sharpness_ratio": {"12": sharp, "48": sharp}}

    assert goodness(scores(24, 21, 0.8)) == 0
    assert goodness(scores(25, 20, 0.8)) == pytest.approx(-0.9)
    assert goodness(scores(24, 21, 0.62)) == pytest.approx(-2.0)
    walked = scores(24, 21, 0.8) | {"walks": {"collapsed_share": 0.5}}
    assert goodness(walked) == pytest.approx(-1.5)


def test_too_little_sharpness_raises_its_weight_and_too_much_lowers_it_slowly():
    balance = Balance()
    balance.steer(sharp_12=0.88, sharp_48=0.70)
    assert (balance.detail, balance.push) == (pytest.approx(0.7), pytest.approx(1.3))
    for _ in range(20):
        balance.steer(sharp_12=2.0, sharp_48=0.0)
    assert (balance.detail, balance.push) == (0.2, 4.0)


def test_blends_lie_on_the_line_between_start_and_tuned():
    start, tuned = {"a": torch.tensor([0.0, 2.0])}, {"a": torch.tensor([4.0, 2.0])}
    assert {name: value["a"].tolist() for name, value in blends(start, tuned, (0.25, 0.5)).items()} == {
        "blend_0.25": [1.0, 2.0],
        "blend_0.5": [2.0, 2.0],
    }
