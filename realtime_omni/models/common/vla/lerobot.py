"""LeRobot's checkpoint folder: ``config.json``, the two ``policy_*processor.json`` and the state files they name.

Owns: reading and checking these files. Must not know a network; ``models.pi0`` and ``models.smolvla`` use what it returns.
The index of a step is part of its state file's name and differs by policy, so the name is always read from ``state_file``.
A processor step that is not known here is refused: skipping one would change the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla.images import Fit
from realtime_omni.models.common.vla.normalize import STATISTICS, Dialect, Mode, Normalizer
from realtime_omni.models.common.vla.policy import LoadOptions
from realtime_omni.models.common.vla.processing import Processing
from realtime_omni.models.common.vla.prompts import PromptForm, load_tokenizer
from realtime_omni.models.common.vla.relative import relative_mask

OLD_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."

Statistics = dict[str, dict[str, NDArray[np.float32]]]
"""Feature -> statistic -> [D]."""


class Feature(msgspec.Struct, frozen=True):
    type: str
    shape: tuple[int, ...]


class PolicyConfig(msgspec.Struct, frozen=True):
    """The part of ``config.json`` that all three policies share; training settings are not read."""

    type: str
    input_features: dict[str, Feature]
    output_features: dict[str, Feature]
    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    tokenizer_max_length: int = 48
    min_period: float = 4e-3
    max_period: float = 4.0
    normalization_mapping: dict[str, Mode] = {}


class Step(msgspec.Struct, frozen=True):
    """One entry of a processor file."""

    registry_name: str = ""
    config: dict[str, Any] = {}
    state_file: str | None = None


class ProcessorFile(msgspec.Struct, frozen=True):
    name: str
    steps: list[Step]


class NormalizerConfig(msgspec.Struct, frozen=True):
    eps: float = 1e-8
    norm_map: dict[str, Mode] = {}


class RelativeConfig(msgspec.Struct, frozen=True):
    enabled: bool = False
    exclude_joints: list[str] = []
    action_names: list[str] | None = None


class TokenizerConfig(msgspec.Struct, frozen=True):
    max_length: int = 48


_Config = TypeVar("_Config")

_UNNEEDED = frozenset({"to_batch_processor", "device_processor", "absolute_actions_processor"})
"""Steps whose work is done elsewhere: rows are made here, devices are the loader's, absolute follows relative."""
_PROMPTS = {
    "pi0_new_line_processor": PromptForm.LINE,
    "smolvla_new_line_processor": PromptForm.LINE,
    "pi05_prepare_state_tokenizer_processor_step": PromptForm.STATE,
}


@dataclass(frozen=True, slots=True)
class Processors:
    """What the two processor files say."""

    rename: Mapping[str, str]
    normalizer: NormalizerConfig
    unnormalizer: NormalizerConfig
    statistics: Statistics
    action_statistics: Statistics
    prompt: PromptForm | None
    prompt_tokens: int | None
    relative: RelativeConfig


def read_config(folder: Path, kind: type[_Config]) -> _Config:
    """``config.json`` as ``kind``. Raises ConfigError with the field that is missing or of another type."""
    return _read_json(folder / "config.json", kind)


def refuse_old_layout(stored: Iterable[str]) -> None:
    """Before its processor files LeRobot kept statistics among the weights; such a checkpoint must be migrated first."""
    if any(name.startswith(OLD_STATISTICS) for name in stored):
        raise ConfigError(
            "model.safetensors holds normalisation statistics, as LeRobot stored them before its processor files; convert the "
            "checkpoint with lerobot's processor/migrate_policy_normalization.py",
            path="model.safetensors",
        )


def read_processors(folder: Path) -> Processors:
    """Both processor files and the state files they name."""
    steps = _steps(folder, "policy_preprocessor.json")
    after = _steps(folder, "policy_postprocessor.json")
    known = {
        "rename_observations_processor",
        "tokenizer_processor",
        "normalizer_processor",
        "relative_actions_processor",
    }
    _refuse_unknown({*steps, *after} - known - set(_PROMPTS) - _UNNEEDED - {"unnormalizer_processor"})
    normalizer = steps.get("normalizer_processor", Step())
    unnormalizer = after.get("unnormalizer_processor", Step())
    prompts = [form for name, form in _PROMPTS.items() if name in steps]
    tokenizer = steps.get("tokenizer_processor")
    return Processors(
        rename=_convert(
            steps.get("rename_observations_processor", Step()).config.get("rename_map", {}), dict[str, str]
        ),
        normalizer=_convert(normalizer.config, NormalizerConfig),
        unnormalizer=_convert(unnormalizer.config, NormalizerConfig),
        statistics=_statistics(folder, normalizer.state_file),
        action_statistics=_statistics(folder, unnormalizer.state_file),
        prompt=prompts[0] if prompts else None,
        prompt_tokens=None if tokenizer is None else _convert(tokenizer.config, TokenizerConfig).max_length,
        relative=_convert(steps.get("relative_actions_processor", Step()).config, RelativeConfig),
    )


def make_processing(
    folder: Path,
    config: PolicyConfig,
    options: LoadOptions,
    *,
    image_size: int,
    vocabulary: int,
    fit: Fit,
    form: PromptForm,
) -> tuple[Processing, dict[str, str]]:
    """The checkpoint's processing and, by feature, where its statistics come from.

    ``form``: the prompt of the family, which the preprocessor's own step must not contradict."""
    processors = read_processors(folder)
    if processors.prompt not in (None, form):
        raise ConfigError(f"policy_preprocessor.json: a {processors.prompt} prompt, this policy reads {form}")
    state_channels, action_channels = _channels(config)
    sources: dict[str, str] = {}
    state = _normalizer(
        STATE, "STATE", state_channels, processors.statistics, processors.normalizer, config, options, sources
    )
    action = _normalizer(
        ACTION,
        "ACTION",
        action_channels,
        processors.action_statistics,
        processors.unnormalizer,
        config,
        options,
        sources,
    )
    relative = processors.relative
    processing = Processing(
        cameras=cameras(config, processors.rename),
        image_size=image_size,
        fit=fit,
        prompt=form,
        prompt_tokens=processors.prompt_tokens or config.tokenizer_max_length,
        tokenizer=load_tokenizer(options.tokenizer or folder),
        vocabulary=vocabulary,
        state=state,
        action=action,
        state_channels=state_channels,
        action_channels=action_channels,
        state_dim=config.max_state_dim,
        action_dim=config.max_action_dim,
        relative=relative_mask(action_channels, relative.action_names, relative.exclude_joints)
        if relative.enabled
        else None,
    )
    return processing, sources


def cameras(config: PolicyConfig, rename: Mapping[str, str]) -> tuple[str, ...]:
    """Camera names in the network's order, as a client calls them: without the prefix, before renaming."""
    called = {new: old for old, new in rename.items()}
    visual = [called.get(key, key) for key, feature in config.input_features.items() if feature.type == "VISUAL"]
    if not visual:
        raise ConfigError("config.json: input_features names no camera", path="input_features")
    return tuple(key.removeprefix(IMAGES) for key in visual)


def _channels(config: PolicyConfig) -> tuple[int, int]:
    state, action = config.input_features.get(STATE), config.output_features.get(ACTION)
    if state is None or action is None or len(state.shape) != 1 or len(action.shape) != 1:
        raise ConfigError(
            f"config.json: {STATE} and {ACTION} must be features with one dimension", path="input_features"
        )
    if state.shape[0] > config.max_state_dim or action.shape[0] > config.max_action_dim:
        raise ConfigError(
            f"config.json: {state.shape[0]} state and {action.shape[0]} action channels do not fit into "
            f"{config.max_state_dim} and {config.max_action_dim}",
            path="max_state_dim",
        )
    return state.shape[0], action.shape[0]


def _normalizer(
    key: str,
    kind: str,
    channels: int,
    statistics: Statistics,
    own: NormalizerConfig,
    config: PolicyConfig,
    options: LoadOptions,
    sources: dict[str, str],
) -> Normalizer:
    """A feature's normalizer; missing statistics are refused unless the options allow identity."""
    mode = own.norm_map.get(kind, config.normalization_mapping.get(kind, Mode.IDENTITY))
    if mode is Mode.IDENTITY:
        sources[key] = "identity (by the checkpoint)"
        return Normalizer.identity()
    if key not in statistics:
        if options.allow_identity_normalization:
            sources[key] = "identity (statistics missing, allowed)"
            return Normalizer.identity()
        there = f"it has statistics of {', '.join(sorted(statistics))}" if statistics else "it has none"
        raise ConfigError(
            f"{key}: {mode} needs {' and '.join(STATISTICS[mode])} of this feature, but the checkpoint does not hold them; "
            f"{there}. Serving without them would move the robot in other units; --allow-identity-normalization does so",
            path=key,
        )
    normalizer = Normalizer.of(mode, Dialect.LEROBOT, statistics[key], key, own.eps)
    if normalizer.width != channels:
        raise ConfigError(f"{key}: statistics of {normalizer.width} channels, config.json says {channels}", path=key)
    sources[key] = f"{mode.lower()} {normalizer.digest()}"
    return normalizer


def _steps(folder: Path, name: str) -> dict[str, Step]:
    """A processor file's steps by name; empty when there is no such file (statistics are then missing)."""
    if not (folder / name).is_file():
        return {}
    steps: dict[str, Step] = {}
    for step in _read_json(folder / name, ProcessorFile).steps:
        if step.registry_name in steps and step.registry_name not in _UNNEEDED:
            raise ConfigError(f"{name}: {step.registry_name} appears twice", path=name)
        steps[step.registry_name] = step
    return steps


def _refuse_unknown(names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(name or "a step without registry_name" for name in names))
        raise ConfigError(f"the processor files use steps that are not supported: {listed}", path="steps")


def _statistics(folder: Path, name: str | None) -> Statistics:
    """A state file: keys are ``<feature>.<statistic>``, split at the last dot."""
    if name is None:
        return {}
    if Path(name).name != name:
        raise ConfigError(f"state_file {name!r} is not a file name", path="state_file")
    try:
        stored = load_file(folder / name)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{name}: cannot be read ({type(error).__name__})", path=name) from None
    result: Statistics = {}
    for key, value in stored.items():
        feature, _, statistic = key.rpartition(".")
        result.setdefault(feature, {})[statistic] = np.asarray(value, np.float32)
    return result


def _read_json(path: Path, kind: type[_Config]) -> _Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing", path=path.name) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: {error}", path=path.name) from None


def _convert(value: Any, kind: type[_Config]) -> _Config:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"processor file: {error}", path="steps") from None
