"""What the HTTP side says of a voice."""

from __future__ import annotations

import httpx

from realtime_omni.server.app import create_app
from realtime_omni.server.settings import ServerSettings
from server.voices import voice_server


async def test_models_say_what_a_voice_takes_and_can_do() -> None:
    async with voice_server() as server:
        app = create_app(server.manager, ServerSettings(), calls=server.calls)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = (await client.get("/v1/models")).json()
            unknown = await client.post("/v1/live/sessions/nobody/hangup")
        assert body["data"] == [{"id": "puppet", "object": "model", "created": 0, "owned_by": "realtime-omni"}]
        (model,) = body["models"]
        assert model["formats"] == []
        assert model["policy"] is None
        assert model["voice"]["frame_ms"] == 80.0
        assert model["voice"]["voices"] == ["tones"]
        assert model["voice"]["takes_tools"] is True
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "session_not_found"
