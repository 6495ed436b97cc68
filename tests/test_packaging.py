"""The wheel: what it must carry, how large it may be, and that it works where it is unpacked."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_WHEEL_BYTES = 60_000_000  # PyPI refuses 100 MB; a first install over a slow line should still be pleasant
MAX_TREE_BYTES = 32 * 1024 * 1024  # all tracked files together, so that a clone stays quick


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as users get it, built once (about three seconds)."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stderr
    (built,) = folder.glob("realtime_omni-*.whl")
    return built


def tracked_files() -> list[Path]:
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if run.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in run.stdout.split("\0") if name]


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_carries_three_packages_and_nothing_else_at_its_top(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "realtime_omni",
        "realtime_omni_protocols",
        "realtime_omni_client",
    }


def test_every_recipe_of_the_checkout_is_in_the_wheel(wheel: Path) -> None:
    expected = {f"realtime_omni/_recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert expected <= names_in(wheel), "add the missing recipe to [tool.hatch.build.targets.wheel.force-include]"


def test_every_tracked_file_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    shelves = {"protocols/realtime_omni_protocols", "clients/python/realtime_omni_client", "realtime_omni"}
    expected = set()
    for file in tracked_files():
        name = file.relative_to(ROOT).as_posix()
        for shelf in shelves:
            if name.startswith(f"{shelf}/") and file.exists():
                expected.add(f"{shelf.split('/')[-1]}/{name.removeprefix(f'{shelf}/')}")
    assert expected - names_in(wheel) == set()


def test_the_wheel_carries_type_markers_licence_and_notice(wheel: Path) -> None:
    names = names_in(wheel)
    assert {
        f"{package}/py.typed" for package in ("realtime_omni", "realtime_omni_protocols", "realtime_omni_client")
    } <= names
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_the_unpacked_wheel_finds_its_own_recipes(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    probe = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from realtime_omni.recipe import recipe_folder\nfrom realtime_omni.config import load\n"
        "print(recipe_folder()); print(load('tiny-world', {}).model)"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.split() == [str(tmp_path / "realtime_omni" / "_recipes"), "tiny-world"], run.stderr


def test_the_tracked_tree_is_small_enough_to_clone_quickly() -> None:
    assert sum(file.stat().st_size for file in tracked_files() if file.is_file()) < MAX_TREE_BYTES
