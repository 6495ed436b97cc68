"""Pictures of the page for the documentation: ``python tests/web/screenshots.py [--model tiny-world] [--out docs/images]``.

Starts its own server and walks a little, so that the pictures show a walk; ``--robot URL`` takes the picture of a
``realtime-omni demo robot --delay 4`` that runs. Needs Chromium, as the browser tests do.
"""

from __future__ import annotations

import argparse
import io
import os
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from world_page import BROWSER_ARGS, LAPTOP, PHONE, PHONE_ON_ITS_SIDE, ROOT, World, running_server, until

SHOTS = (("laptop", LAPTOP, 1), ("phone", PHONE, 2), ("phone-landscape", PHONE_ON_ITS_SIDE, 2))
QUALITY = 75  # of WebP, in percent: letters stay sharp


def take(
    browser: Browser, url: str, name: str, size: dict[str, int], scale: int, out: Path, prompt: str | None
) -> None:
    context = browser.new_context(
        viewport={"width": size["width"], "height": size["height"]}, device_scale_factor=scale, has_touch=scale > 1
    )
    page = context.new_page()
    page.goto(url)
    world = World(page, [])
    world.moves(timeout_s=60)
    if prompt is not None:
        page.evaluate("prompt => { document.querySelector('#prompt').value = prompt; }", prompt)
        page.evaluate("document.querySelector('#prompt-form').requestSubmit()")
        page.evaluate("document.querySelector('#prompt').value = ''")
    world.moves(24, timeout_s=60)
    for key, frames in (("l", 4), ("w", 8)):
        page.keyboard.down(key)
        world.moves(frames, timeout_s=60)
        if key != "w":
            page.keyboard.up(key)
    save(page, out / f"page-{name}.webp")
    context.close()


def take_what_if(browser: Browser, url: str, out: Path, prompt: str | None) -> None:
    """One walk that goes on in two ways."""
    page = browser.new_page(viewport=LAPTOP)
    page.goto(url)
    world = World(page, [])
    world.moves(timeout_s=60)
    if prompt is not None:
        page.fill("#prompt", prompt)
        page.press("#prompt", "Enter")
    world.moves(24, timeout_s=60)
    page.click("#fork")
    world.wait("s.branch !== null && s.branch.shownFrames > 0", 60)
    page.fill("#branch-prompt", "Lava cave")
    page.press("#branch-prompt", "Enter")
    page.keyboard.down("w")
    world.wait("s.branch.shownFrames > 14", 60)
    page.keyboard.down("l")
    world.wait("s.branch.shownFrames > 20", 60)
    save(page, out / "page-what-if.webp")
    page.close()


def take_robot(browser: Browser, url: str, out: Path) -> None:
    """In the middle of an episode, after some with chunks that are joined and some with chunks that are not."""
    page = browser.new_page(viewport=LAPTOP)
    page.goto(url)
    for joining, episodes in (("trained", 4), ("none", 4)):
        page.click(f"#joinings button:text('{joining}')")
        score = f"robotDemo.stats().scores?.find((one) => one.joining === '{joining}')"
        until(page, f"({score}?.episodes ?? 0) >= {episodes}", 180)
    page.click("#joinings button:text('trained')")
    until(
        page,
        "(({ joining, phase, episode_tick, plan }) =>"
        " joining === 'trained' && phase === 'running' && episode_tick > 20 && plan.length > 8)(robotDemo.stats())",
        60,
    )
    save(page, out / "robot-laptop.webp")
    page.close()


def save(page: Page, file: Path) -> None:
    """What the page shows, as WebP: the pictures are in every clone."""
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(file, quality=QUALITY, method=6)


def take_talk(browser: Browser, url: str, out: Path) -> None:
    """Bundled questions, answered; the last answer is interrupted."""
    page = browser.new_page(viewport=LAPTOP)
    page.goto(url)
    page.click("#begin-without")
    for name, then in (
        ("capital", "s.answers === 1 && s.floor === 'nobody'"),
        ("story", "s.floor === 'voice' && s.lines[3].text.length > 40"),
        ("sum", "s.interruptions === 1 && s.floor === 'voice'"),
    ):
        page.click(f'[data-question="{name}"]')
        until(page, f"((s) => {then})(realtimeTalk.stats())", look_every_ms=30)
    save(page, out / "page-talk.webp")
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-world", help="tiny-world, null, voice, or fake (the test server)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--prompt", help="the place to go to first")
    parser.add_argument("--robot", metavar="URL", help="only the picture of this robot's page")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=BROWSER_ARGS)
        if options.robot:
            take_robot(browser, options.robot, options.out)
        elif options.url:
            shoot(browser, options.url, options)
        else:
            with running_server(options.model, log=Path(folder) / "log", timeout_s=90) as url:
                shoot(browser, url, options)
        browser.close()


def shoot(browser: Browser, url: str, options: argparse.Namespace) -> None:
    if options.model == "voice":
        take_talk(browser, url, options.out)
        print("page-talk.webp")
        return
    for name, size, scale in SHOTS:
        take(browser, url, name, size, scale, options.out, options.prompt)
        print(f"page-{name}.webp")
    take_what_if(browser, url, options.out, options.prompt)
    print("page-what-if.webp")


if __name__ == "__main__":
    main()
