"""Camera pictures to what a vision tower reads: [3, S, S] in [-1, 1], aspect kept, the rest black (-1).

Three resamplings are in use and differ numerically, so a checkpoint keeps the one it was trained with:

* ``centred``: torch bilinear on floats, padding on all sides (lerobot's pi0 and pi0.5);
* ``top_left``: torch bilinear on floats, padding above and on the left (SmolVLA);
* ``pillow``: Pillow bilinear on uint8, padding on all sides (openpi's client and server).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from realtime_omni.errors import ArgumentError, ErrorCode


class Fit(StrEnum):
    """How a picture is brought to the tower's size."""

    CENTRED = "centred"
    TOP_LEFT = "top_left"
    PILLOW = "pillow"


def model_image(picture: NDArray[Any], size: int, fit: Fit, path: str) -> Tensor:
    """A picture [H, W, 3], uint8 or float32 in [0, 1], to float32 [3, size, size] in [-1, 1].

    Raises ArgumentError (``image_invalid``) for any other shape, dtype or range; nothing is guessed."""
    _check(picture, path)
    if fit is Fit.PILLOW:
        return _pillow(picture, size) * 2 - 1
    image = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()
    if picture.dtype == np.uint8:
        image = image / 255
    return _torch(image[None], size, fit)[0] * 2 - 1


def raw_image(picture: NDArray[Any], size: int, path: str) -> Tensor | None:
    """A picture that needs no fitting as it is, uint8 [size, size, 3], for :func:`signed` to finish on the device; else None.

    Raises as :func:`model_image` does, and together they give the same numbers."""
    _check(picture, path)
    if picture.dtype != np.uint8 or picture.shape[:2] != (size, size):
        return None
    return torch.from_numpy(np.array(picture))


def signed(images: Tensor) -> Tensor:
    """Pictures [n, 3, S, S] in [-1, 1]: uint8 ones [n, S, S, 3] are brought there, others are there already."""
    return images.permute(0, 3, 1, 2).float() / 255 * 2 - 1 if images.dtype == torch.uint8 else images


def _check(picture: NDArray[Any], path: str) -> None:
    if picture.ndim != 3 or picture.shape[2] != 3 or 0 in picture.shape:
        raise ArgumentError(f"{path}: a picture is [height, width, 3], not {list(picture.shape)}", **_at(path))
    if picture.dtype == np.uint8:
        return
    if picture.dtype != np.float32:
        raise ArgumentError(f"{path}: a picture is uint8 or float32, not {picture.dtype}", **_at(path))
    if not np.isfinite(picture).all() or picture.min() < 0 or picture.max() > 1:
        raise ArgumentError(f"{path}: a float picture lies in [0, 1]", **_at(path))


def _at(path: str) -> dict[str, Any]:
    return {"code": ErrorCode.IMAGE_INVALID, "path": path}


def _fitted(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width after scaling the longer side to ``size``; rounded down as the references do."""
    ratio = max(width / size, height / size)
    return max(1, int(height / ratio)), max(1, int(width / ratio))


def _torch(image: Tensor, size: int, fit: Fit) -> Tensor:
    if tuple(image.shape[2:]) == (size, size):
        return image
    height, width = _fitted(image.shape[2], image.shape[3], size)
    image = functional.interpolate(image, size=(height, width), mode="bilinear", align_corners=False)
    free_h, free_w = size - height, size - width
    top, left = (free_h, free_w) if fit is Fit.TOP_LEFT else (free_h // 2, free_w // 2)
    return functional.pad(image, (left, free_w - left, top, free_h - top))


def _pillow(picture: NDArray[Any], size: int) -> Tensor:
    from PIL import Image  # only openpi checkpoints need it

    pixels = picture if picture.dtype == np.uint8 else (picture * 255).astype(np.uint8)
    if pixels.shape[:2] != (size, size):
        height, width = _fitted(pixels.shape[0], pixels.shape[1], size)
        canvas = Image.new("RGB", (size, size))
        resized = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)
        canvas.paste(resized, ((size - width) // 2, (size - height) // 2))
        pixels = np.asarray(canvas)
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float() / 255
