"""The command line: what reaches the server, and how a refusal looks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from realtime_omni import cli
from realtime_omni.config import Config


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that a stand-in server was asked to serve."""
    configs: list[Config] = []
    stand_in = ModuleType("realtime_omni.server.run")
    monkeypatch.setattr(stand_in, "serve", configs.append, raising=False)
    monkeypatch.setitem(sys.modules, "realtime_omni.server.run", stand_in)
    return configs


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the console script in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["realtime-omni", *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    return int(exited.value.code or 0)


def test_each_source_reaches_the_server_in_order_of_precedence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: list[Config]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("engine: {max_batch: 11, threads: 11, inbox: 11}\nserver: {port: 11}\n")
    monkeypatch.setenv("REALTIME_OMNI__ENGINE__THREADS", "12")
    monkeypatch.setenv("REALTIME_OMNI__ENGINE__INBOX", "12")
    monkeypatch.setenv("REALTIME_OMNI__SERVER__PORT", "12")
    assert run(monkeypatch, "serve", str(recipe), "--set", "engine.inbox=13", "--port", "14") == 0
    (config,) = served
    assert config.engine.max_pending_events == 32
    assert (config.engine.max_batch, config.engine.threads, config.engine.inbox, config.server.port) == (11, 12, 13, 14)


def test_serve_without_arguments_serves_the_embedded_model_on_loopback(
    monkeypatch: pytest.MonkeyPatch, served: list[Config]
) -> None:
    assert run(monkeypatch, "serve") == 0
    assert (served[0].model, served[0].server.host, served[0].server.port) == ("tiny-world", "127.0.0.1", 8000)


def test_an_unknown_recipe_is_refused_before_the_port_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: list[Config]
) -> None:
    assert run(monkeypatch, "serve", "nosuch") == 2
    assert served == []
    assert "unknown model 'nosuch'" in capsys.readouterr().err


@pytest.mark.req("AC-48")
def test_a_refused_configuration_never_reaches_the_server_and_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: list[Config]
) -> None:
    assert run(monkeypatch, "serve", "--set", "engine.max_bach=1") == 2
    assert served == []
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean engine.max_batch?" in error


@pytest.mark.req("AC-46")
def test_a_negative_stalled_input_limit_stops_the_server_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: list[Config]
) -> None:
    monkeypatch.setenv("REALTIME_OMNI_STALLED_INPUT_S", "-1")
    assert run(monkeypatch, "serve") == 2
    assert served == []
    assert "negative" in capsys.readouterr().err


@pytest.mark.req("AC-16")
def test_two_replicas_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: list[Config]
) -> None:
    assert run(monkeypatch, "serve", "--set", "engine.replicas=2") == 2
    assert served == []
    assert "affinity" in capsys.readouterr().err


def test_an_evaluation_that_is_not_in_this_checkout_says_where_it_was_looked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "eval", "no-such-model") == 2
    assert "recipes/no_such_model/evaluate.py" in capsys.readouterr().err
    assert run(monkeypatch, "eval", "../etc") == 2


def test_version_is_the_distributions() -> None:
    command = [sys.executable, "-m", "realtime_omni.cli", "version"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.startswith("0.")
