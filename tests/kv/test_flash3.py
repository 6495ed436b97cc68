"""How a call of FlashAttention-3 is cut, and that its parts are the whole; the kernels themselves run on Hopper only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.kv.attention.flash3 import Flash3, Flash3Kernel, cut_of


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "cut"),
    [
        (1, 4680, 40, (4608, 3)),  # 1,480 tiles, 11 waves are 1,452: 36 blocks of 40; one is left, 40 tiles for 132
        (1, 4680, 12, (4224, 2)),  # 444 tiles, 3 waves are 33 blocks of 12; four are left, 48 tiles
        (1, 4680, 20, None),  # 5 waves are 33 blocks of 20; four are left, 80 tiles: no two processors for each
        (1, 128 * 33, 4, None),  # one wave, full
        (1, 77, 12, None),  # less than one
    ],
)
def test_queries_that_fill_whole_waves_of_132_are_one_call(rows: int, tokens: int, heads: int, cut: object) -> None:
    assert cut_of(rows, tokens, heads, 132) == cut


def operator(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, softmax_scale: float, num_splits: int) -> None:
    parts = [part.transpose(1, 2) for part in (q, k, v)]
    out.copy_(scaled_dot_product_attention(*parts, scale=softmax_scale).transpose(1, 2))


def test_the_parts_of_a_cut_call_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, 64, generator=generator).bfloat16() for n in (300, 40, 40))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for faster in (None, (256, 2)):
        attend = Flash3(operator)
        monkeypatch.setattr(Flash3, "_faster", lambda *_, faster=faster: faster)
        kernel: Any = Flash3Kernel(attend)
        got = kernel(*(part.transpose(1, 2) for part in (q, k, v)), None)
        wanted = scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)))
        torch.testing.assert_close(got, wanted)
