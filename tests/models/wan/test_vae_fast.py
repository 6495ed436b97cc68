"""The decoder as a GPU runs it, on the CPU: channels last, norms with their SiLU in one; its pictures and its streaming."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers")

from models.lingbot.tiny import tiny_vae
from realtime_omni.errors import BackendUnavailable
from realtime_omni.models.common.wan.vae import CodecState
from realtime_omni.models.common.wan.vae_fast import check, hasten


def kernel(x: Tensor, gamma: Tensor, factor: float) -> Tensor:
    """What the GPU's computes, written out."""
    length = (x.float() ** 2).sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    y = x / length * factor * gamma.view(1, -1, 1, 1, 1)
    return y * torch.sigmoid(y)


def test_a_kernel_is_checked_also_where_tensors_are_made_elsewhere_unless_told() -> None:
    with torch.device("meta"):
        check(kernel, torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match="off by"):
        check(lambda x, gamma, factor: kernel(x, gamma, 2 * factor), torch.device("cpu"))


@pytest.mark.parametrize("by", [None, kernel])
def test_pictures_are_those_of_the_modules_as_they_come(by: object) -> None:
    latents = torch.randn(5, 4, 4, 6, generator=torch.Generator().manual_seed(1))
    plain, fast = tiny_vae(), tiny_vae()
    assert hasten(fast._vae.decoder, by) > 0  # type: ignore[arg-type]
    wanted, _ = plain.decode(latents, CodecState())
    state, got = CodecState(), []
    for piece in latents.split((2, 3)):
        pictures, state = fast.decode(piece, state)
        got.append(pictures)
    torch.testing.assert_close(torch.cat(got), wanted, atol=1e-5, rtol=1e-5)
