"""``realtime-omni demo robot`` as a newcomer runs it: policy server, robot and page, and an end that leaves nothing."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from web.world_page import LIVENESS_S, PHONE, ROOT, OpenPage, until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or importlib.util.find_spec("tokenizers") is None,
        reason="torch or tokenizers (extra vla) is not installed",
    ),
]

PIXELS = """() => {
    const canvas = document.querySelector('#top');
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    return Array.from(data.filter((_, i) => i % 64 === 0));
}"""


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "realtime_omni.cli", "demo", "robot", "--no-browser", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().split("at work: ")[1].split()[0]
        finally:
            process.terminate()
            process.wait(30)


def test_the_page_shows_the_robot_at_work_and_what_is_asked_of_it(
    demo: tuple[subprocess.Popen[str], str], open_page: OpenPage
):
    process, url = demo
    page = open_page(url, viewport=PHONE, touch=True).page
    until(page, "robotDemo.stats().shown >= 2", LIVENESS_S)
    before = page.evaluate(PIXELS)
    assert len(set(before)) > 20
    page.click("button[aria-label='stack the red block on the blue block']")
    until(page, "document.querySelector('#words').textContent.startsWith('stack the red')", LIVENESS_S)
    page.click("#joinings button:text('none')")
    page.fill("#delay", "3")
    until(page, "robotDemo.stats().delay === 3", LIVENESS_S)
    until(page, "robotDemo.stats().switches > 0", LIVENESS_S)
    assert "picture" in page.inner_text("#strip")
    assert page.evaluate(PIXELS) != before

    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    page.wait_for_selector("#link[data-tone='bad']", state="attached", timeout=LIVENESS_S * 1000)
    assert not [child for child in children if child.is_running()]
