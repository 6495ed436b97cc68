"""Attention in eight bits, by the arithmetic that any device can do: against the dense formula, through pages, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.errors import BackendUnavailable, ConfigError
from realtime_omni.float8 import to_e4m3
from realtime_omni.kv.attention import fp8, open_backend
from realtime_omni.kv.attention.fp8 import Fp8Kernel, reference
from realtime_omni.kv.attention.plan import AttentionBackend, RowPlan
from realtime_omni.kv.attention.sdpa import SdpaBackend
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage


def parts(tokens: int, seen: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, n, 16, generator=generator) for n in (tokens, seen, seen))  # type: ignore[return-value]


def test_one_query_is_what_the_formula_gives_written_out() -> None:
    q, k, v = (to_e4m3(part) for part in parts(1, 3))
    scores = [sum(float(a) * float(b) for a, b in zip(q[0, 1, 0], k[0, 1, n], strict=True)) / 4 for n in range(3)]
    p = [torch.tensor(s - max(scores)).exp() for s in scores]
    rounded = [float((each * 256).to(torch.float8_e4m3fn)) / 256 for each in p]
    for column in (0, 15):
        want = sum(r * float(v[0, 1, n, column]) for n, r in enumerate(rounded)) / float(sum(p))
        assert float(reference(q, k, v)[0, 1, 0, column]) == pytest.approx(want, abs=1e-5)


def test_the_error_against_exact_attention_is_a_few_percent() -> None:
    q, k, v = parts(24, 200)
    exact = scaled_dot_product_attention(q, k, v)
    eight = Fp8Kernel("cpu")(q, k, v, None)
    assert 0.005 < float((eight - exact).norm() / exact.norm()) < 0.08


def outputs(backend: AttentionBackend) -> list[torch.Tensor]:
    """Of six blocks over sink and window, a probe and a clean pass each."""
    spec = KVSpec(1, 2, 16, 6, 1, 3, 1, page_tokens=4, dtype_bytes=4)
    book = KVBook(spec, sessions=1)
    storage = KVStorage(spec, book.pool.statistics().total + spec.scratch_pages, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    book.begin("a")
    found = []
    for _ in range(6):
        block = book.plan_block("a")
        plan = backend.plan([RowPlan.of(block.branches[0])], storage)
        for commit in (False, True):
            q, k, v = (torch.randn(1, 6, 2, 16, generator=generator) for _ in range(3))
            found.append(plan.attend(0, q, k, v, rows=[0], commit=commit))
        book.commit(block)
        plan.close()
    return found


@pytest.mark.parametrize("keep", [True, False])
def test_history_through_pages_is_near_that_of_full_precision(keep: bool) -> None:
    for exact, eight in zip(outputs(SdpaBackend()), outputs(open_backend(keep_gathered=keep, fp8=True)), strict=True):
        assert float((eight - exact).norm() / exact.norm()) < 0.08


def test_what_it_cannot_do_is_refused() -> None:
    q, k, v = parts(4, 4)
    with pytest.raises(BackendUnavailable, match="no mask"):
        Fp8Kernel("cpu")(q, k, v, torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(BackendUnavailable, match="heads"):
        Fp8Kernel("cpu")(q, k[:, :1], v[:, :1], None)
    with pytest.raises(ConfigError):
        open_backend("flashinfer", fp8=True)


def test_a_conversion_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(plain: object, *, dynamic: bool) -> object:
        def fails(*args: object) -> None:
            raise RuntimeError("no compiler")

        return fails

    monkeypatch.setattr(torch, "compile", compiler)
    rounded = fp8._Compiled(to_e4m3)
    x = torch.randn(4, 4)
    for _ in range(2):
        assert torch.equal(rounded(x).float(), to_e4m3(x).float())


def test_queries_that_are_rounded_already_give_bfloat16_also_where_rows_differ() -> None:
    """Two rows of different histories are two groups of a pass."""
    spec = KVSpec(1, 2, 16, 6, 1, 3, 1, page_tokens=6, requested_sessions=2, dtype_bytes=2, max_in_flight=2)
    book = KVBook(spec, sessions=2)
    storage = KVStorage(spec, book.pool.statistics().total + spec.scratch_pages, dtype=torch.bfloat16)
    backend = open_backend(fp8=True)
    generator = torch.Generator().manual_seed(5)

    def parts_of(rows: int) -> list[torch.Tensor]:
        return [torch.randn(rows, 6, 2, 16, generator=generator).bfloat16() for _ in range(3)]

    book.begin("a")
    book.begin("b")
    first = book.plan_block("a")
    plan = backend.plan([RowPlan.of(first.branches[0])], storage)
    plan.attend(0, *parts_of(1), rows=[0], commit=True)
    book.commit(first)
    blocks = [book.plan_block(name) for name in ("a", "b")]
    q, k, v = parts_of(2)
    outs = []
    for queries in (q, to_e4m3(q)):
        plan = backend.plan([RowPlan.of(block.branches[0]) for block in blocks], storage)
        outs.append(plan.attend(0, queries, k, v, rows=[0, 1], commit=False))
    assert outs[1].dtype == torch.bfloat16
    assert torch.equal(*outs)
