"""What a call begins with, before its first frame: a voice and a text, one step of the language model after another.

PersonaPlex is told who it is in its own streams: the voice speaks, half a second of silence, the text one token a step between
``<system>`` and ``<system>``, half a second of silence; the user's streams meanwhile hold a tone. Source of order and codes:
NVIDIA's PersonaPlex, read as facts. A voice is a safetensors file: ``embeddings`` [n, D], what the first layer reads
in each step, or ``codes`` int [n, N], what the agent says. Everything is a function of (voice, text), so a state needs no
more than how far it has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from realtime_omni.errors import ConfigError
from realtime_omni.models.moshi.config import LMConfig

SILENCE = (948, 243, 1178, 546, 1736, 1030, 1978, 2008)
"""A frame of silence in Mimi's codes."""
TONE = (430, 1268, 381, 1611, 1095, 1495, 56, 472)
"""A frame of the tone that stands for the user during prompts."""
PAUSE_STEPS = 6
MARK = "<system>"
MOST_TEXT_TOKENS = 1000
MOST_VOICE_STEPS = 750


@dataclass(frozen=True, slots=True)
class Voice:
    """Either kind; see the module. Tensors are on the model's device."""

    embeddings: Tensor | None
    codes: Tensor | None

    @property
    def steps(self) -> int:
        given = self.embeddings if self.embeddings is not None else self.codes
        return 0 if given is None else len(given)


@dataclass(frozen=True, slots=True)
class PromptCodes:
    """Frames that stand in for a speaker: agent's silence, user's tone, one code a codebook."""

    silence: tuple[int, ...] = SILENCE
    tone: tuple[int, ...] = TONE


PROMPT_CODES = PromptCodes()


def framed(text: str) -> str:
    """The text between its marks; one that has them already stays as it is."""
    text = text.strip()
    return text if text.startswith(MARK) and text.endswith(MARK) and len(text) > len(MARK) else f"{MARK} {text} {MARK}"


def length(voice: Voice | None, text: Sequence[int]) -> int:
    """Steps of a whole prompt; 0 without voice and text."""
    spoken = voice.steps + PAUSE_STEPS if voice is not None else 0
    return spoken + (len(text) + PAUSE_STEPS if text else 0)


def column(
    config: LMConfig, codes: PromptCodes, voice: Voice | None, text: Sequence[int], step: int
) -> tuple[list[int], Tensor | None]:
    """What all streams hold in a step, [K], and what the first layer reads instead of their embeddings, [D] or None."""
    agent, token, given = list(codes.silence), config.existing_text_padding_id, None
    spoken = 0 if voice is None else voice.steps
    if voice is not None and step < spoken:
        if voice.embeddings is not None:
            given = voice.embeddings[step]
        elif voice.codes is not None:
            agent = voice.codes[step].tolist()
    else:
        at = step - (spoken + PAUSE_STEPS if voice is not None else 0)
        if 0 <= at < len(text):
            token = text[at]
    return [token, *agent, *codes.tone], given


def read_voices(folder: Path, config: LMConfig, device: torch.device | str) -> dict[str, Voice]:
    """Every ``NAME.safetensors`` of a folder that may not be there, by name. Raises ConfigError."""
    return {file.stem: _read_voice(file, config, device) for file in sorted(folder.glob("*.safetensors"))}


def _read_voice(file: Path, config: LMConfig, device: torch.device | str) -> Voice:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError):
        raise ConfigError(f"{file.name}: cannot be read as safetensors", path=file.name) from None
    embeddings, codes = tensors.get("embeddings"), tensors.get("codes")
    if embeddings is not None:
        embeddings = embeddings.reshape(-1, embeddings.shape[-1]).to(device)
    given = embeddings if embeddings is not None else codes
    wide = config.dim if embeddings is not None else config.own_streams
    if given is None or given.dim() != 2 or given.shape[1] != wide or not 0 < len(given) <= MOST_VOICE_STEPS:
        raise ConfigError(
            f"{file.name}: a voice has embeddings [n, {config.dim}] or codes [n, {config.own_streams}]", path=file.name
        )
    if embeddings is None and (given.is_floating_point() or int(given.min()) < 0 or int(given.max()) >= config.card):
        raise ConfigError(f"{file.name}: codes are whole numbers below {config.card}", path=file.name)
    return Voice(embeddings, codes if embeddings is None else None)
