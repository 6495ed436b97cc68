"""Ears of a puppet: a detector of speech by energy, in blocks of 10 ms.

Pure functions of a state and a frame. A tone or a voice above the threshold is speech; it is no match for noise, and does not
pretend to be.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

BLOCK_MS = 10
SHORTEST_MS = 40
"""Of sound in a row that counts as speech: a click is shorter."""
LOUDEST_DB, QUIETEST_DB = -20.0, -60.0
"""What the thresholds 1 and 0 of ``Turns`` mean; 0.5 is -40 dBFS."""
ROUNDING = 0.999
"""Sums of float32 in another order differ by less."""


class Ears(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``loud_ms``: sound in a row up to now. ``speaking``: since ``began_ms``, and heard last before ``last_ms``."""

    speaking: bool = False
    loud_ms: int = 0
    began_ms: float = 0.0
    last_ms: float = 0.0


def listen(ears: Ears, audio: NDArray[np.float32], rate_hz: int, start_ms: float, threshold: float) -> Ears:
    """The ears after a frame that begins at ``start_ms``. They begin to speak by themselves; who ends a turn resets them."""
    size = rate_hz * BLOCK_MS // 1000
    level = 10 ** ((QUIETEST_DB + threshold * (LOUDEST_DB - QUIETEST_DB)) / 20)
    bound = level**2 * size
    if not ears.loud_ms and float(np.dot(audio, audio)) < ROUNDING * bound:
        return ears  # all of it has less energy than a block that is loud
    blocks = audio[: audio.size // size * size].reshape(-1, size)
    loud = np.einsum("bs,bs->b", blocks, blocks) > bound
    if not ears.loud_ms and not loud.any():
        return ears
    speaking, loud_ms, began_ms, last_ms = ears.speaking, ears.loud_ms, ears.began_ms, ears.last_ms
    for number, is_loud in enumerate(loud.tolist()):
        loud_ms = loud_ms + BLOCK_MS if is_loud else 0
        if is_loud:
            last_ms = start_ms + (number + 1) * BLOCK_MS
        if not speaking and loud_ms >= SHORTEST_MS:
            speaking, began_ms = True, last_ms - loud_ms
    return Ears(speaking, loud_ms, began_ms, last_ms)
