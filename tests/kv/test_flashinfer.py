"""The FlashInfer plan, rehearsed on CPU: a stand-in kernel reads exactly the pages it is told to, by the documented contract.

The stand-in knows the wrapper's public arguments (query and page index pointers, page indices, length of the last page) and
computes plain softmax attention over the pool it is given, so a wrong page, slot or length shows as a wrong number. The real
kernels are checked by ``recipes/gpu/attention_check.py``.
"""

import pytest
import torch
from torch import Tensor

from kv.dense_reference import DenseCache
from realtime_omni.errors import BackendUnavailable
from realtime_omni.kv.attention import RowPlan
from realtime_omni.kv.attention.flashinfer import FlashInferBackend, FlashInferPlan
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage


class PagedKernel:
    """What a planned wrapper computes, written from its documentation."""

    def plan(
        self, qo_indptr, indptr, indices, last, q_heads, kv_heads, head_dim, page, *, causal, q_data_type, kv_data_type
    ):
        assert not causal
        assert q_heads == kv_heads
        self.rows = []
        for i in range(len(last)):
            pages = indices[indptr[i] : indptr[i + 1]].tolist()
            assert len(set(pages)) == len(pages)
            self.rows.append((int(qo_indptr[i]), int(qo_indptr[i + 1]), pages, (len(pages) - 1) * page + int(last[i])))

    def run(self, q: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
        out = torch.empty_like(q)
        for start, stop, pages, length in self.rows:
            k, v = (pool[pages].flatten(0, 1)[:length] for pool in pools)
            out[start:stop] = DenseCache(0, 1, 1).attend(q[start:stop], k, v).to(q.dtype)
        return out


class Kernels:
    """Stands for the backend: hands out kernels and takes them back."""

    def __init__(self) -> None:
        self.out = 0

    def take_wrapper(self) -> PagedKernel:
        self.out += 1
        return PagedKernel()

    def give_wrapper(self, wrapper: PagedKernel) -> None:
        self.out -= 1


@pytest.mark.req("AC-27")
@pytest.mark.parametrize(
    ("tokens", "page", "extra", "windows", "thin"),
    [
        (39, 16, 0, (), None),
        (40, 16, 0, (), None),
        (40, 16, 5, (), None),
        (16, 16, 9, (), None),
        (6, 4, 1, (), None),
        (5, 16, 0, (), None),
        (6, 4, 1, (3, 5), None),
        (6, 4, 1, (), 2),
        (6, 4, 0, (4, 5), 2),
        (5, 16, 0, (), 4),
    ],
)
def test_the_listed_pages_are_exactly_the_visible_tokens(tokens, page, extra, windows, thin):
    """Nine blocks of two sessions out of step, across sink and window; the numbers equal a dense cache in float64."""
    spec = KVSpec(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        tokens_per_frame=tokens,
        frames_per_block=2,
        window_frames=5,
        sink_frames=1,
        page_tokens=page,
        scratch_tokens_per_branch=extra,
        dtype_bytes=8,
        max_in_flight=2,
        layer_windows=windows,
        dense_frames=thin,
    )
    book = KVBook(spec, sessions=2)
    managed = book.pool.statistics().total
    storage = KVStorage(spec, managed + spec.scratch_pages, dtype=torch.float64)
    dense = {name: [DenseCache(1, window, tokens, thin) for window in windows or (5, 5)] for name in "ab"}
    kernels = Kernels()
    for name in "ab":
        book.begin(name)
    for tick in range(9):
        names = "ab" if tick > 1 else "a"
        blocks = [book.plan_block(name) for name in names]
        rows = [RowPlan.of(block.branches[0], extra_tokens=extra) for block in blocks]
        plan = FlashInferPlan(rows, storage, kernels)
        for commit in (False, False, True):
            for layer in range(2):
                q, k, v = (torch.randn(len(names), 2 * tokens + extra, 2, 4, dtype=torch.float64) for _ in range(3))
                before = storage.k[layer][:managed].clone()
                out = plan.attend(layer, q, k, v, rows=range(len(names)), commit=commit)
                assert commit or torch.equal(before, storage.k[layer][:managed]), "a probe touched the pool"
                for at, name in enumerate(names):
                    cache, frames = dense[name][layer], slice(0, 2 * tokens)
                    want = reference(cache, q[at], k[at], v[at], tokens)
                    torch.testing.assert_close(out[at], want, rtol=0, atol=1e-12)
                    if commit:
                        cache.commit(k[at, frames], v[at, frames])
        assert all(plan.complete(row) for row in range(len(names)))
        plan.close()
        assert kernels.out == 0
        for block in blocks:
            book.commit(block)
        book.check()


def reference(cache: DenseCache, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
    """The dense rule with extra tokens: the past that a block of two frames selects, then everything the row brought."""
    past = 0 if cache.k is None else cache.k.shape[0] // tokens
    near = past + 2 - (cache.window if cache.dense is None else cache.dense)
    recent = [f for f in range(past) if f >= past + 2 - cache.window and (f >= near or f % 2 == 1)]
    chosen = sorted({*range(min(cache.sink, past)), *recent})
    at = [f * tokens + t for f in chosen for t in range(tokens)]
    whole = DenseCache(0, 1, 1)
    if at:
        k, v = torch.cat([cache.k[at], k]), torch.cat([cache.v[at], v])
    return whole.attend(q, k, v)


def test_a_dropped_row_gets_a_plan_of_its_own_and_closing_returns_every_kernel():
    spec = KVSpec(1, 2, 4, 6, 2, 4, page_tokens=4, dtype_bytes=8, max_in_flight=2)
    book = KVBook(spec, sessions=2)
    storage = KVStorage(spec, book.pool.statistics().total + spec.scratch_pages, dtype=torch.float64)
    for name in "ab":
        book.begin(name)
    rows = [RowPlan.of(book.plan_block(name).branches[0]) for name in "ab"]
    kernels = Kernels()
    plan = FlashInferPlan(rows, storage, kernels)
    q, k, v = (torch.randn(2, 12, 2, 4, dtype=torch.float64) for _ in range(3))
    both = plan.attend(0, q, k, v, rows=[0, 1], commit=False)
    one = plan.attend(0, q[[1]], k[[1]], v[[1]], rows=[1], commit=False)
    assert torch.equal(one[0], both[1])
    assert kernels.out == 2
    plan.close()
    plan.close()
    assert kernels.out == 0
    with pytest.raises(ValueError, match="closed"):
        plan.attend(0, q, k, v, rows=[0, 1], commit=False)


def test_a_dtype_without_kernels_is_refused_by_name():
    spec = KVSpec(1, 2, 128, 6, 2, 4, dtype_bytes=4)
    storage = KVStorage(spec, 3, dtype=torch.float32)
    backend = object.__new__(FlashInferBackend)
    with pytest.raises(BackendUnavailable, match=r"no kernel for torch.float32"):
        backend.plan([], storage)
