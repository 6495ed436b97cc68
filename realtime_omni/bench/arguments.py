"""Numbers on a benchmark's or evaluation's command line: one that measures nothing, or never ends, is refused there."""

from __future__ import annotations

import argparse
from collections.abc import Callable

MOST = 1_000_000
"""Far above any sane run: it catches a slip of the finger."""


MOST_SEED = 2**62
"""A generator takes 64 bits with their sign, and some scripts add to it."""


def count(least: int = 1, most: int = MOST) -> Callable[[str], int]:
    """A type for argparse: whole numbers from ``least`` to ``most``."""

    def whole_number(text: str) -> int:
        found = int(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text}: {least} to {most}")
        return found

    return whole_number


def number(*, zero: bool = False) -> Callable[[str], float]:
    """A type for argparse: numbers above 0 and up to a million; ``zero``: 0, too."""

    def finite_number(text: str) -> float:
        found = float(text)
        if not 0 <= found <= MOST or (not found and not zero):  # no comparison holds for what is no number
            raise argparse.ArgumentTypeError(f"{text}: {'0' if zero else 'above 0, up'} to {MOST}")
        return found

    return finite_number


def device(text: str) -> str:
    """A type for argparse: ``cpu``, or a CUDA device that there is."""
    import torch

    kind, _, number = text.partition(":")
    if text != "cpu" and not (kind == "cuda" and (number or "0").isdecimal()):
        raise argparse.ArgumentTypeError(f"{text}: cpu, cuda or cuda:1")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"{text}: torch sees {torch.cuda.device_count()} CUDA devices")
    return text


def dbfs(text: str) -> float:
    """A type for argparse: a level below full scale, -200 to 0."""
    found = float(text)
    if not -200 <= found <= 0:
        raise argparse.ArgumentTypeError(f"{text}: -200 to 0")
    return found


__all__ = ["MOST_SEED", "count", "dbfs", "device", "number"]
