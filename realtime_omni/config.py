"""The configuration: one frozen tree of typed sections, checked once, and the one order in which sources overlay it.

Owns every field's name, type, default and bounds, and :func:`resolve`. Must not know a model, a server or torch.
Invariant: a :class:`Config` that exists is valid, its numbers are finite, and it survives msgpack unchanged.

Precedence, lowest first: the defaults below, the recipe file, the environment
(``REALTIME_OMNI__SECTION__FIELD=value``), the command line (``--set section.field=value`` and named flags).
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Literal, TypeAlias, TypeGuard, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from realtime_omni.errors import ConfigError, ErrorCode
from realtime_omni.recipe import MAX_DEPTH, Assignment, FieldPath, Recipe, Value, find_recipe, parse_value, read_recipe

ENV_PREFIX = "REALTIME_OMNI__"
STALLED_INPUT_ENV = "REALTIME_OMNI_STALLED_INPUT_S"
STALLED_INPUT_DEFAULT_S = 600.0
# Names of the per-stage layout that older serving stacks use; nothing in it maps to a field here one to one.
_LEGACY_FIELDS = frozenset({"stage_args", "stages"})
_LAYOUT = "the layout is model, device, dtype and the sections kv, engine, session, server, options, parallel, deploy"
_OWNED_ELSEWHERE = frozenset({"options", "deploy"})

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Upper bounds are far above any sane use: they catch a wrong unit, not an ambitious deployment.
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Bytes: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 50)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=7 * 86400)]
SecondsOrOff: TypeAlias = Annotated[float, Meta(ge=0, le=7 * 86400)]
Device: TypeAlias = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
EnvName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of fields. Values built in code are checked as strictly as values read from a file."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, Section):
                continue
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{field.name}: {value} is not finite", path=field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{field.name}: {error}", path=field.name) from None


class KVSection(Section, frozen=True, kw_only=True):
    """KV memory. A null field is the model's own choice."""

    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """Share of the device's free memory; ignored when ``memory_bytes`` is given."""
    memory_bytes: Bytes | None = None
    page_tokens: Count | None = None
    policy: Literal["refuse", "lru"] = "refuse"
    """What a full pool does with one more session: refuse it, or evict the least recently used one, with an event."""
    requested_sessions: Count = 8
    keep_gathered: bool | None = None
    """Whether a tick keeps one contiguous copy of its rows' history for all of its passes: faster, and as many bytes again as
    these rows hold. Null: on a CPU only."""
    fp8_attention: bool = False
    """Gather history as e4m3 and attend to it in eight bits (Hopper or later; package fa3-fwd or nvidia-cudnn-frontend).
    Pages stay."""
    sink_frames: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    window_frames: Count | None = None
    rewind_blocks: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    """How many blocks a session can go back. Every block after the first costs a block's frames of every session."""


class EngineSection(Section, frozen=True, kw_only=True):
    """The engine thread: batching, queues, failure and release."""

    max_batch: Annotated[int, Meta(ge=1, le=4096)] = 8
    max_pending_events: Annotated[int, Meta(ge=1, le=65536)] = 32
    inbox: Count = 1024
    budget_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None
    """Deadline of an observation that names none, from its arrival; whoever is due later does not delay it. Null: none."""
    on_failure: Literal["keep", "release"] = "keep"
    """What happens to the pages of a session whose tick failed, until it is reset or closed."""
    close_timeout_s: Seconds = 180.0
    threads: Annotated[int, Meta(ge=1, le=1024)] = 2
    replicas: Annotated[int, Meta(ge=1, le=1024)] = 1


class ParallelSection(Section, frozen=True, kw_only=True):
    """One model over several devices of one host: ``sp * tp`` of them, from ``device`` on."""

    sp: Annotated[int, Meta(ge=1, le=64)] = 1
    """Ranks that share a block's tokens, and its heads in attention (Ulysses)."""
    tp: Annotated[int, Meta(ge=1, le=64)] = 1
    """Ranks that share the heads and the MLP of every matrix."""
    timeout_s: Seconds = 120.0
    """Bound of every exchange; compiling on one rank while others wait counts."""

    @property
    def ranks(self) -> int:
        return self.sp * self.tp


class SessionSection(Section, frozen=True, kw_only=True):
    """What every session gets. A null field is the model's own choice."""

    grace_s: SecondsOrOff = 30.0
    """How long a session waits for its client to come back after the socket was lost."""
    max_sessions: Count = 8
    horizon_frames: Count | None = None
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None
    """At most what the world protocol lets a session tell."""


class ServerSection(Section, frozen=True, kw_only=True):
    """The listening side."""

    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0 lets the system choose."""
    openpi_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """A second port for robots whose client knows no path (openpi's); null: none. Only for a policy."""
    api_key_env: EnvName = "REALTIME_OMNI_API_KEY"
    """The name of the environment variable that holds the key, never the key."""
    origins: tuple[str, ...] = ()
    stall_timeout_s: Seconds = 60.0
    """A client that reads nothing for this long is closed with a code."""
    stalled_input_s: SecondsOrOff = STALLED_INPUT_DEFAULT_S
    """A session that waits for input for this long is failed; 0 turns the limit off."""
    max_message_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 4 * 1024 * 1024


class Config(Section, frozen=True, kw_only=True):
    """A recipe's layout and the resolved configuration at once."""

    model: Annotated[str, Meta(min_length=1, max_length=255)] = "tiny-world"
    """A name of the model catalog, or ``package.module:Class``."""
    device: Device = "cpu"
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    kv: KVSection = KVSection()
    engine: EngineSection = EngineSection()
    parallel: ParallelSection = ParallelSection()
    session: SessionSection = SessionSection()
    server: ServerSection = ServerSection()
    options: dict[str, object] = {}
    """Owned by the model: read it with :meth:`options_as`, nowhere else."""
    deploy: dict[str, object] = {}
    """A policy's robot: cameras, state, actions, handshake. Owned by the robot endpoint (``server.deployment``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Fields that need each other. Each refusal names both."""
        if self.engine.replicas != 1:
            raise ConfigError(
                "engine.replicas: more than one replica needs session affinity, which this release does not have",
                code=ErrorCode.UNSUPPORTED,
                path="engine.replicas",
            )
        if self.kv.sink_frames is not None and self.kv.window_frames is None:
            raise ConfigError("kv.sink_frames: needs kv.window_frames, which is not set", path="kv.sink_frames")
        if self.device == "cpu" and self.dtype == "float16":
            raise ConfigError("dtype: float16 needs a cuda device; on cpu use float32 or bfloat16", path="dtype")

    def options_as(self, kind: type[_T]) -> _T:
        """The model's options as the model's own type; a field that type does not have is refused."""
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            known = [field.name for field in msgspec.structs.fields(kind)]
            for name in self.options:
                if name not in known:
                    there_are = f"this model's are {', '.join(known)}" if known else "this model has none"
                    raise ConfigError(_unknown(("options", name), known, there_are), path=f"options.{name}")
        try:
            return msgspec.convert(self.options, kind)
        except msgspec.ValidationError as error:
            message, field = _where(error)
            path = f"options.{field}" if field else "options"
            raise ConfigError(f"{path}: {message}", path=path) from None


def load(target: str, env: Mapping[str, str], overrides: Sequence[str] = ()) -> Config:
    """Resolve ``target``: a recipe file, a bundled recipe's name, or else a model (catalog name or module:Class)."""
    path = find_recipe(target)
    if path is not None:
        return resolve(read_recipe(path), env, overrides)
    return resolve(Recipe(target, (Assignment(("model",), target, "the command line"),)), env, overrides)


def load_several(targets: Sequence[str], env: Mapping[str, str], overrides: Sequence[str] = ()) -> tuple[Config, ...]:
    """One configuration per target, as :func:`load` resolves it.

    The environment and plain overrides are the first's; ``TARGET:section.field=value`` is for another (a recipe's file is
    ``mine`` or ``path/mine.yaml``). The section ``server`` is the first's alone.
    """
    own: list[list[str]] = [[] for _ in targets]
    for override in overrides:
        dotted, equals, text = override.partition("=")
        name, _, dotted = dotted.rpartition(":")  # a target may be module:Class; a field has no colon
        number = _find_target(name.strip(), targets, override) if name else 0
        if number and dotted.strip().split(".")[0] == "server":
            raise ConfigError(f"--set {override}: the server's settings are those of {targets[0]}", path="server")
        own[number].append(f"{dotted}{equals}{text}")
    return tuple(load(target, {} if number else env, own[number]) for number, target in enumerate(targets))


def _find_target(name: str, targets: Sequence[str], override: str) -> int:
    found = [number for number, target in enumerate(targets) if name in (target, PurePath(target).stem)]
    if len(found) != 1:
        raise ConfigError(f"--set {override}: {name} is {'several' if found else 'none'} of {', '.join(targets)}")
    return found[0]


def resolve(recipe: Recipe | None, env: Mapping[str, str], overrides: Sequence[str] = ()) -> Config:
    """Lay recipe, environment and command line (``section.field=value``) over the defaults, and check the result."""
    layers = [*(recipe.assignments if recipe else ()), *_from_env(env), *_from_overrides(overrides)]
    tree: dict[str, Value] = {}
    origins: dict[str, str] = {}
    for assignment in layers:
        _check_owner(assignment)
        _assign(tree, assignment)
        origins[".".join(assignment.path)] = assignment.origin
    config = _convert(tree, origins)
    if config.server.stalled_input_s == 0:
        _log.warning(
            "server.stalled_input_s is 0: neither a session waiting for its first input nor one waiting for its next"
            " input is ever ended"
        )
    return config


def parse_stalled_input_s(text: str | None) -> float:
    """The limit in seconds from the knob's text; 0 means off. Unset, empty or unreadable text gives the default.

    A negative or infinite limit is refused, and nothing is bound before the check: a refused value leaves no trace.
    """
    if text is None or not text.strip():
        return STALLED_INPUT_DEFAULT_S
    try:
        limit_s = float(text)
    except ValueError:
        _log.warning("%s=%r is not a number; using %g s", STALLED_INPUT_ENV, text, STALLED_INPUT_DEFAULT_S)
        return STALLED_INPUT_DEFAULT_S
    if not math.isfinite(limit_s):
        raise ConfigError(f"{STALLED_INPUT_ENV}: {text} is not finite", path="server.stalled_input_s")
    if limit_s < 0:
        raise ConfigError(f"{STALLED_INPUT_ENV}: {text} is negative", path="server.stalled_input_s")
    return limit_s


def known_fields(kind: type[msgspec.Struct] = Config, above: FieldPath = ()) -> Iterator[FieldPath]:
    """The path of every field, sections included."""
    for field in msgspec.structs.fields(kind):
        yield (*above, field.name)
        if _is_section(field.type):
            yield from known_fields(field.type, (*above, field.name))


def _from_env(env: Mapping[str, str]) -> Iterator[Assignment]:
    if STALLED_INPUT_ENV in env:
        twin = f"{ENV_PREFIX}SERVER__STALLED_INPUT_S"
        if twin in env:
            raise ConfigError(f"{STALLED_INPUT_ENV} and {twin} set the same field; keep one")
        limit_s = parse_stalled_input_s(env[STALLED_INPUT_ENV])
        yield Assignment(("server", "stalled_input_s"), limit_s, f"environment {STALLED_INPUT_ENV}")
    for name in sorted(env):
        if name.startswith(ENV_PREFIX):
            path = tuple(part.lower() for part in name.removeprefix(ENV_PREFIX).split("__"))
            yield _from_text(path, env[name], f"environment {name}")


def _from_overrides(overrides: Iterable[str]) -> Iterator[Assignment]:
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {override}: write it as section.field=value")
        yield _from_text(tuple(name.strip().split(".")), text, f"--set {override}")


def _from_text(path: FieldPath, text: str, origin: str) -> Assignment:
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{origin[:80]}: nested deeper than {MAX_DEPTH} levels")
    kind = _field_type(path)
    is_text = kind is str or (get_origin(kind) is Annotated and get_args(kind)[0] is str)
    return Assignment(path, text if is_text else parse_value(text, origin, path), origin)


def _field_type(path: FieldPath) -> object | None:
    """The declared type of the field at ``path``; None when there is no such field."""
    kind: object = Config
    for part in path:
        if not _is_section(kind):
            return None
        kind = next((field.type for field in msgspec.structs.fields(kind) if field.name == part), None)
    return kind


def _is_section(kind: object) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def _check_owner(assignment: Assignment) -> None:
    """Refuse an assignment no field owns. What lies below ``options`` and ``deploy`` is checked by whoever owns it."""
    path, dotted = assignment.path, ".".join(assignment.path)
    legacy = _LEGACY_FIELDS.intersection(path[:1]) or {"stage_args"}.intersection(path)
    if legacy:
        hint = f"the per-stage layout is not read; {_LAYOUT} (see recipes/tiny-world.yaml)"
        raise ConfigError(f"{assignment.origin}: {dotted}: {hint}", path=dotted)
    if path[0] in _OWNED_ELSEWHERE and (
        len(path) > 1 or isinstance(assignment.value, dict) or assignment.value is None
    ):
        return
    kind = _field_type(path)
    if kind is None:
        names = [".".join(known) for known in known_fields()]
        raise ConfigError(f"{assignment.origin}: {_unknown(path, names)}", path=dotted)
    if _is_section(kind) and assignment.value not in ({}, None):
        raise ConfigError(f"{assignment.origin}: {dotted}: is a section of fields, not a value", path=dotted)


def _unknown(path: FieldPath, names: Sequence[str], there_are: str = _LAYOUT) -> str:
    """The message for a field nobody owns, with the nearest known name: of the whole path, else of its last part; with
    what there is where none is near."""
    dotted = ".".join(path)
    near = nearest(dotted, names)
    if near is None:
        leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
        leaf = nearest(path[-1], list(leaves))
        near = None if leaf is None else leaves[leaf]
    hint = there_are if near is None else f"did you mean {near}?"
    return f"{dotted}: unknown field, nothing owns it; {hint}"


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that an unknown one was probably meant to be."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.75)), None)


def _assign(tree: dict[str, Value], assignment: Assignment) -> None:
    *above, leaf = assignment.path
    here = tree
    for part in above:
        child = here.get(part)
        if not isinstance(child, dict):
            child = here[part] = {}
        here = child
    if assignment.value is None and (leaf in _OWNED_ELSEWHERE or _is_section(_field_type(assignment.path))):
        return  # an empty section in YAML is null: nothing is set
    here[leaf] = assignment.value


def _where(error: msgspec.ValidationError) -> tuple[str, str]:
    """What was said, and the dotted name of the field that it was said of."""
    message, _, where = str(error).partition(" - at `$")
    return message, re.sub(r"\[.*", "", where.strip(".`"))


def _convert(tree: dict[str, Value], origins: Mapping[str, str]) -> Config:
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        message, dotted = _where(error)
        kind = _field_type(tuple(dotted.split(".")))
        allowed = f"; one of {', '.join(map(str, get_args(kind)))}" if get_origin(kind) is Literal else ""
        raise ConfigError(f"{origins.get(dotted, 'recipe')}: {dotted}: {message}{allowed}", path=dotted) from None
    except ConfigError as error:
        origin = origins.get(error.path or "")
        if origin is None:
            raise
        raise ConfigError(f"{origin}: {error.message}", code=error.code, path=error.path) from None
