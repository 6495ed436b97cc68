"""A model that takes for ever to load."""

from __future__ import annotations

import threading
from typing import NoReturn


class NeverLoaded:
    @classmethod
    def from_config(cls, config: object) -> NoReturn:
        print("loading", flush=True)
        threading.Event().wait()
        raise AssertionError("unreachable")
