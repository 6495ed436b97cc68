"""Servers and a browser for the page's tests: real processes, real sockets, system Chromium.

One browser for a module (it takes a second to start), one fresh context for a test. The fixtures end before the next module:
the synchronous Playwright keeps an event loop of its own in this thread, beside which no asynchronous test could run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from web.world_page import BROWSER_ARGS, LAPTOP, LIVENESS_S, OpenPage, StartServer, World, running_server


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """``start_server("fake", "--api-key", "x")`` or ``start_server("tiny-world")``: the base URL of a server of its own."""
    with contextlib.ExitStack() as running:

        def start(kind: str, *extra: str, timeout_s: float = 2 * LIVENESS_S) -> str:
            log = tmp_path_factory.mktemp("server") / "log"
            return running.enter_context(running_server(kind, *extra, log=log, timeout_s=timeout_s))

        yield start


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    if shutil.which(chromium) is None:
        message = f"no browser: {chromium} is not installed (Debian: apt-get install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        print(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=BROWSER_ARGS)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """``open_page(url, viewport=PHONE, touch=True, before=script)``: a `World` in a context of its own.

    A script error or a refused resource fails the test at its end: the page runs under its own content security policy.
    """
    contexts: list[Any] = []
    problems: list[str] = []

    def open_one(
        url: str,
        *,
        viewport: dict[str, int] = LAPTOP,
        touch: bool = False,
        before: str | None = None,
        routes: dict[str, Callable[[Any], None]] | None = None,
    ) -> World:
        context = browser.new_context(viewport=viewport, has_touch=touch, reduced_motion="reduce")
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LIVENESS_S * 1000)
        page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
        page.on(
            "console",
            lambda message: problems.append(message.text) if "Content Security Policy" in message.text else None,
        )
        if before is not None:
            page.add_init_script(before)
        for pattern, answer in (routes or {}).items():
            page.route(pattern, answer)
        page.goto(url)
        return World(page, problems)

    yield open_one
    for context in contexts:
        context.close()
    assert problems == []
