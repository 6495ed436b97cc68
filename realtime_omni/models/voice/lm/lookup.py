"""What an answer may say next, from its question: prompt lookup decoding (Saxena 2023), for answers that repeat the question.

"What is the capital of France?" is answered "The capital of France is ...". Tokens that are guessed right cost one pass
together, and a wrong guess costs a pass that is a little longer; which tokens an answer has does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

AHEAD = 3
"""Tokens guessed at once: the int8 kernel takes four rows in little more than the time of one."""


class Lookup:
    """Guesses for a chat template's prompts. ``text_of`` a token; ``begin`` opens every turn, ``opening`` tokens long."""

    def __init__(self, text_of: Callable[[int], str], begin: int, opening: int) -> None:
        self._text_of = text_of
        self._begin = begin
        self._opening = opening

    def __call__(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """What followed, in the last question, on the word that the answer ``tokens`` has come to. Nothing once the answer
        goes its own way: words are looked for behind the last one that was found, since an answer repeats them in order."""
        question = [self._word(token) for token in self._question(prompt)]
        behind, repeats = 0, False
        for token in tokens:
            word = self._word(token)
            repeats = bool(word) and word in question[behind:]
            if repeats:
                behind = question.index(word, behind) + 1
        if not repeats:
            return []
        ahead = self._question(prompt)[behind : behind + AHEAD]
        return list(takewhile(self._word, ahead))

    def _question(self, prompt: Sequence[int]) -> Sequence[int]:
        """The turn before the one that the prompt opens, without its own opening and with its end."""
        begins = [i for i, token in enumerate(prompt) if token == self._begin]
        return prompt[begins[-2] + self._opening : begins[-1]] if len(begins) > 1 else ()

    def _word(self, token: int) -> str:
        """Letters and digits; empty for a token without any."""
        text = self._text_of(token).strip().lower()
        return text if any(c.isalnum() for c in text) else ""
