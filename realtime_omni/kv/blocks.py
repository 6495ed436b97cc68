"""The page pool: which page is free, which is reserved, and how many tables refer to each committed page.

Owns: the state of every page id. Must not know: sessions, frames, windows, tensors, clocks, threads.

Pages are handed out, shared and given back in runs of ``run_pages`` consecutive ids (the window's frames are such runs), so a
run is counted once, under the id of its first page, and stays contiguous for ever, which storage turns into views. A run is
in exactly one of three states at any moment::

    free --reserve--> reserved --commit--> referenced (count 1) --incref/decref--> referenced (n) --decref to 0--> free
                         '-----rollback-----> free

Page 0 is the null page. It is in none of these states and is never handed out, so a zeroed slot table can never read or
overwrite somebody's history. The free list is a stack, and runs go back so that they come out in the order in which they
went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from realtime_omni.errors import CapacityError

NULL_PAGE = 0


class PageReservation(Struct, frozen=True):
    """Pages set aside for one block: not readable yet, and to be settled once, by commit or by rollback.

    ``runs`` are the first pages of their runs."""

    number: int
    pages: tuple[int, ...]
    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counts of pages; ``free + reserved + referenced == total - 1`` (the null page is in none of them).

    Pages at the end that make no whole run are free and never handed out."""

    total: int
    free: int
    reserved: int
    referenced: int
    shared: int
    low_water_free: int


class PagePool:
    """A fixed set of page ids ``0 .. pages-1`` with reference counts."""

    def __init__(self, pages: int, *, run_pages: int = 1) -> None:
        """``pages`` counts the null page, so a pool of one page can hand out nothing."""
        if pages < 1:
            raise ValueError(f"a pool needs at least the null page, got pages={pages}")
        if run_pages < 1:
            raise ValueError(f"a run has at least one page, got run_pages={run_pages}")
        self._total = pages
        self.run_pages = run_pages
        self._odd = (pages - 1) % run_pages
        self._free = self._runs()[::-1]
        self._reserved: dict[int, PageReservation] = {}
        self._references = [0] * pages  # by the first page of a run; a list, because a fork counts thousands at once
        self._next_number = 0
        self._low_water = self.free_pages

    @property
    def free_pages(self) -> int:
        """Pages that are neither reserved nor referenced."""
        return len(self._free) * self.run_pages + self._odd

    @property
    def shared_pages(self) -> int:
        """Pages that more than one table refers to. Safe to read from any thread: the list never changes its length."""
        return sum(1 for count in self._references if count > 1) * self.run_pages

    def reserve(self, count: int) -> PageReservation:
        """Set ``count`` pages, whole runs, aside. Raises CapacityError, and changes nothing, when fewer are free."""
        runs, rest = divmod(count, self.run_pages)
        if count < 1 or rest:
            raise ValueError(f"a reservation needs at least one page and whole runs of {self.run_pages}, got {count}")
        if runs > len(self._free):
            raise CapacityError(f"page pool is full: {count} pages asked, {self.free_pages} free of {self._total - 1}")
        first = tuple(self._free[-1 : -runs - 1 : -1])
        del self._free[-runs:]
        self._low_water = min(self._low_water, self.free_pages)
        pages = tuple(page for run in first for page in range(run, run + self.run_pages))
        reservation = PageReservation(self._next_number, pages, first)
        self._next_number += 1
        self._reserved[reservation.number] = reservation
        return reservation

    def commit(self, reservation: PageReservation) -> None:
        """Turn the reservation into pages with one reference each. Raises ValueError when it was settled before."""
        self._settle(reservation)
        for run in reservation.runs:
            self._references[run] = 1

    def rollback(self, reservation: PageReservation) -> None:
        """Give the reserved pages back. Raises ValueError when the reservation was settled before."""
        self._settle(reservation)
        self._free.extend(reversed(reservation.runs))

    def incref(self, runs: Sequence[int]) -> None:
        """Add one reference to each committed run, named by its first page. Raises ValueError, and changes nothing, on a
        run that is not committed.
        """
        self._require_referenced(runs)
        references = self._references
        for run in runs:
            references[run] += 1

    def decref(self, runs: Sequence[int]) -> int:
        """Drop one reference from each run and return how many pages became free.

        Raises ValueError, and changes nothing, on a run that is not committed (a double free) or that is named twice.
        """
        self._require_referenced(runs)
        if len(set(runs)) != len(runs):
            raise ValueError(f"a page is named twice: {tuple(runs)}")
        references = self._references
        freed = []
        for run in reversed(runs):
            references[run] -= 1
            if not references[run]:
                freed.append(run)
        self._free.extend(freed)
        return len(freed) * self.run_pages

    def references(self, page: int) -> int:
        """How many tables refer to this committed page; 0 for a free, reserved or null page."""
        return self._references[page - (page - 1) % self.run_pages] if page != NULL_PAGE else 0

    def is_open(self, reservation: PageReservation) -> bool:
        """Whether this reservation still waits for its commit or rollback."""
        return self._reserved.get(reservation.number) is reservation

    def check(self) -> None:
        """Recount: every run is exactly one of free, reserved, referenced. Raises AssertionError if not."""
        reserved = [run for reservation in self._reserved.values() for run in reservation.runs]
        referenced = [run for run, count in enumerate(self._references) if count]
        seen = sorted([*self._free, *reserved, *referenced])
        if seen != self._runs():
            raise AssertionError(f"runs of {self.run_pages} pages do not partition 1..{self._total - 1}: {seen}")
        if min(self._references) < 0:
            raise AssertionError(f"a run has fewer than no references: {self._references}")

    def statistics(self) -> PoolStatistics:
        """A snapshot of the counts."""
        return PoolStatistics(
            total=self._total,
            free=self.free_pages,
            reserved=sum(len(reservation.pages) for reservation in self._reserved.values()),
            referenced=sum(1 for count in self._references if count) * self.run_pages,
            shared=self.shared_pages,
            low_water_free=self._low_water,
        )

    def _runs(self) -> list[int]:
        return list(range(NULL_PAGE + 1, self._total - self.run_pages + 1, self.run_pages))

    def _settle(self, reservation: PageReservation) -> None:
        if not self.is_open(reservation):
            raise ValueError(
                f"reservation {reservation.number} is not open: it was settled before, or belongs to another pool"
            )
        del self._reserved[reservation.number]

    def _require_referenced(self, runs: Sequence[int]) -> None:
        if not all(map(self._references.__getitem__, runs)):
            raise ValueError(f"page {next(run for run in runs if not self._references[run])} is not committed")
