"""The Realtime endpoint on a real socket: who gets in, by which key, with which session, and what refuses."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect

from realtime_omni.call import Calls
from realtime_omni.config import load
from realtime_omni.manager import SessionManager
from realtime_omni.server.app import create_app
from realtime_omni.server.auth import OPENAI_KEY_SUBPROTOCOL
from realtime_omni.server.client_secrets import ClientSecrets
from realtime_omni.server.run import bind, running
from realtime_omni.server.settings import ServerSettings

KEY = "a-key"
SECRETS = "/v1/realtime/client_secrets"


@contextlib.asynccontextmanager
async def served(*overrides: str, **fields: Any) -> AsyncIterator[str]:
    settings = ServerSettings(port=0, shutdown_timeout_s=5.0, **fields)
    with bind(settings) as listener:
        async with SessionManager(config=load("puppet", {}, list(overrides))) as manager, Calls(manager) as calls:
            async with running(create_app(manager, settings, calls=calls), settings, listener) as url:
                yield url


def socket(url: str, key: str | None = None, **options: Any) -> connect:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    target = url.replace("http", "ws") + "/v1/realtime?model=gpt-realtime"
    return connect(target, additional_headers=headers, **options)


async def created(client: ClientConnection) -> Any:
    event = json.loads(await client.recv())
    assert event["type"] == "session.created"
    return event["session"]


async def test_a_client_secret_opens_its_session_and_nothing_else() -> None:
    async with served(api_key=KEY) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post(SECRETS)).status_code == 401
        body = {"expires_after": {"anchor": "created_at", "seconds": 60}, "session": {"instructions": "Be brief."}}
        answer = await http.post(SECRETS, json=body, headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200
        made = answer.json()
        assert made["value"].startswith("ek_")
        assert abs(made["expires_at"] - time.time() - 60) < 10
        assert made["session"]["instructions"] == "Be brief."
        secret = made["value"]
        async with socket(url, secret) as client:
            assert (await created(client))["instructions"] == "Be brief."
        async with socket(url, subprotocols=["realtime", OPENAI_KEY_SUBPROTOCOL + secret]) as client:
            assert client.subprotocol == "realtime"
            assert (await created(client))["instructions"] == "Be brief."
        for path in ("/v1/sessions", SECRETS):
            assert (await http.request("GET", path, headers={"authorization": f"Bearer {secret}"})).status_code == 401
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with socket(url, secret[:-1]):
                pass
        assert refused.value.response.status_code == 401
        async with socket(url, subprotocols=["realtime", OPENAI_KEY_SUBPROTOCOL + KEY]) as client:
            assert (await created(client))["instructions"] == ""


async def test_bad_requests_for_a_secret_name_their_fault() -> None:
    async with served() as url, httpx.AsyncClient(base_url=url) as http:
        for body, param in (
            (b"{", None),
            (b"[]", ""),
            (b'{"expires_after": {"seconds": 5}}', "expires_after.seconds"),
            (b'{"session": {"audio": {"output": {"speed": 9}}}}', "session.audio.output.speed"),
        ):
            answer = await http.post(SECRETS, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


async def test_a_request_for_a_secret_is_bounded_in_bytes_and_depth() -> None:
    async with served() as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post(SECRETS, content=b'{"session": {"junk": "' + b"a" * 300_000 + b'"}}')
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "message_too_large"
        for body in (b'{"session": ' + b"[" * 50_000, b'{"session": {"instructions": "\xff"}}'):
            answer = await http.post(SECRETS, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_json"


async def test_a_number_beyond_reason_is_a_refused_resume() -> None:
    async with served() as url:
        async with websockets.connect(url.replace("http", "ws") + "/v1/duplex") as client:
            found = await created(client)
            while (event := json.loads(await client.recv()))["type"] != "session.resumable":
                pass
            query = (
                f"session_id={found['id']}&resume_token={event['resume_token']}&last_server_event_seq=" + "9" * 5_000
            )
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with websockets.connect(url.replace("http", "ws") + "/v1/duplex?" + query):
                    pass
            assert refused.value.response.status_code == 404
            await client.send('{"type": "session.heartbeat"}')
            assert json.loads(await client.recv())["type"] == "session.heartbeat_ack"


async def test_a_full_server_refuses_before_the_upgrade() -> None:
    async with served("session.max_sessions=1") as url:
        async with socket(url) as client:
            await created(client)
            with pytest.raises(websockets.InvalidStatus) as refused:
                async with socket(url):
                    pass
            assert refused.value.response.status_code == 503
            assert json.loads(refused.value.response.body or b"")["error"]["code"] == "server_overloaded"


async def test_a_frame_beyond_the_bound_ends_the_connection() -> None:
    async with served(max_message_bytes=100_000) as url:
        async with socket(url) as client:
            await created(client)
            await client.send("x" * 200_000)
            await client.wait_closed()
            assert client.close_code == 1009


def test_a_secret_ends_in_time_and_the_oldest_go() -> None:
    keys = ClientSecrets()
    value = keys.mint({}, now_s=0.0, seconds=10)
    assert keys.find(value, 9.9) is not None
    assert keys.find(value, 10.0) is None
    assert keys.find("sk-something", 0.0) is None
    first = keys.mint({}, 0.0, 10)
    for _ in range(4_096):
        keys.mint({}, 0.0, 10)
    assert keys.find(first, 0.0) is None
    first = keys.mint({}, 0.0, 10)
    for _ in range(65):
        last = keys.mint({"instructions": "a" * 1024 * 1024}, 0.0, 10)
    assert keys.find(first, 0.0) is None
    assert keys.find(last, 0.0) is not None
