"""The page in a real browser, against the fake world server: everything but the model.

What needs the model (does a turn turn, does a prompt change the place) is in test_tiny_world_page.py.
"""

from __future__ import annotations

import base64
import itertools
from typing import Any

import pytest

from web.world_page import LAPTOP, LAPTOP_SMALL, PHONE, PHONE_ON_ITS_SIDE, OpenPage, StartServer, World, until

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def url(start_server: StartServer) -> str:
    return start_server("fake")


@pytest.mark.parametrize("format_name", ["h264", "jpeg", "rgb24"])
def test_it_opens_and_shows_a_moving_picture(open_page: OpenPage, url: str, format_name: str) -> None:
    world = open_page(f"{url}?format={format_name}")
    before = world.moves()
    picture = world.pixels()
    world.page.keyboard.down("w")
    after = world.moves(12)
    assert before["format"] == format_name
    assert after["fps"] > 0
    assert world.pixels() != picture
    assert world.text("#link-text") == "Live"
    assert after["errors"] in ([], ["models: Error: HTTP 404"])  # the fake has no model list


def test_a_key_is_sent_when_it_changes_and_its_latency_is_measured(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    first = world.moves()["nextEventId"]
    for _ in range(5):
        world.page.keyboard.down("w")  # a held key repeats
    held = world.wait("s.keys.length === 1 && s.latencyMs !== null")
    assert held["keys"] == ["w"]
    assert held["nextEventId"] == first + 1
    assert 0 < held["latencyMs"] < 2_000
    assert world.page.locator('[data-key="w"][data-held]').count() == 1
    world.page.keyboard.up("w")
    assert world.wait("s.keys.length === 0")["nextEventId"] == first + 2


def test_keys_are_let_go_when_the_window_loses_the_focus(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    world.page.keyboard.down("w")
    world.page.keyboard.down("l")
    assert world.stats()["keys"] == ["w", "l"]
    world.page.evaluate("window.dispatchEvent(new Event('blur'))")
    assert world.stats()["keys"] == []


def test_typing_a_place_does_not_walk(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    events = world.moves()["nextEventId"]
    world.page.keyboard.press("/")
    world.page.keyboard.type("wasd jikl")
    assert world.page.input_value("#prompt") == "wasd jikl"
    assert world.stats()["nextEventId"] == events
    world.page.keyboard.press("Enter")
    world.wait("s.prompt === 'wasd jikl'")
    world.page.wait_for_selector('#place:text-is("wasd jikl")')
    world.page.keyboard.down("d")  # the focus is back with the world
    assert world.stats()["keys"] == ["d"]


def test_everything_can_be_reached_from_the_keyboard_and_left_again(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    seen: list[str] = []
    for _ in range(60):
        world.page.keyboard.press("Tab")
        element = "(e => e.id || e.dataset.key || e.dataset.prompt || e.tagName)(document.activeElement)"
        seen.append(world.page.evaluate(element))
        if seen[-1] == "BODY" and len(seen) > 5:
            break
    assert seen[-1] == "BODY", "the focus is trapped"
    wanted = ["pause", "w", "a", "s", "d", "i", "j", "k", "l", "prompt", "upload", "seed", "reset", "renew", "close"]
    assert [name for name in wanted if name not in seen] == []
    world.page.focus('[data-key="w"]')
    world.page.keyboard.down("Space")
    assert world.stats()["keys"] == ["w"]
    world.page.keyboard.up("Space")
    assert world.stats()["keys"] == []
    world.page.keyboard.press("p")
    world.wait("s.phase === 'paused'")
    assert world.page.evaluate("document.activeElement.textContent") == "Walk on"
    world.page.keyboard.press("Enter")
    world.moves()


def test_two_fingers_hold_two_buttons(open_page: OpenPage, url: str) -> None:
    world = open_page(url, viewport=PHONE, touch=True)
    world.moves()
    press = """([key, id, type]) => document.querySelector(`[data-key="${key}"]`).dispatchEvent(
        new PointerEvent(type, { pointerId: id, pointerType: 'touch', button: 0, bubbles: true, cancelable: true }))"""
    # Only a finger that is really down can be captured; these are made up.
    world.page.evaluate("Element.prototype.setPointerCapture = () => undefined")
    world.page.evaluate(press, ["w", 11, "pointerdown"])
    world.page.evaluate(press, ["l", 12, "pointerdown"])
    assert world.stats()["keys"] == ["w", "l"]
    world.page.evaluate(press, ["w", 11, "pointerup"])
    assert world.stats()["keys"] == ["l"]
    world.page.evaluate(press, ["l", 12, "pointercancel"])
    assert world.stats()["keys"] == []


def test_a_drag_on_the_picture_looks_around(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    box = world.page.locator("#view").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    world.page.mouse.move(x, y)
    world.page.mouse.down()
    world.page.mouse.move(x + 90, y)
    assert world.stats()["keys"] == ["l"]
    world.page.mouse.move(x - 90, y)
    assert world.stats()["keys"] == ["j"]
    world.page.mouse.up()
    assert world.stats()["keys"] == []


def test_a_cut_socket_resumes_with_the_next_frame(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    watch_frame_numbers(world)
    before = world.moves()
    for _ in range(3):
        world.page.evaluate("realtimeOmni.cut()")
        after = world.moves(9)
    assert after["sessionId"] == before["sessionId"]
    assert after["epoch"] == before["epoch"]
    frames = world.page.evaluate("window.frameNumbers")
    assert len(frames) > 20
    assert [later - earlier for earlier, later in itertools.pairwise(frames) if later != earlier + 1] == []


def test_a_connection_that_the_server_drops_resumes(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    session = world.moves()["sessionId"]
    watch_frame_numbers(world)
    world.page.fill("#prompt", "drop")  # the fake cuts the connection after the next block
    world.page.keyboard.press("Enter")
    world.wait("s.prompt === 'drop'")
    assert world.moves(15)["sessionId"] == session
    frames = world.page.evaluate("window.frameNumbers")
    assert [later - earlier for earlier, later in itertools.pairwise(frames) if later != earlier + 1] == []


def test_a_connection_that_drops_again_and_again_still_shows_every_frame(
    open_page: OpenPage, start_server: StartServer
) -> None:
    world = open_page(start_server("fake", "--drop-every-s", "1.5"))
    world.moves()
    watch_frame_numbers(world)
    for prompt in ("one", "two", "three"):
        world.page.fill("#prompt", prompt)
        world.page.keyboard.press("Enter")
        world.wait(f"s.prompt === '{prompt}'")  # not lost, wherever the cut was
        world.page.keyboard.down("d")
        world.moves(20)
        world.page.keyboard.up("d")
    frames = world.page.evaluate("window.frameNumbers")
    assert [later - earlier for earlier, later in itertools.pairwise(frames) if later != earlier + 1] == []


def watch_frame_numbers(world: World) -> None:
    """Every frame number that is shown, noted by the page itself."""
    world.page.evaluate("""() => {
        window.frameNumbers = [];
        const context = realtimeOmni.world.getContext('2d');
        const draw = context.drawImage.bind(context);
        context.drawImage = (...args) => {
            draw(...args);
            queueMicrotask(() => window.frameNumbers.push(realtimeOmni.stats().lastFrameIndex));
        };
    }""")


def test_a_reload_comes_back_to_the_same_walk(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    before = world.moves()
    world.page.reload()
    after = world.moves()
    assert after["sessionId"] == before["sessionId"]
    assert after["lastFrameIndex"] > before["lastFrameIndex"]


def test_without_webcodecs_it_takes_jpeg(open_page: OpenPage, url: str) -> None:
    world = open_page(url, before="delete globalThis.VideoDecoder")
    assert world.moves()["format"] == "jpeg"


def test_a_decoder_that_fails_makes_it_change_to_jpeg_and_walk_on(open_page: OpenPage, url: str) -> None:
    broken = """globalThis.VideoDecoder = class extends VideoDecoder {
        decode(chunk) { if ((this.fed = (this.fed ?? 0) + 1) > 8) throw new Error('made to fail'); super.decode(chunk); }
    }"""
    world = open_page(url, before=broken)
    after = world.wait("s.format === 'jpeg' && s.shownFrames > 20")
    assert any("decoder" in error for error in after["errors"])
    assert after["epoch"] == 0


def test_a_failed_block_offers_what_the_server_says_can_be_done(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    world.page.fill("#prompt", "fail")
    world.page.keyboard.press("Enter")
    world.wait("s.phase === 'failed'")
    assert "failed to produce" in world.text("#card-text")
    assert world.page.locator("#card-actions button").count() >= 2
    world.page.click("#card-actions >> text=Start over")
    assert world.moves()["epoch"] == 1


def test_start_over_keeps_the_session_and_end_ends_it(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    session = world.moves()["sessionId"]
    world.page.fill("#seed", "42")
    world.page.click("#reset")
    assert world.wait("s.epoch === 1 && s.lastFrameIndex > 3")["sessionId"] == session
    assert world.page.input_value("#seed") == "42"
    world.page.click("#close")
    world.wait("s.phase === 'closed'")
    assert world.text("#card-title") == "You have left the world"
    assert world.page.locator(".tools button:disabled:visible").count() == 3  # to fork, to go back and to pause
    world.page.click("#card-actions button")
    assert world.moves()["sessionId"] != session


def test_a_seed_that_is_none_is_told_and_nothing_begins_with_it(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    world.page.fill("#seed", "seven")
    assert world.page.is_visible("#seed-error")
    world.page.click("#reset")
    assert world.page.evaluate("document.activeElement.id") == "seed"
    world.moves()
    assert world.stats()["epoch"] == 0
    world.page.fill("#seed", "7")
    assert not world.page.is_visible("#seed-error")
    world.page.click("#reset")
    world.wait("s.epoch === 1")


@pytest.mark.parametrize(("starts", "takes_image"), [([], False), ([], True), (["door"], False)])
def test_only_the_beginnings_that_the_model_takes_are_offered(
    open_page: OpenPage, url: str, starts: list[str], takes_image: bool
) -> None:
    model = {"name": "tiny-world", "prompts": [], "starts": starts, "takes_image": takes_image}
    world = open_page(url, routes={"**/v1/models": lambda route: route.fulfill(json={"models": [model]})})
    world.moves()
    assert world.page.is_visible("#starts-section") == (bool(starts) or takes_image)
    assert world.page.is_visible("#own-start") == takes_image


def test_who_walks_straight_on_is_told_how_to_turn(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    assert world.page.is_visible("#hint >> text=walk")
    world.page.keyboard.down("w")
    world.page.wait_for_selector("#hint >> text=turn", state="hidden")
    world.page.wait_for_selector("#hint >> text=turn")
    assert not world.page.is_visible("#hint >> text=walk")
    world.page.keyboard.press("l")
    world.moves()
    assert not world.page.is_visible("#hint")


@pytest.mark.parametrize("viewport", [LAPTOP_SMALL, PHONE], ids=["laptop", "phone"])
def test_no_suggested_place_is_cut_off(open_page: OpenPage, url: str, viewport: dict[str, int]) -> None:
    places = [
        "Brick dungeon",
        "Snowy valley",
        "Desert ruins",
        "Green garden",
        "Night city",
        "Lava cave",
        "A long name of a place " * 3,
    ]
    model = {"name": "tiny-world", "prompts": places, "starts": [], "takes_image": True}
    started = """const parse = JSON.parse; JSON.parse = (text, ...rest) => {
        const value = parse(text, ...rest);
        if (value?.type === 'session.started') value.prompts = [];
        return value;
    }"""  # the fake suggests places of its own
    routes = {"**/v1/models": lambda route: route.fulfill(json={"models": [model]})}
    world = open_page(url, viewport=viewport, routes=routes, before=started)
    world.moves()
    chips = world.page.evaluate("""[...document.querySelectorAll('#prompts button')].map((chip) => {
        const box = chip.getBoundingClientRect();
        return { whole: chip.scrollWidth <= chip.clientWidth, right: box.right, bottom: box.bottom };
    })""")
    assert len(chips) == len(places)
    assert all(chip["whole"] and chip["right"] <= viewport["width"] for chip in chips)
    if viewport is LAPTOP_SMALL:
        assert chips[-1]["bottom"] < viewport["height"] / 2, "the places leave room for the rest"


def test_what_if_goes_on_in_two_ways_from_the_same_picture(open_page: OpenPage, url: str) -> None:
    world = open_page(f"{url}?format=rgb24")
    world.moves()
    world.page.evaluate("""() => {
        const context = realtimeOmni.branchWorld.getContext('2d');
        const draw = context.drawImage.bind(context);
        context.drawImage = (source, ...rest) => {
            draw(source, ...rest);
            if (source !== realtimeOmni.world) return;
            const bytes = (canvas) => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.join();
            window.sameStart = bytes(realtimeOmni.world) === bytes(realtimeOmni.branchWorld);
        };
    }""")
    world.page.click("#fork")
    both = world.wait("s.branch !== null && s.branch.phase === 'live' && s.branch.shownFrames > 3")
    assert world.page.evaluate("window.sameStart") is True
    assert both["branch"]["sessionId"] != both["sessionId"]
    assert world.page.evaluate("document.activeElement.id") == "branch-prompt"
    world.page.keyboard.type("a green garden")
    world.page.keyboard.press("Enter")
    world.wait("s.branch.prompt === 'a green garden'")
    assert world.stats()["prompt"] != "a green garden"
    world.page.keyboard.down("w")  # both move
    shown = world.stats()
    after = world.wait(
        f"s.shownFrames > {shown['shownFrames'] + 6} && s.branch.shownFrames > {shown['branch']['shownFrames'] + 6}"
    )
    assert world.pixels() != world.pixels("branchWorld")
    assert (after["applied"], after["branch"]["applied"]) > (0, 0)
    world.page.keyboard.up("w")


@pytest.mark.parametrize("viewport", [LAPTOP, PHONE, PHONE_ON_ITS_SIDE], ids=["laptop", "phone", "on its side"])
def test_nothing_covers_the_names_of_the_two_places(open_page: OpenPage, url: str, viewport: dict[str, int]) -> None:
    world = open_page(url, viewport=viewport, touch=viewport is not LAPTOP)
    world.moves()
    world.page.click("#fork")
    world.wait("s.branch !== null && s.branch.phase === 'live' && s.branch.shownFrames > 3")
    for field in ("#first-form input", "#branch-form input"):
        world.page.fill(field, "a green garden")
        world.page.press(field, "Enter")
    until(world.page, "document.querySelectorAll('.place:not([hidden])').length === 2")
    covered = world.page.evaluate("""() => {
        const seen = (element) => element.getClientRects().length > 0;
        const box = (element) => element.getBoundingClientRect();
        const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        const others = [...document.querySelectorAll('.bar button, .keys-to, .pad button, .pane form')].filter(seen);
        const places = [...document.querySelectorAll('.place')];
        const over = places.flatMap((place) => others.filter((other) => overlap(box(place), box(other))));
        return over.map((other) => other.id || other.className);
    }""")
    assert covered == []


def test_keys_go_where_they_are_told_to(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    world.page.keyboard.press("f")
    world.wait("s.branch !== null && s.branch.phase === 'live' && s.branch.shownFrames > 3")
    world.page.check("input[value='branch']", force=True)
    world.page.evaluate("document.activeElement.blur()")
    before = world.wait("s.nextEventId > 0")
    world.page.keyboard.down("d")
    world.page.keyboard.up("d")
    after = world.wait(f"s.branch.nextEventId >= {before['branch']['nextEventId'] + 2}")
    keys = world.page.evaluate("[...document.querySelectorAll('.world')].map((w) => w.hasAttribute('data-keys'))")
    assert keys == [False, True]
    assert after["keys"] == []


@pytest.mark.parametrize("which", ["first", "branch"])
def test_one_of_the_two_is_kept(open_page: OpenPage, url: str, which: str) -> None:
    world = open_page(url)
    world.moves()
    world.page.click("#fork")
    both = world.wait("s.branch !== null && s.branch.phase === 'live' && s.branch.shownFrames > 3")
    kept = both["sessionId"] if which == "first" else both["branch"]["sessionId"]
    # At once, while frames still wait to be shown.
    world.page.evaluate("(id) => document.querySelector(id).click()", "#keep" if which == "first" else "#branch-keep")
    one = world.wait(f"s.branch === null && s.sessionId === {kept!r} && s.phase === 'live'")
    assert world.moves()["chunkIndex"] >= one["chunkIndex"]
    assert not world.page.is_visible("#branch-view")
    assert world.page.is_visible("#fork")
    world.page.keyboard.down("w")
    world.wait("s.latencyMs !== null")  # the keys go to it


def test_both_survive_a_cut_and_a_pause(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    world.page.click("#fork")
    world.wait("s.branch !== null && s.branch.phase === 'live' && s.branch.shownFrames > 3")
    world.page.evaluate("document.activeElement.blur()")
    world.page.keyboard.press("p")
    world.wait("s.phase === 'paused' && s.branch.phase === 'paused'")
    world.page.keyboard.press("p")
    world.page.evaluate("realtimeOmni.cut()")
    shown = world.stats()
    world.wait(
        f"s.shownFrames > {shown['shownFrames'] + 6} && s.branch.shownFrames > {shown['branch']['shownFrames'] + 6}"
    )


def test_going_back_shows_the_earlier_picture_and_the_chunk_goes_back(open_page: OpenPage, url: str) -> None:
    world = open_page(f"{url}?format=rgb24")
    world.page.keyboard.down("d")
    world.wait("s.chunkIndex > 6")
    world.page.keyboard.press("p")
    paused = world.wait("s.phase === 'paused' && s.received === s.shown")
    moments = world.page.locator("#past button:not(:disabled)")
    kept = moments.nth(1).evaluate("""(button) => {
        const canvas = button.querySelector('canvas');
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        const gray = (i) => Math.round((data[4 * i] + 2 * data[4 * i + 1] + data[4 * i + 2]) / 4);
        return Array.from({ length: data.length / 4 }, (_, i) => gray(i));
    }""")
    count = moments.count()
    assert count > 2
    moments.nth(1).focus()
    world.page.keyboard.press("Enter")
    back = world.wait("s.epoch === 1")
    assert back["chunkIndex"] == paused["chunkIndex"] - count + 1
    assert back["shown"] == (back["chunkIndex"] + 1) * 3
    assert world.pixels() == kept
    assert back["phase"] == "paused"
    world.page.keyboard.press("p")
    walked = world.moves()
    assert (walked["sessionId"], walked["epoch"]) == (paused["sessionId"], 1)


def test_the_button_goes_back_a_second(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.wait("s.chunkIndex > 8")
    before = world.stats()
    world.page.click("#back")
    after = world.wait("s.epoch === 1")
    assert after["chunkIndex"] < before["chunkIndex"]
    world.moves()


def test_a_world_that_cannot_branch_offers_neither(open_page: OpenPage, start_server: StartServer) -> None:
    world = open_page(start_server("fake", "--no-branches"))
    world.moves()
    assert not world.page.is_visible("#fork")
    assert not world.page.is_visible("#back")
    assert not world.page.is_visible("#past-section")


@pytest.mark.parametrize("viewport", [PHONE, PHONE_ON_ITS_SIDE, LAPTOP_SMALL], ids=["upright", "on its side", "laptop"])
def test_two_pictures_fit_on_one_screen(open_page: OpenPage, url: str, viewport: dict[str, int]) -> None:
    world = open_page(url, viewport=viewport, touch=viewport is not LAPTOP_SMALL)
    world.moves()
    world.page.keyboard.press("f")
    world.wait("s.branch !== null && s.branch.shownFrames > 3")
    width = world.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1] == viewport["width"]
    boxes = {}
    for selector in ("#view", "#branch-view", "#keep", "#branch-keep", '[data-key="a"]', '[data-key="l"]'):
        box = boxes[selector] = world.page.locator(selector).bounding_box()
        assert 0 <= box["x"] <= viewport["width"] - box["width"], selector
        assert 0 <= box["y"] <= viewport["height"] - box["height"], selector
    first, second = boxes["#view"], boxes["#branch-view"]
    assert min(first["width"], second["width"]) >= 180
    stacked = viewport is PHONE
    assert (second["y"] >= first["y"] + first["height"]) == stacked
    assert (second["x"] >= first["x"] + first["width"]) == (not stacked)


def test_an_own_picture_is_cut_to_size_and_sent(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    dot = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
    )
    files = [{"name": "dot.png", "mimeType": "image/png", "buffer": dot}]
    world.page.set_input_files("#upload", files)
    assert world.wait("s.epoch === 1 && s.lastFrameIndex > 2")["epoch"] == 1


NO_PICTURE = [{"name": "notes.png", "mimeType": "image/png", "buffer": b"these are notes"}]


def test_what_is_no_picture_leaves_no_tile_and_its_line_leaves_with_what_works(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    tiles = world.page.locator("#starts button")
    before = tiles.count()
    world.page.set_input_files("#upload", NO_PICTURE)
    world.page.wait_for_selector("#toast[data-tone='bad']:has-text('be used')")
    assert tiles.count() == before
    assert world.page.locator("#starts button[aria-pressed='true']").count() == 0
    world.page.click("#reset")
    world.wait("s.epoch === 1 && s.lastFrameIndex > 2")
    assert world.text("#toast") == ""


def test_a_hidden_page_pauses_and_a_seen_one_plays_on(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    world.moves()
    show = """hidden => {
        Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    world.page.evaluate(show, True)
    world.wait("s.phase === 'paused' && s.received === s.shown")
    world.page.evaluate(show, False)
    world.moves()


def test_the_same_walk_in_a_second_window_takes_it_over(open_page: OpenPage, url: str) -> None:
    world = open_page(url)
    first = world.moves()
    world.page.keyboard.press("p")  # or it would acknowledge more than the other window knows of
    world.wait("s.phase === 'paused' && s.received === s.shown")
    world.page.evaluate("window.dispatchEvent(new Event('pagehide'))")  # keeps what a window needs to come back
    second = world.page.context.new_page()
    kept = world.page.evaluate("sessionStorage.getItem('realtime_omni.session')")
    second.add_init_script(f"sessionStorage.setItem('realtime_omni.session', {kept!r})")
    second.goto(url)
    there = World(second, world.problems)
    there.wait("s.phase === 'paused'")
    world.wait("s.phase === 'closed'")
    second.keyboard.press("p")
    assert there.moves()["sessionId"] == first["sessionId"]
    assert world.text("#card-title") == "Open in another window"


def test_a_server_with_a_key_asks_for_it(open_page: OpenPage, start_server: StartServer) -> None:
    # The fake compares the subprotocol's text as it is (base64url of the key), and has no model list, to which a real
    # server answers 401 without the key.
    locked = start_server("fake", "--api-key", "b3BlbiBzZXNhbWU")
    world = open_page(locked, routes={"**/v1/models": answer_with_key})
    world.page.fill("#key", "open sesame")
    world.page.keyboard.press("Enter")
    world.moves()


def answer_with_key(route: Any) -> None:
    known = route.request.headers.get("authorization") == "Bearer open sesame"
    route.fulfill(status=200 if known else 401, json={"models": []} if known else {"error": {"code": "unauthorized"}})


@pytest.mark.parametrize("viewport", [PHONE, PHONE_ON_ITS_SIDE], ids=["upright", "on its side"])
def test_a_phone_shows_world_and_buttons_without_sideways_scrolling(
    open_page: OpenPage, url: str, viewport: dict[str, int]
) -> None:
    world = open_page(url, viewport=viewport, touch=True)
    world.moves()
    width = world.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1] == viewport["width"]
    for selector in ("#view", '[data-key="w"]', '[data-key="d"]', '[data-key="l"]', '[data-key="s"]'):
        box = world.page.locator(selector).bounding_box()
        assert 0 <= box["x"] <= viewport["width"] - box["width"], selector
        assert 0 <= box["y"] <= viewport["height"] - box["height"], selector
    for selector in ('[data-key="w"]', '[data-key="l"]'):
        box = world.page.locator(selector).bounding_box()
        assert min(box["width"], box["height"]) >= 44, "large enough for a finger"


def test_on_its_side_the_place_is_in_a_drawer(open_page: OpenPage, url: str) -> None:
    world = open_page(url, viewport=PHONE_ON_ITS_SIDE, touch=True)
    world.moves()
    assert not world.page.is_visible("#prompt")
    world.page.click("#menu")
    world.page.click("#prompts button >> nth=1")
    chosen = world.page.locator("#prompts button >> nth=1").get_attribute("data-prompt")
    world.wait(f"s.prompt === {chosen!r}")
    assert not world.page.is_visible("#prompt")
    world.page.click("#menu")
    world.page.fill("#prompt", chosen.upper())
    world.page.press("#prompt", "Enter")
    world.wait(f"s.prompt === {chosen.upper()!r}")
    assert not world.page.is_visible("#prompt"), "a place that was typed closes it, too"
    assert world.page.locator("#prompts button >> nth=1").get_attribute("aria-pressed") == "true"
