"""What is refused at start, before a session exists."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from realtime_omni.build import engine_settings, kv_plan, kv_spec
from realtime_omni.config import Config, EngineSection, KVSection, ParallelSection, SessionSection
from realtime_omni.errors import ConfigError
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.models import catalog
from realtime_omni.models.duplex import DuplexBase
from realtime_omni.models.null.policy import NullPolicy
from realtime_omni.models.policy import PolicyBase
from realtime_omni.testing.inline import InlineEngine, small_config
from realtime_omni.testing.models import TinyKVWorld


@pytest.mark.req("AC-17")
@pytest.mark.parametrize("max_batch", [2, 8])
def test_a_serial_model_with_a_batch_of_more_than_one_is_refused_by_name_and_never_reduced(max_batch: int) -> None:
    with pytest.raises(ConfigError) as refused:
        InlineEngine(TinyKVWorld(serial=True), max_batch=max_batch)
    assert refused.value.path == "engine.max_batch"
    assert refused.value.code == "unsupported"


@pytest.mark.req("AC-17")
def test_a_serial_model_with_batches_of_one_serves_its_sessions_one_by_one() -> None:
    work: list[tuple[str, ...]] = []
    model = TinyKVWorld(serial=True, trace=lambda what, who: work.append(who) if what == "forward:1" else None)
    engine = InlineEngine(model, max_batch=1)
    for name in "ab":
        engine.create(name)
    engine.next_all("ab")
    assert work == [("a",), ("b",)]


@pytest.mark.req("AC-16")
def test_more_than_one_replica_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="affinity"):
        Config(engine=EngineSection(replicas=2))


def test_memory_that_does_not_hold_one_session_is_refused_with_the_numbers() -> None:
    config = replace_kv(small_config(), memory_bytes=100)
    with pytest.raises(ConfigError, match="cannot fit one session") as refused:
        InlineEngine(TinyKVWorld(), config)
    assert refused.value.code == "capacity"


def test_the_pool_bounds_the_sessions_whatever_the_recipe_asks() -> None:
    spec = TinyKVWorld().spec
    one = replace(spec.kv, max_in_flight=1).required_bytes(1)
    two = replace(spec.kv, max_in_flight=1).required_bytes(2)
    config = replace_kv(small_config(sessions=4, max_batch=1), memory_bytes=two)
    assert kv_plan(config, spec).sessions == 2
    engine = InlineEngine(TinyKVWorld(), config)
    assert engine.engine.settings.max_sessions == 2
    assert engine.runner.storage.bytes <= two
    assert kv_plan(replace_kv(config, memory_bytes=two - 1), spec).sessions == 1
    assert kv_plan(replace_kv(config, memory_bytes=one), spec).sessions == 1


def test_a_kept_failure_needs_a_model_that_says_it_can_go_on() -> None:
    for rollback_safe, on_failure, keep in ((True, "keep", True), (False, "keep", False), (True, "release", False)):
        spec = TinyKVWorld(rollback_safe=rollback_safe).spec
        assert engine_settings(small_config(on_failure=on_failure), spec, 4).keep_failed is keep


def test_the_recipe_may_change_window_sink_and_page_size() -> None:
    spec = TinyKVWorld().spec
    kv = KVSection(sink_frames=0, window_frames=6, page_tokens=3, memory_bytes=1 << 20, rewind_blocks=4)
    resolved = kv_spec(Config(model="null", kv=kv, dtype="float64"), spec)
    assert (resolved.sink_frames, resolved.window_frames, resolved.page_tokens, resolved.dtype_bytes) == (0, 6, 3, 8)
    assert resolved.rewind_blocks == 4


@pytest.mark.parametrize("window", [2, 4, 8])
def test_a_shorter_window_changes_what_a_world_remembers_and_a_longer_page_does_not(window: int) -> None:
    def rollout(**kv: Any) -> list[bytes]:
        engine = InlineEngine(TinyKVWorld(), replace_kv(small_config(), window_frames=window, **kv))
        engine.create("a", seed=3)
        return [engine.next("a").artifacts["frames"].data.tobytes() for _ in range(8)]

    assert rollout(page_tokens=1) == rollout() == rollout(page_tokens=3)
    assert (rollout(sink_frames=0) != rollout(sink_frames=2)) or window == 8


def test_an_unknown_model_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tiny-world") as refused:
        catalog.load_class("no-such-model")
    assert refused.value.code == "model_unknown"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("realtime_omni.errors:Missing", "has no Missing"),
        ("no_such_package.module:Model", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'$"),
        (":", "cannot be imported: ValueError: Empty module name"),
        (".:Model", "cannot be imported"),
        ("realtime_omni.testing.faults:InjectedFault", "lacks"),
        ("realtime_omni.models.catalog:CATALOG", "not a class"),
    ],
)
def test_a_dotted_name_that_is_no_model_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        catalog.build(Config(model=name))


def test_a_window_that_holds_no_block_of_the_model_is_refused() -> None:
    config = msgspec.structs.replace(small_config(), kv=KVSection(memory_bytes=1 << 20, window_frames=1))
    with pytest.raises(ConfigError, match="window_frames=1 must hold a block") as refused:
        kv_spec(config, catalog.build(Config(model="null")).spec)
    assert refused.value.path == "kv"


def test_a_model_whose_file_is_broken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_world.py").write_text("class World(\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be imported: SyntaxError: .*broken_world\.py, line 1\)$"):
        catalog.build(Config(model="broken_world:World"))


@pytest.mark.parametrize("name", catalog.CATALOG)
def test_an_option_that_a_model_does_not_have_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(catalog.load_class(name), "from_config", None)
    with pytest.raises(ConfigError, match=r"^options\.chekpoint: unknown field") as refused:
        catalog.build(Config(model=name, options={"chekpoint": "x"}))
    known = [field.name for field in msgspec.structs.fields(_options_of(name))]
    near = "did you mean checkpoint?" if "checkpoint" in known else ", ".join(known) or "this model has none"
    assert refused.value.message.endswith(near)


def _options_of(name: str) -> type:
    module, _, kind = catalog.OPTIONS[name].partition(":")
    return getattr(import_module(module), kind)  # type: ignore[no-any-return]


def test_options_of_a_model_that_reads_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optionless.py").write_text("class World:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"options\.steps: .* has no from_config"):
        catalog.build(Config(model="optionless:World", options={"steps": 2}))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "import json\njson.loads('{')\n",
            r"cannot be imported: JSONDecodeError: .* \(own_world_unread\.py, line 2\)$",
        ),
        (
            "class World:\n    def __init__(self):\n        {}['weights']\n",
            r"KeyError: 'weights' \(own_world_bare\.py, line 3\)$",
        ),
        (
            "class World:\n    @classmethod\n    def from_config(cls, config):\n        raise ValueError('two\\nlines')\n",
            r"could not be loaded: ValueError: two lines \(own_world_lines\.py, line 4\)$",
        ),
        (
            "class World:\n    def __init__(self):\n        assert not self\n",
            r"AssertionError \(own_world_mute\.py, line 3\)$",
        ),
    ],
)
def test_an_error_in_a_models_own_file_is_told_with_its_type_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    name = re.search(r"own_world_[a-z]+", why.replace("\\", ""))
    assert name is not None
    (tmp_path / f"{name[0]}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=why) as refused:
        catalog.build(Config(model=f"{name[0]}:World"))
    assert "\n" not in refused.value.message


CONTRACT = [
    "spec",
    "open",
    "understand",
    "new_reducer",
    "needs_prefill",
    "prefill",
    "step",
    "pack",
    "unpack",
    "fingerprint",
    "close",
    "start_image",
]


class Without:
    """A model without some of the contract's members."""

    def __init__(self, model: object, *members: str) -> None:
        self.model, self.members = model, members

    def __getattr__(self, name: str) -> Any:
        if name in self.members:
            raise AttributeError(name)
        return getattr(self.model, name)


def test_a_model_that_lacks_members_of_the_contract_is_refused_with_all_their_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refusal(make: Callable[[], object]) -> str:
        kind = type("Kind", (), {"from_config": staticmethod(lambda config: make())})
        monkeypatch.setattr(catalog, "load_class", lambda name: kind)
        with pytest.raises(ConfigError) as refused:
            catalog.build(Config(model="mine:Mini"))
        return refused.value.message

    assert refusal(object) == f"model 'mine:Mini' lacks {', '.join(CONTRACT)}"
    for member in CONTRACT:
        assert refusal(lambda member=member: Without(TinyKVWorld(), member)) == f"model 'mine:Mini' lacks {member}"
    seven = ("needs_prefill", "prefill", "pack", "unpack", "fingerprint", "close", "start_image")
    assert refusal(lambda: Without(TinyKVWorld(), *seven)) == f"model 'mine:Mini' lacks {', '.join(seven)}"
    for base in (PolicyBase, DuplexBase):
        own = "spec, open, step, pack, unpack, fingerprint"
        assert refusal(base) == f"model 'mine:Mini' lacks {own}"
    policy = ("pack", "check_observation")
    assert refusal(lambda: Without(NullPolicy(), *policy)) == f"model 'mine:Mini' lacks {', '.join(policy)}"


def test_a_model_that_rewrites_history_must_say_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TinyKVWorld().spec
    model = TinyKVWorld()
    kv = replace(spec.kv, rewrite_frames=spec.kv.frames_per_block)
    monkeypatch.setattr(model, "_spec", replace(spec, kv=kv))
    assert catalog.missing_members(model) == ("rewritten_blocks",)


@pytest.mark.parametrize("name", ["null", "realtime_omni.models.null.model:NullWorld"])
def test_a_model_is_found_by_its_catalog_name_and_by_its_dotted_name(name: str) -> None:
    assert catalog.build(Config(model=name)).spec.name == "null"


@pytest.mark.skipif(torch.cuda.device_count() > 76, reason="has the device that must be missing")
def test_a_device_that_is_not_there_is_refused_by_the_recipes_field_before_anything_is_loaded() -> None:
    config = msgspec.structs.replace(small_config(), device="cuda:76")
    for attempt in (lambda: InlineEngine(TinyKVWorld(), config), lambda: catalog.build(config)):
        with pytest.raises(ConfigError, match=r"device: cuda:76 is needed") as refused:
            attempt()
        assert refused.value.path == "device"
    ranks = msgspec.structs.replace(config, device="cuda:70", parallel=ParallelSection(sp=7))
    with pytest.raises(ConfigError, match=r"cuda:76 is needed"):
        catalog.build(ranks)


def test_session_limits_of_the_recipe_hold() -> None:
    config = Config(model="null", session=SessionSection(max_sessions=3, horizon_frames=9))
    settings = engine_settings(config, TinyKVWorld().spec, sessions=100)
    assert (settings.max_sessions, settings.horizon_frames) == (3, 9)


def replace_kv(config: Config, **changes: Any) -> Config:
    return msgspec.structs.replace(config, kv=msgspec.structs.replace(config.kv, **changes))


def test_the_geometry_of_the_test_model_is_what_its_page_says() -> None:
    kv = TinyKVWorld().spec.kv
    assert isinstance(kv, KVSpec)
    assert (kv.num_layers, kv.tokens_per_frame, kv.frames_per_block) == (2, 2, 2)
