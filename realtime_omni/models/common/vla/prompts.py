"""The text that a policy was trained to read, and the tokens of it.

pi0 and SmolVLA read the instruction and a line end; pi0.5 reads the instruction and the state, in words. A tokenizer is
whatever turns that text into ids: the checkpoint's own ``tokenizer.json`` or sentencepiece ``tokenizer.model``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from realtime_omni.errors import BackendUnavailable, ConfigError

STATE_BINS = 256


class PromptForm(StrEnum):
    """What the text looks like."""

    LINE = "line"
    """The instruction as it is, ended by a line end (lerobot's pi0, SmolVLA)."""
    CLEAN_LINE = "clean_line"
    """The same of the cleaned instruction (openpi's pi0)."""
    STATE = "state"
    """``Task: ..., State: ...;`` and a second line ``Action: `` (pi0.5)."""


def prompt_text(form: PromptForm, instruction: str, state: NDArray[np.float32]) -> str:
    """The text of one observation; ``state`` [D] is normalised and not padded."""
    if form is PromptForm.LINE:
        return instruction if instruction.endswith("\n") else f"{instruction}\n"
    cleaned = instruction.strip().replace("_", " ").replace("\n", " ")
    if form is PromptForm.CLEAN_LINE:
        return f"{cleaned}\n"
    words = " ".join(str(level) for level in state_levels(state))
    return f"Task: {cleaned}, State: {words};\nAction: "


def state_levels(state: NDArray[np.float32]) -> list[int]:
    """Each channel as the number of its bin of 256 over [-1, 1]; below is -1, above is 255."""
    edges = np.linspace(-1, 1, STATE_BINS + 1)[:-1]
    return [int(level) for level in np.digitize(state, bins=edges) - 1]


class Tokenizer(Protocol):
    """Text to ids, special tokens included."""

    def encode(self, text: str) -> Sequence[int]: ...


class JsonTokenizer:
    """A ``tokenizer.json`` of the ``tokenizers`` library; the file says which special tokens are added."""

    def __init__(self, path: Path) -> None:
        tokenizers = _library("tokenizers")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception:  # the library raises bare Exception
            raise ConfigError(f"{path.name}: not a tokenizer file", path=path.name) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids


class PieceTokenizer:
    """A sentencepiece model as openpi uses PaliGemma's: a beginning-of-text token, then the text."""

    def __init__(self, path: Path) -> None:
        sentencepiece = _library("sentencepiece")
        try:
            self._pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError):
            raise ConfigError(f"{path.name}: not a sentencepiece model", path=path.name) from None

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._pieces.encode(text, add_bos=True)
        return ids


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")


def load_tokenizer(path: Path) -> Tokenizer:
    """From a file, or from the first of ``TOKENIZER_FILES`` in a folder. Raises ConfigError when there is none."""
    if path.is_dir():
        found = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        if not found:
            raise ConfigError(
                f"no tokenizer: the checkpoint has neither {' nor '.join(TOKENIZER_FILES)}; put one there or name it "
                "with the option tokenizer",
                path="tokenizer",
            )
        path = found[0]
    elif not path.is_file():
        raise ConfigError(f"no tokenizer: {path.name} does not exist", path="tokenizer")
    return PieceTokenizer(path) if path.suffix == ".model" else JsonTokenizer(path)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise BackendUnavailable(f"this tokenizer needs {name}: pip install 'realtime-omni[vla]'") from None
