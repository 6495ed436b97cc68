"""Text tokens to text and back: the checkpoint's SentencePiece model."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from realtime_omni.errors import ConfigError


class Pieces(Protocol):
    """A vocabulary."""

    def text(self, token: int) -> str:
        """What a token reads, its leading space included; empty for a control token."""
        ...

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...


class SentencePieces:
    """A SentencePiece model. A byte token outside ASCII, a part of a letter that the vocabulary lacks, reads as U+FFFD."""

    def __init__(self, file: Path) -> None:
        """Raises ConfigError: no such model, or the library is not installed."""
        try:
            import sentencepiece
        except ImportError:
            raise ConfigError("Moshi's text needs sentencepiece: pip install 'realtime-omni[vla]'") from None
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError):
            raise ConfigError(f"{file.name}: not a sentencepiece model", path=file.name) from None

    @property
    def count(self) -> int:
        return int(self._model.get_piece_size())

    def text(self, token: int) -> str:
        if not 0 <= token < self.count or self._model.is_control(token):
            return ""
        piece: str = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            value = int(piece[1:-1], 16)
            return chr(value) if value < 0x80 else "\ufffd"
        return piece.replace("▁", " ")

    def tokens(self, text: str) -> list[int]:
        return [int(token) for token in self._model.encode(text)]
