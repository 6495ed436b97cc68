"""A block that is given is written first; passes that look ahead see history and the block, and leave nothing behind."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kv.test_flashinfer import Kernels
from realtime_omni.kv.attention import RowPlan
from realtime_omni.kv.attention.flashinfer import FlashInferPlan
from realtime_omni.kv.attention.sdpa import SdpaBackend
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.geometry import WindowGeometry
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage

REGISTERS = 5


def spec_of(tokens: int = 6, page: int = 4) -> KVSpec:
    return KVSpec(
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        tokens_per_frame=tokens,
        frames_per_block=2,
        window_frames=5,
        page_tokens=page,
        scratch_tokens_per_branch=REGISTERS,
        dtype_bytes=8,
        max_in_flight=2,
        reset_at_boundary=True,
        opening_frames=1,
    )


def plan_of(kind: str, rows, storage: KVStorage):
    if kind == "flashinfer":
        return FlashInferPlan(rows, storage, Kernels())
    return SdpaBackend(cache_history=kind == "cached").plan(rows, storage)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = [part.transpose(0, 1)[None] for part in (q, k, v)]
    return scaled_dot_product_attention(*parts)[0].transpose(0, 1)


@pytest.mark.parametrize("kind", ["cached", "gathered", "flashinfer"])
@pytest.mark.parametrize(("tokens", "page"), [(6, 4), (8, 8), (3, 16)])
def test_two_sessions_out_of_step_look_ahead_over_history_and_block(kind, tokens, page):
    """Eight ticks over three windows; the numbers are those of dense attention over the same tokens."""
    spec = spec_of(tokens, page)
    book = KVBook(spec, sessions=2)
    storage = KVStorage(spec, book.pool.statistics().total + spec.scratch_pages, dtype=torch.float64)
    random = torch.Generator().manual_seed(3)
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def qkv(count: int) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.randn(count, 2, 4, generator=random, dtype=torch.float64) for _ in range(3))

    for name in "ab":
        book.begin(name)
    for tick in range(8):
        names = "a" if tick == 0 else "ab"
        blocks = {name: book.plan_block(name) for name in names}
        for name, block in blocks.items():
            if block.first_frame % spec.window_frames == 0:
                seen[name] = [(torch.zeros(0, 2, 4).double(),) * 2] * spec.num_layers
            assert block.frames == (1 if block.first_frame % spec.window_frames == 0 else 2)
        plan = plan_of(kind, [RowPlan.of(block.branches[0]) for block in blocks.values()], storage)
        for row, (name, block) in enumerate(blocks.items()):
            for layer in range(2):
                q, k, v = qkv(block.frames * tokens)
                with pytest.raises(ValueError, match="follows the clean pass"):
                    plan.attend(layer, q[None], k[None], v[None], rows=[row], commit=False, ahead=True)
                out = plan.attend(layer, q[None], k[None], v[None], rows=[row], commit=True)
                seen[name][layer] = tuple(torch.cat(pair) for pair in zip(seen[name][layer], (k, v), strict=True))
                torch.testing.assert_close(out[0], dense(q, *seen[name][layer]))
        for _ in range(3):
            for layer in range(2):
                each = [qkv(2 * tokens + REGISTERS) for _ in names]
                q, k, v = (torch.stack(parts) for parts in zip(*each, strict=True))
                out = plan.attend(layer, q, k, v, rows=range(len(names)), commit=False, ahead=True)
                for row, name in enumerate(names):
                    keys, values = (
                        torch.cat((past, new[row])) for past, new in zip(seen[name][layer], (k, v), strict=True)
                    )
                    torch.testing.assert_close(out[row], dense(q[row], keys, values))
        assert all(plan.complete(row) for row in range(len(names)))
        for name, block in blocks.items():
            book.commit(block)
            for layer in range(2):
                frames = book.table(name, "main").retained()
                keys, _ = storage.read(layer, frames)
                wanted = seen[name][layer][0]
                assert torch.equal(keys, wanted[len(wanted) - len(keys) :])
        book.check()
    assert book.completed_frames("a") == 13


@pytest.mark.parametrize("kind", ["cached", "flashinfer"])
def test_more_than_a_block_and_its_registers_is_refused(kind):
    spec = spec_of()
    book = KVBook(spec, sessions=1)
    storage = KVStorage(spec, book.pool.statistics().total + spec.scratch_pages, dtype=torch.float64)
    book.begin("a")
    row = RowPlan.of(book.plan_block("a").branches[0])
    plan = plan_of(kind, [row], storage)
    block = torch.zeros(1, 6, 2, 4).double()
    for layer in range(2):
        plan.attend(layer, block, block, block, rows=[0], commit=True)
    wide = torch.zeros(1, row.room_ahead + 1, 2, 4).double()
    with pytest.raises(ValueError, match="room for"):
        plan.attend(0, wide, wide, wide, rows=[0], commit=False, ahead=True)
    with pytest.raises(ValueError, match="commits nothing"):
        plan.attend(0, block, block, block, rows=[0], commit=True, ahead=True)


def test_a_window_opens_with_its_short_block():
    window = WindowGeometry(0, 7, 2, 4, 4, reset_at_boundary=True, opening_frames=1)
    completed, frames = 0, []
    for _ in range(9):
        frames.append(window.block_frames(completed))
        completed += frames[-1]
    assert frames == [1, 2, 2, 2, 1, 2, 2, 2, 1]


@pytest.mark.parametrize(
    "how",
    [
        {"opening_frames": 1},
        {"opening_frames": 3, "reset_at_boundary": True},
        {"opening_frames": 0, "reset_at_boundary": True},
        {"opening_frames": 2, "reset_at_boundary": True},
    ],
)
def test_an_opening_that_does_not_fill_a_window_with_blocks_is_refused(how):
    with pytest.raises(ValueError, match=r"opening_frames|blocks of"):
        WindowGeometry(0, 7, 2, 4, 4, **how)


@pytest.mark.parametrize("kind", ["cached", "gathered", "flashinfer"])
def test_a_pass_that_only_writes_leaves_what_one_that_also_attends_leaves(kind):
    spec = spec_of()
    left = []
    for attends in (True, False):
        book = KVBook(spec, sessions=2)
        storage = KVStorage(spec, book.pool.statistics().total + spec.scratch_pages, dtype=torch.float64)
        for pool in (*storage.k, *storage.v):
            pool.zero_()
        for name in "ab":
            book.begin(name)
        plan = plan_of(kind, [RowPlan.of(book.plan_block(name).branches[0]) for name in "ab"], storage)
        for layer in range(spec.num_layers):
            q, k, v = torch.randn(3, 2, 6, 2, 4, generator=torch.Generator().manual_seed(layer)).double()
            assert not plan.complete(0)
            if attends:
                plan.attend(layer, q, k, v, rows=[0, 1], commit=True)
            else:
                plan.write(layer, k, v, rows=[0, 1])
        assert plan.complete(0)
        assert plan.complete(1)
        managed = book.pool.statistics().total
        left.append([pool[:managed].clone() for pool in (*storage.k, *storage.v)])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))
    assert any(pool.any() for pool in left[0])
