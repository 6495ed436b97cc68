"""A layer in eight bits whose rounding is part of what precedes it computes what the plain layer computes.

The kernels themselves run on a GPU only; there ``operations_for`` holds each of them to the operations that are tested here
before it is used (``recipes/gpu/fp8_variants.py`` times them).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from realtime_omni.errors import BackendUnavailable
from realtime_omni.models.common.fp8 import quantise
from realtime_omni.models.common.wan.fused import FusedLayer, TorchOperations, check, operations_for
from realtime_omni.models.common.wan.transformer import WanConfig, WanTransformer

CONFIG = WanConfig(layers=2, heads=2, head_dim=16, mlp_width=64, in_channels=4, out_channels=4, text_width=16)


def network(dtype: torch.dtype, camera_channels: int) -> WanTransformer:
    config = WanConfig(
        **{name: getattr(CONFIG, name) for name in CONFIG.__slots__} | {"camera_channels": camera_channels}
    )
    built = WanTransformer(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in built.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    built = built.to(dtype)
    quantise(built, built.heavy_matrices())
    return built


def full(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)


def flow(net: WanTransformer, dtype: torch.dtype, camera_channels: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    latents = torch.randn(2, 3, 4, 4, 6, generator=generator)
    text = net.text_cache(torch.randn(2, 5, 16, generator=generator).to(dtype))
    camera = (
        net.camera_cache(torch.randn(2, 3, camera_channels, 4, 6, generator=generator)) if camera_channels else None
    )
    frames = torch.tensor([[0, 1, 2], [7, 8, 9]])
    return net(latents, torch.tensor([900.0, 300.0]), frames, text, full, camera=camera)


@pytest.mark.parametrize("camera_channels", [0, 8])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.02), (torch.bfloat16, 0.06)])
def test_a_fused_network_predicts_what_the_plain_one_does(
    camera_channels: int, dtype: torch.dtype, most: float
) -> None:
    """Two rows of different timesteps and places; sums in another order move a few numbers by a step of e4m3."""
    net = network(dtype, camera_channels)
    wanted = flow(net, dtype, camera_channels)
    behind = None
    for layer in reversed(net.layers):
        behind = layer.fuse_parts(FusedLayer(layer, TorchOperations()), behind)
    got = flow(net, dtype, camera_channels)  # its camera is fused, too
    assert float((got - wanted).norm() / wanted.norm()) < most


def test_the_gate_the_camera_and_the_norm_act_in_this_order() -> None:
    generator = torch.Generator().manual_seed(5)
    x, part, scale, shift = (torch.randn(2, 3, 32, generator=generator) for _ in range(4))
    gate, gain, offset = (torch.randn(2, 32, generator=generator) for _ in range(3))
    whole, rounded = TorchOperations().mix(x, part, gate, (scale, shift), (gain, offset), about_one=True, eps=1e-6)
    assert rounded is not None
    rows, scales = rounded
    for row in range(2):
        added = (1 + scale[row]) * (x[row] + gate[row] * part[row]) + shift[row]
        torch.testing.assert_close(whole[row], added)
        wanted = layer_norm(added, (32,), eps=1e-6) * (1 + gain[row]) + offset[row]
        back = (rows.float() * scales)[3 * row : 3 * row + 3]
        assert ((back - wanted).abs() <= wanted.abs() / 16 + scales[3 * row : 3 * row + 3] * 2**-9).all()


class Wrong(TorchOperations):
    def heads(self, x: Tensor, weights: Tensor, angles: object, **how: Any) -> tuple[Tensor, ...]:
        return super().heads(x, weights, None, **how)


def test_kernels_that_compute_something_else_are_refused() -> None:
    check(TorchOperations(), torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match="off by"):
        check(Wrong(), torch.device("cpu"))


def test_layers_on_a_cpu_are_not_fused() -> None:
    assert operations_for(network(torch.float32, 0).layers) is None
