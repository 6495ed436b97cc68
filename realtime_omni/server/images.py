"""Pictures that clients send: PNG or JPEG → uint8 RGB array, within limits that are checked before decoding.

Owns the limits. Runs in a thread, never on the event loop. Everything wrong with a picture is ``image_invalid``.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings

import numpy as np
import numpy.typing as npt

from realtime_omni.errors import ArgumentError, ErrorCode

MAX_SIDE = 4096
MAX_PIXELS = 4096 * 4096
MAX_BYTES = 4 * 1024 * 1024


def decode_image(text: str) -> npt.NDArray[np.uint8]:
    """Decode base64 to [H, W, 3].

    Raises:
        ArgumentError: ``image_invalid``.
    """
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise _invalid(f"image is larger than {MAX_BYTES} bytes")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _invalid("image is not base64") from None
    return read_picture(data)


def read_picture(data: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """Decode a file's bytes to [H, W, 3].

    Raises:
        ArgumentError: ``image_invalid``.
    """
    if len(data) > MAX_BYTES:
        raise _invalid(f"image is larger than {MAX_BYTES} bytes")
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise _invalid("this server cannot read pictures (Pillow is not installed)") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as picture:
                width, height = picture.size  # from the header: no pixel is decoded yet
                if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
                    raise _invalid(f"image is {width} x {height}; at most {MAX_SIDE} x {MAX_SIDE} pixels are read")
                upright = ImageOps.exif_transpose(picture)  # a telephone writes how it was held, not turned pixels
                if upright.mode.startswith(
                    "I"
                ):  # 16 bits of grey, which Pillow would cut off at 255 instead of scaling
                    upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
                return np.array(upright.convert("RGB"), dtype=np.uint8)
    except ArgumentError:
        raise
    except Exception:  # Pillow raises what its decoders raise: OSError, SyntaxError, ValueError, struct.error, ...
        raise _invalid("image is not a readable PNG or JPEG") from None


def _invalid(message: str) -> ArgumentError:
    return ArgumentError(message, code=ErrorCode.IMAGE_INVALID, path="image")
