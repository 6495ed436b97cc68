"""Step rules on velocity fields whose solution is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from realtime_omni.models.common.vla.flow import integrate
from realtime_omni.rtc.rules import Guided, Jacobian, OverlapRamp, TrainedPrefix, ramp
from realtime_omni.rtc.weights import guidance_weight

B, H, A, STEPS = 2, 5, 3, 8


def noise() -> Tensor:
    return torch.randn(B, H, A, generator=torch.Generator().manual_seed(0))


def old() -> Tensor:
    return torch.randn(B, H, A, generator=torch.Generator().manual_seed(1))


def weights() -> Tensor:
    return torch.tensor([[1.0, 1.0, 0.6, 0.2, 0.0], [1.0, 0.5, 0.0, 0.0, 0.0]])


@pytest.mark.parametrize("jacobian", list(Jacobian))
def test_a_field_at_rest_relaxes_geometrically_towards_the_old_chunk(jacobian: Jacobian) -> None:
    """v = 0: the estimate is x, its Jacobian 1. With limit 1 every guidance weight is 1 (the formula's minimum is 2),
    so each of n steps shrinks the distance by 1 - w / n: x_0 = old + (noise - old) (1 - w / n)^n."""
    rule = Guided(old(), weights(), jacobian, limit=1.0)
    got = integrate(lambda x, t: x * 0.0, noise(), STEPS, rule)
    expected = old() + (noise() - old()) * ((1 - weights() / STEPS) ** STEPS)[..., None]
    assert (got - expected).abs().max() <= 1e-6


@pytest.mark.parametrize("jacobian", list(Jacobian))
def test_a_linear_field_follows_the_hand_derived_recursion(jacobian: Jacobian) -> None:
    """v = k x + b: the estimate is (1 - t k) x - t b and its Jacobian the number 1 - t k; recursion in float64."""
    k, b = 0.7, -0.3
    rule = Guided(old(), weights(), jacobian)
    got = integrate(lambda x, t: k * x + b, noise(), STEPS, rule)
    x, w = noise().double(), weights().double()[..., None]
    for step in range(STEPS):
        t = 1 - step / STEPS
        slope = 1 - t * k if jacobian is Jacobian.VJP else 1.0
        beta = 5.0 if step == 0 else min(5.0, ((1 - t) ** 2 + t**2) / ((1 - t) * t))
        v = k * x + b - beta * slope * (old().double() - (x - t * (k * x + b))) * w
        x = x - v / STEPS
    assert (got.double() - x).abs().max() <= 1e-5


def test_the_true_jacobian_knows_that_a_certain_answer_cannot_be_moved() -> None:
    """All data at one point a: v = (x - a) / t, the estimate is a whatever x is. The VJP is 0, the identity is not."""
    point = torch.tensor([0.5, -1.0, 2.0])

    def certain(x: Tensor, t: Tensor) -> Tensor:
        return (x - point) / t[:, None, None]

    exact = integrate(certain, noise(), STEPS, Guided(old(), weights(), Jacobian.VJP))
    assert (exact - point).abs().max() <= 1e-5
    pulled = integrate(certain, noise(), STEPS, Guided(old(), weights(), Jacobian.IDENTITY))
    assert (pulled - point).abs().max() > 0.1


@pytest.mark.parametrize("jacobian", list(Jacobian))
def test_free_rows_and_places_follow_the_plain_rule_bit_for_bit(jacobian: Jacobian) -> None:
    def field(x: Tensor, t: Tensor) -> Tensor:
        return torch.sin(x) * t[:, None, None]

    free = weights() * torch.tensor([[0.0], [1.0]])
    got = integrate(field, noise(), STEPS, Guided(old(), free, jacobian))
    plain = integrate(field, noise(), STEPS)
    assert torch.equal(got[0], plain[0])
    assert torch.equal(got[1, 2:], plain[1, 2:])
    assert not torch.equal(got[1, :2], plain[1, :2])


def test_vjp_works_where_gradients_are_off() -> None:
    layer = torch.nn.Linear(A, A).requires_grad_(False)
    with torch.no_grad():
        got = integrate(lambda x, t: layer(x), noise(), 2, Guided(old(), weights(), Jacobian.VJP))
    assert not got.requires_grad


def test_vjp_says_why_inference_mode_does_not_do() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="no_grad"):
        integrate(lambda x, t: x, noise(), 2, Guided(old(), weights(), Jacobian.VJP))


def test_a_trained_prefix_is_kept_exactly_and_shown_as_clean() -> None:
    seen: list[Tensor] = []

    def field(x: Tensor, t: Tensor) -> Tensor:
        assert torch.equal(x[0, :2], old()[0, :2])
        seen.append(t)
        return x

    got = integrate(field, noise(), STEPS, TrainedPrefix(old(), torch.tensor([2, 0])))
    assert torch.equal(got[0, :2], old()[0, :2])
    assert torch.equal(got[1], integrate(lambda x, t: x, noise(), STEPS)[1])
    assert seen[0].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]


def test_the_ramp_by_hand() -> None:
    """frozen 1, overlap 3, horizon 5: u = 1/3, 2/3."""
    full = 1 - math.exp(-6)
    expected = [0.0, (1 - math.exp(-2)) / full, (1 - math.exp(-4)) / full, 1.0, 1.0]
    assert ramp(1, 3, 5).tolist() == pytest.approx(expected, abs=1e-6)


def test_an_overlap_keeps_frozen_actions_and_frees_the_rest() -> None:
    rule = OverlapRamp(old(), torch.tensor([3, 0]), torch.stack((ramp(1, 3, H), ramp(0, 0, H))))
    got = integrate(lambda x, t: x, noise(), STEPS, rule)
    assert torch.equal(got[0, 0], old()[0, 0])
    assert torch.equal(got[:, 3:], integrate(lambda x, t: x, noise(), STEPS)[:, 3:])


def test_guidance_weights_are_per_row() -> None:
    """Rows of a batch may stand at different times."""
    rule = Guided(old(), weights())
    t = torch.tensor([1.0, 0.5])
    both = rule.step(lambda x, t: x * 0.0, noise(), t, -0.1)
    alone = Guided(old()[1:], weights()[1:]).step(lambda x, t: x * 0.0, noise()[1:], t[1:], -0.1)
    assert torch.equal(both[1:], alone)
    assert guidance_weight(t, 5.0).tolist() == pytest.approx([5.0, 2.0])
