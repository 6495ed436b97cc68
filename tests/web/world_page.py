"""What the page's tests and `screenshots.py` share: how a server and the browser are started, and the words of a test."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "realtime_omni" / "server" / "page"
FAKE = ROOT / "tests" / "client" / "fake_world_server.py"
# Background services of the browser would look for hosts that a closed network refuses, many at a time.
BROWSER_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

LIVENESS_S = 60.0
"""For whatever a page shows within a second or three: where others compute, a browser waits for its turn."""

LAPTOP = {"width": 1366, "height": 768}
LAPTOP_SMALL = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
PHONE_ON_ITS_SIDE = {"width": 844, "height": 390}

READY = re.compile(r"^(?:realtime-omni serves|fake world server) .*(http://[\w.]+:\d+)", re.MULTILINE)
StartServer = Callable[..., str]
OpenPage = Callable[..., "World"]


@contextlib.contextmanager
def running_server(
    kind: str, *extra: str, log: Path, timeout_s: float = 2 * LIVENESS_S, port: int = 0
) -> Iterator[str]:
    """The base URL of a server process: ``fake``, or a model that ``realtime-omni serve`` knows. ``port`` 0: any, the
    server's choice."""
    if kind == "fake":
        command = [sys.executable, str(FAKE), "--static", str(PAGE), "--width", "128", "--height", "128"]
    else:
        command = [sys.executable, "-m", "realtime_omni.cli", "serve", kind]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *extra],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
    try:
        yield _address(process, log, timeout_s)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> str:
    """Where it says that it serves, once it does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if said := READY.search(log.read_text()):
            return f"{said[1]}/"
        time.sleep(0.1)
    raise RuntimeError(f"no server:\n{log.read_text()[-3000:]}")


def until(page: Any, condition: str, timeout_s: float | None = None, look_every_ms: float | None = None) -> None:
    """Until a JavaScript expression holds (by default looked at for every picture, as long as the page's time-out says).

    The only way to wait: Playwright's own takes any string, and evaluates one that is no function anew at every look. Only
    at the first one the page's content security policy lets it, so such a test passes until a machine is slow.
    """
    page.wait_for_function(
        f"() => ({condition})", timeout=None if timeout_s is None else timeout_s * 1000, polling=look_every_ms
    )


class World:
    """A page under test and the words of its tests."""

    def __init__(self, page: Any, problems: list[str]) -> None:
        self.page = page
        self.problems = problems

    def stats(self) -> dict[str, Any]:
        return dict(self.page.evaluate("realtimeOmni.stats()"))

    def wait(self, condition: str, timeout_s: float = LIVENESS_S) -> dict[str, Any]:
        """Until a JavaScript condition over ``s`` (the statistics) holds."""
        until(self.page, f"((s) => {condition})(realtimeOmni.stats())", timeout_s, 30)
        return self.stats()

    def moves(self, frames: int = 6, timeout_s: float = LIVENESS_S) -> dict[str, Any]:
        """Until the world is live and shows some more frames."""
        shown = self.stats()["shownFrames"]
        return self.wait(f"s.phase === 'live' && s.shownFrames >= {shown + frames}", timeout_s)

    def pixels(self, canvas: str = "world") -> list[int]:
        """The world (or ``branchWorld``) as it is shown, in its own size, gray, row by row."""
        script = """(canvas) => {
            const { width, height } = realtimeOmni[canvas];
            const data = realtimeOmni[canvas].getContext('2d').getImageData(0, 0, width, height).data;
            const gray = [];
            for (let i = 0; i < data.length; i += 4) gray.push(Math.round((data[i] + 2 * data[i + 1] + data[i + 2]) / 4));
            return gray;
        }"""
        return list(self.page.evaluate(script, canvas))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector)).strip()
