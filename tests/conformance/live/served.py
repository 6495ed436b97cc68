"""A voice on a port of its own, for clients that are not ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from realtime_omni.call import Calls
from realtime_omni.config import load
from realtime_omni.manager import SessionManager
from realtime_omni.server.app import create_app
from realtime_omni.server.run import bind, running
from realtime_omni.server.settings import ServerSettings


@asynccontextmanager
async def served(*overrides: str, model: str = "puppet") -> AsyncIterator[str]:
    """A voice on a port of its own, with the real clock; yields the base URL of OpenAI's clients."""
    settings = ServerSettings(port=0)
    with bind(settings) as listener:
        async with SessionManager(config=load(model, {}, list(overrides))) as manager, Calls(manager) as calls:
            async with running(create_app(manager, settings, calls=calls), settings, listener) as url:
                yield f"{url}/v1"
