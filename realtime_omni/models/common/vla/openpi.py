"""openpi's checkpoint folder (PyTorch port): ``config.json``, ``model.safetensors``, ``assets/<asset>/norm_stats.json``.

Owns: reading these. What openpi keeps in its training code and not in files (cameras, the robot's channels, relative
actions) is an argument, :class:`Robot`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla.images import Fit
from realtime_omni.models.common.vla.normalize import Dialect, Mode, Normalizer
from realtime_omni.models.common.vla.policy import LoadOptions
from realtime_omni.models.common.vla.processing import Processing
from realtime_omni.models.common.vla.prompts import PromptForm, load_tokenizer

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
"""openpi's camera slots, in order."""

_Config = TypeVar("_Config")


@dataclass(frozen=True, slots=True)
class Robot:
    """What openpi's data configuration says about a robot.

    ``asset``: the folder under ``assets`` (default: the only one). ``relative``: mask of relative action channels.
    ``discrete_state``: pi0.5 writes the state into the prompt (off for its LIBERO checkpoints).
    """

    state_channels: int
    action_channels: int
    cameras: tuple[str, ...] = CAMERAS
    asset: str | None = None
    relative: tuple[bool, ...] | None = None
    discrete_state: bool = True
    prompt_tokens: int | None = None


class Statistics(msgspec.Struct, frozen=True):
    """One feature's numbers in ``norm_stats.json``."""

    mean: list[float]
    std: list[float]
    q01: list[float] | None = None
    q99: list[float] | None = None


class StatisticsFile(msgspec.Struct, frozen=True):
    norm_stats: dict[str, Statistics]


def read_config(folder: Path, kind: type[_Config]) -> _Config:
    """``config.json`` as ``kind``."""
    return _read_json(folder / "config.json", kind)


def make_processing(
    folder: Path,
    options: LoadOptions,
    robot: Robot,
    *,
    image_size: int,
    vocabulary: int,
    form: PromptForm,
    quantiles: bool,
    prompt_tokens: int,
    padded_dim: int,
) -> tuple[Processing, dict[str, str]]:
    """The checkpoint's processing and, by feature, where its statistics come from."""
    if max(robot.state_channels, robot.action_channels) > padded_dim:
        raise ConfigError(f"the robot's channels do not fit into {padded_dim}", path="action_dim")
    sources: dict[str, str] = {}
    statistics = _read_statistics(folder, robot.asset, options)
    mode = Mode.QUANTILES if quantiles else Mode.MEAN_STD
    state = _normalizer("state", mode, statistics, robot.state_channels, sources)
    action = _normalizer("actions", mode, statistics, robot.action_channels, sources)
    processing = Processing(
        cameras=robot.cameras,
        image_size=image_size,
        fit=Fit.PILLOW,
        prompt=form,
        prompt_tokens=prompt_tokens,
        tokenizer=load_tokenizer(options.tokenizer or folder),
        vocabulary=vocabulary,
        state=state,
        action=action,
        state_channels=robot.state_channels,
        action_channels=robot.action_channels,
        state_dim=padded_dim,
        action_dim=padded_dim,
        relative=robot.relative,
    )
    return processing, sources


def _read_statistics(folder: Path, asset: str | None, options: LoadOptions) -> dict[str, Statistics] | None:
    """The asset's statistics, or None when there are none and the options allow it."""
    assets = sorted(path.parent for path in (folder / "assets").glob("**/norm_stats.json"))
    ids = [path.relative_to(folder / "assets").as_posix() for path in assets]
    if asset is None and len(ids) == 1:
        asset = ids[0]
    if asset in ids:
        return _read_json(folder / "assets" / asset / "norm_stats.json", StatisticsFile).norm_stats
    if asset is None and not ids and options.allow_identity_normalization:
        return None
    there = f"it has assets {', '.join(ids)}" if ids else "it has no assets/*/norm_stats.json"
    wanted = f"asset {asset!r} is not in the checkpoint" if asset else "which statistics to use is not clear"
    raise ConfigError(f"{wanted}: {there}; --allow-identity-normalization serves without any", path="assets")


def _normalizer(
    key: str, mode: Mode, statistics: dict[str, Statistics] | None, channels: int, sources: dict[str, str]
) -> Normalizer:
    if statistics is None:
        sources[key] = "identity (statistics missing, allowed)"
        return Normalizer.identity()
    if key not in statistics:
        raise ConfigError(f"norm_stats.json: no {key}; it has {', '.join(sorted(statistics))}", path=key)
    numbers = {
        name: np.asarray(values, np.float32)
        for name, values in msgspec.structs.asdict(statistics[key]).items()
        if values is not None
    }
    normalizer = Normalizer.of(mode, Dialect.OPENPI, numbers, f"norm_stats.json {key}")
    if normalizer.width is not None and normalizer.width < channels:
        raise ConfigError(f"norm_stats.json: {key} covers {normalizer.width} channels of {channels}", path=key)
    sources[key] = f"{mode.lower()} {normalizer.digest()}"
    return normalizer


def _read_json(path: Path, kind: type[_Config]) -> _Config:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ConfigError(f"{path.name} is missing", path=path.name) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: {error}", path=path.name) from None
