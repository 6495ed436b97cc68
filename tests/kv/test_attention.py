"""Paged attention equals a dense cache, whatever the page size, the batch or the pages' places; probes change nothing."""

import pytest
import torch

from kv.dense_reference import DenseCache
from realtime_omni.errors import BackendUnavailable, ConfigError
from realtime_omni.kv.attention import RowPlan, open_backend
from realtime_omni.kv.attention.sdpa import SdpaBackend
from realtime_omni.kv.capacity import KVBranch, KVSpec
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Room:
    """A book, its storage and one dense oracle per session and layer; every pass is checked against the oracle."""

    def __init__(
        self, *, dtype=torch.float64, backend=None, tokens=39, page=16, sessions=3, block=3, window=9, sink=3, **more
    ):
        self.spec = KVSpec(
            num_layers=2,
            num_kv_heads=2,
            head_dim=8,
            tokens_per_frame=tokens,
            frames_per_block=block,
            window_frames=window,
            sink_frames=sink,
            page_tokens=page,
            dtype_bytes=dtype.itemsize,
            max_in_flight=sessions,
            **more,
        )
        self.book = KVBook(self.spec, sessions=sessions)
        pages = self.book.pool.statistics().total + self.spec.scratch_pages
        self.storage = KVStorage(self.spec, pages, dtype=dtype)
        self.backend = backend or SdpaBackend()
        self.dtype = dtype
        self.random = torch.Generator().manual_seed(7)
        self.dense: dict[str, list[DenseCache]] = {}
        self.worst = 0.0

    def begin(self, *sessions: str) -> None:
        for session in sessions:
            self.book.begin(session)
            size = self.spec
            self.dense[session] = [
                DenseCache(size.sink_frames, window, size.tokens_per_frame, size.dense_frames)
                for window in size.layer_windows or (size.window_frames,) * size.num_layers
            ]

    def qkv(self, rows: int, tokens: int, q_heads: int = 2):
        return tuple(
            torch.randn(rows, tokens, heads, 8, generator=self.random, dtype=torch.float64).to(self.dtype)
            for heads in (q_heads, 2, 2)
        )

    def tick(self, *sessions: str, probes: int = 2, q_heads: int = 2) -> None:
        """One batched tick: probes with fresh noise, one clean pass, commit; asserts every output against the oracle."""
        blocks = [self.book.plan_block(session) for session in sessions]
        rows = [RowPlan.of(block.branches[0]) for block in blocks]
        plan = self.backend.plan(rows, self.storage)
        for number in range(probes + 1):
            commit = number == probes
            for layer in range(self.spec.num_layers):
                q, k, v = self.qkv(len(rows), rows[0].tokens, q_heads)
                out = plan.attend(layer, q, k, v, rows=range(len(rows)), commit=commit)
                for at, session in enumerate(sessions):
                    cache = self.dense[session][layer]
                    want = cache.attend(q[at], k[at], v[at])
                    self.worst = max(self.worst, float((out[at].double() - want).abs().max()))
                    if commit:
                        cache.commit(k[at], v[at])
        assert all(plan.complete(row) for row in range(len(rows)))
        plan.close()
        for block in blocks:
            self.book.commit(block)
        self.book.check()
        assert self.worst <= TOLERANCE[self.dtype]


@pytest.mark.req("AC-27")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "page"), [(39, 16), (39, 39), (16, 16), (5, 16), (7, 1)])
def test_seven_chunks_across_sink_and_window_equal_a_dense_cache(dtype, tokens, page):
    """Tolerances on outputs of order one: 1e-12 in float64, 1e-5 in float32, 2e-2 in bfloat16."""
    room = Room(dtype=dtype, tokens=tokens, page=page)
    room.begin("a")
    for _ in range(7):
        room.tick("a")
    assert room.book.completed_frames("a") == 21
    assert len(room.book.table("a", "main").retained()) == 12


@pytest.mark.req("AC-27")
@pytest.mark.parametrize("cache_history", [True, False])
def test_sessions_out_of_step_in_one_batch_each_equal_their_own_dense_cache(cache_history):
    room = Room(dtype=torch.float32, backend=SdpaBackend(cache_history=cache_history))
    room.begin("a", "b", "c")
    room.tick("a")
    room.tick("a", "b")
    for _ in range(6):
        room.tick("a", "b", "c")


@pytest.mark.parametrize("cache_history", [True, False])
@pytest.mark.parametrize(("windows", "page"), [((9, 3), 16), ((6, 9), 39), ((6, 3), 1)])
def test_layers_of_smaller_windows_equal_dense_caches_of_those(windows, page, cache_history):
    """Two sessions out of step; the sinks are seen in every layer."""
    backend = SdpaBackend(cache_history=cache_history)
    room = Room(dtype=torch.float64, backend=backend, tokens=5, page=page, layer_windows=windows)
    room.begin("a", "b")
    room.tick("a")
    for _ in range(6):
        room.tick("a", "b")


@pytest.mark.parametrize("cache_history", [True, False])
@pytest.mark.parametrize(
    ("dense", "windows", "sink", "page"), [(6, (), 0, 16), (3, (), 3, 1), (3, (15, 9), 0, 5), (6, (3, 12), 4, 16)]
)
def test_of_what_is_older_than_the_dense_part_the_last_frame_of_each_block_is_seen(
    dense, windows, sink, page, cache_history
):
    """Two sessions out of step, over a window of five blocks; also where a layer's window is smaller than either part."""
    backend = SdpaBackend(cache_history=cache_history)
    room = Room(backend=backend, tokens=5, page=page, window=15, sink=sink, dense_frames=dense, layer_windows=windows)
    room.begin("a", "b")
    room.tick("a")
    for _ in range(8):
        room.tick("a", "b")


def test_a_layers_window_is_counted_from_the_block_also_where_the_frame_before_it_is_not_seen():
    """After blocks of two frames, which end no block: of frames 0 to 3 only 2 is seen, and from frame 6 it is four away."""
    room = Room(window=15, sink=0, dense_frames=3)
    room.begin("a")
    for _ in range(2):
        room.book.commit(room.book.plan_block("a", frames=2))
    row = RowPlan.of(room.book.plan_block("a").branches[0])
    assert [frame.index for frame in row.seen] == [2]
    assert row.within(4, 0).seen == ()
    assert row.within(5, 0).seen == row.history


def test_a_full_thin_window_fills_memory_that_is_used_again_with_what_is_seen():
    """What recorded passes do: three sessions with full windows, gathered into memory of one shape, twice."""
    room = Room(dtype=torch.float32, tokens=5, page=16, window=15, sink=1, dense_frames=6)
    room.begin("a", "b", "c")
    history = None
    for tick in range(8):
        rows = [RowPlan.of(room.book.plan_block(session).branches[0]) for session in "abc"]
        plan = room.backend.plan(rows, room.storage)
        full = plan.full_window([0, 1, 2])
        assert full == (((1 + 3 + 3) * 5, 15) if tick >= 4 else None)
        if full is not None:
            history = plan.new_history(3, sum(full)) if history is None else history
            plan.gather_into([0, 1, 2], history)
            q, k, v = room.qkv(3, 15)
            out = plan.attend(1, q, k, v, rows=[0, 1, 2], commit=False)
            want = [room.dense[s][1].attend(q[at], k[at], v[at]) for at, s in enumerate("abc")]
            torch.testing.assert_close(out.double(), torch.stack(want), rtol=0, atol=1e-5)
        plan.close()
        for session in "abc":
            room.book.rollback(room.book._open[session])
        room.tick("a", "b", "c", probes=0)
    assert history is not None


@pytest.mark.parametrize("windows", [(9,), (9, 2), (9, 10)])
def test_layer_windows_that_fit_no_layer_or_window_are_refused(windows):
    with pytest.raises(ValueError, match="layer windows"):
        Room(layer_windows=windows)


def test_queries_may_have_more_heads_than_keys():
    room = Room(dtype=torch.float32)
    room.begin("a", "b")
    room.tick("a", q_heads=6)
    for _ in range(3):
        room.tick("a", "b", q_heads=6)


@pytest.mark.parametrize(("window", "dense"), [(6, None), (12, 3)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_of_three_equals_three_batches_of_one(dtype, window, dense):
    """Bit for bit in float64, to 1e-5 in float32; rows at different depths, two of them equal."""
    room = Room(dtype=dtype, sink=1, window=window, dense_frames=dense)
    room.begin("a", "b", "c")
    for sessions in ("a", "ab", "abc", "a"):
        room.tick(*sessions)
    rows = [RowPlan.of(room.book.plan_block(session).branches[0]) for session in "abc"]
    assert len({row.history_tokens for row in rows}) > 1
    q, k, v = room.qkv(3, rows[0].tokens)
    together = room.backend.plan(rows, room.storage)
    for layer in range(2):
        out = together.attend(layer, q, k, v, rows=[0, 1, 2], commit=False)
        for at, row in enumerate(rows):
            one = slice(at, at + 1)
            alone = room.backend.plan([row], room.storage).attend(layer, q[one], k[one], v[one], rows=[0], commit=False)
            if dtype is torch.float64:
                assert torch.equal(out[one], alone)
            else:
                torch.testing.assert_close(out[one], alone, rtol=0, atol=1e-5)


def test_rows_may_be_dropped_between_passes_without_changing_the_others():
    room = Room()
    room.begin("a", "b", "c")
    for _ in range(4):
        room.tick("a", "b", "c")
    rows = [RowPlan.of(room.book.plan_block(session).branches[0]) for session in "abc"]
    plan = room.backend.plan(rows, room.storage)
    q, k, v = room.qkv(3, rows[0].tokens)
    whole = plan.attend(0, q, k, v, rows=[0, 1, 2], commit=False)
    for kept in ([0, 2], [2], [2, 0]):
        part = plan.attend(0, q[kept], k[kept], v[kept], rows=kept, commit=False)
        assert torch.equal(part, whole[kept])
    for layer in range(2):
        plan.attend(layer, q[[2]], k[[2]], v[[2]], rows=[2], commit=True)
    assert [plan.complete(row) for row in range(3)] == [False, False, True]


def test_a_probe_changes_no_page_and_the_clean_pass_only_the_reserved_ones():
    room = Room(dtype=torch.float32)
    room.begin("a", "b")
    for _ in range(3):
        room.tick("a", "b")
    blocks = [room.book.plan_block(session) for session in "ab"]
    rows = [RowPlan.of(block.branches[0]) for block in blocks]
    plan = room.backend.plan(rows, room.storage)
    before = [pool.clone() for pool in (*room.storage.k, *room.storage.v)]
    q, k, v = room.qkv(2, rows[0].tokens)
    plan.attend(0, q, k, v, rows=[0, 1], commit=False)
    scratch_start = room.book.pool.statistics().total
    for pool, old in zip((*room.storage.k, *room.storage.v), before, strict=True):
        assert torch.equal(pool[:scratch_start], old[:scratch_start])
    plan.attend(0, q[[1]], k[[1]], v[[1]], rows=[1], commit=True)
    reserved = {page for frame in rows[1].frames for page in frame.pages}
    changed = (room.storage.k[0] != before[0]).flatten(1).any(1).nonzero().flatten().tolist()
    assert set(changed) == reserved
    assert torch.equal(room.storage.read(0, rows[1].frames)[0], k[1])


def test_where_pages_lie_cannot_change_a_bit():
    """The same session on a fresh pool and on one full of holes gives the same float32 numbers."""
    outputs = []
    for disturbed in (False, True):
        room = Room(dtype=torch.float32)
        room.begin("a", "b")
        for number in range(6):
            room.random.manual_seed(number)
            room.tick("a")
            if disturbed:
                room.tick("b")
                if number == 3:
                    room.book.end("b")
                    del room.dense["b"]
                    room.begin("b")
        row = RowPlan.of(room.book.plan_block("a").branches[0])
        room.random.manual_seed(99)
        q, k, v = room.qkv(1, row.tokens)
        outputs.append((row, room.backend.plan([row], room.storage).attend(1, q, k, v, rows=[0], commit=False)))
    assert outputs[0][0].history != outputs[1][0].history
    assert torch.equal(outputs[0][1], outputs[1][1])


def test_a_failed_block_can_run_again_and_gives_the_same_bits():
    room = Room()
    room.begin("a")
    for _ in range(5):
        room.tick("a")
    outs = []
    for attempt in range(2):
        reservation = room.book.plan_block("a")
        row = RowPlan.of(reservation.branches[0])
        plan = room.backend.plan([row], room.storage)
        room.random.manual_seed(3)
        q, k, v = room.qkv(1, row.tokens)
        outs.append([plan.attend(layer, q, k, v, rows=[0], commit=False) for layer in range(2)])
        if attempt == 0:
            plan.attend(0, q, k, v, rows=[0], commit=True)  # fails half-way through its clean pass
            assert not plan.complete(0)
            plan.close()
            room.book.rollback(reservation)
    assert all(torch.equal(first, second) for first, second in zip(*outs, strict=True))


def test_extra_tokens_are_attended_to_and_never_committed():
    room = Room(scratch_tokens_per_branch=20)
    room.begin("a")
    block = room.book.plan_block("a")
    row = RowPlan.of(block.branches[0], extra_tokens=5)
    plan = room.backend.plan([row], room.storage)
    q, k, v = room.qkv(1, 3 * 39 + 5)
    for layer in range(2):
        out = plan.attend(layer, q, k, v, rows=[0], commit=True)
        oracle = DenseCache(3, 9, 1)
        torch.testing.assert_close(out[0], oracle.attend(q[0], k[0], v[0]), rtol=0, atol=1e-12)
        assert torch.equal(room.storage.read(layer, row.frames)[0], k[0, : 3 * 39])
    with pytest.raises(ValueError, match="scratch for 20"):
        RowPlan.of(block.branches[0], extra_tokens=21)


def test_a_fork_continues_as_its_source_would_and_leaves_it_alone():
    room = Room()
    room.begin("a")
    for _ in range(5):
        room.tick("a")
    room.book.fork("a", "b")
    room.dense["b"] = []
    for cache in room.dense["a"]:
        twin = DenseCache(cache.sink, cache.window, cache.tokens)
        twin.k, twin.v = cache.k, cache.v
        room.dense["b"].append(twin)
    for _ in range(4):
        room.tick("b")
        room.tick("a", "b")


def test_two_guidance_branches_are_two_rows():
    room = Room(branches=(KVBranch("positive", 0), KVBranch("negative", 1)))
    room.begin("a")
    reservation = room.book.plan_block("a")
    rows = [RowPlan.of(block) for block in reservation.branches]
    plan = room.backend.plan(rows, room.storage)
    q, k, v = room.qkv(2, rows[0].tokens)
    for layer in range(2):
        plan.attend(layer, q, k, v, rows=[0, 1], commit=True)
    room.book.commit(reservation)
    for at, branch in enumerate(("positive", "negative")):
        stored = room.storage.read(1, room.book.table("a", branch).retained())[1]
        assert torch.equal(stored, v[at])


def test_a_plan_refuses_what_it_was_not_planned_for():
    room = Room()
    room.begin("a")
    row = RowPlan.of(room.book.plan_block("a").branches[0])
    plan = room.backend.plan([row], room.storage)
    q, k, v = room.qkv(1, row.tokens)
    for bad in (
        lambda: plan.attend(0, q[:, :-1], k[:, :-1], v[:, :-1], rows=[0], commit=False),
        lambda: plan.attend(0, q, k, v[:, :, :1], rows=[0], commit=False),
        lambda: plan.attend(0, q, k, v, rows=[0, 0], commit=False),
    ):
        with pytest.raises(ValueError):
            bad()
    plan.close()
    plan.close()
    with pytest.raises(ValueError, match="closed"):
        plan.attend(0, q, k, v, rows=[0], commit=False)


def test_the_backend_is_chosen_by_name_and_unknown_ones_are_refused():
    assert open_backend("auto", device="cpu").name == "sdpa"
    assert open_backend("sdpa", device="cpu").name == "sdpa"
    with pytest.raises(ConfigError, match="known: auto, sdpa, flashinfer"):
        open_backend("magic")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_flashinfer_says_what_is_missing_and_is_imported_without_its_package():
    from realtime_omni.kv.attention import flashinfer

    found = flashinfer.probe()
    assert not found.available
    with pytest.raises(BackendUnavailable, match=found.reason):
        open_backend("flashinfer", device="cuda")


def test_causal_attention_sees_the_history_and_each_token_up_to_itself():
    room = Room(tokens=1, page=1, block=5, window=16, sink=0)
    room.begin("a")
    room.tick("a")
    [history] = [room.book.plan_block("a")]
    plan = room.backend.plan([RowPlan.of(history.branches[0])], room.storage)
    q, k, v = room.qkv(1, 5, q_heads=4)
    out = plan.attend(0, q, k, v, rows=[0], commit=False, causal=True)
    past_k, past_v = room.storage.read(0, history.branches[0].history)
    for token in range(5):
        keys = torch.cat((past_k, k[0, : token + 1])).repeat_interleave(2, dim=1)
        values = torch.cat((past_v, v[0, : token + 1])).repeat_interleave(2, dim=1)
        weights = torch.einsum("hd,thd->ht", q[0, token], keys).div(8**0.5).softmax(-1)
        torch.testing.assert_close(out[0, token], torch.einsum("ht,thd->hd", weights, values), rtol=0, atol=1e-12)
