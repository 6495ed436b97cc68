"""The recipe's ``options`` of a policy that is loaded from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

import msgspec
import torch
from msgspec import Meta

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla import openpi
from realtime_omni.models.common.vla.graphs import Speed
from realtime_omni.models.common.vla.policy import LoadOptions
from realtime_omni.rtc.modes import Mode, Settings
from realtime_omni.rtc.weights import Schedule

if TYPE_CHECKING:
    from realtime_omni.config import Config

Channels = Annotated[int, Meta(ge=1, le=65_536)]


class RtcOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See :class:`realtime_omni.rtc.modes.Settings`. Off by default: it needs a client that says its ticks. ``allow``: other
    modes that an observation may ask for; not ``ensemble``, which needs more memory in every session."""

    mode: Mode = Mode.NONE
    allow: tuple[Mode, ...] = ()
    schedule: Schedule = Schedule.EXP
    limit: Annotated[float, Meta(gt=0, le=1000)] = 5.0
    soft_end: Annotated[int, Meta(ge=0)] | None = None
    ramp_rate: Annotated[float, Meta(gt=0, le=1000)] = 6.0

    def __post_init__(self) -> None:
        if Mode.ENSEMBLE in self.allow:
            raise ValueError("options.rtc.allow: ensemble is a deployment's mode, not an observation's")

    def settings(self) -> Settings:
        return Settings(self.mode, self.schedule, self.limit, self.soft_end, self.ramp_rate)

    def modes(self) -> tuple[Mode, ...]:
        """What an observation may ask for; the first is the deployment's own."""
        return tuple(dict.fromkeys((self.mode, *self.allow)))


class RobotOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What openpi's code says about a robot and its files do not; see :class:`realtime_omni.models.common.vla.openpi.Robot`."""

    state_channels: Channels
    action_channels: Channels
    cameras: tuple[str, ...] = openpi.CAMERAS
    asset: str | None = None
    relative: tuple[bool, ...] | None = None
    discrete_state: bool = True
    prompt_tokens: Channels | None = None

    def robot(self) -> openpi.Robot:
        return openpi.Robot(**msgspec.structs.asdict(self))


class ServingOptions(TypedDict):
    """What ``serving.VLAModel`` takes beside the policy."""

    rtc: Settings
    rtc_modes: tuple[Mode, ...]
    reuse: bool
    speed: Speed
    cache_mib: int


class VLAOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``checkpoint``: a folder in ``layout``; ``robot`` belongs to layout ``openpi`` alone. ``reuse``: keep a session's
    prefix for the next observation with the same pictures and words. ``speed``: see ``graphs.open_stages``.
    ``cache_mib``: features of pictures, and prefixes, that all sessions share by content; 0: none."""

    checkpoint: str = ""
    layout: Literal["lerobot", "openpi"] = "lerobot"
    tokenizer: str | None = None
    allow_identity_normalization: bool = False
    robot: RobotOptions | None = None
    rtc: RtcOptions = RtcOptions()
    reuse: bool = True
    speed: Speed = "auto"
    cache_mib: Annotated[int, Meta(ge=0, le=1 << 20)] = 256

    def folder(self) -> Path:
        """Raises ConfigError: no checkpoint is named, or there is no such folder."""
        if not self.checkpoint:
            raise ConfigError(
                "options.checkpoint: name the folder of the checkpoint, such as --set options.checkpoint=./pi0_base",
                path="options.checkpoint",
            )
        folder = Path(self.checkpoint).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"options.checkpoint: {self.checkpoint} is no folder", path="options.checkpoint")
        return folder

    def serving(self) -> ServingOptions:
        return {
            "rtc": self.rtc.settings(),
            "rtc_modes": self.rtc.modes(),
            "reuse": self.reuse,
            "speed": self.speed,
            "cache_mib": self.cache_mib,
        }

    def needed_robot(self) -> openpi.Robot:
        if self.robot is None:
            raise ConfigError("options.robot: layout openpi needs the robot's channels", path="options.robot")
        return self.robot.robot()

    def load(self, config: Config) -> LoadOptions:
        return LoadOptions(
            dtype=getattr(torch, config.dtype),
            device=config.device,
            allow_identity_normalization=self.allow_identity_normalization,
            tokenizer=None if self.tokenizer is None else Path(self.tokenizer).expanduser(),
        )
