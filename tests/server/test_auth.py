"""Who may talk to the server, as a pure decision."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from realtime_omni.config import Config, ServerSection
from realtime_omni.errors import ConfigError
from realtime_omni.server.auth import KEY_SUBPROTOCOL, RequestFacts, refusal
from realtime_omni.server.settings import ServerSettings

KEY = "kölsch key/+= 1"
HEADER_KEY = KEY.encode().decode("latin-1")  # UTF-8 bytes, as ASGI hands header values over
OPEN = ServerSettings()
LOCKED = ServerSettings(api_key=KEY)
SOCKET = RequestFacts(
    websocket=True,
    method="GET",
    path="/v1/realtime/world",
    host="127.0.0.1:8000",
    origin=None,
    authorization=None,
    subprotocols=("realtime-omni.world.v1",),
)
PAGE = replace(SOCKET, websocket=False, path="/", subprotocols=())


def status(facts: RequestFacts, settings: ServerSettings) -> int:
    refused = refusal(facts, settings)
    return 200 if refused is None else refused.status


def as_subprotocol(key: str) -> str:
    return KEY_SUBPROTOCOL + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def test_a_program_on_this_machine_needs_nothing_when_no_key_is_set() -> None:
    assert status(SOCKET, OPEN) == 200


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "HTTP://127.0.0.1:8000"])
def test_the_servers_own_page_may_connect(origin: str) -> None:
    assert status(replace(SOCKET, origin=origin), OPEN) == 200


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "http://127.0.0.1:9000", "http://localhost:8000", "null", "", "http://", "file://"],
)
def test_a_foreign_page_may_not_connect(origin: str) -> None:
    assert status(replace(SOCKET, origin=origin), OPEN) == 403


def test_an_allowed_origin_may_connect() -> None:
    settings = replace(OPEN, origins=("https://play.example",))
    assert status(replace(SOCKET, origin="https://play.example"), settings) == 200
    assert status(replace(SOCKET, origin="https://play.example.evil.example"), settings) == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "", "127.0.0.1.evil.example", "localhost.evil:8000"]
)
def test_a_rebound_host_name_is_refused_on_loopback(host: str) -> None:
    facts = replace(SOCKET, host=host, origin=f"http://{host}")
    assert status(facts, OPEN) == 403
    assert status(replace(PAGE, host=host), OPEN) == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "LOCALHOST:1", "[::1]:8000", "127.0.0.1"])
def test_loopback_names_are_answered(host: str) -> None:
    assert status(replace(SOCKET, host=host), OPEN) == 200


@pytest.mark.parametrize(
    "facts",
    [
        replace(SOCKET, authorization=f"Bearer {HEADER_KEY}"),
        replace(SOCKET, authorization=f"bearer  {HEADER_KEY}"),
        replace(SOCKET, subprotocols=("realtime-omni.world.v1", as_subprotocol(KEY))),
    ],
)
def test_the_right_key_opens_by_header_and_by_subprotocol(facts: RequestFacts) -> None:
    assert status(facts, LOCKED) == 200


@pytest.mark.parametrize(
    "facts",
    [
        SOCKET,
        replace(SOCKET, authorization="Bearer "),
        replace(SOCKET, authorization="Bearer wrong"),
        replace(SOCKET, authorization=f"Basic {KEY}"),
        replace(SOCKET, authorization=KEY),
        replace(SOCKET, subprotocols=(as_subprotocol("wrong"),)),
        replace(SOCKET, subprotocols=(KEY_SUBPROTOCOL + "!!!",)),
        replace(SOCKET, subprotocols=(KEY_SUBPROTOCOL,)),
        replace(PAGE, path="/v1/sessions"),
        replace(PAGE, path="/v1/sessions/x", method="DELETE"),
        replace(PAGE, path="/metrics"),
    ],
)
def test_a_wrong_or_missing_key_is_401(facts: RequestFacts) -> None:
    assert status(facts, LOCKED) == 401


def test_the_page_and_health_are_public_so_that_the_page_can_ask_for_the_key() -> None:
    assert status(PAGE, LOCKED) == 200
    assert status(replace(PAGE, path="/healthz"), LOCKED) == 200


def test_a_foreign_page_cannot_delete_a_session() -> None:
    facts = replace(PAGE, path="/v1/sessions/x", method="DELETE", origin="https://evil.example")
    assert status(facts, OPEN) == 403


def config(host: str, **fields: object) -> Config:
    return Config(server=ServerSection(host=host, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", "127.evil.example"])
def test_a_public_host_without_a_key_is_refused_before_anything_listens(host: str) -> None:
    with pytest.raises(ConfigError, match="REALTIME_OMNI_API_KEY") as refused:
        ServerSettings.from_config(config(host), {})
    assert refused.value.path == "server.host"
    with pytest.raises(ConfigError):
        ServerSettings.from_config(config(host), {"REALTIME_OMNI_API_KEY": ""})


@pytest.mark.parametrize(
    "origin", ["game.example", "*", "https://*.example", "https://game.example/play", "", "https://"]
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"https://game\.example") as refused:
        ServerSettings.from_config(Config(server=ServerSection(origins=("https://a.example", origin))), {})
    assert refused.value.path == "server.origins"


@pytest.mark.parametrize(
    "origin", ["https://game.example", "http://127.0.0.1:9000/", "http://[::1]:9000", "null", "App://local"]
)
def test_an_origin_of_a_page_an_app_or_a_file_may_be_listed(origin: str) -> None:
    settings = ServerSettings.from_config(Config(server=ServerSection(origins=(origin,))), {})
    assert settings.origins == (origin.rstrip("/").lower(),)


def test_a_public_host_with_a_key_is_allowed_and_the_key_is_never_printed() -> None:
    settings = ServerSettings.from_config(config("0.0.0.0"), {"REALTIME_OMNI_API_KEY": "s3cret"})
    assert settings.api_key == "s3cret"
    assert "s3cret" not in repr(settings)
    assert status(replace(SOCKET, host="any.example", authorization="Bearer s3cret"), settings) == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_loopback_needs_no_key(host: str) -> None:
    assert ServerSettings.from_config(config(host), {}).api_key is None
