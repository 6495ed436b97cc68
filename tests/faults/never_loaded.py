"""Models that take for ever to load."""

from __future__ import annotations

import threading
from typing import NoReturn


class NeverLoaded:
    @classmethod
    def from_config(cls, config: object) -> NoReturn:
        print("loading", flush=True)
        threading.Event().wait()
        raise AssertionError("unreachable")


class AlwaysComputing:
    """In native code all the time, as where weights are read and converted."""

    @classmethod
    def from_config(cls, config: object) -> NoReturn:
        import torch

        weights = torch.zeros(64, 64)
        print("loading", flush=True)
        while True:
            weights = weights @ weights
