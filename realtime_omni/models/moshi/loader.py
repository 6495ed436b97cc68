"""From a recipe to a loaded Moshi: which files of a checkpoint folder are which, and what their sizes are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.capture import check_kernels, has_kernels
from realtime_omni.models.common.packing import fingerprint_of_files
from realtime_omni.models.moshi.config import MOSHI_7B, LMConfig, MimiConfig, mimi_config, read_config
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.model import Moshi, Settings
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.prompts import read_voices
from realtime_omni.models.moshi.sampling import AUDIO, TEXT, Chance
from realtime_omni.models.moshi.text import SentencePieces
from realtime_omni.models.moshi.weights import depth_steps_in, load_lm, load_mimi

if TYPE_CHECKING:
    from realtime_omni.config import Config

log = logging.getLogger(__name__)
Temperature = Annotated[float, Meta(ge=0, le=10)]
TopK = Annotated[int, Meta(ge=0)]


class MoshiOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``.

    ``checkpoint``: a folder with the language model's safetensors, Mimi's, and the SentencePiece model, as kyutai and NVIDIA
    publish them; ``lm``, ``mimi``, ``tokenizer``: their names in it. ``voices``: a folder in it. Temperature 0: the likeliest
    token; top_k 0: among all. ``speed``: ``graphs``: the stages of a tick are CUDA graphs; ``plain``: none are;
    ``auto``: graphs on a GPU.
    """

    checkpoint: str
    lm: str = "model.safetensors"
    mimi: str = "tokenizer-e351c8d8-checkpoint125.safetensors"
    tokenizer: str = "tokenizer_spm_32k_3.model"
    voices: str = "voices"
    text_temperature: Temperature = TEXT.temperature
    text_top_k: TopK = TEXT.top_k
    audio_temperature: Temperature = AUDIO.temperature
    audio_top_k: TopK = AUDIO.top_k
    speed: Literal["auto", "plain", "graphs"] = "auto"


def load(config: Config) -> Moshi:
    """Raises ConfigError with what is missing or does not fit."""
    options = config.options_as(MoshiOptions)
    folder = Path(options.checkpoint).expanduser()
    if not options.checkpoint or not folder.is_dir():
        raise ConfigError("options.checkpoint must be a folder with Moshi's files", path="options.checkpoint")
    files = {name: folder / name for name in (options.lm, options.mimi, options.tokenizer)}
    missing = [name for name, file in files.items() if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder.name} lacks {', '.join(missing)}", path="options.checkpoint")
    lm_file, mimi_file = files[options.lm], files[options.mimi]
    sizes = lm_sizes(folder, lm_file)
    with torch.device("meta"):
        lm = MoshiLM(sizes)
        mimi = Mimi(mimi_sizes(folder), sizes.own_streams)
    dtype = getattr(torch, config.dtype)
    log.info("loading %s: %.1f billion parameters", folder.name, sum(p.numel() for p in lm.parameters()) / 1e9)
    load_lm(lm, lm_file, dtype=dtype, device=config.device)
    load_mimi(mimi, mimi_file, device=config.device)
    settings = Settings(
        Chance(options.text_temperature, options.text_top_k), Chance(options.audio_temperature, options.audio_top_k)
    )
    voices = read_voices(folder / options.voices, sizes, config.device)
    used = [*files.values(), *sorted((folder / options.voices).glob("*.safetensors"))]
    return Moshi(
        lm,
        mimi,
        SentencePieces(files[options.tokenizer]),
        settings,
        voices=voices,
        device=config.device,
        captured_rows=config.engine.max_batch if _has_graphs(options.speed, config.device) else None,
        fingerprint=fingerprint_of_files(used, repr((sizes, settings, config.dtype))),
    )


def _has_graphs(speed: str, device: str) -> bool:
    """Raises ConfigError where graphs are asked for on a GPU and torch has come without Triton."""
    if speed == "graphs":
        check_kernels(device, "options.speed")
    return speed == "graphs" or (speed == "auto" and device.startswith("cuda") and has_kernels(device))


def lm_sizes(folder: Path, file: Path) -> LMConfig:
    """From ``config.json``; where it has none they are the 7B model's, with as many depth steps as the file."""
    found = read_config(folder)
    return msgspec.structs.replace(MOSHI_7B, dep_q=depth_steps_in(file) or MOSHI_7B.dep_q) if found is None else found


def mimi_sizes(folder: Path) -> MimiConfig:
    """From ``mimi_config.json``, else the published ones. Raises ConfigError."""
    file = folder / "mimi_config.json"
    if not file.exists():
        return MimiConfig()
    try:
        return mimi_config(json.loads(file.read_bytes()))
    except ValueError:
        raise ConfigError("mimi_config.json is no JSON", path="mimi_config.json") from None


__all__ = ["MoshiOptions", "load"]
