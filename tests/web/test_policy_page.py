"""The page of a server that serves a policy alone: what it is, where robots connect, and nothing to walk with."""

from __future__ import annotations

import pytest

from web.world_page import LAPTOP, PHONE, PHONE_ON_ITS_SIDE, OpenPage, StartServer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url(start_server: StartServer) -> str:
    return start_server("null-policy")


@pytest.mark.parametrize("viewport", [LAPTOP, PHONE, PHONE_ON_ITS_SIDE], ids=["laptop", "phone", "phone on its side"])
def test_a_policy_says_what_it_is_and_where_robots_connect(
    open_page: OpenPage, url: str, viewport: dict[str, int]
) -> None:
    page = open_page(url, viewport=viewport).page
    page.wait_for_selector("#card-title:has-text('leads robots')")
    detail = page.inner_text("#card-detail")
    assert f"{url.replace('http', 'ws')}v1/realtime/robot/openpi" in detail.split("\n")
    assert "realtime-omni demo robot" in detail
    assert page.locator("button:visible").count() == 0
    assert page.locator("input:visible").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    assert page.evaluate("document.documentElement.scrollHeight") == viewport["height"]
