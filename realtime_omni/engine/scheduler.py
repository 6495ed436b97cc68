"""Who ticks next. Pure: no clock, no thread, no session, only values.

The earliest deadline comes first. A session that names none is due a fixed time after it asked (``PATIENCE_S``), so among
such sessions the order is that in which they asked, and nobody starves behind those that are always in a hurry. Since a
session that was served asks again later than everybody who is still waiting, without deadlines every waiting session is
served within ``ceil(waiting / max_batch)`` ticks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

PATIENCE_S = 10.0


class Due(Struct, frozen=True):
    """A session that wants a tick; ``asked`` orders requests (a counter or a time). ``due_s``: when its chunk should be
    there; ``urgent``: that was said by whoever asked, so nobody who is due later may delay it."""

    session_id: str
    asked: float
    due_s: float = 0.0
    urgent: bool = False


def choose(due: Iterable[Due], max_batch: int) -> tuple[str, ...]:
    """The sessions of the next batch, earliest deadline first, then longest waiting; ties keep the given order."""
    return tuple(d.session_id for d in sorted(due, key=lambda d: (d.due_s, d.asked))[:max_batch])


def joining(due: Iterable[Due], flying: Sequence[Due], max_batch: int, now_s: float) -> tuple[str, ...]:
    """The sessions that join a batch that runs: as many as there are places, in the order of :func:`choose`.

    Who joins is begun at the next checkpoint, before anybody else's next step. So it does not join while somebody urgent
    flies who is due earlier: he would wait for the other's beginning. Who is due before all that fly joins at once, and
    has waited for one piece of their work. A deadline that is past keeps nobody out: it is missed, and he may fly for long."""
    bound_s = min((f.due_s for f in flying if f.urgent and f.due_s > now_s), default=math.inf)
    return choose([d for d in due if d.due_s < bound_s], max_batch - len(flying))
