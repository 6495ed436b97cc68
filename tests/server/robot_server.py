"""The robot endpoint on a real socket: uvicorn, both paths, a null policy."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from realtime_omni.server.openpi import PolicyHub, create_policy_app
from realtime_omni.server.policy import PolicyBackend
from realtime_omni.server.run import bind, running
from realtime_omni.server.settings import ServerSettings


@contextlib.asynccontextmanager
async def served(policy: PolicyBackend, **fields: Any) -> AsyncIterator[str]:
    """Yields the ``ws://`` address; afterwards no session is left."""
    settings = ServerSettings(port=0, shutdown_timeout_s=5.0, **fields)
    hub = PolicyHub(policy, settings)
    with bind(settings) as listener:
        async with running(create_policy_app(hub), settings, listener) as url:
            yield url.replace("http", "ws")
    assert not hub.live
