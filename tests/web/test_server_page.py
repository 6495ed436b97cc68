"""The page under the real server, with the null model: its headers, its discovery, its access rules, its resume."""

from __future__ import annotations

import base64
import itertools
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from web.world_page import PHONE, OpenPage, StartServer, running_server, until

pytestmark = pytest.mark.browser

DOT = [
    {
        "name": "dot.png",
        "mimeType": "image/png",
        "buffer": base64.b64decode(
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
        ),
    }
]
FRAMES = """() => {
    window.frameNumbers = [];
    const context = realtimeOmni.world.getContext('2d');
    const draw = context.drawImage.bind(context);
    context.drawImage = (...args) => {
        draw(...args);
        queueMicrotask(() => window.frameNumbers.push(realtimeOmni.stats().lastFrameIndex));
    };
}"""


@pytest.fixture(scope="module")
def url(start_server: StartServer) -> str:
    return start_server("null")


def test_it_opens_under_the_servers_own_content_security_policy(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    stats = world.moves()
    assert stats["format"] == "h264"
    assert stats["errors"] == []
    policy = world.page.evaluate("fetch('./').then((response) => response.headers.get('content-security-policy'))")
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert world.page.locator("#tabs").is_hidden()  # there is no voice


def test_what_is_waited_for_under_that_policy_may_come_later(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.page.evaluate("() => { setTimeout(() => { window.later = true; }, 300); }")
    until(world.page, "window.later")


def test_the_prompts_of_the_model_are_offered_and_work(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    here = world.moves()["prompt"]
    prompts = [chip.get_attribute("data-prompt") for chip in world.page.locator("#prompts button").all()]
    other = next(prompt for prompt in prompts if prompt != here)
    world.page.click(f'#prompts button[data-prompt="{other}"]')
    world.wait(f"s.prompt === {other!r}")
    world.page.wait_for_selector(f'#prompts button[data-prompt="{other}"][aria-pressed="true"]')


def test_an_unknown_prompt_is_refused_in_words_and_the_walk_goes_on(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    world.page.fill("#prompt", "xyzzy plugh")
    world.page.keyboard.press("Enter")
    world.page.wait_for_selector("#toast:has-text('does not know this place')")
    world.moves()


@pytest.mark.parametrize("way_on", ["#reset", "#fork"])
def test_a_refused_place_is_told_until_something_works(open_page: OpenPage, url: str, way_on: str) -> None:
    world = open_page(url)
    world.moves()
    world.page.fill("#prompt", "xyzzy plugh")
    world.page.keyboard.press("Enter")
    world.page.wait_for_selector("#toast[data-tone='bad']:has-text('does not know this place')")
    assert world.page.input_value("#prompt") == "xyzzy plugh"  # to be mended
    world.page.click(way_on)
    until(world.page, "document.getElementById('prompt').value === ''")
    assert world.text("#toast") == ""
    world.moves()


def test_a_picture_that_the_server_refuses_leaves_no_tile_and_the_choice_as_it_was(
    open_page: OpenPage, url: str
) -> None:
    spoil = "HTMLCanvasElement.prototype.toDataURL = () => 'data:image/jpeg;base64,AAAA'"
    world = open_page(url, before=spoil)
    world.moves()
    tiles = world.page.locator("#starts button")
    before = tiles.count()
    world.page.set_input_files("#upload", DOT)
    world.page.wait_for_selector("#toast[data-tone='bad']:has-text('be used')", state="attached")
    assert world.stats()["errors"][-1].startswith("image_invalid")  # the server's word
    assert tiles.count() == before
    assert world.page.locator("#starts button[aria-pressed='true']").count() == 0
    world.page.click("#reset")
    assert world.wait("s.epoch === 1 && s.lastFrameIndex > 2")["phase"] == "live"
    assert world.text("#toast") == ""


def test_of_two_pictures_chosen_within_a_round_trip_the_refused_one_alone_is_taken_back(
    open_page: OpenPage, start_server: StartServer
) -> None:
    spoil_the_first_and_hold_it_until_the_second_is_sent = """
        HTMLCanvasElement.prototype.toDataURL = () => 'data:image/jpeg;base64,AAAA';
        const send = WebSocket.prototype.send, held = [];
        WebSocket.prototype.send = function (data) {
            if (!String(data).includes('"session.reset"')) return send.call(this, data);
            held.push(data);
            if (held.length === 2) for (const one of held) send.call(this, one);
        };"""
    world = open_page(start_server("tiny-world"), before=spoil_the_first_and_hold_it_until_the_second_is_sent)
    world.moves()
    tiles = world.page.locator("#starts button[title^='Start from']")
    count = tiles.count()
    world.page.set_input_files("#upload", DOT)
    world.page.wait_for_selector("#starts button[title='Start from yours'][aria-pressed='true']")
    tiles.first.click()
    world.wait("s.epoch === 1 && s.lastFrameIndex > 2")
    assert world.stats()["errors"][-1].startswith("image_invalid")
    assert tiles.count() == count
    assert tiles.first.get_attribute("aria-pressed") == "true"


def test_cut_and_reloaded_it_walks_on_with_the_next_frame(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    before = world.moves()
    world.page.evaluate(FRAMES)
    world.page.evaluate("realtimeOmni.cut()")
    world.moves(12)
    frames = world.page.evaluate("window.frameNumbers")
    assert [later - earlier for earlier, later in itertools.pairwise(frames) if later != earlier + 1] == []
    world.page.reload()
    after = world.moves()
    assert after["sessionId"] == before["sessionId"]
    assert after["lastFrameIndex"] > frames[-1]


def test_a_server_that_was_shut_down_is_looked_for_and_walked_on_when_it_is_back(
    open_page: OpenPage, tmp_path: Path
) -> None:
    with running_server("null", log=tmp_path / "before") as url:
        world = open_page(url)
        before = world.moves()
    world.page.wait_for_selector("#card-title:has-text('The server has gone away')")
    with running_server("tiny-world", log=tmp_path / "after", port=urlsplit(url).port):  # and with another world
        world.page.wait_for_selector("#card-title:has-text('The server is back')")
        world.page.click("#card-actions >> text=Start a new session")
        after = world.moves()
    assert after["sessionId"] != before["sessionId"]
    assert world.text("#model-name") == "tiny-world"


def test_a_session_asked_for_while_the_server_is_away_begins_when_it_is_back(
    open_page: OpenPage, tmp_path: Path
) -> None:
    with running_server("null", log=tmp_path / "before") as url:
        world = open_page(url)
        before = world.moves()
    world.page.click("#card-actions >> text=Start a new session")
    world.page.wait_for_selector("#card-title:has-text('The server does not answer')")
    with running_server("null", log=tmp_path / "after", port=urlsplit(url).port):
        assert world.moves()["sessionId"] != before["sessionId"]


def test_a_connection_lost_for_longer_than_the_walk_is_kept_says_so_and_begins_again(
    open_page: OpenPage, start_server: StartServer
) -> None:
    world = open_page(start_server("null", "--set", "session.grace_s=1"))
    before = world.moves()
    world.page.context.set_offline(True)
    world.page.evaluate("realtimeOmni.cut()")
    world.page.wait_for_selector("#card-text:has-text('kept for 1 s, and that time is over')")
    assert world.page.locator("#card-actions >> text=Start a new session").is_visible()
    world.page.context.set_offline(False)
    world.page.wait_for_selector("#card-title:has-text('Your walk is over')")
    world.page.click("#card-actions >> text=Start a new session")
    assert world.moves()["sessionId"] != before["sessionId"]


def test_a_world_that_the_server_does_not_have_is_not_asked_for_again(open_page: OpenPage, url: str) -> None:
    world = open_page(f"{url}?model=gone")
    world.page.wait_for_selector("#card-text:has-text('does not have this model')")
    world.page.click("#card-actions >> text=Start a new session")
    world.moves()


def test_a_server_with_a_key_asks_for_it_and_says_when_it_is_wrong(
    open_page: OpenPage, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALTIME_OMNI_API_KEY", "open-sesame")
    world = open_page(start_server("null"))
    world.page.fill("#key", "wrong")
    world.page.keyboard.press("Enter")
    world.page.wait_for_selector("#card-text:has-text('did not accept')")
    world.page.fill("#key", "open-sesame")
    world.page.keyboard.press("Enter")
    world.moves()


@pytest.mark.parametrize(("width", "height"), [(320, 568), (683, 384), (960, 540)], ids=lambda pixels: str(pixels))
def test_in_a_small_or_enlarged_window_nothing_is_cut_off_or_covered(
    open_page: OpenPage, url: str, width: int, height: int
) -> None:
    page = open_page(url, viewport={"width": width, "height": height}).page
    page.wait_for_selector("#hint:visible")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    if width > height:  # the panel scrolls by itself
        assert page.evaluate("document.documentElement.scrollHeight") == height
    pads = [page.locator(f".pad.{name}").bounding_box() for name in ("move", "look")]
    hint = page.locator("#hint p:visible").bounding_box()
    assert pads[0]["x"] + pads[0]["width"] < pads[1]["x"]
    assert all(hint["y"] + hint["height"] <= pad["y"] for pad in pads)


def test_what_is_chosen_on_a_phone_is_seen_and_what_opens_too(open_page: OpenPage, url: str) -> None:
    world = open_page(url, viewport=PHONE, touch=True)
    world.moves()
    world.page.fill("#prompt", "noon")
    world.page.evaluate("scrollTo(0, 300)")
    world.page.locator("#prompts button").last.tap()
    until(world.page, "scrollY === 0")
    assert world.page.input_value("#prompt") == ""
    world.page.locator("#about summary").tap()
    assert world.page.locator("#facts").is_visible()
    until(world.page, "document.getElementById('about').getBoundingClientRect().bottom <= innerHeight + 1")
