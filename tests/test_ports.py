"""How tests and benchmarks come to a port."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASED = re.compile(r"(\w+)\.bind\(\(\S+, 0\)\)\s+(?:port = |return ).*\1\.getsockname\(\)")
# openpi's server does not say which port it has taken.
NO_OTHER_WAY = {"realtime_omni/bench/vla.py", "tests/conformance/openpi/test_reference_server.py"}


def test_no_port_is_picked_and_released_for_a_server_that_can_take_one_itself() -> None:
    """Somebody else may take it before the server does: a server is given port 0, and says which one it has."""
    files = [path for folder in ("realtime_omni", "recipes", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    found = {str(path.relative_to(ROOT)) for path in files if RELEASED.search(path.read_text(encoding="utf-8"))}
    assert found == NO_OTHER_WAY
