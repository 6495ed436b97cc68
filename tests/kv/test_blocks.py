"""The page pool hands out every page but page 0, once at a time, and takes it back when the last reference goes."""

import pytest

from realtime_omni.errors import CapacityError
from realtime_omni.kv.blocks import NULL_PAGE, PagePool


def test_a_fresh_pool_offers_every_page_but_the_null_page():
    pool = PagePool(5)
    assert sorted(pool.reserve(4).pages) == [1, 2, 3, 4]
    assert pool.free_pages == 0
    pool.check()


def test_a_pool_needs_room_for_the_null_page():
    with pytest.raises(ValueError, match="null page"):
        PagePool(0)
    PagePool(1).check()


def test_a_full_pool_refuses_and_changes_nothing():
    pool = PagePool(4)
    before = pool.statistics()
    with pytest.raises(CapacityError, match="4 pages asked, 3 free of 3"):
        pool.reserve(4)
    assert pool.statistics() == before
    pool.check()


def test_a_rolled_back_reservation_gives_its_pages_back_in_the_same_order():
    pool = PagePool(8)
    first = pool.reserve(3)
    pool.rollback(first)
    assert pool.reserve(3).pages == first.pages


def test_frames_freed_in_any_order_stay_contiguous_runs():
    pool = PagePool(1 + 4 * 3)
    frames = [pool.reserve(3) for _ in range(4)]
    for frame in frames:
        pool.commit(frame)
    for i in (2, 0, 3):
        pool.decref(frames[i].pages)
    for _ in range(3):
        pages = pool.reserve(3).pages
        assert pages == (pages[0], pages[0] + 1, pages[0] + 2)


def test_a_reservation_is_settled_once():
    pool = PagePool(4)
    reservation = pool.reserve(2)
    pool.commit(reservation)
    for settle in (pool.commit, pool.rollback):
        with pytest.raises(ValueError, match="not open"):
            settle(reservation)
    assert pool.free_pages == 1
    pool.check()


def test_a_reservation_of_another_pool_is_refused():
    mine, other = PagePool(4), PagePool(4)
    mine.reserve(1)
    with pytest.raises(ValueError, match="another pool"):
        mine.commit(other.reserve(1))


def test_a_shared_page_is_free_only_after_its_last_reference():
    pool = PagePool(4)
    reservation = pool.reserve(2)
    pool.commit(reservation)
    pool.incref(reservation.pages)
    assert pool.statistics().shared == 2
    assert pool.decref(reservation.pages) == 0
    assert pool.free_pages == 1
    assert pool.decref(reservation.pages) == 2
    assert pool.free_pages == 3
    pool.check()


def test_a_double_free_is_refused_and_changes_nothing():
    pool = PagePool(4)
    reservation = pool.reserve(2)
    pool.commit(reservation)
    pool.decref(reservation.pages)
    with pytest.raises(ValueError, match="not committed"):
        pool.decref(reservation.pages)
    pool.check()


def test_a_page_named_twice_is_refused():
    pool = PagePool(4)
    reservation = pool.reserve(1)
    pool.commit(reservation)
    with pytest.raises(ValueError, match="named twice"):
        pool.decref(reservation.pages * 2)


def test_a_reserved_page_and_the_null_page_take_no_references():
    pool = PagePool(4)
    reservation = pool.reserve(1)
    for pages in (reservation.pages, (NULL_PAGE,)):
        with pytest.raises(ValueError, match="not committed"):
            pool.incref(pages)
    assert pool.references(NULL_PAGE) == 0


@pytest.mark.parametrize("count", [0, -1])
def test_an_empty_reservation_is_refused(count):
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(4).reserve(count)


def test_the_low_water_mark_remembers_the_fullest_moment():
    pool = PagePool(6)
    pool.rollback(pool.reserve(4))
    assert pool.statistics().low_water_free == 1
    assert pool.free_pages == 5


def test_the_recount_notices_a_lost_page():
    pool = PagePool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="partition"):
        pool.check()


def test_runs_are_handed_out_shared_and_given_back_whole():
    pool = PagePool(1 + 3 * 4 + 2, run_pages=4)
    assert pool.free_pages == 14, "two pages at the end make no run: free, and never handed out"
    block = pool.reserve(8)
    assert (block.pages, block.runs) == ((1, 2, 3, 4, 5, 6, 7, 8), (1, 5))
    pool.commit(block)
    pool.incref([5])
    assert [pool.references(page) for page in (0, 1, 4, 5, 8, 9, 13)] == [0, 1, 1, 2, 2, 0, 0]
    assert pool.statistics().shared == 4
    assert (pool.decref(block.runs), pool.decref([5])) == (4, 4)
    assert pool.reserve(12).runs == (5, 1, 9)
    with pytest.raises(CapacityError, match="4 pages asked, 2 free of 14"):
        pool.reserve(4)
    pool.check()


@pytest.mark.parametrize("count", [3, 5])
def test_no_part_of_a_run_is_handed_out(count):
    with pytest.raises(ValueError, match="whole runs of 4"):
        PagePool(20, run_pages=4).reserve(count)


def test_a_pool_of_no_runs_is_refused():
    with pytest.raises(ValueError, match="run_pages=0"):
        PagePool(4, run_pages=0)
