"""SessionManager under attack: whatever happens to an engine, a model or a caller, nobody waits for ever and nothing stays."""

from __future__ import annotations

import asyncio

import pytest

from realtime_omni.errors import SessionGoneError
from realtime_omni.manager import SessionManager
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import TinyKVWorld


async def test_a_session_evicted_before_its_creator_wakes_leaves_no_handle() -> None:
    """Five creates at once on a server with one place: each evicts the one before in the same breath of the engine."""
    async with SessionManager(TinyKVWorld(), small_config(sessions=1, policy="lru")) as manager:
        made = await asyncio.gather(*(manager.create_session(f"s{i}") for i in range(5)))
        assert [view.session_id for view in manager.sessions()] == ["s4"]
        assert [session.state for session in made] == ["closed"] * 4 + ["active"]
        with pytest.raises(SessionGoneError):
            manager.get_session("s0")
