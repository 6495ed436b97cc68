"""Text and tokens of the language model: byte-level BPE built from a GGUF file's fields, and its chat template.

The template is ChatML: ``<|im_start|>role\\ntext<|im_end|>\\n`` for every turn, then ``<|im_start|>assistant\\n``. It is
applied to tokens, not to text, so that nothing a user says can become a control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from realtime_omni.models.voice.lm.lookup import Lookup
from realtime_omni.models.voice.speaker import Role
from realtime_omni.models.voice.speech import sentence_ended

_FOR_THE_EYE = frozenset('"*#:\n')
_ONCE = 4
"""Tokens of a sentence. Fewer would forbid what is said twice for good reason, as "the capital of"."""
_CONTROL = 3  # GGUF's token type of a control token


def describe_tokenizer(fields: dict[str, Any]) -> str:
    """JSON of the tokenizer of a GGUF file (``gpt2`` model, ``smollm`` splitting: digits one by one, then bytes)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces: Sequence[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(pieces, fields["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(p, special=True) for p, kind in kinds if kind == _CONTROL])
    return str(tokenizer.to_str())


class ChatTokens:
    """A tokenizer with the template's tokens at hand."""

    def __init__(self, description: str) -> None:
        """``description``: JSON as :func:`describe_tokenizer` gives it. Raises ValueError without the template's tokens."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_str(description)
        self._tokenizer.encode_special_tokens = True  # control tokens in a user's text are letters
        begin, end = (self._tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
        if begin is None or end is None:
            raise ValueError("the tokenizer has no chat template tokens")
        self._begin, self.end = int(begin), int(end)
        self.stops = frozenset({self.end, 0})  # 0: <|endoftext|>
        self._newline = self.encode("\n")

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of plain text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; an incomplete character at the end is left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True)).rstrip("�")

    def unspoken(self) -> tuple[int, ...]:
        """Tokens with a mark that is for the eye: of quotations, lists, headings and scripts, and the ends of lines."""
        return tuple(t for t in range(self.size) if t not in self.stops and set(self.decode((t,))) & _FOR_THE_EYE)

    def circles(self, tokens: Sequence[int]) -> list[int]:
        """What would have a first sentence say the same tokens in a row again (no repeated n-grams, Paulus et al. 2017). Later
        ones may: there the answer ends (:func:`.speech.enough_said`) instead of saying something else, which is seldom true."""
        last = tokens[len(tokens) - _ONCE + 1 :]
        follow = [tokens[i + _ONCE - 1] for i in range(len(tokens) - _ONCE + 1) if tokens[i : i + _ONCE - 1] == last]
        return [] if follow and sentence_ended(self.decode(tokens)) else follow

    def lookup(self) -> Lookup:
        """Guesses of answers."""
        return Lookup(lru_cache(4096)(lambda token: self.decode((token,))), self._begin, len(self.opening("user")))

    def turn(self, role: Role, text: str) -> tuple[int, ...]:
        """A whole turn."""
        return (*self.opening(role), *self.encode(text), self.end, *self._newline)

    def opening(self, role: Role) -> tuple[int, ...]:
        """What comes before a turn's text."""
        return (self._begin, *self.encode(f"{role}\n"))
