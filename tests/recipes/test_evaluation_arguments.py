"""What the evaluations of the embedded models are asked for: nonsense is refused before anything is computed, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from realtime_omni.errors import ConfigError  # noqa: E402
from recipes.tiny_policy import evaluate as policy  # noqa: E402
from recipes.tiny_world import evaluate as world  # noqa: E402

NUMBERS = ("-1", "x", "99999999999999999999999")


@pytest.mark.parametrize("flag", ["--episodes", "--delay", "--tasks", "--seed"])
@pytest.mark.parametrize("value", NUMBERS)
def test_a_number_that_no_policy_is_asked_for(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        policy.main([f"{flag}={value}"])
    assert ended.value.code == 2
    assert f"argument {flag}: " in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--episodes", "0"], ["--delay", "9"], ["--tasks", "0", "9"]])
def test_no_episodes_a_delay_that_no_chunk_bridges_and_a_task_that_there_is_not(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        policy.main(argv)
    assert ended.value.code == 2


def test_a_server_has_its_own_policy() -> None:
    with pytest.raises(SystemExit) as ended:
        policy.main(["--url", "ws://127.0.0.1:1", "--policy", "expert"])
    assert ended.value.code == 2


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1", "nonsense://127.0.0.1", ""])
def test_a_policy_server_that_is_not_there_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url .*no connection to the server"):
        policy.main(["--url", url, "--episodes", "2"])


def test_a_checkpoint_that_is_a_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="Not a directory"):
        policy.main([__file__])


@pytest.mark.parametrize("flag", ["--steps", "--seed"])
@pytest.mark.parametrize("value", NUMBERS)
def test_a_number_that_no_world_is_asked_for(flag: str, value: str) -> None:
    with pytest.raises(SystemExit) as ended:
        world.main([f"{flag}={value}"])
    assert ended.value.code == 2


def test_no_steps_are_no_default() -> None:
    with pytest.raises(SystemExit):
        world.main(["--steps", "0"])


@pytest.mark.parametrize("device", ["nonsense", "meta", "cpu:0", "cuda:99", "cuda:x", ""])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="--device"):
        world.main(["--device", device])


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--weights"):
        world.main(["--weights", str(tmp_path)])
    (tmp_path / "config.json").write_text('{"width": 3}', encoding="utf-8")
    with pytest.raises(ConfigError, match="--weights"):
        world.main(["--weights", str(tmp_path)])
    (tmp_path / "config.json").write_bytes((world.WEIGHTS / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="--weights"):
        world.main(["--weights", str(tmp_path)])


@pytest.mark.parametrize("flag", ["--out", "--sheets"])
def test_where_nothing_can_be_written_is_found_out_first(flag: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    if flag == "--sheets":
        there.write_text("a file", encoding="utf-8")
    else:
        there.mkdir()
    with pytest.raises(ConfigError, match="there"):
        world.main([flag, str(there)])
