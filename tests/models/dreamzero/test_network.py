"""The network without its registers and picture is Wan's; positions, timesteps and embodiments of the registers act."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.dreamzero.tiny import CONFIG, tiny_network
from realtime_omni.models.common.wan.rope import rotary_line, rotate
from realtime_omni.models.common.wan.transformer import WanTransformer
from realtime_omni.models.dreamzero.network import DreamZeroTransformer, Registers

F, H, W, N = 2, 4, 8, 5


def plain(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a pass over itself."""
    return scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)


def inputs(rows: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "latents": torch.randn(rows, F, CONFIG.trunk.in_channels, H, W, generator=generator),
        "t": torch.linspace(100, 900, rows),
        "frames": torch.arange(F)[None] + torch.arange(rows)[:, None] * 3,
        "text": torch.randn(rows, 5, CONFIG.trunk.text_width, generator=generator),
        "features": torch.randn(rows, 3, CONFIG.image_width, generator=generator),
        "actions": torch.randn(rows, N, CONFIG.action_width, generator=generator),
        "state": torch.randn(rows, 1, CONFIG.state_width, generator=generator),
    }


def registers(given: dict[str, Tensor], **changes: Tensor) -> Registers:
    rows = len(given["t"])
    made = Registers(given["actions"], given["state"], torch.full((rows,), 500.0), torch.arange(rows))
    return replace(made, **changes)


def joint(
    network: DreamZeroTransformer, given: dict[str, Tensor], made: Registers, category: int = 0
) -> tuple[Tensor, Tensor]:
    text, image = network.text_cache(given["text"]), network.image_cache(given["features"])
    flow, acted = network.joint(
        given["latents"], given["t"], given["frames"], text, image, plain, made, category=category
    )
    assert acted is not None
    return flow, acted


@torch.no_grad()
def test_without_registers_and_picture_it_is_wans_transformer() -> None:
    config = replace(CONFIG, image_width=0)
    network, wan = tiny_network(config=config), WanTransformer(CONFIG.trunk)
    wan.load_state_dict({name: t for name, t in network.state_dict().items() if name in wan.state_dict()})
    given = inputs()
    text = network.text_cache(given["text"])
    flow, acted = network.joint(given["latents"], given["t"], given["frames"], text, None, plain)
    assert acted is None
    assert (flow - wan(given["latents"], given["t"], given["frames"], text, plain)).abs().max() <= 1e-6


@torch.no_grad()
def test_rows_do_not_touch_each_other() -> None:
    network, given = tiny_network(), inputs()
    flow, acted = joint(network, given, registers(given))
    for row in range(2):
        one = {name: tensor[row : row + 1] for name, tensor in given.items()}
        alone = Registers(one["actions"], one["state"], torch.tensor([500.0]), torch.tensor([row]))
        flow_one, acted_one = joint(network, one, alone)
        assert (flow[row] - flow_one[0]).abs().max() <= 1e-5
        assert (acted[row] - acted_one[0]).abs().max() <= 1e-5


@torch.no_grad()
def test_registers_at_the_timestep_of_the_block_are_one_sequence_with_it() -> None:
    network, given = tiny_network(), inputs()
    apart = joint(network, given, registers(given, t=given["t"]))
    together = joint(network, given, replace(registers(given), t=None))
    for one, other in zip(apart, together, strict=True):
        assert (one - other).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("what", ["features", "text", "state", "actions", "t", "index", "category", "video"])
def test_everything_that_is_given_acts_on_pictures_and_on_actions(what: str) -> None:
    network, given = tiny_network(), inputs()
    flow, acted = joint(network, given, registers(given))
    made, category = registers(given), 0
    if what in ("features", "text"):
        given[what] = -given[what]
    elif what == "video":
        given["latents"] = given["latents"] + 1
    elif what == "category":
        category = 1
    else:
        made = registers(given, **{what: getattr(made, what) + 1})
    other, other_acted = joint(network, given, made, category)
    assert (other - flow).abs().max() > 1e-5
    assert (other_acted - acted).abs().max() > 1e-5


def test_registers_turn_by_one_position_over_the_whole_head() -> None:
    """Pair i of a head of 12 turns by p * 10000 ** (-i / 6); worked out with complex numbers."""
    positions = torch.tensor([[0, 7, 24 * 300]])
    x = torch.randn(1, 3, 1, 12, dtype=torch.float64)
    turned = rotate(x, *rotary_line(positions, 12))
    pairs = torch.view_as_complex(x.view(1, 3, 1, 6, 2))
    angles = positions[0].double()[:, None] * 10_000.0 ** (-torch.arange(6, dtype=torch.float64) / 6)
    want = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]).flatten(3)
    assert (turned - want).abs().max() <= 1e-5


def test_a_register_of_a_later_block_goes_on_counting() -> None:
    given = inputs(1)
    made = registers(given, index=torch.tensor([3]))
    assert DreamZeroTransformer._positions(made).tolist() == [[15, 16, 17, 18, 19, 3]]


@torch.no_grad()
def test_the_action_encoder_by_its_formula() -> None:
    encoder = tiny_network(torch.float64).action_encoder
    actions, t = torch.randn(1, 2, CONFIG.action_width, dtype=torch.float64), 250.0
    width, category = CONFIG.trunk.width, 1
    embedded = actions @ encoder.first.weight[category] + encoder.first.bias[category]
    rates = 10_000.0 ** (-torch.arange(width // 2).double() / (width // 2))
    wave = torch.cat((torch.sin(t * rates), torch.cos(t * rates)))
    joined = torch.cat((embedded, wave.expand(1, 2, -1)), dim=-1)
    hidden = joined @ encoder.second.weight[category] + encoder.second.bias[category]
    want = (hidden * torch.sigmoid(hidden)) @ encoder.third.weight[category] + encoder.third.bias[category]
    assert (encoder(actions, torch.tensor([t]), category) - want).abs().max() <= 1e-4
