"""Settings every test shares: thread limits before torch can be imported, opt-in marks, and the requirement table."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Two threads, asleep when idle: test machines have two cores, and spinning OpenMP workers would starve the rest.
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# What a developer's shell sets must not reach the tests.
for _name in [name for name in os.environ if name.startswith("REALTIME_OMNI_")]:
    del os.environ[_name]

# What Hypothesis does by itself where CI is set: an example may take as long as it takes.
settings.register_profile("busy machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

pytest_plugins = ("req_table",)

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run_slow = config.getoption("--slow")
    for item in items:
        if item.get_closest_marker("slow") and not run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run it with --slow"))
        missing = shutil.which(CHROMIUM) is None and os.environ.get("CI") != "true"  # in CI the fixture fails instead
        if item.get_closest_marker("browser") and missing:
            item.add_marker(pytest.mark.skip(reason=f"browser: {CHROMIUM} is not installed"))
        if item.get_closest_marker("gpu") and not _cuda_available():
            item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device on this machine"))


def _cuda_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser that browser tests drive."""
    return CHROMIUM


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_to_the_collector() -> Iterator[None]:
    """Sockets, pipes, files and event loops are closed by whoever opened them, before the next module.

    Otherwise the collector closes them at a moment of its own, in a test that has nothing to do with them, and the warning
    is that test's failure where our code happens to run. It collects only where something is open that was not before.
    """
    before = _open_files()
    yield
    if _open_files() <= before:
        return
    with warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    assert [str(warning.message) for warning in left if warning.category is ResourceWarning] == []


def _open_files() -> set[str]:
    """What this process has open, by what the kernel calls it (``socket:[1234]``); nothing where it does not tell."""
    found = set()
    for number in Path("/proc/self/fd").glob("*"):
        try:
            found.add(f"{number.name} {os.readlink(number)}")
        except OSError:  # the folder itself, read just now
            continue
    return found
