"""Sink and window of one branch: what stays, what the next block sees, and what rewind and fork may do."""

import gc
from types import FunctionType, ModuleType

import pytest

from realtime_omni.errors import ArgumentError, CapacityError
from realtime_omni.kv.blocks import NULL_PAGE, PagePool
from realtime_omni.kv.geometry import WindowGeometry
from realtime_omni.kv.window import FrameRef, WindowTable


def geometry(sink=3, window=9, block=3, tokens=1, page=1, reset=False, rewind_blocks=1, dense=None) -> WindowGeometry:
    return WindowGeometry(sink, window, block, tokens, page, reset, rewind_blocks, dense_frames=dense)


def table(size: WindowGeometry, pages: int | None = None) -> WindowTable:
    enough = 1 + (size.retained_frames + size.frames_per_block) * size.pages_per_frame
    return WindowTable(
        "ar::a::main", size, PagePool(enough if pages is None else pages, run_pages=size.pages_per_frame)
    )


def indices(frames: tuple[FrameRef, ...]) -> list[int]:
    return [frame.index for frame in frames]


def run_blocks(window: WindowTable, blocks: int) -> None:
    for _ in range(blocks):
        window.reserve(window.geometry.frames_per_block)
        window.commit()
        window.check()


def test_b17_the_sink_is_never_skipped():
    """80 tokens in frames of 16, a window of 32 tokens and a sink of one frame: 32 tokens are skipped."""
    size = geometry(sink=1, window=2, block=1, tokens=16, page=16)
    window = table(size)
    run_blocks(window, 5)
    assert size.skipped_frames(5) * 16 == 32
    assert indices(window.retained()) == [0, 3, 4]


@pytest.mark.req("AC-23")
def test_b18_twenty_blocks_hold_window_plus_one_while_allocating_and_the_window_after_commit():
    size = geometry(sink=0, window=4, block=1, tokens=3, page=2)
    pool = PagePool(1 + 5 * 2 + 7, run_pages=2)
    window = WindowTable("ar::a::main", size, pool)
    free = []
    for _ in range(20):
        block = window.reserve(1)
        held = [page for frame in (*window.retained(), *block) for page in frame.pages]
        assert len(window.retained()) + len(block) <= 4 + 1
        assert NULL_PAGE not in held
        assert len(set(held)) == len(held)
        window.commit()
        assert len(window.retained()) <= 4
        free.append(pool.free_pages)
    assert free[:4] == [15, 13, 11, 9]
    assert free[4 - 1 :] == [9] * 17, "the free count plateaus from index window - 1"


@pytest.mark.parametrize("sink", [0, 1, 3])
@pytest.mark.parametrize(("window_frames", "block"), [(3, 3), (4, 3), (9, 3), (6, 4), (5, 1), (1, 1), (7, 2)])
def test_the_block_sees_what_a_full_history_with_an_index_rule_would_select(sink, window_frames, block):
    """The rule, in the other direction: of all frames including the block itself, the first S and the last W."""
    window = table(geometry(sink, window_frames, block))
    everything: list[int] = []
    for _ in range(12):
        current = list(range(len(everything), len(everything) + block))
        including = [*everything, *current]
        selected = sorted({*including[:sink], *including[max(0, len(including) - window_frames) :]})
        reserved = window.reserve(block)
        assert indices(reserved) == current
        assert [*indices(window.visible()), *current] == selected
        everything = including
        window.commit()
        kept = sorted({*everything[:sink], *everything[max(0, len(everything) - window_frames) :]})
        assert indices(window.retained()) == kept


def thin(frames: list[int], end: int, dense: int, block: int) -> list[int]:
    """Those that are among the last ``dense`` before ``end``, or end a block."""
    return [f for f in frames if f >= end - dense or f % block == block - 1]


@pytest.mark.parametrize("sink", [0, 1, 3, 5])
@pytest.mark.parametrize(("window_frames", "block", "dense"), [(15, 3, 6), (12, 3, 3), (9, 3, 9), (8, 2, 4), (7, 2, 4)])
def test_beyond_its_dense_part_a_block_sees_one_frame_of_each_block(sink, window_frames, block, dense):
    """The rule, from the side of the frames: the first S, and of the last W those that :func:`thin` leaves."""
    size = geometry(sink, window_frames, block, dense=dense)
    window = table(size)
    for number in range(14):
        end = block * (number + 1)
        selected = {*range(sink), *thin(list(range(max(0, end - window_frames), end)), end, dense, block)}
        current = indices(window.reserve(block))
        assert [*indices(window.visible()), *current] == sorted(i for i in selected if i < end)
        window.commit()
        window.check()
    assert len(window.visible()) == size.seen_frames


def test_what_no_block_will_see_gives_its_pages_back_after_the_commit():
    """Twenty blocks: 45 to 59 are the window, 54 to 59 dense; then what leaves both. A rollback gives nothing back."""
    window = table(geometry(sink=0, window=15, block=3, dense=6))
    run_blocks(window, 20)
    assert indices(window.retained()) == [47, 50, 53, 54, 55, 56, 57, 58, 59]
    assert window._pool.free_pages == 3 == window._pool.statistics().total - 1 - window.geometry.retained_frames
    window.reserve(3)
    window.rollback()
    assert len(window.retained()) == 9
    window.reserve(3)
    assert indices(window.commit()) == [47, 54, 55]
    assert window.geometry.skipped_frames(63) == 63 - 9


def test_a_window_of_a_full_turn_holds_31_frames_and_three_more_for_each_block_of_rewind():
    assert geometry(sink=0, window=75, block=3, dense=9).retained_frames == 9 + 66 // 3 == 31
    assert geometry(sink=0, window=75, block=3, dense=9, rewind_blocks=8).retained_frames == 31 + 7 * 3


def test_a_rewind_to_where_the_dense_part_is_thin_by_now_is_refused_and_changes_nothing():
    """The block at 18 saw frames 15 to 17; after 24 frames 15 and 16 are gone, though no block ends have been evicted yet."""
    window = table(geometry(sink=0, window=30, block=3, dense=6))
    run_blocks(window, 7)
    context = window.visible()
    run_blocks(window, 1)
    before = window.retained()
    with pytest.raises(ArgumentError, match="cannot rewind 6 frames: 24 committed, 12 stored"):
        window.rewind(6)
    assert window.retained() == before
    window.rewind(3)
    window.check()
    assert window.visible() == context
    assert not window.can_rewind(3)


@pytest.mark.parametrize("back", [0, 2, 4])
@pytest.mark.parametrize("blocks", [1, 3, 12])
def test_a_restored_thin_window_goes_on_as_the_saved_one(blocks, back):
    size = geometry(sink=1, window=12, block=2, dense=4, rewind_blocks=2)
    saved, restored = table(size), table(size)
    run_blocks(saved, blocks)
    saved.rewind(min(back, saved.completed))
    restored.restore(saved.completed, indices(saved.retained()))
    for _ in range(4):
        restored.check()
        assert indices(restored.retained()) == indices(saved.retained())
        assert indices(restored.visible()) == indices(saved.visible())
        run_blocks(saved, 1)
        run_blocks(restored, 1)


def test_of_saved_frames_those_that_a_thin_window_has_no_use_for_are_left_out():
    """Saved with all frames, or for more blocks of rewind; what is missing, twice there or out of order is refused."""
    size = geometry(sink=0, window=12, block=3, dense=3)
    assert size.restored(30, range(30)) == (20, 23, 26, 27, 28, 29)
    for wrong in ([20, 26, 27, 28, 29], [20, 23, 26, 27, 28], [23, 20, 26, 29], [20, 23, 26, 26, 29], []):
        with pytest.raises(ArgumentError, match="not the frames of a session after 30"):
            size.restored(30, wrong)
    assert size.restored(30, [23, 26, 29]) == (23, 26, 29), "a rewind has spent the rest"


@pytest.mark.parametrize(
    ("dense", "tails", "none"),
    [
        (None, [range(18, 30), range(21, 30)], [range(17, 30), range(25, 30), [18, *range(20, 30)]]),
        (
            3,
            [[20, 23, *range(24, 30)], [20, 23, 26, 27, 28, 29], [23, 26, 29]],
            [[17, 20, 23, *range(24, 30)], [22, 23, 26, 29], [20, 26, 27, 28, 29], [23, 26], [23, 29, 26], [29]],
        ),
    ],
)
def test_a_tail_is_what_is_seen_and_of_what_is_kept_the_newest_without_gaps_but_thin_ones(dense, tails, none):
    """After 30 frames 24 to 29 are seen and 18 to 29 kept; where it is thin, 26 and 29 are seen, and 24 to 29 kept whole."""
    size = geometry(sink=0, window=9, block=3, rewind_blocks=2, dense=dense)
    assert all(size.is_tail(30, tail) for tail in tails)
    assert not any(size.is_tail(30, tail) for tail in none)


@pytest.mark.parametrize(
    "how",
    [
        {"dense": 0},
        {"dense": 2},
        {"dense": 12},
        {"dense": 3, "reset": True},
        {"dense": 3, "block": 1},
    ],
)
def test_a_dense_part_that_makes_no_window_is_refused(how):
    with pytest.raises(ValueError, match="dense_frames"):
        geometry(**how)


def test_pages_of_16_do_not_divide_1560_tokens_and_no_page_straddles_two_frames():
    size = geometry(sink=9, window=9, block=3, tokens=1560, page=16)
    assert size.pages_per_frame == 98
    window = table(size)
    run_blocks(window, 12)
    pages = window.pages()
    assert len(pages) == 18 * 98 == len(set(pages))
    last = window.retained()[-1]
    assert 1560 - 97 * 16 == 8, "the last page of a frame is half full"
    assert last.tokens == 1560
    assert last.pages == tuple(range(last.pages[0], last.pages[0] + 98)), "a frame is one run of pages"


@pytest.mark.parametrize("tokens", range(1, 40))
def test_a_frame_of_any_size_gets_the_fewest_pages_that_hold_it(tokens):
    pages = geometry(tokens=tokens, page=8).pages_per_frame
    assert (pages - 1) * 8 < tokens <= pages * 8


def test_frames_are_evicted_after_the_commit_and_a_rollback_evicts_nothing():
    window = table(geometry(sink=1, window=3, block=1))
    run_blocks(window, 4)
    before = window.retained()
    window.reserve(1)
    window.rollback()
    assert window.retained() == before
    window.reserve(1)
    assert window.retained() == before
    assert indices(window.commit()) == [1]


def test_an_odd_first_block_may_be_shorter():
    window = table(geometry(sink=1, window=6, block=4))
    window.reserve(1)
    window.commit()
    assert indices(window.reserve(4)) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="in flight"):
        window.reserve(4)


@pytest.mark.parametrize("frames", [0, 4, -1])
def test_a_block_of_another_size_is_refused(frames):
    with pytest.raises(ValueError, match="1 to 3 frames"):
        table(geometry()).reserve(frames)


def test_a_full_pool_refuses_the_block_and_changes_nothing():
    window = table(geometry(), pages=3)
    with pytest.raises(CapacityError):
        window.reserve(3)
    assert window.block == ()
    window.check()


@pytest.mark.parametrize(("dense", "kept"), [(None, 12), (3, 3 + 3 + 2)])
def test_a_long_session_costs_no_more_than_a_short_one(dense, kept):
    """10,000 blocks: the table's length, its object count and the pool stay as they were after the window filled."""
    window = table(geometry(sink=3, window=9, block=3, tokens=39, page=16, dense=dense))
    run_blocks(window, 6)
    lengths, objects, free = len(window.retained()), reachable(window), window._pool.free_pages
    run_blocks(window, 9_994)
    assert window.completed == 30_000
    assert indices(window.retained())[:4] == [0, 1, 2, 29_991 if dense is None else 29_993]
    assert len(window.retained()) == lengths == kept
    assert reachable(window) == objects
    assert window._pool.free_pages == free


def reachable(root: object) -> int:
    """How many objects hang on this one, types, modules and functions aside."""
    seen: set[int] = set()
    queue = [root]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType | int):
            continue
        seen.add(id(item))
        queue.extend(gc.get_referents(item))
    return len(seen)


def test_reset_at_boundary_empties_the_window_each_time_it_is_complete():
    size = geometry(sink=1, window=4, block=2, reset=True)
    window = table(size)
    kept = []
    for _ in range(5):
        window.reserve(2)
        window.commit()
        window.check()
        kept.append(indices(window.retained()))
    assert kept == [[0, 1], [0], [0, 4, 5], [0], [0, 8, 9]]
    assert size.skipped_frames(8) == 8 - 1


def test_a_rewind_by_one_block_finds_exactly_the_context_that_block_had():
    window = table(geometry(sink=3, window=9, block=3))
    run_blocks(window, 7)
    context = window.visible()
    run_blocks(window, 1)
    assert window.can_rewind(3)
    assert indices(window.rewind(3)) == [21, 22, 23]
    assert window.visible() == context
    assert window.completed == 21
    window.check()


def test_a_rewind_whose_context_is_gone_is_refused_and_changes_nothing():
    window = table(geometry(sink=3, window=9, block=3))
    run_blocks(window, 8)
    before = window.retained()
    with pytest.raises(ArgumentError, match="cannot rewind 6 frames: 24 committed, 12 stored"):
        window.rewind(6)
    assert window.retained() == before
    window.rewind(3)
    assert not window.can_rewind(3), "the spare block is spent"
    run_blocks(window, 1)
    assert window.can_rewind(3), "and is there again after the next one"


def test_a_session_that_evicted_nothing_can_go_back_to_any_frame():
    window = table(geometry(sink=3, window=9, block=3))
    run_blocks(window, 4)
    assert all(window.can_rewind(frames) for frames in range(13))
    assert not window.can_rewind(13)
    assert not window.can_rewind(-1)


def test_a_rewind_into_the_sink_is_always_possible():
    window = table(geometry(sink=3, window=9, block=3))
    run_blocks(window, 20)
    window.rewind(58)
    assert indices(window.retained()) == [0, 1]
    window.check()
    window.rewind(2)
    assert window._pool.free_pages == 15


def test_a_fork_shares_pages_and_then_goes_its_own_way():
    size = geometry(sink=1, window=3, block=1)
    pool = PagePool(20)
    window = WindowTable("ar::a::main", size, pool)
    run_blocks(window, 5)
    twin = window.fork("ar::b::main")
    assert twin.retained() == window.retained()
    assert pool.statistics().referenced == 4
    run_blocks(twin, 2)
    assert indices(window.retained()) == [0, 2, 3, 4]
    assert indices(twin.retained()) == [0, 4, 5, 6]
    window.release()
    twin.check()
    pool.check()
    twin.release()
    assert pool.free_pages == 19


def test_release_gives_back_the_block_in_flight_too():
    window = table(geometry())
    run_blocks(window, 2)
    window.reserve(3)
    assert window.release() == 9
    window._pool.check()
    assert window._pool.statistics().referenced == window._pool.statistics().reserved == 0


def test_no_rewind_under_a_block_in_flight():
    window = table(geometry())
    window.reserve(3)
    with pytest.raises(ValueError, match="in flight"):
        window.rewind(0)


@pytest.mark.parametrize("settle", ["commit", "rollback"])
def test_a_fork_during_a_block_has_what_was_committed_before_it(settle):
    size = geometry(sink=1, window=3, block=1)
    pool = PagePool(20)
    window = WindowTable("ar::a::main", size, pool)
    run_blocks(window, 5)
    before = window.retained()
    window.reserve(1)
    twin = window.fork("ar::b::main")
    assert (twin.retained(), twin.completed, twin.block) == (before, 5, ())
    getattr(window, settle)()
    assert twin.retained() == before
    run_blocks(twin, 1)
    for one in (window, twin):
        one.check()
        one.release()
    pool.check()
    assert pool.free_pages == 19


@pytest.mark.parametrize(("frames", "dense", "kept"), [(6, None, 6), (12, 4, 4 + 4), (12, 2, 2 + 5)])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_with_r_blocks_of_rewind_a_full_window_goes_back_r_blocks_one_by_one_or_at_once(blocks, frames, dense, kept):
    size = geometry(sink=2, window=frames, block=2, rewind_blocks=blocks, dense=dense)
    assert size.retained_frames == 2 + kept + (blocks - 1) * 2
    pool = PagePool(1 + (size.retained_frames + 2) * size.pages_per_frame, run_pages=size.pages_per_frame)
    window = WindowTable("ar::a::main", size, pool)
    contexts = []
    for _ in range(20):
        contexts.append(window.visible())
        run_blocks(window, 1)
        window.check()
    assert len(window.retained()) == size.retained_frames
    assert not window.can_rewind(2 * (blocks + 1))
    for back in range(1, blocks + 1):
        assert window.can_rewind(2)
        window.rewind(2)
        window.check()
        assert window.visible() == contexts[20 - back]
    assert not window.can_rewind(2)
    run_blocks(window, blocks)
    window.rewind(2 * blocks)
    assert window.visible() == contexts[20 - blocks]
    window.release()
    assert pool.free_pages == (size.retained_frames + 2) * size.pages_per_frame


@pytest.mark.parametrize("blocks", range(7))
def test_a_restored_window_goes_on_at_the_same_frame_also_where_the_boundary_has_emptied_it(blocks):
    size = geometry(sink=0, window=4, block=2, reset=True)
    saved, restored = table(size), table(size)
    run_blocks(saved, blocks)
    restored.restore(saved.completed, indices(saved.retained()))
    restored.check()
    assert restored.completed == saved.completed == 2 * blocks
    assert indices(restored.reserve(2)) == indices(saved.reserve(2))


@pytest.mark.parametrize("verb", ["commit", "rollback"])
def test_there_is_nothing_to_settle_between_blocks(verb):
    with pytest.raises(ValueError, match="without a block"):
        getattr(table(geometry()), verb)()
