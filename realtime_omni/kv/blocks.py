"""The page pool: which page is free, which is reserved, and how many tables refer to each committed page.

Owns: the state of every page id. Must not know: sessions, frames, windows, tensors, clocks, threads.

A page is in exactly one of three states at any moment::

    free --reserve--> reserved --commit--> referenced (count 1) --incref/decref--> referenced (n) --decref to 0--> free
                         '-----rollback-----> free

Page 0 is the null page. It is in none of these states and is never handed out, so a zeroed slot table can never read or
overwrite somebody's history.

The free list is a stack, and pages go back so that they come out in the order in which they went in. When every
caller asks for and returns whole frames (the window does), a frame's pages stay one contiguous run for ever, which
storage turns into views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realtime_omni.errors import CapacityError

NULL_PAGE = 0


@dataclass(frozen=True, slots=True)
class PageReservation:
    """Pages set aside for one block: not readable yet, and to be settled once, by commit or by rollback."""

    number: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of pages; ``free + reserved + referenced == total - 1`` (the null page is in none of them)."""

    total: int
    free: int
    reserved: int
    referenced: int
    shared: int
    low_water_free: int


class PagePool:
    """A fixed set of page ids ``0 .. pages-1`` with reference counts."""

    def __init__(self, pages: int) -> None:
        """``pages`` counts the null page, so a pool of one page can hand out nothing."""
        if pages < 1:
            raise ValueError(f"a pool needs at least the null page, got pages={pages}")
        self._total = pages
        self._free = list(range(pages - 1, NULL_PAGE, -1))
        self._reserved: dict[int, PageReservation] = {}
        self._references: dict[int, int] = {}
        self._next_number = 0
        self._low_water = len(self._free)

    @property
    def free_pages(self) -> int:
        """Pages that ``reserve`` could hand out now."""
        return len(self._free)

    def reserve(self, count: int) -> PageReservation:
        """Set ``count`` pages aside. Raises CapacityError, and changes nothing, when fewer are free."""
        if count < 1:
            raise ValueError(f"a reservation needs at least one page, got {count}")
        if count > len(self._free):
            raise CapacityError(f"page pool is full: {count} pages asked, {len(self._free)} free of {self._total - 1}")
        pages = tuple(self._free[-1 : -count - 1 : -1])
        del self._free[-count:]
        self._low_water = min(self._low_water, len(self._free))
        reservation = PageReservation(self._next_number, pages)
        self._next_number += 1
        self._reserved[reservation.number] = reservation
        return reservation

    def commit(self, reservation: PageReservation) -> None:
        """Turn the reservation into pages with one reference each. Raises ValueError when it was settled before."""
        self._settle(reservation)
        for page in reservation.pages:
            self._references[page] = 1

    def rollback(self, reservation: PageReservation) -> None:
        """Give the reserved pages back. Raises ValueError when the reservation was settled before."""
        self._settle(reservation)
        self._free.extend(reversed(reservation.pages))

    def incref(self, pages: Sequence[int]) -> None:
        """Add one reference to each committed page. Raises ValueError, and changes nothing, on a page that is not
        committed.
        """
        self._require_referenced(pages)
        for page in pages:
            self._references[page] += 1

    def decref(self, pages: Sequence[int]) -> int:
        """Drop one reference from each page and return how many became free.

        Raises ValueError, and changes nothing, on a page that is not committed (a double free) or that is named twice.
        """
        self._require_referenced(pages)
        freed = 0
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                del self._references[page]
                self._free.append(page)
                freed += 1
        return freed

    def references(self, page: int) -> int:
        """How many tables refer to this committed page; 0 for a free, reserved or null page."""
        return self._references.get(page, 0)

    def is_open(self, reservation: PageReservation) -> bool:
        """Whether this reservation still waits for its commit or rollback."""
        return self._reserved.get(reservation.number) is reservation

    def check(self) -> None:
        """Recount: every page but the null page is exactly one of free, reserved, referenced. Raises AssertionError
        if not.
        """
        reserved = [page for reservation in self._reserved.values() for page in reservation.pages]
        seen = sorted([*self._free, *reserved, *self._references])
        if seen != list(range(1, self._total)):
            raise AssertionError(f"page states do not partition 1..{self._total - 1}: {seen}")
        if any(count < 1 for count in self._references.values()):
            raise AssertionError(f"a committed page has no reference: {self._references}")

    def statistics(self) -> PoolStatistics:
        """A snapshot of the counts."""
        return PoolStatistics(
            total=self._total,
            free=len(self._free),
            reserved=sum(len(reservation.pages) for reservation in self._reserved.values()),
            referenced=len(self._references),
            shared=sum(1 for count in self._references.values() if count > 1),
            low_water_free=self._low_water,
        )

    def _settle(self, reservation: PageReservation) -> None:
        if not self.is_open(reservation):
            raise ValueError(
                f"reservation {reservation.number} is not open: it was settled before, or belongs to another pool"
            )
        del self._reserved[reservation.number]

    def _require_referenced(self, pages: Sequence[int]) -> None:
        if len(set(pages)) != len(pages):
            raise ValueError(f"a page is named twice: {tuple(pages)}")
        for page in pages:
            if page not in self._references:
                raise ValueError(f"page {page} is not committed")
