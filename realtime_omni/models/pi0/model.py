"""pi0 and pi0.5 as models of the engine: a checkpoint folder becomes a policy that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla.options import VLAOptions
from realtime_omni.models.common.vla.policy import Policy
from realtime_omni.models.common.vla.serving import VLAModel
from realtime_omni.models.pi0 import loader

if TYPE_CHECKING:
    from realtime_omni.config import Config


class Pi0(VLAModel):
    """Catalog name ``pi0``."""

    @classmethod
    def from_config(cls, config: Config) -> Pi0:
        return cls._load(config, "pi0", "pi0")

    @classmethod
    def _load(cls, config: Config, name: str, family: str) -> Pi0:
        options = config.options_as(VLAOptions)
        folder, load = options.folder(), options.load(config)
        policy: Policy
        if options.layout == "openpi":
            policy = loader.load_openpi(folder, load, options.needed_robot())
        else:
            policy = loader.load_lerobot(folder, load)
        if policy.family != family:
            raise ConfigError(
                f"options.checkpoint: a {policy.family} checkpoint, not {family}", path="options.checkpoint"
            )
        model = cls(name, policy, device=config.device, **options.serving())
        model.warm_up(config.engine.max_batch)
        return model


class Pi05(Pi0):
    """Catalog name ``pi0.5``."""

    @classmethod
    def from_config(cls, config: Config) -> Pi05:
        loaded = cls._load(config, "pi0.5", "pi05")
        assert isinstance(loaded, cls)
        return loaded
