"""What people read: links lead somewhere, tables are whole, and nothing that a merge left behind is among it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
LEFT_BY_A_MERGE = re.compile(r"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)


def pages() -> list[Path]:
    """Every tracked Markdown file."""
    command = ["git", "ls-files", "-z", "*.md"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if run.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in run.stdout.split("\0") if name]


def test_every_link_to_a_file_leads_to_one() -> None:
    links = [(page, link) for page in pages() for link in LINK.findall(page.read_text(encoding="utf-8"))]
    local = [(page, link) for page, link in links if "://" not in link and not link.startswith("mailto:")]
    assert len(local) > 50
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in local if not (page.parent / link).exists()] == []


def test_no_page_holds_both_sides_of_a_merge() -> None:
    found = [page for page in pages() if LEFT_BY_A_MERGE.search(page.read_text(encoding="utf-8"))]
    assert [str(page.relative_to(ROOT)) for page in found] == []


def test_every_table_has_a_header_and_rows_of_its_width() -> None:
    broken = []
    for page in pages():
        outside_code = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for table in re.findall(r"(?:^\|.*\n?)+", outside_code, re.MULTILINE):
            rows = table.splitlines()
            widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
            if len(rows) < 3 or len(widths) > 1 or not re.fullmatch(r"\|[\s:|-]+\|", rows[1]):
                broken.append(f"{page.relative_to(ROOT)}: {rows[0][:60]}")
    assert broken == []
