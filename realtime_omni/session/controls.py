"""Reducers: how opaque control events become the snapshot of one block.

Owns the contract and the default. A reducer is the model's; the session only calls it: ``prepare`` speculates at the start of
a tick, ``commit`` makes it true together with the tick, ``reset`` starts over. One reducer object per session. What it
remembers between ticks it can hand out as a JSON value (``save``) and take into a fresh object (``load``): forks, rewinds
and saved sessions rest on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from realtime_omni.errors import ArgumentError
from realtime_omni.session.values import ControlInput, SessionEvent


class PreparedControls(Struct, frozen=True):
    """A proposal for one tick: the snapshot the model sees, what stays for the next tick, the reducer's own next state.

    ``controls`` go into the tick. ``carried`` (default: the same) are the session's controls after the commit.
    """

    controls: tuple[ControlInput, ...]
    carried: tuple[ControlInput, ...] | None = None
    private: Any = None

    @property
    def after(self) -> tuple[ControlInput, ...]:
        return self.controls if self.carried is None else self.carried


class ControlReducer(Protocol):
    """Turns events into the snapshot of one block. ``prepare`` changes nothing; a ``commit`` that raises fails the tick."""

    def prepare(
        self, current: Mapping[str, ControlInput], events: Sequence[SessionEvent], chunk_index: int
    ) -> PreparedControls: ...

    def commit(self, prepared: PreparedControls) -> None: ...

    def reset(self) -> None: ...

    def save(self) -> Any:
        """What is remembered between ticks, as a JSON value; None when that is nothing. Later changes do not reach it."""
        ...

    def load(self, memory: Any) -> None:
        """Remember what another reducer of this model saved; called on a fresh object only.

        Raises ArgumentError for a value that ``save`` could not have made: it may come from a file."""
        ...


class LatestWinsReducer:
    """The default reducer: the last control per track wins and stays until replaced."""

    def prepare(
        self, current: Mapping[str, ControlInput], events: Sequence[SessionEvent], chunk_index: int
    ) -> PreparedControls:
        merged = dict(current)
        for event in events:
            merged.update({c.track: c for c in event.controls})
        return PreparedControls(tuple(merged.values()))

    def commit(self, prepared: PreparedControls) -> None:
        """Nothing private to keep."""

    def reset(self) -> None:
        """Nothing private to forget."""

    def save(self) -> None:
        """Nothing private to hand out."""

    def load(self, memory: Any) -> None:
        if memory is not None:
            raise ArgumentError("this reducer remembers nothing", path="memory")
