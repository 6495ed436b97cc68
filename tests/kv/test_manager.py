"""The KV book: sessions and branches over one pool, blocks planned all or nothing, and the order of last use."""

import pytest

from realtime_omni.errors import ArgumentError, CapacityError
from realtime_omni.kv.capacity import CrossAttentionSpec, KVBranch, KVSpec, plan_capacity
from realtime_omni.kv.cross import CrossKey
from realtime_omni.kv.manager import KVBook

TWO_BRANCHES = (KVBranch("positive", 0), KVBranch("negative", 1))


def tiny(**changes) -> KVSpec:
    geometry = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_dim": 1,
        "tokens_per_frame": 1,
        "frames_per_block": 3,
        "window_frames": 3,
        "sink_frames": 3,
        "cross_attention": (CrossAttentionSpec("text", 2),),
        "dtype_bytes": 4,
        "requested_sessions": 2,
    }
    return KVSpec(**{**geometry, **changes})


def book(sessions=2, **changes) -> KVBook:
    return KVBook(tiny(**changes), sessions=sessions)


def tick(kv: KVBook, session: str) -> None:
    kv.commit(kv.plan_block(session))
    kv.check()


@pytest.mark.req("AC-18")
def test_b5_two_full_sessions_of_six_pages_still_leave_room_for_a_block():
    kv = KVBook.from_plan(plan_capacity(tiny(), available_bytes=192))
    for session in "ab":
        kv.begin(session)
        for _ in range(4):
            tick(kv, session)
        assert len(kv.pages_of(session)) == 6
    reservation = kv.plan_block("a")
    assert reservation.frames == 3
    kv.check()


@pytest.mark.req("AC-24")
def test_b15_interleaved_sessions_are_disjoint_and_the_order_of_use_is_kept():
    kv = book()
    kv.begin("A")
    kv.begin("B")
    tick(kv, "A")
    early = kv.pages_of("A")
    tick(kv, "B")
    tick(kv, "A")
    assert (len(kv.pages_of("A")), len(kv.pages_of("B"))) == (6, 3)
    assert not set(kv.pages_of("A")) & set(kv.pages_of("B"))
    assert kv.pages_of("A")[:3] == early
    assert (kv.completed_frames("A"), kv.completed_frames("B")) == (6, 3)
    assert kv.sessions == ("B", "A")
    assert kv.table("A", "main").name == "ar::A::main"


@pytest.mark.req("AC-25")
def test_b14_evicting_the_oldest_for_a_third_session_frees_everything_it_had():
    kv = book()
    fresh = kv.free_pages
    kv.begin("one")
    kv.cross.publish(CrossKey("one", "main", "text"), "a prompt")
    tick(kv, "one")
    held = fresh - kv.free_pages
    kv.begin("two")
    with pytest.raises(CapacityError, match="2 KV places"):
        kv.begin("three")
    closed = []
    victim = kv.oldest(idle={"one", "two"})
    assert victim == "one"
    closed.append(victim)  # the engine runs its close hook here
    assert kv.end(victim) == held
    kv.begin("three")
    assert closed == ["one"]
    assert kv.cross.entries_of("one") == ()
    assert kv.free_pages == fresh
    kv.check()


@pytest.mark.req("AC-25")
def test_b13_with_room_for_one_the_second_session_takes_the_place_of_the_first():
    plan = plan_capacity(tiny(), available_bytes=128)
    assert (plan.requested_sessions, plan.sessions) == (2, 1)
    kv = KVBook.from_plan(plan)
    kv.begin("first")
    with pytest.raises(CapacityError, match="1 KV places"):
        kv.begin("second")
    kv.end(kv.oldest(idle=kv.sessions))
    kv.begin("second")
    assert kv.sessions == ("second",)


def test_b16_two_branches_share_no_page_and_move_together():
    kv = book(branches=TWO_BRANCHES)
    kv.begin("a")
    for _ in range(3):
        tick(kv, "a")
    positive, negative = kv.pages_of("a", "positive"), kv.pages_of("a", "negative")
    assert len(positive) == len(negative) == 6
    assert not set(positive) & set(negative)
    assert kv.table("a", "negative").name == "ar::a::negative"
    reservation = kv.plan_block("a")
    assert [block.branch for block in reservation.branches] == ["positive", "negative"]
    with pytest.raises(KeyError):
        kv.table("a", "neutral")


def test_a_rolled_back_block_leaves_no_trace():
    kv = book(branches=TWO_BRANCHES)
    kv.begin("a")
    tick(kv, "a")
    pages, free = kv.pages_of("a"), kv.free_pages
    reservation = kv.plan_block("a")
    kv.rollback(reservation)
    assert (kv.pages_of("a"), kv.free_pages, kv.completed_frames("a")) == (pages, free, 3)
    again = kv.plan_block("a")
    assert again.branches == reservation.branches, "a retry gets the same pages and the same history"
    assert kv.statistics().blocks_rolled_back == 1


def test_a_block_is_settled_once_and_never_after_its_session_ended():
    kv = book()
    kv.begin("a")
    reservation = kv.plan_block("a")
    kv.commit(reservation)
    with pytest.raises(ValueError, match="not open"):
        kv.rollback(reservation)
    late = kv.plan_block("a")
    assert kv.end("a") == 6
    kv.begin("a")
    for settle in (kv.commit, kv.rollback):
        with pytest.raises(ValueError, match="not open"):
            settle(late)
    kv.check()


def test_a_session_has_one_block_in_flight_and_the_engine_as_many_as_planned():
    kv = book(sessions=3, max_in_flight=2)
    for session in "abc":
        kv.begin(session)
    first = kv.plan_block("a")
    with pytest.raises(ValueError, match="in flight"):
        kv.plan_block("a")
    second = kv.plan_block("b")
    with pytest.raises(CapacityError, match="all 2 blocks"):
        kv.plan_block("c")
    scratch = [page for r in (first, second) for frame in r.branches[0].scratch for page in frame.pages]
    assert len(set(scratch)) == 6
    assert min(scratch) == kv.pool.statistics().total, "scratch pages lie behind the managed ones"
    kv.rollback(first)
    assert kv.plan_block("c").lane == first.lane


def test_scratch_pages_of_all_lanes_and_branches_fill_exactly_what_was_planned():
    kv = book(
        sessions=2,
        max_in_flight=2,
        branches=TWO_BRANCHES,
        tokens_per_frame=39,
        page_tokens=16,
        scratch_tokens_per_branch=20,
    )
    pages = []
    for session in "ab":
        kv.begin(session)
        for block in kv.plan_block(session).branches:
            pages += [page for frame in (*block.scratch, *block.extra) for page in frame.pages]
            assert [frame.tokens for frame in block.extra] == [16, 4]
    first = kv.pool.statistics().total
    assert sorted(pages) == list(range(first, first + kv.spec.scratch_pages))


def test_a_full_pool_refuses_a_block_on_all_branches_at_once():
    kv = book(branches=TWO_BRANCHES)
    kv.begin("a")
    hog = kv.pool.reserve(kv.pool.free_pages - 5)
    before = kv.statistics()
    with pytest.raises(CapacityError, match="6 needed, 5 free"):
        kv.plan_block("a")
    assert kv.statistics() == before
    kv.pool.rollback(hog)
    kv.check()


def test_a_busy_session_is_never_offered_for_eviction():
    kv = book(sessions=3, max_in_flight=3)
    for session in "abc":
        kv.begin(session)
    kv.plan_block("a")
    assert kv.sessions == ("b", "c", "a")
    assert kv.oldest(idle={"a", "c"}) == "c"
    assert kv.oldest(idle={"a"}) is None
    kv.touch("b")
    assert kv.sessions == ("c", "a", "b")


def test_rewind_goes_back_on_every_branch_or_on_none():
    kv = book(branches=TWO_BRANCHES)
    kv.begin("a")
    for _ in range(4):
        tick(kv, "a")
    histories = [block.history for block in kv._branch_blocks(kv._tables["a"], 0)]
    tick(kv, "a")
    assert kv.can_rewind("a", 3)
    kv.rewind("a", 3)
    kv.check()
    assert [block.history for block in kv.plan_block("a").branches] == histories
    with pytest.raises(ValueError, match="in flight"):
        kv.rewind("a", 3)
    kv.end("a")
    kv.begin("a")
    with pytest.raises(ArgumentError, match="cannot go back by 1"):
        kv.rewind("a", 1)


def test_a_fork_costs_no_page_and_dies_alone():
    kv = book(branches=TWO_BRANCHES)
    fresh = kv.free_pages
    kv.begin("a")
    for _ in range(3):
        tick(kv, "a")
    free = kv.free_pages
    kv.fork("a", "b")
    kv.check()
    assert kv.free_pages == free
    assert kv.pages_of("a") == kv.pages_of("b")
    assert kv.statistics().shared_pages == 12
    for _ in range(3):
        tick(kv, "b")
    assert kv.end("a") > 0
    tick(kv, "b")
    kv.end("b")
    assert kv.free_pages == fresh


def test_a_session_is_opened_once_and_an_unknown_one_is_a_key_error():
    kv = book()
    kv.begin("a")
    with pytest.raises(ValueError, match="open already"):
        kv.begin("a")
    for call in (kv.plan_block, kv.end, kv.completed_frames, kv.pages_of):
        with pytest.raises(KeyError):
            call("nobody")


def test_churn_of_ten_times_the_capacity_leaks_nothing():
    kv = book(sessions=3, max_in_flight=3, branches=TWO_BRANCHES)
    fresh = kv.statistics()
    for i in range(30):
        kv.begin(str(i))
        for _ in range(i % 5):
            tick(kv, str(i))
        if i % 3 == 1:
            kv.plan_block(str(i))
        if i >= 2:
            kv.end(str(i - 2))
        kv.check()
    kv.end("28")
    kv.end("29")
    assert kv.free_pages == fresh.free_pages
    assert kv.statistics().sessions == 0


def rewriting() -> KVBook:
    """Two earlier blocks beside the new one may be written anew; sink 3, window 9."""
    kv = book(window_frames=9, rewrite_frames=6)
    kv.begin("a")
    for _ in range(5):
        tick(kv, "a")
    return kv


def test_blocks_that_are_written_anew_see_what_is_before_them_as_it_is_written_now():
    kv = rewriting()
    old = kv.table("a", "main").visible()
    reservation = kv.plan_block("a", rewritten=2)
    kv.check()
    third, fourth = (branches[0] for branches in reservation.rewritten)
    new = reservation.branches[0]
    assert [f.index for f in old] == [0, 1, 2, *range(9, 15)]
    assert third.history == old[:3]
    assert [f.index for f in third.frames] == [9, 10, 11]
    assert fourth.history == (*old[:3], *third.frames)
    assert new.history == (*old[:3], *third.frames, *fourth.frames)
    assert [f.index for f in new.frames] == [15, 16, 17]
    assert (reservation.first_frame, len(new.scratch)) == (15, 3)
    kv.commit(reservation)
    kv.check()
    assert kv.table("a", "main").visible() == (*old[:3], *fourth.frames, *new.frames)
    assert kv.completed_frames("a") == 18
    assert not set(kv.pages_of("a")) & {page for frame in old[3:] for page in frame.pages}


def test_a_block_that_was_to_write_anew_gives_everything_back():
    kv = rewriting()
    pages, free = kv.pages_of("a"), kv.free_pages
    kv.rollback(kv.plan_block("a", rewritten=2))
    kv.check()
    assert (kv.pages_of("a"), kv.free_pages) == (pages, free)
    kv.plan_block("a", rewritten=1)
    kv.end("a")
    kv.check()
    assert kv.free_pages == kv.pool.statistics().total - 1


def test_a_fork_keeps_what_its_source_writes_anew():
    kv = rewriting()
    kv.fork("a", "b")
    pages = kv.pages_of("b")
    kv.commit(kv.plan_block("a", rewritten=2))
    kv.check()
    assert kv.pages_of("b") == pages


@pytest.mark.parametrize("rewritten", [-1, 3])
def test_only_as_much_as_was_planned_for_can_be_written_anew(rewritten: int):
    kv = rewriting()
    with pytest.raises(ValueError, match="written anew"):
        kv.plan_block("a", rewritten=rewritten)
    kv.check()


def test_the_sink_is_not_written_anew():
    kv = book(window_frames=9, rewrite_frames=6)
    kv.begin("a")
    tick(kv, "a")
    with pytest.raises(ValueError, match="3 frames cannot be written anew, at most 0"):
        kv.plan_block("a", rewritten=1)
    kv.check()
