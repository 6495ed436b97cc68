"""`examples/own_page.html`: a world in a page of another origin, which the server allows by name or refuses."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from web.world_page import LIVENESS_S, ROOT, StartServer, until

pytestmark = pytest.mark.browser

WALKS = "document.getElementById('status').textContent.includes('walks')"
# How many chunks, errors and applied events the server has told of: `window.answers["chunk"]`.
COUNT = """() => {
    window.answers = {};
    socket.addEventListener("message", ({ data }) => {
        if (typeof data !== "string") return;
        const { type, event_ids } = JSON.parse(data);
        window.answers[type] = (window.answers[type] ?? 0) + (event_ids?.length ?? 1);
    });
}"""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def origins() -> Iterator[list[str]]:
    """Two web servers that are not ours, with the examples."""
    with contextlib.ExitStack() as running:
        servers = [
            running.enter_context(
                ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=ROOT / "examples"))
            )
            for _ in range(2)
        ]
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            running.callback(server.shutdown)
        yield [f"http://127.0.0.1:{server.server_port}" for server in servers]


@pytest.fixture(scope="module")
def server(start_server: StartServer, origins: list[str]) -> str:
    """Allows the first origin."""
    return start_server("null", "--set", f'server.origins=["{origins[0]}"]')


def page_of(browser: Any, origin: str, server: str) -> Any:
    page = browser.new_page()
    page.set_default_timeout(LIVENESS_S * 1000)
    page.goto(f"{origin}/own_page.html?server={server.replace('http', 'ws', 1).rstrip('/')}")
    return page


def test_a_page_of_a_listed_origin_shows_the_world_and_steers_it(browser: Any, server: str, origins: list[str]) -> None:
    page = page_of(browser, origins[0], server)
    until(page, WALKS)
    page.evaluate(COUNT)
    before = page.evaluate("document.querySelector('canvas').toDataURL()")
    page.keyboard.down("w")
    until(page, "answers['event.applied'] >= 1 && answers['chunk'] >= 8")  # further than what is made ahead
    page.keyboard.up("w")
    page.locator("#places button").last.click()
    until(page, "answers['event.applied'] >= 3")
    assert page.evaluate("document.querySelector('canvas').toDataURL()") != before
    assert page.evaluate("answers['error'] ?? 0") == 0
    page.close()


def test_a_page_of_another_origin_is_refused_and_says_what_to_do(browser: Any, server: str, origins: list[str]) -> None:
    page = page_of(browser, origins[1], server)
    page.wait_for_selector("#status:has-text('server.origins')")
    page.close()
