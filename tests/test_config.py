"""The configuration: strict recipes, one precedence order, and the stalled-input knob."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import msgspec
import pytest

from realtime_omni.config import (
    STALLED_INPUT_ENV,
    Config,
    EngineSection,
    ServerSection,
    load,
    parse_stalled_input_s,
    resolve,
)
from realtime_omni.errors import ConfigError, ErrorCode
from realtime_omni.recipe import bundled_recipes, find_recipe, parse_recipe, read_scalar

ROOT = Path(__file__).resolve().parent.parent


def resolve_text(text: str, env: dict[str, str] | None = None, overrides: tuple[str, ...] = ()) -> Config:
    return resolve(parse_recipe(text, "r.yaml"), env or {}, overrides)


def refusal(text: str, env: dict[str, str] | None = None, overrides: tuple[str, ...] = ()) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve_text(text, env, overrides)
    return caught.value


# -- precedence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "env", "flags", "expected"),
    [
        ("", {}, (), 8),
        ("engine: {max_batch: 21}", {}, (), 21),
        ("engine: {max_batch: 21}", {"REALTIME_OMNI__ENGINE__MAX_BATCH": "22"}, (), 22),
        ("engine: {max_batch: 21}", {"REALTIME_OMNI__ENGINE__MAX_BATCH": "22"}, ("engine.max_batch=23",), 23),
        ("engine: {max_batch: 21}", {}, ("engine.max_batch=23",), 23),
        ("", {"REALTIME_OMNI__ENGINE__MAX_BATCH": "22"}, (), 22),
    ],
)
def test_a_later_source_wins_defaults_recipe_environment_command_line(
    recipe: str, env: dict[str, str], flags: tuple[str, ...], expected: int
) -> None:
    assert resolve_text(recipe, env, flags).engine.max_batch == expected


def test_the_last_of_two_overrides_of_one_field_wins() -> None:
    assert resolve_text("", overrides=("server.port=1", "server.port=2")).server.port == 2


def test_a_source_changes_only_the_fields_it_names() -> None:
    config = resolve_text("engine: {max_batch: 3}", {"REALTIME_OMNI__ENGINE__THREADS": "4"}, ("engine.inbox=5",))
    assert config.engine == EngineSection(max_batch=3, threads=4, inbox=5)


def test_text_fields_take_their_override_as_text() -> None:
    config = resolve_text("", {"REALTIME_OMNI__SERVER__HOST": "0"}, ("model=null",))
    assert (config.server.host, config.model) == ("0", "null")


def test_a_list_is_written_as_a_yaml_list_in_an_override() -> None:
    assert resolve_text("", overrides=("server.origins=[https://a.example, https://b.example]",)).server.origins == (
        "https://a.example",
        "https://b.example",
    )


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.req("AC-48")
def test_an_unknown_field_is_refused_with_its_line_its_path_and_the_nearest_name() -> None:
    error = refusal("model: tiny-world\nengine:\n  max_bach: 4\n")
    assert error.code is ErrorCode.INVALID_CONFIG
    assert error.path == "engine.max_bach"
    assert error.message == "r.yaml:3: engine.max_bach: unknown field, nothing owns it; did you mean engine.max_batch?"


@pytest.mark.req("AC-48")
def test_a_field_in_the_wrong_section_is_refused_and_its_home_is_named() -> None:
    assert refusal("server: {max_batch: 4}").message.endswith("did you mean engine.max_batch?")


@pytest.mark.req("AC-48")
@pytest.mark.parametrize(
    "text", ["stage_args: []", "model: x\nstage_args:\n  - stage_id: 0", "engine: {stage_args: 1}"]
)
def test_the_legacy_stage_args_layout_is_refused_with_a_pointer_to_the_current_one(text: str) -> None:
    message = refusal(text).message
    assert "stage_args" in message
    assert "kv, engine, session, server, options" in message


@pytest.mark.req("AC-48")
@pytest.mark.parametrize(
    "number", ["nan", ".nan", "NaN", "inf", ".inf", "-.inf", "-inf", "1e999", "-1e999", "1.0e+999"]
)
def test_a_number_that_is_not_finite_is_refused_with_its_line(number: str) -> None:
    message = refusal(f"model: tiny-world\nsession:\n  grace_s: {number}\n").message
    assert message.startswith("r.yaml:3: session.grace_s: ")
    assert "not finite" in message


@pytest.mark.req("AC-48")
@pytest.mark.parametrize("number", ["nan", "inf", "1e999"])
def test_a_number_that_is_not_finite_is_refused_from_every_source(number: str) -> None:
    assert "not finite" in refusal("", {"REALTIME_OMNI__KV__MEMORY_FRACTION": number}).message
    assert "not finite" in refusal("", overrides=(f"kv.memory_fraction={number}",)).message
    assert "not finite" in refusal(f"options: {{deep: [1, {number}]}}").message
    with pytest.raises(ConfigError, match="not finite"):
        ServerSection(stall_timeout_s=float(number))


@pytest.mark.req("AC-48")
@pytest.mark.parametrize("override", ["a.b=c", "engine.max_batch.x=1", "nowhere=1", "kv=3", "options=3"])
def test_an_override_no_field_owns_is_refused(override: str) -> None:
    assert refusal("", overrides=(override,)).message.startswith(f"--set {override}: ")


@pytest.mark.req("AC-48")
def test_an_environment_variable_no_field_owns_is_refused() -> None:
    message = refusal("", {"REALTIME_OMNI__ENGINE__MAX_BATCHES": "2"}).message
    assert message.startswith("environment REALTIME_OMNI__ENGINE__MAX_BATCHES: ")
    assert message.endswith("did you mean engine.max_batch?")


@pytest.mark.parametrize("override", ["engine.max_batch", "=3", ""])
def test_an_override_without_a_name_and_a_value_is_refused(override: str) -> None:
    assert "section.field=value" in refusal("", overrides=(override,)).message


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("engine: {max_batch: 0}", "engine.max_batch"),
        ("engine: {max_batch: 4097}", "engine.max_batch"),
        ("engine: {max_batch: true}", "engine.max_batch"),
        ("engine: {max_batch: 1.5}", "engine.max_batch"),
        ("engine: {max_batch: '8'}", "engine.max_batch"),
        ("engine: {max_pending_events: 0}", "engine.max_pending_events"),
        ("kv: {memory_fraction: 0}", "kv.memory_fraction"),
        ("kv: {memory_fraction: 1.01}", "kv.memory_fraction"),
        ("kv: {policy: random}", "kv.policy"),
        ("session: {fps: 0}", "session.fps"),
        ("session: {fps: 241}", "session.fps"),
        ("server: {port: 65536}", "server.port"),
        ("server: {origins: [1]}", "server.origins"),
        ("device: tpu", "device"),
        ("dtype: int8", "dtype"),
    ],
)
def test_a_value_outside_its_type_or_bounds_is_refused_with_line_and_path(text: str, path: str) -> None:
    error = refusal(text)
    assert error.path == path
    assert error.message.startswith(f"r.yaml:1: {path}: ")


def test_values_built_in_code_are_checked_like_values_read_from_a_file() -> None:
    with pytest.raises(ConfigError, match="max_batch"):
        EngineSection(max_batch=0)
    with pytest.raises(ConfigError, match="device"):
        Config(device="tpu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\nmodel: b\n", "r.yaml:2: model: given twice"),
        ("- a\n", "r.yaml:1: a recipe is a mapping of fields"),
        ("model: [\n", "r.yaml:2: not valid YAML"),
        ("model: !!python/name:os.system\n", "r.yaml:1: model: the tag"),
        ("options: &a {b: [*a]}\n", "nested deeper"),
        ("options: &a\n  b: *a\n", "nested deeper"),
    ],
)
def test_text_that_is_not_one_plain_mapping_is_refused(text: str, message: str) -> None:
    assert message in refusal(text).message


def test_a_recipe_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the recipe"):
        load(str(tmp_path / "none.yaml"), {})


# -- fields that need each other -----------------------------------------------------------------------------------


def test_more_than_one_replica_is_refused_until_sessions_have_affinity() -> None:
    error = refusal("engine:\n  replicas: 2\n")
    assert error.code is ErrorCode.UNSUPPORTED
    assert error.message.startswith("r.yaml:2: engine.replicas: ")
    assert "affinity" in error.message


def test_a_sink_needs_a_window() -> None:
    assert "kv.window_frames" in refusal("kv: {sink_frames: 2}").message
    assert resolve_text("kv: {sink_frames: 2, window_frames: 8}").kv.sink_frames == 2


def test_half_precision_needs_a_cuda_device() -> None:
    assert "cuda" in refusal("dtype: float16").message
    assert resolve_text("{dtype: float16, device: 'cuda:1'}").device == "cuda:1"


# -- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("2.", 2.0),
        ("1.5e-3", 0.0015),
        ("~", None),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("infinite", "infinite"),
    ],
)
def test_plain_scalars_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    read = read_scalar(text)
    assert (read, type(read)) == (value, type(value))


def test_quoted_numbers_are_text_even_when_they_look_infinite() -> None:
    assert resolve_text('options: {name: "nan", size: 1e2}').options == {"name": "nan", "size": 100.0}


def test_an_empty_section_sets_nothing() -> None:
    assert resolve_text("engine:\nkv: {}\noptions:\n") == Config()


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    steps: int = 4
    name: str = "a"


def test_options_are_decoded_by_the_models_own_type() -> None:
    config = resolve_text("options: {steps: 2}", overrides=("options.name=b",))
    assert config.options_as(Options) == Options(steps=2, name="b")
    assert Config().options_as(Options) == Options()


@pytest.mark.parametrize(
    ("text", "path"), [("options: {step: 2}", "options.step"), ("options: {steps: x}", "options.steps")]
)
def test_an_option_the_model_does_not_have_is_refused(text: str, path: str) -> None:
    config = resolve_text(text)
    with pytest.raises(ConfigError, match="steps") as caught:
        config.options_as(Options)
    assert caught.value.path == path


@pytest.mark.req("AC-48")
def test_a_resolved_config_round_trips_through_msgpack() -> None:
    config = resolve_text(
        "kv: {memory_bytes: 123, window_frames: 8, sink_frames: 1}\nserver: {origins: [a, b]}\n"
        "options: {deep: {list: [1, 2.5, null, text]}}\n"
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Config()), type=Config) == Config()


def test_a_config_that_arrives_with_an_unknown_or_infinite_field_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"modle": "x"}), type=Config)
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"session": {"fps": math.nan}}), type=Config)


def test_sections_take_keywords_only_and_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        EngineSection(8)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Config().engine.max_batch = 3  # type: ignore[misc]


# -- the bundled recipes -------------------------------------------------------------------------------------------


def test_every_bundled_recipe_resolves() -> None:
    names = bundled_recipes()
    assert set(names) >= {"tiny-world", "null"}
    assert sorted(names) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    for name in names:
        assert isinstance(load(name, {}), Config)


def test_a_target_is_a_recipe_file_a_bundled_name_or_a_model(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: my.package:Model\nserver: {port: 9}\n")
    assert load(str(recipe), {}).server.port == 9
    assert load("null", {}).model == "null"
    assert load("my.package:Model", {}, ["server.port=7"]) == Config(
        model="my.package:Model", server=ServerSection(port=7)
    )
    assert find_recipe("../pyproject") is None
    assert find_recipe("a" * 300) is None


# -- the stalled-input knob ----------------------------------------------------------------------------------------


@pytest.mark.req("AC-46")
@pytest.mark.parametrize(("text", "limit_s"), [(None, 600.0), ("", 600.0), ("30", 30.0), ("0.5", 0.5), ("0", 0.0)])
def test_the_stalled_input_limit_is_read_in_seconds(text: str | None, limit_s: float) -> None:
    assert parse_stalled_input_s(text) == limit_s


@pytest.mark.req("AC-46")
@pytest.mark.parametrize("text", ["-1", "-0.001", "-1e3"])
def test_a_negative_stalled_input_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="negative"):
        parse_stalled_input_s(text)


@pytest.mark.req("AC-46")
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "Infinity"])
def test_a_stalled_input_limit_that_is_not_finite_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not finite"):
        parse_stalled_input_s(text)


@pytest.mark.req("AC-46")
def test_an_unreadable_stalled_input_limit_falls_back_to_the_default_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_stalled_input_s("ten minutes") == 600.0
    assert "ten minutes" in caplog.text


@pytest.mark.req("AC-46")
@pytest.mark.parametrize("source", ["knob", "recipe"])
def test_zero_turns_the_limit_off_and_warns_naming_both_waits(caplog: pytest.LogCaptureFixture, source: str) -> None:
    with caplog.at_level(logging.WARNING):
        if source == "knob":
            config = resolve_text("", {STALLED_INPUT_ENV: "0"})
        else:
            config = resolve_text("server: {stalled_input_s: 0}")
    assert config.server.stalled_input_s == 0
    assert "first input" in caplog.text
    assert "next input" in caplog.text


@pytest.mark.req("AC-46")
def test_a_refused_limit_leaves_no_trace_in_the_next_resolution() -> None:
    with pytest.raises(ConfigError, match="negative"):
        resolve_text("", {STALLED_INPUT_ENV: "-1"})
    assert resolve_text("", {}).server.stalled_input_s == 600.0


def test_the_knob_stands_between_recipe_and_command_line() -> None:
    recipe = "server: {stalled_input_s: 41}"
    assert resolve_text(recipe, {STALLED_INPUT_ENV: "42"}).server.stalled_input_s == 42
    assert resolve_text(recipe, {STALLED_INPUT_ENV: "42"}, ("server.stalled_input_s=43",)).server.stalled_input_s == 43


def test_two_environment_names_for_one_field_are_refused_together() -> None:
    env = {STALLED_INPUT_ENV: "42", "REALTIME_OMNI__SERVER__STALLED_INPUT_S": "43"}
    assert "same field" in refusal("", env).message
