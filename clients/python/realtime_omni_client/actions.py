"""`ActionQueue`: the actions a robot is going to execute, merged from chunks by control step.

Owns: which action belongs to which tick.  Must not know: sockets, time.
Invariants: an action that was executed is never replaced; a chunk of an old epoch, or one behind a newer chunk, changes
nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Action = npt.NDArray[np.float32]


class ActionQueue:
    """One per robot. ``tick`` is the robot's own count of control steps."""

    def __init__(self) -> None:
        self.epoch = 0
        self.consumed = 0
        """Actions handed out since the latest merge: the delay as it really was, in control steps."""
        self.late = 0
        """Chunks that came too late to change anything."""
        self._seq = 0
        self._next_tick = 0
        self._actions: dict[int, Action] = {}

    def __len__(self) -> int:
        return len(self._actions)

    def merge(self, actions: npt.NDArray[Any], *, seq: int, epoch: int, start_tick: int, valid_from: int = 0) -> int:
        """Take a chunk ``[H, A]``: its rows replace what was planned from its first valid tick on. Returns how many
        were taken.

        Rows below ``valid_from`` and rows of ticks that are past are dropped; planned actions before the first row
        taken stay.
        """
        first = max(start_tick + valid_from, self._next_tick)
        if epoch != self.epoch or seq <= self._seq or first >= start_tick + len(actions):
            self.late += 1
            return 0
        self._seq = seq
        self._actions = {tick: action for tick, action in self._actions.items() if tick < first}
        for tick in range(first, start_tick + len(actions)):
            self._actions[tick] = np.array(actions[tick - start_tick], np.float32)
        self.consumed = 0
        return start_tick + len(actions) - first

    def pop(self, tick: int) -> Action | None:
        """The action for this control step; None when none is planned: hold still. Ticks never go back."""
        if tick < self._next_tick:
            raise ValueError(f"tick {tick} is past, {self._next_tick} is next")
        self._next_tick = tick + 1
        action = self._actions.pop(tick, None)
        self._actions = {later: kept for later, kept in self._actions.items() if later > tick}
        self.consumed += action is not None
        return action

    def planned(self, tick: int) -> list[Action]:
        """The actions for ``tick`` and the control steps after it, up to the first that has none."""
        found: list[Action] = []
        while (action := self._actions.get(tick + len(found))) is not None:
            found.append(action)
        return found

    def dry_in(self, tick: int) -> int:
        """Control steps from ``tick`` on that have an action without a gap."""
        return len(self.planned(tick))

    def reset(self, epoch: int) -> None:
        """A new episode: nothing of the old one is executed any more."""
        self.epoch = epoch
        self.consumed = 0
        self._actions.clear()
