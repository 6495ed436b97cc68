"""The text encoder of the Wan family: UMT5, from a checkpoint in diffusers' or transformers' layout.

Owns tokens and their bound. A prompt becomes 512 rows of features, zero behind its last token. The modules are transformers'
(imported when one is loaded); whatever has :meth:`TextEncoder.check` and :meth:`TextEncoder.encode` may stand in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.models.common.pretrained import load_pretrained

TOKENS = 512


class TextEncoder(Protocol):
    """Prompts to features."""

    def check(self, prompt: str) -> None:
        """Raises ArgumentError for a prompt that does not fit."""
        ...

    def encode(self, prompt: str) -> Tensor:
        """[TOKENS, text_width], zero behind the prompt's last token."""
        ...


class UMT5:
    """``folder`` holds ``tokenizer`` and ``text_encoder``, as a diffusers pipeline does."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> None:
        """Raises ConfigError, naming what is missing."""
        try:
            from transformers import AutoTokenizer, UMT5EncoderModel
        except ImportError:
            raise ConfigError("Wan's text encoder needs the package transformers", path="options.checkpoint") from None
        self._tokenizer: Any = _tokenizer(AutoTokenizer, folder / "tokenizer")
        self._model: Any = load_pretrained(
            UMT5EncoderModel,
            folder / "text_encoder",
            what="text encoder",
            path="options.checkpoint",
            dtype=dtype,
            device=device,
        )
        self._device = device

    def check(self, prompt: str) -> None:
        count = len(self._ids(prompt))
        if count > TOKENS:
            raise ArgumentError(f"the prompt has {count} tokens, at most {TOKENS} are read", path="prompt")

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        ids = self._ids(prompt)[:TOKENS]
        found: Tensor = self._model(input_ids=torch.tensor([ids], device=self._device)).last_hidden_state[0]
        padded = found.new_zeros(TOKENS, found.shape[-1])
        padded[: len(ids)] = found
        return padded

    def _ids(self, prompt: str) -> list[int]:
        return list(self._tokenizer(prompt, add_special_tokens=True).input_ids)


def _tokenizer(kind: Any, folder: Path) -> Any:
    if not folder.is_dir():
        raise ConfigError(
            f"options.checkpoint: no folder {folder.name!r} beside the weights", path="options.checkpoint"
        )
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises its own, and bare ones
        raise ConfigError(
            f"no tokenizer can be read from {folder.name} ({type(error).__name__})", path="options.checkpoint"
        ) from None
