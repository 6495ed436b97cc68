"""A pass for its history alone: the keys, values and actions of the whole pass, whether or not the last layer has actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.matrix_game.tiny import CONFIG
from realtime_omni.models.matrix_game.actions import PICTURES
from realtime_omni.models.matrix_game.network import Acted, MatrixGameTransformer

FRAMES = 3


@pytest.mark.parametrize("action_layers", [1, 2])
@torch.no_grad()
def test_a_pass_for_history_leaves_what_the_whole_pass_leaves(action_layers: int) -> None:
    torch.manual_seed(0)
    network = MatrixGameTransformer(replace(CONFIG, action_layers=action_layers))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    attended: list[int] = []
    seen: list[tuple[int, Tensor, Tensor]] = []

    def write(layer: int, k: Tensor, v: Tensor) -> None:
        seen.append((layer, k, v))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended.append(layer)
        write(layer, k, v)
        return functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)

    given = (
        torch.randn(1, FRAMES, CONFIG.in_channels, 4, 6),
        torch.zeros(1),
        torch.arange(FRAMES)[None],
        network.context_cache(torch.randn(1, 5, CONFIG.context_width)),
        Acted(torch.randn(1, FRAMES, PICTURES, 2), torch.rand(1, FRAMES, PICTURES, CONFIG.keys)),
        [network.no_history(6)],
        attend,
    )
    _, (whole,) = network(*given)
    (alone,) = network.commit(*given, write)
    assert attended == ([0, 1, 0] if action_layers == 1 else [0, 1, 0, 1])
    assert [layer for layer, _, _ in seen] == [0, 1, 0, 1]
    for a, b in zip(seen[:2], seen[2:], strict=True):
        assert torch.equal(a[1], b[1])
        assert torch.equal(a[2], b[2])
    assert len(whole) == len(alone) == action_layers
    for kept, again in zip(whole, alone, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(kept, again, strict=True))
