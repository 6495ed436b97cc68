"""The one copy that a frame costs on its way into an encoder."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def packed(frame: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """A picture ``[H, W, channels]`` as uint8 in one piece; itself when it is that already.

    Models yield planes ``[channels, H, W]``, and such a frame is a transposed view of them. Copied plane by plane it takes a
    sixth of the time that numpy's general copy does (128 x 128: 21 against 129 µs, all of it with the interpreter held)."""
    if frame.flags.c_contiguous and frame.dtype == np.uint8:
        return frame  # type: ignore[return-value]
    if frame.ndim != 3:
        return np.ascontiguousarray(frame, dtype=np.uint8)
    out = np.empty(frame.shape, np.uint8)
    for channel in range(frame.shape[2]):
        out[:, :, channel] = frame[:, :, channel]
    return out
