"""What a client must never read, whatever the model does: ids of requests and of other sessions, names, paths, tracebacks."""

from __future__ import annotations

import pytest

from realtime_omni.errors import TickError
from realtime_omni.manager import SessionManager
from realtime_omni.server.clock import LoopClock
from realtime_omni.server.hub import WorldHub
from realtime_omni.server.metrics import Metrics
from realtime_omni.server.settings import ServerSettings
from realtime_omni.testing.inline import small_config
from realtime_omni.testing.models import Knobs, TinyKVWorld
from server.wire import Client

FAULTS = {
    "another session's output": Knobs(misreport="session_id"),
    "another request's output": Knobs(misreport="request_id"),
    "an undeclared artifact": Knobs(artifact="undeclared"),
    "a missing artifact": Knobs(artifact="missing"),
    "the model's own words": Knobs(row_result=TickError("see /srv/models/secret.py")),
    "a row's own words": Knobs(row_error=True),
    "an unfinished pass": Knobs(skip_layer=True),
}


@pytest.mark.parametrize("knobs", FAULTS.values(), ids=FAULTS)
async def test_a_failed_block_tells_its_client_nothing_internal(knobs: Knobs) -> None:
    async with SessionManager(TinyKVWorld(knobs=knobs), small_config()) as manager:
        hub = WorldHub(manager, ServerSettings(), Metrics(), LoopClock())
        client = Client(hub)
        await client.start()
        failed = await client.until("session.failed")
        assert (failed.code, failed.message) == ("tick_failed", "the model failed; the server's log says why")
        await client.drop()
        await hub.shutdown(5)
        hub.close()
