"""GELU of a gate times what it opens, in one operation: the formula, the kernel, and where layers use it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from models.vla import tiny
from realtime_omni.models.common.vla import decoder, gated
from realtime_omni.models.common.vla.decoder import DecoderConfig, DecoderLayer


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).mul_(3).to(dtype)


def layer() -> DecoderLayer:
    made = DecoderLayer(DecoderConfig(width=16, layers=1, mlp_width=128, heads=2, kv_heads=1, head_dim=8))
    tiny.randomise(made)
    made.requires_grad_(False).fuse()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_gelu_of_the_first_half_times_the_second(dtype: torch.dtype) -> None:
    x = numbers(2, 5, 256, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    wanted = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gated.geglu(x).double(), wanted, rtol=2.0**-8, atol=1e-5)
    with FakeTensorMode():
        assert gated.geglu(torch.empty(2, 5, 256, dtype=dtype, device="cuda")).shape == wanted.shape


def test_many_tokens_take_it_and_few_or_a_gradient_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, x, seen = layer(), numbers(2, 3, 16), numbers(2, 3, 2, 8)
    taken: list[Tensor] = []
    monkeypatch.setattr(decoder, "geglu", lambda both: taken.append(both) or gated.written_out(both))

    def finished(tokens: Tensor = x) -> Tensor:
        return whole.finish(tokens, seen, None)

    with torch.no_grad():
        plain = finished()
        whole.one_pass = True
        assert torch.equal(finished(), plain)
        assert not taken
        monkeypatch.setattr(decoder, "MANY", 2 * 3 * 256)
        torch.testing.assert_close(finished(), plain, rtol=0, atol=1e-5)
    assert len(taken) == 1
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(finished(x.requires_grad_()).sum(), x)
    assert len(taken) == 1
    assert float(gradient.abs().max()) > 0


def test_a_compiled_layer_is_one_graph_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few tokens and of many, after another: what the sizes are is asked when a layer is traced."""
    whole, seen = layer(), numbers(2, 9, 2, 8)
    whole.one_pass = True
    monkeypatch.setattr(decoder, "MANY", 2 * 5 * 256)
    compiled = torch.compile(whole.finish, backend="eager", fullgraph=True)
    for tokens in (3, 7, 9, 4):
        x = numbers(2, tokens, 16)
        with torch.no_grad():
            whole.one_pass = False
            plain = whole.finish(x, seen[:, :tokens], None)
            whole.one_pass = True
            torch.testing.assert_close(compiled(x, seen[:, :tokens], None), plain, rtol=0, atol=1e-5)


def test_a_kernel_that_is_not_there_or_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not gated.runs(torch.zeros(256, 16, dtype=torch.bfloat16))  # no GPU, nothing to say
    assert not caplog.records
    x = numbers(5, 256, dtype=torch.bfloat16)
    gated.check(x)
    monkeypatch.setattr(gated, "geglu", lambda x: gated.written_out(x) * 1.01)
    with pytest.raises(RuntimeError, match="off by"):
        gated.check(x)


@pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton comes with torch for CUDA; TRITON_INTERPRET=1 runs it anywhere"
)
@pytest.mark.parametrize(("width", "block"), [(384, None), (4096, None), (4096, 1024)])
def test_the_kernel_is_the_formula(width: int, block: int | None) -> None:
    """On CUDA, or with Triton's interpreter (whose rounding to bfloat16 cuts off, so float32 here)."""
    from realtime_omni.models.common.vla.geglu_kernel import geglu

    x = numbers(2, 3, 2 * width).to("cuda" if torch.cuda.is_available() else "cpu")
    x[0, 0, :4] = torch.tensor([-60.0, 60.0, 0.0, -1e20])
    torch.testing.assert_close(geglu(x, block), gated.written_out(x.double()).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA")
def test_a_width_that_no_block_divides_is_refused() -> None:
    from realtime_omni.models.common.vla.geglu_kernel import geglu

    with pytest.raises(ValueError, match="no multiple"):
        geglu(torch.zeros(2, 200))
