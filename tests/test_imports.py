"""What importing the light parts of the package loads, seen from a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "flashinfer", "diffusers", "transformers", "realtime_omni.models", "av", "uvicorn", "fastapi")
LIGHT = (
    "realtime_omni",
    "realtime_omni.config",
    "realtime_omni.recipe",
    "realtime_omni.session",
    "realtime_omni_protocols",
    "realtime_omni_client",
)


def loaded_after(statement: str) -> list[str]:
    """The heavy modules a fresh interpreter holds after ``statement``."""
    probe = f"import sys\n{statement}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


@pytest.mark.req("AC-49")
@pytest.mark.parametrize("module", LIGHT)
def test_a_light_package_loads_no_model_runtime(module: str) -> None:
    assert loaded_after(f"import {module}") == []


@pytest.mark.req("AC-49")
@pytest.mark.parametrize("recipe", ["tiny-world", "null"])
def test_resolving_a_recipe_loads_no_model_runtime(recipe: str) -> None:
    assert loaded_after(f"from realtime_omni.config import load; load({recipe!r}, {{}})") == []


def test_the_command_line_loads_no_model_runtime_before_a_command_runs() -> None:
    assert loaded_after("import realtime_omni.cli") == []


def test_the_command_line_tells_openmp_to_sleep_before_anything_can_load_torch() -> None:
    probe = "import os, realtime_omni.cli; print(os.environ['OMP_WAIT_POLICY'])"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, env={}, check=True)
    assert run.stdout.strip() == "PASSIVE"
