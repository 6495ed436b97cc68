"""Which models there are, and how a name becomes a model.

A name is one of the catalog, an entry point of the group ``realtime_omni.models``, or ``package.module:Class``. Nothing here
imports a model before it is asked for. A model class is built by ``Class.from_config(config)`` where it has that method, else
by ``Class()``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from realtime_omni.errors import ConfigError, ErrorCode, OmniError
from realtime_omni.models.common.own_code import told

if TYPE_CHECKING:
    from realtime_omni.config import Config
    from realtime_omni.models.base import WorldModel

ENTRY_POINT_GROUP = "realtime_omni.models"

CATALOG: dict[str, str] = {
    "tiny-world": "realtime_omni.models.tiny_world.model:TinyWorld",
    "lingbot-world": "realtime_omni.models.lingbot.model:LingBot",
    "matrix-game": "realtime_omni.models.matrix_game.model:MatrixGame",
    "dreamzero": "realtime_omni.models.dreamzero.model:DreamZero",
    "null": "realtime_omni.models.null.model:NullWorld",
    "pi0": "realtime_omni.models.pi0.model:Pi0",
    "pi0.5": "realtime_omni.models.pi0.model:Pi05",
    "tiny-policy": "realtime_omni.models.pi0.model:TinyPolicy",
    "smolvla": "realtime_omni.models.smolvla.model:SmolVLA",
    "voice": "realtime_omni.models.voice.model:EmbeddedVoice",
    "null-policy": "realtime_omni.models.null.policy:NullPolicy",
    "puppet": "realtime_omni.models.puppet.model:Puppet",
    "moshi": "realtime_omni.models.moshi.model:Moshi",
    "minicpm-o": "realtime_omni.models.minicpmo.model:MiniCPMO",
}

# What a recipe's `options` may hold for each; read before anything of the model is loaded.
OPTIONS: dict[str, str] = {
    "tiny-world": "realtime_omni.models.tiny_world.model:Options",
    "lingbot-world": "realtime_omni.models.lingbot.loader:Options",
    "matrix-game": "realtime_omni.models.matrix_game.loader:Options",
    "dreamzero": "realtime_omni.models.dreamzero.loader:Options",
    "null": "realtime_omni.models.null.model:NullOptions",
    "pi0": "realtime_omni.models.common.vla.options:VLAOptions",
    "pi0.5": "realtime_omni.models.common.vla.options:VLAOptions",
    "tiny-policy": "realtime_omni.models.common.vla.options:VLAOptions",
    "smolvla": "realtime_omni.models.common.vla.options:VLAOptions",
    "voice": "realtime_omni.models.voice.parts:VoiceOptions",
    "null-policy": "realtime_omni.models.null.policy:NullPolicyOptions",
    "puppet": "realtime_omni.models.puppet.model:PuppetOptions",
    "moshi": "realtime_omni.models.moshi.loader:MoshiOptions",
    "minicpm-o": "realtime_omni.models.minicpmo.loader:MiniCPMOOptions",
}

# What kind each is and what it needs, for whoever looks for one.
ABOUT: dict[str, str] = {
    "tiny-world": "world, embedded",
    "lingbot-world": "world; a checkpoint and a GPU",
    "matrix-game": "world; a checkpoint and a GPU",
    "dreamzero": "world and policy in one; a checkpoint and a GPU",
    "null": "world without a network",
    "pi0": "policy; a checkpoint",
    "pi0.5": "policy; a checkpoint",
    "tiny-policy": "policy, embedded",
    "smolvla": "policy; a checkpoint",
    "voice": "voice; extra voice, and realtime-omni fetch voice",
    "null-policy": "policy without a network",
    "puppet": "voice without a network, in tones",
    "moshi": "voice; a checkpoint and a GPU",
    "minicpm-o": "voice; a checkpoint and a GPU",
}


def names() -> tuple[str, ...]:
    """Catalog names and installed entry points."""
    return (*CATALOG, *sorted(e.name for e in entry_points(group=ENTRY_POINT_GROUP) if e.name not in CATALOG))


def locate(name: str) -> str:
    """``module:Class`` of a name; nothing is imported. Raises ConfigError (``model_unknown``) naming what exists."""
    target = CATALOG.get(name)
    if target is None:
        for point in entry_points(group=ENTRY_POINT_GROUP):
            if point.name == name:
                target = point.value
    if target is None and ":" in name:
        target = name
    if target is None:
        from realtime_omni.config import nearest

        known = names()
        near = nearest(name, known)
        hint = "" if near is None else f"did you mean {near}? "
        raise ConfigError(
            f"unknown model {name!r}; {hint}known: {', '.join(known)}, or package.module:Class",
            code=ErrorCode.MODEL_UNKNOWN,
            path="model",
        )
    return target


def load_class(name: str) -> type[Any]:
    """Raises ConfigError (``model_unknown``) naming what exists."""
    module_name, _, attribute = locate(name).partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # it may be the user's own file, with whatever mistake
        raise ConfigError(
            f"model {name!r} cannot be imported: {told(error, module_name)}",
            code=ErrorCode.MODEL_UNKNOWN,
            path="model",
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(
            f"model {name!r}: module {module_name} has no {attribute}", code=ErrorCode.MODEL_UNKNOWN, path="model"
        )
    found = getattr(module, attribute)
    if not isinstance(found, type):
        raise ConfigError(f"model {name!r} is not a class", code=ErrorCode.MODEL_UNKNOWN, path="model")
    return found


def check_options(config: Config) -> None:
    """Raises ConfigError for options that a model of the catalog does not have. Nothing is loaded; without options nothing is
    imported either."""
    target = OPTIONS.get(config.model)
    if target is None or not config.options:
        return
    module, _, kind = target.partition(":")
    config.options_as(getattr(import_module(module), kind))


def check_device(config: Config) -> None:
    """Raises ConfigError when the machine lacks the devices that ``device`` and ``parallel`` name."""
    kind, _, number = config.device.partition(":")
    if kind != "cuda":
        return
    import torch

    there, last = torch.cuda.device_count(), int(number or 0) + config.parallel.ranks - 1
    if last >= there:
        found = f"torch sees {there} CUDA devices" if there else f"torch {torch.__version__} sees no CUDA device"
        raise ConfigError(f"device: cuda:{last} is needed and {found}", path="device")


def build(config: Config) -> WorldModel:
    """The configured model, loaded."""
    check_device(config)
    cls = load_class(config.model)
    check_options(config)
    if config.options and not hasattr(cls, "from_config"):
        field = f"options.{next(iter(config.options))}"
        raise ConfigError(f"{field}: model {config.model!r} has no from_config that could read it", path=field)
    try:
        model = cls.from_config(config) if hasattr(cls, "from_config") else cls()
        missing = missing_members(model)
    except OmniError:
        raise
    except Exception as error:
        why = told(error, cls.__module__)
        raise ConfigError(f"model {config.model!r} could not be loaded: {why}", path="model") from error
    if missing:
        raise ConfigError(f"model {config.model!r} lacks {', '.join(missing)}", path="model")
    return model  # type: ignore[no-any-return]


def missing_members(model: object) -> tuple[str, ...]:
    """What the contract of the model's kind names and the model does not have, in the contract's order."""
    from realtime_omni.models.base import RewritingModel, WorldModel
    from realtime_omni.models.policy import PolicyModel

    contracts: list[type] = [WorldModel]
    try:
        spec = getattr(model, "spec", None)
    except NotImplementedError:  # PolicyBase's and DuplexBase's
        spec = None
    if spec is not None and spec.policy is not None:
        contracts.append(PolicyModel)
    if spec is not None and spec.kv.rewrite_frames:
        contracts.append(RewritingModel)
    members = [name for contract in contracts for name in vars(contract) if not name.startswith("_")]
    return tuple(name for name in members if (spec if name == "spec" else getattr(model, name, None)) is None)
