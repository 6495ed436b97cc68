"""HTTP requests that try names, paths and methods nobody serves, and pictures that are not what they look like."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator

import httpx
import numpy as np
import pytest
from PIL import Image

from realtime_omni.config import Config, ServerSection
from realtime_omni.errors import ConfigError
from realtime_omni.server.app import create_app
from realtime_omni.server.images import decode_image
from realtime_omni.server.settings import LOOPBACK_HOSTS, ServerSettings, strip_port
from server.fakes import FakeManager


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(FakeManager(), ServerSettings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client
    app.state.hub.close()


@pytest.mark.parametrize(
    "host",
    [
        "[::1]evil.example",
        "[::1]:80.evil.example",
        "localhost:80@evil.example",
        "localhost:evil",
        "localhost:80:80",
        "user@localhost",
        "localhost.",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "[::ffff:127.0.0.1]",
        "0.0.0.0",
        "",
        "localhost evil.example",
    ],
)
async def test_a_host_that_only_looks_like_loopback_is_refused(http: httpx.AsyncClient, host: str) -> None:
    assert strip_port(host) not in LOOPBACK_HOSTS
    answer = await http.get("/v1/models", headers={"host": host})
    assert answer.status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:65535", "[::1]", "[::1]:8000", "localhost:"])
async def test_every_way_to_write_loopback_is_served(http: httpx.AsyncClient, host: str) -> None:
    assert (await http.get("/v1/models", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/sessions/", 404),
        ("GET", "/v1/models/fake/starts/..%2f..%2fdoor.png", 404),
        ("GET", "/v1/models/fake/starts/%2e%2e.png", 404),
        ("GET", "/%2e%2e/app.py", 404),
        ("GET", "/assets/..%5c..%5capp.py", 404),
        ("GET", "/v1/realtime/world", 404),
        ("POST", "/v1/sessions", 405),
        ("DELETE", "/healthz", 405),
        ("FOO", "/v1/models", 405),
        ("DELETE", "/v1/sessions/%00%0d%0a", 404),
    ],
)
async def test_every_refusal_has_a_code_and_names_nothing_of_ours(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"code", "message"}
    assert "realtime_omni" not in answer.text


def picture(image: Image.Image, kind: str = "PNG", **how: object) -> str:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return base64.b64encode(out.getvalue()).decode()


def test_sixteen_bits_of_grey_are_scaled_not_cut_off() -> None:
    grey = Image.fromarray(np.array([[0, 0x4000, 0xFFFF]], np.uint16))
    assert decode_image(picture(grey))[0, :, 0].tolist() == [0, 0x40, 0xFF]


def test_a_picture_taken_sideways_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right to see it as it was
    assert decode_image(picture(Image.new("RGB", (4, 8)), "JPEG", exif=exif)).shape == (4, 8, 3)


HOSTS = ["0.0.0.0", "::", "0", "127.1", "2130706433", "0x7f000001", "127.0.0.1 ", " ", "[::1]", "::ffff:0.0.0.0"]


@pytest.mark.parametrize("host", [*HOSTS, "localhost.localdomain", "example.invalid"])
def test_only_what_is_surely_loopback_may_do_without_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="a key is needed"):
        ServerSettings.from_config(Config(server=ServerSection(host=host)), {})


@pytest.mark.parametrize("key", [" ", "\n", "secret\n", " secret"])
def test_a_key_that_no_client_can_send_is_refused_at_start(key: str) -> None:
    with pytest.raises(ConfigError, match="white space"):
        ServerSettings.from_config(Config(), {"REALTIME_OMNI_API_KEY": key})
