"""Attention over pages where they lie equals the gathered one, for rows at any depth, and writes nobody else's pages."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from realtime_omni.kv.attention import RowPlan
from realtime_omni.kv.attention.decode import DecodePlan, DecodeRows, decodable, gathered
from realtime_omni.kv.attention.sdpa import SdpaBackend
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage

LAYERS, HEADS, SIZE = 2, 2, 8


class Room:
    """A book and its storage; every tick goes over both ways of attending, and all pages are compared."""

    def __init__(self, *, window: int = 6, sink: int = 0, rewinds: int = 3, page: int = 1, sessions: int = 5) -> None:
        self.spec = KVSpec(
            num_layers=LAYERS,
            num_kv_heads=HEADS,
            head_dim=SIZE,
            tokens_per_frame=1,
            frames_per_block=1,
            window_frames=window,
            sink_frames=sink,
            page_tokens=page,
            rewind_blocks=rewinds,
            dtype_bytes=8,
            max_in_flight=sessions,
        )
        self.book = KVBook(self.spec, sessions=sessions)
        self.storage = KVStorage(
            self.spec, self.book.pool.statistics().total + self.spec.scratch_pages, dtype=torch.float64
        )
        self.rows = DecodeRows(self.storage, 8)
        self.random = torch.Generator().manual_seed(3)

    def tick(self, *sessions: str, active: tuple[int, ...] | None = None, commit: bool = True) -> None:
        blocks = [self.book.plan_block(session) for session in sessions]
        active = tuple(range(len(sessions))) if active is None else active
        reference = SdpaBackend().plan([RowPlan.of(block.branches[0]) for block in blocks], self.storage)
        plan = DecodePlan([block.branches[0] for block in blocks], self.storage)
        assert plan.fits(self.rows, 8)
        assert not plan.fits(self.rows, 9)
        plan.fill(self.rows, active, 8)
        scratch = list(range(self.book.pool.statistics().total, self.storage.pages))
        for layer in range(LAYERS):
            q, k, v = torch.randn(3, 8, 1, HEADS, SIZE, generator=self.random, dtype=torch.float64)
            before = self.storage.k[layer].clone()
            out = self.rows.attend(layer, q, k, v)
            after = self.storage.k[layer].clone()
            here = slice(0, len(active))
            want = reference.attend(layer, q[here], k[here], v[here], rows=active, commit=True)
            assert float((out[here] - want).abs().max()) <= 1e-12
            changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
            own = [blocks[row].branches[0].frames[0].pages[0] for row in active]
            assert set(changed) <= {*own, *scratch}
            assert torch.equal(after[own], self.storage.k[layer][own])
        assert not any(plan.complete(row) for row in active)
        plan.wrote(active)
        assert [row for row in range(len(sessions)) if plan.complete(row)] == list(active)
        for row, block in enumerate(blocks):
            (self.book.commit if commit and row in active else self.book.rollback)(block)
        self.book.check()


@pytest.mark.parametrize(("sink", "page"), [(0, 1), (2, 1), (2, 4)])
def test_calls_out_of_step_that_leave_fail_go_back_fork_and_return_see_their_own_past(sink: int, page: int) -> None:
    room = Room(sink=sink, page=page)
    for session in "abc":
        room.book.begin(session)
    for number in range(20):
        room.tick(*("abc" if number % 3 else "ca"), active=(1,) if number % 5 == 4 else None, commit=number % 4 != 2)
    room.book.rewind("a", 3)
    room.tick("a", "b")
    room.book.rewind("a", 1)
    room.book.fork("a", "d")
    room.book.end("b")
    for _ in range(3):
        room.tick("a", "d", "c")
    kept = [frame.index for frame in room.book.table("c", "main").retained()]
    room.book.restore("e", room.book.completed_frames("c"), [kept])
    for _ in range(8):
        room.tick("e", "d")


def test_geometries_with_blocks_layer_windows_or_boundaries_are_refused() -> None:
    room = Room()
    assert decodable(room.spec)
    for wrong in (
        {"tokens_per_frame": 2, "page_tokens": 2},
        {"frames_per_block": 2},
        {"reset_at_boundary": True},
        {"layer_windows": (6, 3)},
    ):
        spec = KVSpec(**{**{f: getattr(room.spec, f) for f in room.spec.__dataclass_fields__}, **wrong})
        assert not decodable(spec)


@pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton comes with torch for CUDA; TRITON_INTERPRET=1 runs it anywhere"
)
def test_the_kernel_equals_the_gathered_one() -> None:
    """Rows of one key, of some, of all; several parts of a row. On CUDA, or with Triton's interpreter."""
    from realtime_omni.kv.attention.decode_kernel import decode, parts_of

    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(n, 4, 32, generator=random).to(device) for n in (3, 400, 400))
    table = torch.stack([torch.randperm(400, generator=random)[:100] for _ in range(3)]).int().to(device)
    lengths = torch.tensor([1, 57, 100], dtype=torch.int32, device=device)
    assert parts_of(3, 4, 100) == 4
    gap = decode(q, keys, values, table, lengths) - gathered(q, keys, values, table, lengths)
    assert float(gap.abs().max()) <= 1e-5
