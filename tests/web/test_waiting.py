"""How tests wait for a page."""

from __future__ import annotations

from pathlib import Path

from web.world_page import ROOT

FOLDERS = ("realtime_omni", "protocols", "clients", "recipes", "examples", "tests")
WAITS = "wait_for_" + "function"  # two words, or this file would be found


def test_nobody_waits_with_a_string_that_the_pages_policy_may_refuse() -> None:
    """`until` of world_page.py says why; it alone calls Playwright's own."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "node_modules" not in path.parts]
    assert len(files) > 500
    found = [path for path in files if WAITS in path.read_text(encoding="utf-8")]
    assert found == [Path(__file__).with_name("world_page.py")]
