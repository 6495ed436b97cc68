"""How is it said? hibari (a 7.9 MB voice distilled from Kokoro-82M, Apache-2.0), one clause at a time, at 24 kHz."""

from __future__ import annotations

import re

import numpy as np

RATE = 24_000
_SPOKEN = re.compile(r"[A-Za-z0-9]")
LOUD = 10 ** (-50 / 20)
LEAD_S, TAIL_S, OPEN_TAIL_S = 0.02, 0.12, 0.03
"""hibari puts 0.3 s of silence in front of a sentence and 0.4 s behind it: waiting, and too long a pause. The third one is
behind words without punctuation, which the next clause goes on from."""
_MOST_SENTENCES = 2
_SAME_WORDS = 4
"""In a row: of a sentence that says what was said before."""
_MIN_WORDS = 3
_MAX_WORDS = 10
_SOON_WORDS = 4
_LEANS = re.compile(
    r"\b(a|an|the|my|your|his|her|its|our|their|this|that|and|or|but|to|of|in|on|at|by|for|from|with|as|is|are|was|were|be|not)$",
    re.IGNORECASE,
)
"""Words after which nobody breathes: they belong to the next one."""
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*\s")
_CLAUSE_END = re.compile(r"[,;:.!?]+[\"')\]]*\s")


class Synthesizer:
    """Speech of a clause. Safe to call from several threads; the same text gives the same samples."""

    def __init__(self) -> None:
        from hibari import Hibari  # type: ignore[import-untyped]

        self._voice = Hibari()
        self("Ready.")  # loads the lexicon, half a second

    def __call__(self, text: str, speed: float = 1.0) -> np.ndarray:
        """float32 [n] in -1..1 at 24 kHz; nothing for text that has no English letter or digit, and never less."""
        if not _SPOKEN.search(text):
            return np.zeros(0, np.float32)
        audio = np.clip(self._voice(text, speed=speed, seed=0), -1.0, 1.0).astype(np.float32)
        return trim(audio, TAIL_S if _CLAUSE_END.search(f"{text} ") else OPEN_TAIL_S)


def trim(audio: np.ndarray, tail_s: float = TAIL_S) -> np.ndarray:
    """``audio`` from 20 ms before its first sample above -50 dBFS to ``tail_s`` behind the last one; nothing without one."""
    loud = np.flatnonzero(np.abs(audio) > LOUD)
    if not len(loud):
        return audio[:0]
    return audio[max(0, loud[0] - int(LEAD_S * RATE)) : loud[-1] + int(tail_s * RATE)]


def first_clause(text: str, *, final: bool) -> tuple[str, str]:
    """:func:`take_clause` for the beginning of an answer that still grows: waiting for it is silence, so four words are enough
    where the last one does not lean on the next. What it takes does not depend on how much more of the text is there."""
    for word in list(re.finditer(r"\S+\s+", text))[:_MAX_WORDS]:
        so_far = text[: word.end()]
        clause, left = take_clause(so_far, final=False)
        if clause:
            return clause, left + text[word.end() :]
        if len(so_far.split()) >= _SOON_WORDS and not _LEANS.search(so_far.rstrip()):
            return so_far.strip(), text[word.end() :]
    return (text.strip(), "") if final else ("", text)


def take_clause(text: str, *, final: bool) -> tuple[str, str]:
    """(what can be spoken now, the rest) of text that grows. The first is empty while a clause is still open.

    A clause ends at a sentence's end, at other punctuation after three words, or after ten words; ``final`` ends it too.
    Punctuation counts once something follows it, so that 3.5 stays whole.
    """
    ends = [m.end() for m in _SENTENCE_END.finditer(text)]
    ends += [m.end() for m in _CLAUSE_END.finditer(text) if len(text[: m.end()].split()) >= _MIN_WORDS]
    if ends:
        cut = min(ends)
        return text[:cut].strip(), text[cut:]
    if final:
        return text.strip(), ""
    words = list(re.finditer(r"\S+\s+", text))
    if len(words) >= _MAX_WORDS:
        cut = words[_MAX_WORDS - 1].end()
        return text[:cut].strip(), text[cut:]
    return "", text


def end_of_sentences(text: str) -> str:
    """``text`` without an unfinished sentence at its end; all of it where no sentence is finished."""
    ends = list(re.finditer(r"[.!?]+[\"')\]]*(?=\s|$)", text))
    return text[: ends[-1].end()] if ends else text


def enough_said(text: str) -> tuple[str, bool]:
    """``text`` up to the second sentence, or to one that says again what was said before, and whether it goes on no further.

    A small model that has begun to repeat itself does so for ever."""
    said: list[str] = []
    at = 0
    for end in _SENTENCE_END.finditer(text):
        sentence = text[at : end.end()].strip()
        if sentence in said or _said_again(text[:at], text[at : end.end()]):
            return text[:at].strip(), True
        said.append(sentence)
        if len(said) == _MOST_SENTENCES:
            return text[: end.end()].strip(), True
        at = end.end()
    if text[at:].strip() in said or _said_again(text[:at], text[at:]):
        return text[:at].strip(), True
    return text, False


def _said_again(before: str, sentence: str) -> bool:
    """Whether whole words of ``sentence`` were in a row in ``before``."""
    return not _runs(before).isdisjoint(_runs(sentence))


def _runs(text: str) -> set[tuple[str, ...]]:
    words = [word.strip(",;:.!?").lower() for word in re.findall(r"\S+(?=\s)", text)]
    return {tuple(words[i : i + _SAME_WORDS]) for i in range(len(words) - _SAME_WORDS + 1)}


def sentence_ended(text: str) -> bool:
    """Whether ``text`` is more than one sentence, or a whole one."""
    return _SENTENCE_END.search(f"{text} ") is not None


def word_times(clause: str, samples: int) -> list[tuple[str, int, int]]:
    """(word, first sample, end) of each word of a clause that sounds for ``samples``: by the number of letters, an estimate.

    A word but the first carries the blank before it, so that joined they are the clause."""
    words = re.findall(r"\S+", clause)
    weights = np.cumsum([0, *(len(word) + 1 for word in words)])
    at = (weights * samples // max(1, weights[-1])).tolist()
    return [(word if i == 0 else f" {word}", at[i], at[i + 1]) for i, word in enumerate(words)]
