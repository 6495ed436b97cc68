"""The Talk page in a real browser, against the puppet: sound in from a fake microphone, sound out through the worklet.

The fake microphone hears a recording: a question, and a second one while the puppet still answers the first.
"""

from __future__ import annotations

import shutil
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import av
import numpy as np
import pytest

from web.world_page import BROWSER_ARGS, PAGE, PHONE, OpenPage, StartServer, running_server, until

pytestmark = pytest.mark.browser

LINE = (  # so long that who interrupts it need not hurry
    "I hear you very well and I would like to tell you a long story about it"
    " and about all that came after it and what became of everybody who was there"
)
SAYS_IT = f'puppet:options.lines=["{LINE}"]'
RATE = 16_000
KEY = "open-sesame"
HAS_KEY = f"sessionStorage.setItem('realtime_omni.key', '{KEY}');"


def _question(name: str) -> np.ndarray[Any, np.dtype[np.int16]]:
    with av.open(str(PAGE / "questions" / f"{name}.mp3")) as file:
        to_pcm = av.AudioResampler("s16", "mono", RATE)
        frames = [pcm for frame in file.decode(audio=0) for pcm in to_pcm.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in frames])


def _silence(seconds: float) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.zeros(int(seconds * RATE), np.int16)


@pytest.fixture(scope="module")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("microphone") / "two_questions.wav"
    heard = [_silence(0.3), _question("capital"), _silence(1.8), _question("sum"), _silence(60)]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(np.concatenate(heard).tobytes())
    return path


@pytest.fixture(scope="module")
def browser(chromium: str, microphone: Path) -> Iterator[Any]:
    """One that has a microphone."""
    if shutil.which(chromium) is None:
        pytest.skip(f"no browser: {chromium} is not installed")
    from playwright.sync_api import sync_playwright

    fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=chromium, args=[*BROWSER_ARGS, *fake, f"--use-file-for-fake-audio-capture={microphone}"]
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def url(start_server: StartServer) -> str:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("REALTIME_OMNI_API_KEY", KEY)
        return start_server("null", "puppet", "--set", SAYS_IT) + "talk.html"


class TalkPage:
    """The page and the words of its tests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        page.wait_for_selector("#model-name:not(:empty)", state="attached")

    def stats(self) -> dict[str, Any]:
        return dict(self.page.evaluate("realtimeTalk.stats()"))

    def wait(self, condition: str) -> dict[str, Any]:
        """Until a JavaScript condition over ``s`` (the statistics) holds."""
        until(self.page, f"((s) => {condition})(realtimeTalk.stats())", look_every_ms=20)
        return self.stats()

    def record(self) -> None:
        """From now on `then` finds what was so for a moment, however late it is asked."""
        self.page.evaluate("""() => {
            window.moments = [];
            setInterval(() => moments.push(JSON.parse(JSON.stringify(realtimeTalk.stats()))), 20);
        }""")

    def then(self, condition: str) -> dict[str, Any]:
        """The first recorded moment at which the condition holds, from the one on that was found last."""
        until(self.page, f"moments.some((s) => {condition})")
        self.page.evaluate(f"() => {{ moments.splice(0, moments.findIndex((s) => {condition})); }}")
        return dict(self.page.evaluate("moments[0]"))

    def begin(self, *, microphone: bool) -> None:
        self.page.click("#begin" if microphone else "#begin-without")
        self.wait("s.live")


@pytest.fixture
def open_talk(open_page: OpenPage) -> Any:
    """``open_talk(url, before=script)``: a page that has the server's key."""
    return lambda url, before="", **options: TalkPage(open_page(url, before=HAS_KEY + before, **options).page)


def test_hands_free_both_are_heard_and_an_interruption_is_silence_at_once(open_talk: Any, url: str) -> None:
    talk = open_talk(url)
    talk.begin(microphone=True)
    talk.record()
    talk.then("s.floor === 'you' && s.levels.you > 0.01")
    answer = talk.then("s.floor === 'voice' && s.levels.voice > 0.05")
    assert [line["who"] for line in answer["lines"]] == ["user", "voice"]
    assert "seconds of sound" in answer["lines"][0]["text"]
    assert answer["firstAudioMs"] is not None
    talk.then("s.floor === 'both' || s.interruptions > 0")
    after = talk.then("s.interruptions === 1 && !s.sounding && s.waitingMs === 0 && s.bargeInMs !== null")
    assert after["flushes"] >= 1
    cut = talk.then("s.lines[1].done")["lines"][1]
    assert LINE.startswith(cut["text"] + cut["unheard"])
    assert len(cut["text"]) < len(LINE)
    talk.then("s.lines.length === 4 && s.floor === 'voice'")  # and answered again
    shown = [row.inner_text() for row in talk.page.locator("#captions li").all()]
    assert shown[0].startswith("You")
    assert shown[1].startswith("Voice")


def test_escape_stops_it_and_a_lost_connection_is_the_same_call(open_talk: Any, url: str) -> None:
    talk = open_talk(url)
    talk.begin(microphone=False)
    talk.page.fill("#text", f"say {LINE}")
    talk.page.keyboard.press("Enter")
    talk.wait("s.floor === 'voice' && s.lines.length === 2")
    talk.page.evaluate("realtimeTalk.cut()")
    sounds = talk.stats()["sounds"]
    talk.page.wait_for_selector("#link[data-tone='good']")
    before = talk.wait(f"s.sounds > {sounds + 2}")  # it speaks on
    assert [line["text"] for line in before["lines"][:1]] == [f"say {LINE}"]
    talk.page.keyboard.press("Escape")
    stopped = talk.wait("!s.sounding && s.interruptions === 1 && s.lines[1].done")
    assert stopped["live"]
    assert len(stopped["lines"]) == 2
    until(
        talk.page,
        "(({ text, unheard }) =>"
        " text + unheard === document.querySelector('#captions [data-who=voice] p').textContent"
        f" && text.length < {len(LINE)})(realtimeTalk.stats().lines[1])",
    )


def test_without_a_microphone_a_question_is_played_and_a_second_one_interrupts(open_talk: Any, url: str) -> None:
    talk = open_talk(url, viewport=PHONE, touch=True)
    talk.page.click('[data-question="capital"]')  # it opens the call too
    answer = talk.wait("s.floor === 'voice' && s.levels.voice > 0.05")
    assert not answer["microphone"]
    assert "1." in answer["lines"][0]["text"]  # seconds
    talk.page.click('[data-question="sum"]')
    talk.wait("s.interruptions === 1 && s.bargeInMs !== null")
    talk.page.click("#talk")  # the microphone after all
    talk.wait("s.microphone")
    talk.page.click("#end")
    talk.page.wait_for_selector("#card-title:has-text('The call is over')")


def test_push_to_talk_hears_only_while_the_key_is_held(open_talk: Any, url: str) -> None:
    talk = open_talk(url)
    talk.begin(microphone=False)
    talk.page.locator('input[value="push"]').focus()
    talk.page.keyboard.press("Space")
    talk.page.select_option("#microphone", index=1)
    packets = talk.wait("s.mode === 'push' && s.microphone")["packets"]
    deaf = talk.wait(f"s.packets > {packets + 40}")  # the recording speaks already
    assert (deaf["lines"], deaf["levels"]["you"]) == ([], 0)
    talk.page.locator("#captions").focus()
    talk.page.keyboard.down(" ")
    talk.wait("s.floor === 'you'")
    packets = talk.stats()["packets"]
    talk.wait(f"s.packets > {packets + 20}")
    talk.page.keyboard.up(" ")
    answer = talk.wait("s.floor === 'voice' && s.levels.voice > 0.05")
    assert [line["who"] for line in answer["lines"]][-2:] == ["user", "voice"]
    talk.page.keyboard.down(" ")  # the key interrupts
    talk.wait("!s.sounding && s.interruptions === 1 && s.bargeInMs !== null")
    talk.page.keyboard.up(" ")
    talk.page.keyboard.press(" ")  # too short for a word
    talk.page.wait_for_selector("#note:has-text('Hold it down')")


def test_without_permission_or_device_it_says_so_and_goes_on_without(open_talk: Any, url: str) -> None:
    refusing = "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', window.fault); };"
    talk = open_talk(url, before=refusing)
    for fault, words in (("NotAllowedError", "is not allowed"), ("NotFoundError", "There is no microphone")):
        talk.page.evaluate("fault => { window.fault = fault; }", fault)
        talk.page.click("#begin")
        talk.page.wait_for_selector(f"#card-title:has-text('{words}')")
    talk.begin(microphone=False)


def test_it_asks_for_the_key_under_the_servers_own_content_security_policy(open_page: OpenPage, url: str) -> None:
    page = open_page(url).page
    policy = page.evaluate("fetch('./').then((response) => response.headers.get('content-security-policy'))")
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    for key, then in (("wrong", "#card-text:has-text('did not accept')"), (KEY, "#begin:visible")):
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector(then)
    TalkPage(page).begin(microphone=False)


def test_a_server_that_takes_nobody_in_is_said_and_can_be_tried_again(open_talk: Any, url: str) -> None:
    refused = """window.WebSocket = class extends WebSocket {
        constructor(url, names) { super(window.full ? url.replace('duplex', 'nothing') : url, names); } };
        window.full = true;"""
    talk = open_talk(url, before=refused)
    talk.page.click("#begin-without")
    talk.page.wait_for_selector("#card-title:has-text('takes no calls now')")
    talk.page.evaluate("window.full = false")
    talk.begin(microphone=False)


def test_a_server_that_was_shut_down_is_looked_for_and_talked_to_when_it_is_back(
    open_talk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALTIME_OMNI_API_KEY", KEY)
    with running_server("puppet", log=tmp_path / "before") as url:
        talk = open_talk(url + "talk.html")
        talk.begin(microphone=False)
    talk.page.wait_for_selector("#card-title:has-text('The server has gone away')")
    assert talk.page.inner_text("#card-detail") == ""
    with running_server("puppet", log=tmp_path / "after", port=urlsplit(url).port or 0):
        talk.page.wait_for_selector("#card-title:has-text('The server is back')")
        talk.begin(microphone=False)


def test_a_call_asked_for_while_the_server_is_away_is_refused_in_words_and_possible_once_it_is_back(
    open_talk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REALTIME_OMNI_API_KEY", KEY)
    with running_server("puppet", log=tmp_path / "before") as url:
        talk = open_talk(url + "talk.html")
    talk.page.click("#begin-without")
    talk.page.wait_for_selector("#card-title:has-text('The server does not answer')")
    with running_server("puppet", log=tmp_path / "after", port=urlsplit(url).port or 0):
        talk.page.wait_for_selector("#card-title:has-text('The server is back')")
        talk.begin(microphone=False)


def test_a_server_with_a_world_and_a_voice_links_their_pages(open_talk: Any, url: str) -> None:
    page = open_talk(url).page
    with page.expect_navigation():
        page.click("#tabs a:has-text('World')")
    until(page, "realtimeOmni.stats().phase === 'live'")
    assert page.locator("#model option").all_inner_texts() == ["null"]
    with page.expect_navigation():
        page.click("#tabs a:has-text('Talk')")
    TalkPage(page).begin(microphone=False)
