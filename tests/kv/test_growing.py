"""Blocks that are written in pieces: equal to one pass, whatever the pieces, the pages and what is kept; refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.kv.attention.growing import GrowingPlan
from realtime_omni.kv.attention.plan import RowPlan
from realtime_omni.kv.attention.rooms import Rooms
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.kv.window import FrameRef

LAYERS, HEADS, KV_HEADS, DIM, ROOM = 2, 4, 2, 8, 7


class Bench:
    """Two sequences on pages of three tokens, in frames with room for seven."""

    def __init__(self) -> None:
        self.spec = KVSpec(
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            tokens_per_frame=ROOM,
            frames_per_block=1,
            window_frames=4,
            page_tokens=3,
            dtype_bytes=4,
            requested_sessions=2,
            max_in_flight=2,
        )
        self.book = KVBook(self.spec, sessions=2)
        pages = self.spec.managed_pages(2) + self.spec.scratch_pages
        self.storage = KVStorage(self.spec, pages, dtype=torch.float32)
        self.held: dict[str, list[int]] = {"a": [], "b": []}
        for name in self.held:
            self.book.begin(name)

    def plan(self, cached: bool, together: bool = False) -> tuple[GrowingPlan, list[object]]:
        blocks = [self.book.plan_block(name) for name in self.held]
        rows = []
        for block, lengths in zip(blocks, self.held.values(), strict=True):
            row = RowPlan.of(block.branches[0])
            history = tuple(FrameRef(f.index, f.pages, lengths[f.index]) for f in row.history)
            rows.append(RowPlan(history, row.frames, row.scratch, row.extra, row.tokens))
        return GrowingPlan(
            rows, self.storage, turn=lambda row, keys: None, cache_history=cached, together=together
        ), list(blocks)


def _draw(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(LAYERS, tokens, n, DIM, generator=generator) for n in heads)
    return q, k, v


def _rooms(bench: Bench, rows: int) -> Rooms:
    return Rooms.of(bench.spec, rows, dtype=torch.float32, device="cpu")


def _dense(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> Tensor:
    """The last ``tokens`` queries over all keys, causal."""
    mask = torch.ones(len(k), len(k), dtype=torch.bool).tril()[-tokens:]
    q, k, v = (x.transpose(0, 1)[None] for x in (q[-tokens:], k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_pieces_are_one_pass_over_all_that_was_written(cached: bool, together: bool) -> None:
    """Three frames of several lengths, one of them empty, in pieces; rows leave a pass and come back."""
    bench = Bench()
    written: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"a": [], "b": []}
    for number, pieces in enumerate(([(0, 3), (1, 3), (0, 1)], [(1, 2)], [(0, 4), (0, 2), (1, 7)])):
        plan, blocks = bench.plan(cached, together)
        tokens = {"a": 0, "b": 0}
        for place, (row, count) in enumerate(pieces):
            name = "ab"[row]
            q, k, v = _draw(count, 10 * number + place)
            written[name].append((q, k, v))
            tokens[name] += count
            whole = [torch.cat([part[i] for part in written[name]], dim=1) for i in range(3)]
            for layer in range(LAYERS):
                got = plan.attend(layer, q[layer][None], k[layer][None], v[layer][None], rows=[row])[0]
                expected = _dense(whole[0][layer], whole[1][layer], whole[2][layer], count)
                assert float((got - expected).abs().max()) <= 1e-5
        assert not plan.complete(0)
        plan.finish([0, 1])
        assert plan.complete(0)
        assert plan.complete(1)
        plan.close()
        for block, name in zip(blocks, bench.held, strict=True):
            bench.book.commit(block)  # type: ignore[arg-type]
            bench.held[name].append(tokens[name])
    for name, lengths in bench.held.items():
        for frame, length in zip(bench.book.table(name, "main").retained(), lengths, strict=True):
            keys, _ = bench.storage.read(0, [frame])
            assert not bool(keys[length:].any())
            assert length == 0 or bool(keys[:length].any())


def test_rows_that_share_a_kernel_are_what_they_are_alone() -> None:
    """Of different lengths, in passes of both, of one, and of both in the other order."""
    bench, got = Bench(), {}
    for number, count in enumerate((5, 3)):
        plan, blocks = bench.plan(True)
        for row, name in enumerate(bench.held):
            q, k, v = _draw(count - row, number)
            for layer in range(LAYERS):
                plan.attend(layer, q[layer][None], k[layer][None], v[layer][None], rows=[row])
            bench.held[name].append(count - row)
        plan.finish([0, 1])
        for block in blocks:
            bench.book.commit(block)  # type: ignore[arg-type]
    drawn = [_draw(2, 70), _draw(1, 71), _draw(3, 72)]
    for together in (True, False):
        plan, blocks = bench.plan(True, together)
        outs = []
        for (q, k, v), rows in zip(drawn, ([0, 1], [1], [1, 0]), strict=True):
            for layer in range(LAYERS):
                stacked = [torch.stack([x[layer] * (1 + row) for row in rows]) for x in (q, k, v)]
                outs.append(plan.attend(layer, *stacked, rows=rows))
        got[together] = outs
        plan.close()
        for block in blocks:
            bench.book.rollback(block)  # type: ignore[arg-type]
    for one, two in zip(got[True], got[False], strict=True):
        assert float((one - two).abs().max()) <= 1e-5


def test_passes_through_rooms_see_and_leave_what_plain_ones_do() -> None:
    """Frames are written by passes of one, two and more tokens, of all rows and of one, in either order, filled up; rooms are
    left as the tick before left them, and as one that computed no numbers did. Pages are equal to the last slot."""
    plain, roomed = Bench(), Bench()
    rooms: Rooms | None = None
    for number in range(6):
        outs: list[list[Tensor]] = [[], []]
        for way, bench in enumerate((plain, roomed)):
            plan, blocks = bench.plan(True)
            if bench is roomed:
                rooms = rooms or _rooms(bench, 3)
                plan.use(rooms)
            counts = [0, 0]
            for place, (rows, count) in enumerate((([0, 1], 2), ([0, 1], 1), ([1], 1), ([1, 0], 1), ([0, 1], 2))):
                drawn = _draw(count, 10 * number + place)
                if bench is roomed:
                    assert rooms is not None
                    rooms.place(rows, plan.columns(rows), count, 3)
                    attend = rooms.look(3, count)
                for layer in range(LAYERS):
                    q, k, v = (torch.stack([x[layer] * (1 + row) for row in rows]) for x in drawn)
                    if bench is plain:
                        outs[way].append(plan.attend(layer, q, k, v, rows=rows))
                        continue
                    q, k, v = (x.new_ones(3, *x.shape[1:]).index_copy(0, torch.tensor(rows), x) for x in (q, k, v))
                    outs[way].append(attend(layer, q, k, v)[rows])
                if bench is roomed:
                    plan.wrote(rows, count)
                for row in rows:
                    counts[row] += count
            plan.finish([1, 0])
            assert plan.complete(0)
            assert plan.complete(1)
            for block, (name, held) in zip(blocks, bench.held.items(), strict=True):
                bench.book.commit(block)  # type: ignore[arg-type]
                held.append(counts["ab".index(name)])
        for one, two in zip(*outs, strict=True):
            assert float((one - two).abs().max()) <= 1e-5
        for layer in range(LAYERS):
            managed = slice(0, plain.book.pool.statistics().total)
            for pool in ("k", "v"):
                pages = [getattr(bench.storage, pool)[layer][managed] for bench in (plain, roomed)]
                assert torch.equal(*pages)
        assert rooms is not None
        rooms.place([0, 1], [30, 30], 2, 3)
        rooms.look(3, 2)(0, *(torch.full((3, 2, heads, DIM), torch.nan) for heads in (HEADS, KV_HEADS, KV_HEADS)))


def test_rooms_are_taken_before_the_first_pass_and_where_they_fit() -> None:
    bench = Bench()
    plan, _ = bench.plan(True)
    with pytest.raises(ValueError, match="no rooms"):
        plan.use(_rooms(bench, 1))
    rooms = _rooms(bench, 2)
    q, k, v = (x[0][None] for x in _draw(1, 0))
    plan.attend(0, q, k, v, rows=[0])
    with pytest.raises(ValueError, match="too late"):
        plan.use(rooms)
    other, _ = Bench().plan(True)
    other.use(rooms)
    with pytest.raises(ValueError, match="in rooms"):
        other.attend(0, q, k, v, rows=[0])
    other.wrote([0], ROOM)
    with pytest.raises(ValueError, match="no room"):
        other.wrote([0], 1)


def test_a_frame_has_no_room_for_more_and_a_finished_row_for_none() -> None:
    bench = Bench()
    plan, _ = bench.plan(True)
    q, k, v = (x[0][None] for x in _draw(5, 0))
    plan.attend(0, q, k, v, rows=[0])
    with pytest.raises(ValueError, match="no room for 5"):
        plan.attend(0, q, k, v, rows=[0])
    plan.finish([0])
    assert not plan.complete(0), "the second layer was not written"
    with pytest.raises(ValueError, match="no room"):
        plan.attend(1, q[:, :1], k[:, :1], v[:, :1], rows=[0])
    plan.close()
    with pytest.raises(ValueError, match="closed"):
        plan.attend(0, q, k, v, rows=[1])
