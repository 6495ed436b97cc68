"""SmolVLA as a model of the engine: a checkpoint folder becomes a policy that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.vla.options import VLAOptions
from realtime_omni.models.common.vla.serving import VLAModel
from realtime_omni.models.smolvla import loader

if TYPE_CHECKING:
    from realtime_omni.config import Config


class SmolVLA(VLAModel):
    """Catalog name ``smolvla``."""

    @classmethod
    def from_config(cls, config: Config) -> SmolVLA:
        options = config.options_as(VLAOptions)
        if options.layout != "lerobot":
            raise ConfigError("options.layout: SmolVLA has LeRobot's layout alone", path="options.layout")
        policy = loader.load_lerobot(options.folder(), options.load(config))
        model = cls("smolvla", policy, device=config.device, **options.serving())
        model.capture(config.engine.max_batch)
        return model
