"""The networks' promises: exact packing, rows that never mix, no state on modules, per-action time, true gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from models.vla import tiny
from realtime_omni.models.common.vla.attention import DensePrefixAttention, Prefix, PrefixKV, attend
from realtime_omni.models.common.vla.network import FlowNetwork, PolicyInputs, encode, sample
from realtime_omni.models.smolvla.network import gated_mlp_width
from realtime_omni.rtc.rules import Guided, Jacobian, TrainedPrefix


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def network(request: pytest.FixtureRequest) -> FlowNetwork:
    return tiny.network(request.param)


PAGE = 4


class Paged:
    """A prefix in pages of a shared pool, in any order, as a serving engine keeps it; one row."""

    def __init__(self, kv: PrefixKV) -> None:
        self.lengths = kv.lengths
        count = -(-int(self.lengths) // PAGE)
        self.table = torch.randperm(count + 3, generator=torch.Generator().manual_seed(0))[:count]
        self.pools = [tuple(self._pool(t, count) for t in layer) for layer in zip(kv.keys, kv.values, strict=True)]

    def _pool(self, tensor: Tensor, count: int) -> Tensor:
        pool = torch.full((count + 3, PAGE, *tensor.shape[2:]), 1e4)  # what other sessions left there
        tokens = torch.full((count * PAGE, *tensor.shape[2:]), 1e4)
        tokens[: tensor.shape[1]] = tensor[0]
        pool[self.table] = tokens.unflatten(0, (count, PAGE))
        return pool

    def _history(self, layer: int) -> tuple[Tensor, Tensor]:
        k, v = (pool[self.table].flatten(0, 1)[None, : int(self.lengths)] for pool in self.pools[layer])
        return k, v

    def own(self, layer: int) -> None:
        return None

    def joint(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        keys, values = self._history(layer)
        mask = torch.ones(1, q.shape[1], keys.shape[1] + k.shape[1], dtype=torch.bool)
        mask[..., keys.shape[1] :] = mask[..., keys.shape[1] :].tril() if causal else True
        return attend(q, torch.cat((keys, k), 1), torch.cat((values, v), 1), mask)

    def cross(self, layer: int, q: Tensor) -> Tensor:
        return attend(q, *self._history(layer))


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("cameras", [(True, True, True), (True, False, True), (False, False, True)])
def test_packing_masked_tokens_out_changes_nothing(network: FlowNetwork, cameras: Sequence[bool]) -> None:
    row = tiny.row(1, cameras)
    padded = PolicyInputs.stack([row, tiny.row(2, words=15)])
    alone = PolicyInputs(*(getattr(padded, f)[:1] for f in ("images", "image_mask", "tokens", "token_mask", "state")))
    plain = encode(network, alone, pack=False)
    packed = encode(network, alone)
    assert packed.mask.all()
    assert packed.mask.shape[1] == int(plain.mask.sum())
    assert gap(sample(network, packed, tiny.noise()), sample(network, plain, tiny.noise())) <= 1e-6


def test_what_a_masked_camera_shows_is_never_seen(network: FlowNetwork) -> None:
    row = tiny.row(1, (True, False, True))
    other = PolicyInputs(row.images.clone(), row.image_mask, row.tokens, row.token_mask, row.state)
    other.images[0, 1] = 0.7
    for pack in (True, False):
        chunks = [sample(network, encode(network, inputs, pack=pack), tiny.noise()) for inputs in (row, other)]
        assert torch.equal(*chunks)


def test_a_batch_equals_its_rows_alone(network: FlowNetwork) -> None:
    rows = [tiny.row(1, words=3), tiny.row(2, (True, False, False), words=11), tiny.row(3, (False, True, True))]
    noise = tiny.noise(3)
    together = sample(network, encode(network, PolicyInputs.stack(rows)), noise)
    for index, row in enumerate(rows):
        assert gap(sample(network, encode(network, row), noise[index : index + 1])[0], together[index]) <= 1e-5


def test_prefixes_computed_apart_serve_one_batch(network: FlowNetwork) -> None:
    rows = [tiny.row(1, words=3), tiny.row(2, (True, False, False), words=11)]
    prefixes = [encode(network, row) for row in rows]
    noise = tiny.noise(2)
    together = sample(network, PrefixKV.stack(prefixes), noise)
    for index, kv in enumerate(prefixes):
        assert gap(sample(network, kv, noise[index : index + 1])[0], together[index]) <= 1e-5


def test_several_noise_samples_share_one_prefix(network: FlowNetwork) -> None:
    kv, noise = encode(network, tiny.row(1)), tiny.noise(3)
    together = sample(network, kv, noise)
    for index in range(3):
        assert gap(sample(network, kv, noise[index : index + 1])[0], together[index]) <= 1e-6


def test_a_prefix_in_pages_serves_as_well_as_a_dense_one(network: FlowNetwork) -> None:
    kv = encode(network, tiny.row(1, (True, False, True)))
    dense, paged = DensePrefixAttention(kv), Paged(kv)
    for t in (1.0, 0.3):
        ours = network.denoise_step(tiny.noise(), torch.tensor([t]), paged)
        assert gap(ours, network.denoise_step(tiny.noise(), torch.tensor([t]), dense)) <= 1e-6


def test_nothing_is_kept_between_calls(network: FlowNetwork) -> None:
    """Same answer after other work; the prefix is untouched; no attribute or buffer appears."""
    kv = encode(network, tiny.row(1))
    before = [t.clone() for t in (*kv.keys, *kv.values)]
    attributes = {name: set(vars(module)) for name, module in network.named_modules()}  # type: ignore[attr-defined]
    first = sample(network, kv, tiny.noise())
    sample(network, encode(network, tiny.row(2, words=12)), tiny.noise(1, seed=4))
    assert torch.equal(first, sample(network, kv, tiny.noise()))
    assert all(torch.equal(a, b) for a, b in zip(before, (*kv.keys, *kv.values), strict=True))
    assert attributes == {name: set(vars(module)) for name, module in network.named_modules()}  # type: ignore[attr-defined]


def test_one_time_for_all_actions_equals_the_same_time_for_each(network: FlowNetwork) -> None:
    attention = DensePrefixAttention(encode(network, tiny.row(1)))
    x = tiny.noise()
    same = network.denoise_step(x, torch.tensor([0.4]), attention)
    each = network.denoise_step(x, torch.full((1, tiny.HORIZON), 0.4), attention)
    assert gap(same, each) <= 1e-6
    mixed = torch.full((1, tiny.HORIZON), 0.4)
    mixed[0, 0] = 0.0
    assert gap(network.denoise_step(x, mixed, attention), same) > 1e-3


def test_the_vjp_through_a_network_equals_a_finite_difference(network: FlowNetwork) -> None:
    """Along a direction u: u . J^T e = e . (J u), with J u from two evaluations of the clean estimate."""
    attention = DensePrefixAttention(encode(network, tiny.row(1)))
    t, x, old = torch.tensor([0.6]), tiny.noise(), tiny.noise(1, seed=2)

    def estimate(x: Tensor) -> Tensor:
        return x - 0.6 * network.denoise_step(x, t, attention)

    rule = Guided(old, torch.ones(1, tiny.HORIZON), Jacobian.VJP, limit=1.0)
    v = network.denoise_step(x, t, attention)
    pull = v - (rule.step(lambda x, t: network.denoise_step(x, t, attention), x, t, 1.0) - x)
    error, u = old - estimate(x), tiny.noise(1, seed=5)
    step = 1e-2
    slope = (estimate(x + step * u) - estimate(x - step * u)) / (2 * step)
    assert float((u * pull).sum()) == pytest.approx(float((error * slope).sum()), rel=2e-2)


def test_a_trained_prefix_reaches_every_network(network: FlowNetwork) -> None:
    old = tiny.noise(1, seed=6)
    rule = TrainedPrefix(old, torch.tensor([2]))
    chunk = sample(network, encode(network, tiny.row(1)), tiny.noise(), rule=rule)
    assert torch.equal(chunk[:, :2], old[:, :2])
    assert torch.isfinite(chunk).all()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bfloat16_weights_give_a_float32_chunk_near_the_float32_one(family: str) -> None:
    network = tiny.network(family)
    exact = sample(network, encode(network, tiny.row(1)), tiny.noise())
    network.to(torch.bfloat16)
    rounded = sample(network, encode(network, tiny.row(1)), tiny.noise())
    assert rounded.dtype is torch.float32
    assert gap(rounded, exact) <= 0.15 * float(exact.abs().max())


def test_packing_keeps_order_positions_and_blocks() -> None:
    mask = torch.tensor([[True, False, True, True], [False, False, True, True]])
    block = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 1]])
    prefix = Prefix(torch.arange(8.0).reshape(2, 4, 1), mask, block)
    packed = prefix.pack()
    assert packed.embeddings[..., 0].tolist() == [[0, 2, 3], [6, 7, 4]]
    assert packed.mask.tolist() == [[True, True, True], [True, True, False]]
    assert packed.block.tolist() == [[0, 0, 1], [0, 1, 0]]
    assert packed.positions[0].tolist() == prefix.positions[0, mask[0]].tolist()


def test_steps_below_one_are_refused(network: FlowNetwork) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        sample(network, encode(network, tiny.row(1)), tiny.noise(), steps=0)


@pytest.mark.parametrize(("width", "inner"), [(720, 2048), (384, 1024), (18, 256)])
def test_the_experts_mlp_width_by_hand(width: int, inner: int) -> None:
    """4 * int(2 * width / 3), up to the next multiple of 256: 1920, 1024 and 48 before."""
    assert gated_mlp_width(width) == inner


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_weight_can_be_trained_but_those_without_a_reader(family: str) -> None:
    """The stages are the training graph too. Of the last language layer only keys and values are read."""
    network = tiny.network(family).requires_grad_(True)
    attention = DensePrefixAttention(encode(network, tiny.row(1)))
    network.denoise_step(tiny.noise(), torch.tensor([0.5]), attention).square().mean().backward()
    idle = {name for name, parameter in network.named_parameters() if parameter.grad is None}
    assert idle == {f"language.2.{part}.weight" for part in ("q", "o", "mlp_norm", "gate", "up", "down")}
