"""realtime_omni: an interactive realtime session server, and the in-process SessionManager API.

``from realtime_omni import SessionManager, SessionEvent, ControlInput, Snapshot``. Importing the package imports no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realtime_omni.manager import Session, SessionManager
    from realtime_omni.session.values import Artifact, Chunk, ControlInput, EventAcceptance, SessionEvent
    from realtime_omni.snapshot.snapshot import Snapshot

# Torch's OpenMP workers spin between ticks unless told to sleep before torch is imported; beside other work on a small
# machine the spinning makes a tick ten times slower. Whoever has the machine to himself sets ACTIVE.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "SessionManager": "realtime_omni.manager",
    "Session": "realtime_omni.manager",
    "SessionEvent": "realtime_omni.session.values",
    "ControlInput": "realtime_omni.session.values",
    "EventAcceptance": "realtime_omni.session.values",
    "Chunk": "realtime_omni.session.values",
    "Artifact": "realtime_omni.session.values",
    "Snapshot": "realtime_omni.snapshot.snapshot",
}

__all__ = [
    "Artifact",
    "Chunk",
    "ControlInput",
    "EventAcceptance",
    "Session",
    "SessionEvent",
    "SessionManager",
    "Snapshot",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
