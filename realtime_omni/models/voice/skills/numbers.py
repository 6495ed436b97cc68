"""Numbers in speech: words to digits and back to what is pleasant to hear, and the value of "three plus four times five"."""

from __future__ import annotations

import re
from fractions import Fraction
from math import isqrt

_UNITS = {
    word: value
    for value, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"  # noqa: SIM905
        " eighteen nineteen".split()
    )
}
_TENS = {
    word: value * 10
    for value, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)  # noqa: SIM905
}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_WORDS = {*_UNITS, *_TENS, *_SCALES, "hundred"}
_OPERATORS = (
    (r"(?:to the power of|raised to(?: the power of)?)", "^"),
    (r"(?:multiplied by|times|x)", "*"),
    (r"(?:divided by|over)", "/"),
    (r"(?:plus|and)", "+"),
    (r"(?:minus|less|take away)", "-"),
    (r"percent of", "%*"),
)
_TOKEN = re.compile(r"\d+(?:\.\d+)?|%\*|[-+*/^]")
_MAX_POWER = 64
_MAX_DIGITS = 15


class NotArithmetic(ValueError):
    """The text is no sum; something else may understand it."""


def digits(text: str) -> str:
    """``text`` in lower case with its number words as digits: "twenty-five point five" becomes "25.5"."""
    words = text.replace("-", " ").split()
    out: list[str] = []
    at = 0
    while at < len(words):
        value, used = _number(words, at)
        if used == 0:
            out.append(words[at])
            at += 1
            continue
        at += used
        spoken = str(value)
        if at + 1 < len(words) and words[at] == "point" and words[at + 1] in _UNITS:
            at += 1
            decimals = ""
            while at < len(words) and _UNITS.get(words[at], 10) < 10:
                decimals += str(_UNITS[words[at]])
                at += 1
            spoken += f".{decimals}"
        out.append(spoken)
    return " ".join(out)


def _number(words: list[str], at: int) -> tuple[int, int]:
    """(value, words used) of the number that begins at ``at``; (0, 0) when none does."""
    start, total, part, last = at, 0, 0, 0
    while at < len(words):
        word = words[at]
        if word in _UNITS and last % 100 in (0, *_TENS.values()) and not (last in _TENS.values() and _UNITS[word] > 9):
            part, last = part + _UNITS[word], _UNITS[word] or 1
        elif word in _TENS and last % 100 == 0:
            part, last = part + _TENS[word], _TENS[word]
        elif word == "hundred" and 0 < part < 10:
            part, last = part * 100, 100
        elif word in _SCALES and part:
            total, part, last = total + part * _SCALES[word], 0, 1000
        elif word == "and" and last >= 100 and words[at + 1 : at + 2] and words[at + 1] in {*_UNITS, *_TENS}:
            pass
        else:
            break
        at += 1
    return (total + part, at - start) if at > start else (0, 0)


def evaluate(text: str) -> Fraction:
    """The value of a sum in words or signs, times and divided before plus and minus.

    Raises NotArithmetic for what is none, ZeroDivisionError, OverflowError for results beyond speech."""
    text = digits(text.lower()).strip()
    if root := re.fullmatch(r"(?:the )?square root of (\d+)", text):
        number = int(root[1])
        if isqrt(number) ** 2 == number:
            return Fraction(isqrt(number))
        return Fraction(f"{number**0.5:.4f}")
    if square := re.fullmatch(r"(\d+(?:\.\d+)?) (squared|cubed)", text):
        return _power(Fraction(square[1]), Fraction(2 if square[2] == "squared" else 3))
    text = re.sub(r"(\d)\s*% of", r"\1 percent of", text)
    for words, sign in _OPERATORS:
        text = re.sub(rf"(?<=[\d\s]){words}(?=[\d\s])", f" {sign} ", text)
    if _TOKEN.sub("", text).strip():
        raise NotArithmetic(text)
    tokens = _TOKEN.findall(text)
    if len(tokens) < 3:
        raise NotArithmetic(text)
    value, rest = _sum(tokens)
    if rest:
        raise NotArithmetic(text)
    if abs(value) >= 10**_MAX_DIGITS:
        raise OverflowError
    return value


def _sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        right, rest = _product(tokens[1:])
        value, tokens = (value + right if tokens[0] == "+" else value - right), rest
    return value, tokens


def _product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, tokens = _factor(tokens)
    while tokens and tokens[0] in ("*", "/", "%*"):
        right, rest = _factor(tokens[1:])
        value = value / right if tokens[0] == "/" else value * right / (100 if tokens[0] == "%*" else 1)
        tokens = rest
    return value, tokens


def _factor(tokens: list[str]) -> tuple[Fraction, list[str]]:
    if tokens[:1] == ["-"]:
        value, rest = _factor(tokens[1:])
        return -value, rest
    if not tokens or not tokens[0][0].isdigit():
        raise NotArithmetic(" ".join(tokens))
    base, tokens = Fraction(tokens[0]), tokens[1:]
    if tokens and tokens[0] == "^":
        exponent, tokens = _factor(tokens[1:])
        return _power(base, exponent), tokens
    return base, tokens


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_POWER or abs(base) > 10**6:
        raise OverflowError
    return Fraction(base**exponent)


def pleasant(value: Fraction) -> str:
    """A number as it is said: whole where it is, otherwise at most three places and ``about`` where that is not exact."""
    if value.denominator == 1:
        return _signed(str(abs(value.numerator)), value)
    rounded = f"{abs(float(value)):.3f}".rstrip("0").rstrip(".")
    exact = Fraction(rounded) == abs(value)
    return ("" if exact else "about ") + _signed(rounded, value)


def _signed(number: str, value: Fraction) -> str:
    return f"minus {number}" if value < 0 else number
