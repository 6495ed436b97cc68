"""pi0 and pi0.5 as models of the engine: a checkpoint folder becomes a policy that serves.

``tiny/`` is one that comes with the package: the policy that ``recipes/tiny_policy`` trains, 4.9 million parameters in the
layout that any other has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla.options import VLAOptions
from realtime_omni.models.common.vla.policy import Policy
from realtime_omni.models.common.vla.serving import VLAModel
from realtime_omni.models.pi0 import loader

if TYPE_CHECKING:
    from realtime_omni.config import Config

TINY_POLICY = Path(__file__).parent / "tiny"


class Pi0(VLAModel):
    """Catalog name ``pi0``."""

    @classmethod
    def from_config(cls, config: Config) -> Pi0:
        return cls._load(config, "pi0", "pi0")

    @classmethod
    def _load(cls, config: Config, name: str, family: str, shipped: Path | None = None) -> Pi0:
        """``shipped``: the folder when the options name none."""
        options = config.options_as(VLAOptions)
        folder = shipped if shipped is not None and not options.checkpoint else options.folder()
        load = options.load(config)
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
        model.capture(config.engine.max_batch)
        return model


class Pi05(Pi0):
    """Catalog name ``pi0.5``."""

    @classmethod
    def from_config(cls, config: Config) -> Pi05:
        loaded = cls._load(config, "pi0.5", "pi05")
        assert isinstance(loaded, cls)
        return loaded


class TinyPolicy(Pi0):
    """Catalog name ``tiny-policy``: a pi0 that brings its weights; ``options.checkpoint`` names others of its recipe."""

    @classmethod
    def from_config(cls, config: Config) -> TinyPolicy:
        loaded = cls._load(config, "tiny-policy", "pi0", TINY_POLICY)
        assert isinstance(loaded, cls)
        return loaded
