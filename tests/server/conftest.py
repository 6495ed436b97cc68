"""A fake manager on a manual clock and a hub over it; every test ends with nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from realtime_omni.server.hub import WorldHub
from server.fakes import FakeManager
from server.wire import make_hub


@pytest.fixture
async def manager() -> FakeManager:
    return FakeManager()


@pytest.fixture
async def hub(manager: FakeManager) -> AsyncIterator[WorldHub]:
    before = asyncio.all_tasks()
    hub = make_hub(manager)
    yield hub
    await hub.shutdown(5)
    hub.close()
    assert not hub.connections
    assert len(hub.sessions) == 0
    assert hub.pool.open_lanes == 0
    assert asyncio.all_tasks() - before <= {asyncio.current_task()}
