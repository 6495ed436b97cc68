"""The tokens that structure a call, and text to tokens and back: the checkpoint's ``tokenizer.json``.

A unit in the language model's context: ``<unit>``, the second's sound, what the model writes, one of three ends, ``</unit>``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from realtime_omni.errors import ConfigError

BROKEN = "\ufffd"
"""What a part of a letter reads as."""
MOST_UNREAD = 8
"""Tokens of a letter that is not complete: a letter has four bytes."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Token numbers. ``forbidden``: never written by choice."""

    unit: int
    unit_end: int
    listen: int
    speak: int
    tts_bos: int
    chunk_eos: int
    chunk_tts_eos: int
    turn_eos: int
    forbidden: tuple[int, ...] = ()
    ends: frozenset[int] = field(init=False)
    """What ends what the model writes in a unit."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", frozenset((self.listen, self.chunk_eos, self.chunk_tts_eos)))


class Words(Protocol):
    """A vocabulary."""

    @property
    def marks(self) -> Marks: ...

    def tokens(self, text: str) -> list[int]:
        """Of a text in which ``<|im_start|>`` and its like stand for themselves."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Without the tokens that structure a call. Ends with U+FFFD where a letter is not complete yet."""
        ...


def readable(words: Words, tokens: tuple[int, ...], *, last: bool) -> tuple[str, tuple[int, ...]]:
    """What can be read of the tokens, and those that make no whole letter yet; ``last``: none will come."""
    text = words.text(tokens)
    if last or not text.endswith(BROKEN):
        return text, ()
    for kept in range(len(tokens) - 1, max(len(tokens) - MOST_UNREAD, 0) - 1, -1):
        whole = words.text(tokens[:kept])
        if not whole.endswith(BROKEN):
            return whole, tokens[kept:]
    return text, ()


MARKS = {
    "unit": "<unit>",
    "unit_end": "</unit>",
    "listen": "<|listen|>",
    "speak": "<|speak|>",
    "tts_bos": "<|tts_bos|>",
    "chunk_eos": "<|chunk_eos|>",
    "chunk_tts_eos": "<|chunk_tts_eos|>",
    "turn_eos": "<|turn_eos|>",
}


class TokenizerFile:
    """A ``tokenizer.json`` of the ``tokenizers`` library; ``tokenizer_config.json`` beside it may list ``bad_token_ids``."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: no such file, a mark that it does not know, or the library is not installed."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError("MiniCPM-o's text needs tokenizers: pip install 'realtime-omni[vla]'") from None
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder.name} lacks tokenizer.json", path="tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exceptions
            raise ConfigError(f"tokenizer.json cannot be read: {error}", path="tokenizer.json") from None
        marks = {**MARKS, "tts_pad": "<|tts_pad|>"}
        known: dict[str, int | None] = {name: self._tokenizer.token_to_id(mark) for name, mark in marks.items()}
        missing = [marks[name] for name, token in known.items() if token is None]
        if missing:
            raise ConfigError(f"tokenizer.json knows no {', '.join(missing)}", path="tokenizer.json")
        found = {name: token for name, token in known.items() if token is not None}
        pad = found.pop("tts_pad")
        self._marks = Marks(forbidden=(pad, *_bad_tokens(folder)), **found)
        self._structure = frozenset((*found.values(), pad))

    @property
    def marks(self) -> Marks:
        return self._marks

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: Sequence[int]) -> str:
        kept = [token for token in tokens if token not in self._structure]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=True)
        return text


def _bad_tokens(folder: Path) -> tuple[int, ...]:
    try:
        raw = json.loads((folder / "tokenizer_config.json").read_bytes())
        return tuple(int(token) for token in raw.get("bad_token_ids", ()))
    except OSError:
        return ()
    except (ValueError, TypeError, AttributeError):
        raise ConfigError("tokenizer_config.json cannot be read", path="tokenizer_config.json") from None
