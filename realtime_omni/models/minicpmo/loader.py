"""From a recipe to a loaded MiniCPM-o: which files of a checkpoint folder are which, and its vocoder or the one that a recipe
names."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import torch
from msgspec import Meta

from realtime_omni.errors import ArgumentError, ConfigError, ErrorCode, OmniError
from realtime_omni.models.common.own_code import told
from realtime_omni.models.common.packing import fingerprint_of_files
from realtime_omni.models.minicpmo.config import Config45, read_config
from realtime_omni.models.minicpmo.ears import Ears
from realtime_omni.models.minicpmo.model import MiniCPMO
from realtime_omni.models.minicpmo.mouth import Vocoder
from realtime_omni.models.minicpmo.network import Language
from realtime_omni.models.minicpmo.sampling import CODES, TEXT, CodeChance, TextChance
from realtime_omni.models.minicpmo.settings import Settings
from realtime_omni.models.minicpmo.sizes import unit_tokens
from realtime_omni.models.minicpmo.state import MOST_UNITS
from realtime_omni.models.minicpmo.talker import Talker
from realtime_omni.models.minicpmo.vocabulary import TokenizerFile
from realtime_omni.models.minicpmo.vocoder import token2wav
from realtime_omni.models.minicpmo.voices import read_voices, tokens_of
from realtime_omni.models.minicpmo.weights import Checkpoint, load_networks

if TYPE_CHECKING:
    from realtime_omni.config import Config

log = logging.getLogger(__name__)
Temperature = Annotated[float, Meta(ge=0, le=10)]
Factor = Annotated[float, Meta(gt=0, le=10)]


class MiniCPMOOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``.

    ``checkpoint``: a folder as OpenBMB publishes it. ``vocoder``: ``package.module:factory`` of what makes sound of codes,
    called with the folder, the device and ``vocoder_options``; see :class:`~realtime_omni.models.minicpmo.mouth.Vocoder`.
    Without one, the checkpoint's own, converted: :func:`~realtime_omni.models.minicpmo.vocoder.token2wav.open_folder`.
    ``voices``: a folder in the checkpoint with ``NAME.wav``. ``unit_words``: tokens that the model writes in a second.
    ``prompt_tokens``: room of a call's prompt. ``graphs``: both transformers' passes, and whole seconds of the checkpoint's
    own vocoder, are CUDA graphs; None: on a GPU.
    The others: see :mod:`.sampling`; temperature 0: the likeliest.
    """

    checkpoint: str
    vocoder: str = ""
    vocoder_options: dict[str, Any] = {}
    voices: str = "voices"
    unit_words: Annotated[int, Meta(ge=3, le=200)] = 20
    prompt_tokens: Annotated[int, Meta(ge=16, le=8192)] = 256
    text_temperature: Temperature = TEXT.temperature
    text_top_k: Annotated[int, Meta(ge=1)] = TEXT.top_k
    text_top_p: Annotated[float, Meta(gt=0, le=1)] = TEXT.top_p
    text_repetition: Factor = TEXT.repetition
    turn_length: Factor = TEXT.length
    code_temperature: Temperature = CODES.temperature
    code_repetition: Factor = CODES.repetition
    graphs: bool | None = None


def load(config: Config) -> MiniCPMO:
    """Raises ConfigError with what is missing or does not fit."""
    options = config.options_as(MiniCPMOOptions)
    folder = Path(options.checkpoint).expanduser()
    if not options.checkpoint or not folder.is_dir():
        raise ConfigError("options.checkpoint must be a folder with MiniCPM-o's files", path="options.checkpoint")
    sizes = read_config(folder)
    settings = settings_of(options, config)
    check_window(config, sizes, settings)
    words = TokenizerFile(folder)
    graphs = config.device.startswith("cuda") if options.graphs is None else options.graphs
    captured_rows = config.engine.max_batch if graphs else None
    vocoder = open_vocoder(options, folder, config.device, sizes.audio_tokens - 1, captured_rows)
    with torch.device("meta"):
        language = Language(sizes.language, sizes.vocab_size)
        ears = Ears(sizes.ears, sizes.language.hidden_size)
        talker = Talker(sizes)
    checkpoint = Checkpoint(folder)
    parameters = sum(p.numel() for network in (language, ears, talker) for p in network.parameters())
    log.info("loading %s: %.1f billion parameters", folder.name, parameters / 1e9)
    dtype = getattr(torch, config.dtype)
    load_networks(checkpoint, language, ears, talker, dtype=dtype, device=config.device)
    sounds = read_voices(folder / options.voices)
    check_voices(vocoder, sounds)
    used = [*checkpoint.files, folder / "tokenizer.json", *sorted((folder / options.voices).glob("*.wav"))]
    decides = replace(settings, rewind_units=0)  # how far a call may go back decides nothing of how it goes on
    parts = (repr((sizes, decides, config.dtype)), vocoder.fingerprint)
    return MiniCPMO(
        sizes,
        language,
        ears,
        talker,
        words,
        vocoder,
        settings,
        voices={name: tokens_of(ears, sound) for name, sound in sounds.items()},
        device=config.device,
        fingerprint=fingerprint_of_files(used, *parts),
        captured_rows=captured_rows,
    )


def settings_of(options: MiniCPMOOptions, config: Config) -> Settings:
    """With what the recipe says elsewhere of windows and rewinds."""
    default = Settings()
    window = config.kv.window_frames
    return Settings(
        text=TextChance(
            options.text_temperature,
            options.text_top_k,
            options.text_top_p,
            options.text_repetition,
            options.turn_length,
        ),
        codes=CodeChance(options.code_temperature, options.code_repetition),
        unit_words=options.unit_words,
        prompt_tokens=options.prompt_tokens,
        window_units=default.window_units if window is None else window,
        rewind_units=config.kv.rewind_blocks,
    )


def check_window(config: Config, sizes: Config45, settings: Settings) -> None:
    """Raises ConfigError where a call would see more than the language model reads, or its prompt would slide away."""
    if config.kv.sink_frames is not None:
        raise ConfigError(
            "what stays of a call is its prompt: options.prompt_tokens says how long", path="kv.sink_frames"
        )
    _, most = unit_tokens(sizes, settings)
    tokens = (-(-settings.prompt_tokens // most) + settings.window_units) * most
    positions, units = sizes.language.max_position_embeddings, MOST_UNITS - settings.rewind_units
    if tokens > positions or settings.window_units > units:
        raise ConfigError(
            f"prompt and window may have {tokens} tokens in {settings.window_units} seconds; "
            f"the model reads {positions}, and {units} seconds",
            path="kv.window_frames",
        )


def check_voices(vocoder: Vocoder, names: Iterable[str]) -> None:
    """Raises ConfigError for a voice that the model hears and the vocoder does not speak in, or whatever else it raises."""
    try:
        for name in names:
            vocoder.begin(name)
    except ArgumentError as error:
        raise ConfigError(f"{error}", path="options.voices") from None
    except Exception as error:
        why = told(error, type(vocoder).__module__)
        raise ConfigError(f"the vocoder cannot begin: {why}", path="options.vocoder") from error


def open_vocoder(
    options: MiniCPMOOptions, folder: Path, device: str, codes: int, captured_rows: int | None = None
) -> Vocoder:
    """Of so many codes. Raises ConfigError: there is none of that name, or it refuses."""
    module, _, name = options.vocoder.partition(":")
    path = "options.vocoder"
    if not module:
        return _own_vocoder(options, folder, device, codes, captured_rows)
    if not name:
        raise ConfigError("options.vocoder must be package.module:factory; see recipes/minicpm-o.md", path=path)
    try:
        factory = getattr(import_module(module), name)
    except Exception as error:
        why = told(error, module)
        raise ConfigError(f"the vocoder cannot be imported: {why}", code=ErrorCode.MODEL_UNKNOWN, path=path) from error
    try:
        vocoder = factory(folder, device, **options.vocoder_options)
        lacking = [name for name in vars(Vocoder) if not name.startswith("_") and not hasattr(vocoder, name)]
    except OmniError:
        raise
    except Exception as error:
        raise ConfigError(f"the vocoder could not be loaded: {told(error, module)}", path=path) from error
    if lacking:
        raise ConfigError(f"the vocoder lacks {', '.join(lacking)}", path=path)
    return cast("Vocoder", vocoder)


def _own_vocoder(options: MiniCPMOOptions, folder: Path, device: str, codes: int, captured_rows: int | None) -> Vocoder:
    try:
        wanted = msgspec.convert(options.vocoder_options, token2wav.Token2WavOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}", path="options.vocoder_options") from None
    own = token2wav.open_folder(folder, device, wanted, captured_rows)
    if own.flow.sizes.codes < codes:
        raise ConfigError(
            f"the talker has {codes} codes, the vocoder {own.flow.sizes.codes}", path="options.checkpoint"
        )
    return own


__all__ = ["MiniCPMOOptions", "load"]
