"""The environments of the foreign clients, and how a script runs in one.

``make conformance`` builds them from the lock files beside this one, keyed by the lock's hash. A test that needs one is skipped
where it is not built.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

HERE = Path(__file__).parent
MAKE = HERE.parents[2] / ".make"
Group = Literal["openai", "pipecat", "moshi"]


def environment(group: Group) -> Path:
    """The folder of a group's environment."""
    lock = (HERE / f"{group}.lock").read_bytes()
    return MAKE / f"voices-{group}-{hashlib.sha256(lock).hexdigest()[:12]}"


def need(group: Group) -> Path:
    """Its Python; skips the test where it is not built, and in any run but that of ``make conformance``: it takes minutes."""
    if os.environ.get("CONFORMANCE") != "1":
        pytest.skip("conversations with foreign clients take minutes: make conformance")
    python = environment(group) / "bin" / "python"
    if not (environment(group) / "done").is_file():
        pytest.skip(f"the clients of {group}.lock are not installed: make conformance")
    return python


@contextlib.contextmanager
def serve(recipe: str) -> Iterator[str]:
    """A server of its own process; its address. It must stop in order."""
    command = [sys.executable, "-m", "realtime_omni.cli", "serve", recipe, "--port", "0"]
    with subprocess.Popen(command, cwd=MAKE.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r" on (http\S+)", process.stdout.readline())
            assert found is not None
            yield found[1]
        finally:
            process.terminate()
        assert process.wait(20) == 0


def run(group: Group, script: str, *arguments: str, timeout_s: float = 60) -> Any:
    """What a script of the folder ``scripts`` prints as its last line, in JSON."""
    command = [str(need(group)), str(HERE / "scripts" / script), *arguments]
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environ)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])
