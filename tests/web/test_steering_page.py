"""Steering by voice on the World page, in a real browser: a fake microphone that speaks, a puppet that calls tools, a world."""

from __future__ import annotations

import shutil
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.voice.real import needs_weights, spoken
from web.test_talk_page import RATE, microphone  # noqa: F401 (a fixture)
from web.world_page import BROWSER_ARGS, PHONE, OpenPage, StartServer, World

pytestmark = pytest.mark.browser

SPOKEN = ("Turn left.", "Make it snow.", "Walk forward.", "Stop.")
ASKING = """
const { mediaDevices } = navigator, ask = mediaDevices.getUserMedia.bind(mediaDevices);
mediaDevices.getUserMedia = async (wanted) => {
  window.asked = true;
  await new Promise((resolve) => { window.answer = resolve; });
  return window.given = await ask(wanted);
};
window.allow = async () => {
  window.answer();
  while (!window.given) await new Promise((resolve) => setTimeout(resolve, 10));
  await new Promise((resolve) => setTimeout(resolve, 200));
  return window.given.getTracks().map((track) => track.readyState);
};
"""
LINES = """puppet:options.lines=['call turn {"direction": "left"}', 'call set_scene {"scene": "dusk"}']"""
NEVER_BY_ITSELF = """{  // a walk ends after half a minute in which nobody speaks
  const later = window.setTimeout;
  window.setTimeout = (run, ms, ...rest) => (ms >= 30_000 ? 0 : later(run, ms, ...rest));
}"""
REFUSING = "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotAllowedError'); };"


@pytest.fixture(scope="module")
def playing(chromium: str) -> Iterator[Any]:
    """``playing(path)``: a browser whose microphone hears that recording."""
    if shutil.which(chromium) is None:
        pytest.skip(f"no browser: {chromium} is not installed")
    from playwright.sync_api import sync_playwright

    fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_playwright() as playwright:
        yield lambda path: playwright.chromium.launch(
            executable_path=chromium, args=[*BROWSER_ARGS, *fake, f"--use-file-for-fake-audio-capture={path}"]
        )


@pytest.fixture(scope="module")
def browser(playing: Any, microphone: Path) -> Iterator[Any]:  # noqa: F811
    """One that has a microphone, which asks two questions."""
    launched = playing(microphone)
    yield launched
    launched.close()


@pytest.fixture(scope="module")
def url(start_server: StartServer) -> str:
    return start_server("null", "puppet", "--set", LINES)


def save(path: Path, samples: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())


def listening(world: World) -> World:
    world.moves()
    world.page.click("#speak")
    world.wait("s.voice.state === 'live'")
    return world


def test_what_the_voice_calls_is_the_pages_own_next_event(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    assert "control.js" not in world.page.evaluate("performance.getEntriesByType('resource').map((r) => r.name).join()")
    event = listening(world).stats()["nextEventId"]
    turning = world.wait("s.keys.includes('j')")
    assert "seconds of sound" in turning["voice"]["lines"][0]
    turned = world.wait(f"!s.keys.includes('j') && s.appliedEventId >= {event + 1}")  # down and up, in this order
    assert turned["nextEventId"] >= event + 2
    there = world.wait(f"s.prompt === 'dusk' && s.appliedEventId >= {event + 2}")
    assert there["errors"] == []


def test_keys_and_voice_share_one_writer_and_the_microphone_can_be_closed(open_page: OpenPage, url: str) -> None:
    world = listening(open_page(url, viewport=PHONE))
    world.page.keyboard.down("l")
    both = world.wait("s.keys.includes('j')")
    assert both["keys"] == ["j", "l"]
    world.page.keyboard.press("v")
    ended = world.wait("s.voice.state === 'off'")
    assert ended["keys"] == ["l"]
    assert ended["voice"]["lines"] == []
    world.page.keyboard.up("l")
    world.wait("s.keys.length === 0 && s.appliedEventId === s.nextEventId - 1")
    assert world.page.get_attribute("#speak", "aria-pressed") == "false"


def test_without_permission_it_says_so_and_the_world_goes_on(open_page: OpenPage, url: str) -> None:
    world = open_page(url, before=REFUSING)
    world.moves()
    world.page.click("#speak")
    world.page.wait_for_selector("#toast:has-text('microphone is not allowed')")
    assert world.stats()["voice"]["state"] == "off"
    world.moves()


def test_a_stop_acts_in_a_pause_too(open_page: OpenPage, start_server: StartServer) -> None:
    lines = """puppet:options.lines=['call move {"direction": "forward"}', 'call halt {}']"""
    world = listening(open_page(start_server("null", "puppet", "--set", lines), before=NEVER_BY_ITSELF))
    world.wait("s.keys.includes('w')")
    world.page.keyboard.press("p")
    world.wait("s.phase === 'paused'")
    world.wait("s.keys.length === 0")


def test_a_microphone_that_is_allowed_after_the_button_was_let_go_is_closed(open_page: OpenPage, url: str) -> None:
    world = open_page(url, before=ASKING)
    world.moves()
    world.page.click("#speak")
    while not world.page.evaluate("window.asked === true"):
        world.page.wait_for_timeout(20)
    world.page.click("#speak")
    world.wait("s.voice.state === 'off'")
    assert world.page.evaluate("window.allow()") == ["ended"]


def without_a_voice(route: Any) -> None:
    response = route.fetch()
    models = [entry for entry in response.json()["models"] if entry["voice"] is None]
    route.fulfill(response=response, json=response.json() | {"models": models})


def test_a_world_alone_has_no_microphone(open_page: OpenPage, url: str) -> None:
    world = open_page(url, routes={"**/v1/models": without_a_voice})
    world.moves()
    assert world.page.is_hidden("#speak")


@needs_weights
def test_the_embedded_voice_steers_the_embedded_world(playing: Any, start_server: StartServer, tmp_path: Path) -> None:
    """Said by flite; "stop" is heard as one of several words."""
    if shutil.which("flite") is None:
        pytest.skip("flite is not installed")
    path, pause = tmp_path / "said.wav", np.zeros(5 * RATE, np.float32)
    parts = [part for text in SPOKEN for part in (pause, spoken("flite", text, tmp_path))]
    save(path, np.concatenate([*parts, *[pause] * 12]))
    url = start_server("tiny-world", "voice")
    launched = playing(path)
    page = launched.new_page()
    page.goto(url)
    world = World(page, [])
    world.moves()
    page.click("#speak")
    world.wait("s.voice.state === 'live'")
    world.wait("s.keys.includes('j')")
    world.wait("s.prompt === 'snow'")
    world.wait("s.keys.includes('w')")
    stopped = world.wait("s.keys.length === 0", 25)  # before it stops by itself
    assert stopped["errors"] == []
    launched.close()
