"""A client's observation against the contract: a complete, finite `Observation`, or the exact thing that is wrong.

Owns: every rule of openpi.md section 5.  Must not know: rows, sessions, models; a PNG or JPEG is decoded by a function
it is given.
Invariant: nothing is guessed. What could mean two things (a layout, a value range, a camera's name) is refused with its
code, because the alternative is a robot that moves on a wrong picture.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from .arrays import EncodedImage, sniff_image
from .contract import Camera, Float32, PolicyContract, StateField, to_float32
from .errors import PolicyCode, PolicyError
from .reader import child_path

MAX_SIDE = 4096
MAX_PROMPT_CHARS = 2_000
_UINT8 = np.dtype(np.uint8)

Array: TypeAlias = npt.NDArray[Any]
Image: TypeAlias = npt.NDArray[np.uint8]
Found: TypeAlias = tuple[object, str]
"""A value and its path."""
ImageDecoder: TypeAlias = Callable[[EncodedImage], Image]
"""PNG or JPEG to uint8 RGB ``[H, W, 3]``; ``PolicyError(image_invalid)`` when it cannot."""


class Observation(Struct, frozen=True, kw_only=True):
    """One observation, as a policy gets it.

    ``images``: every camera of the contract, in its order: uint8 RGB ``[H, W, 3]`` (``[T, H, W, 3]`` for a camera that
    takes stacks), or None where the slot is masked. Perhaps read-only and not contiguous. ``state``: float32
    ``[state_dim]``, padded with zeros.
    """

    images: Mapping[str, Image | None]
    state: Float32
    prompt: str


class ObservationReader:
    """Reads observations of one contract. Without state: one reader serves every session."""

    def __init__(self, contract: PolicyContract) -> None:
        self.contract = contract
        self._slots: dict[str, Camera | StateField | None] = dict.fromkeys(contract.ignored)
        for slot in contract.slots:
            self._slots |= dict.fromkeys(slot.wire_names, slot)
        self._prompt_keys = frozenset(contract.prompt_keys)

    def read(self, message: Mapping[str, object], decode: ImageDecoder | None = None) -> Observation:
        """Judge an observation's map (without the request's own fields, such as ``endpoint``).

        Raises:
            PolicyError: with the code and the path of the first thing that is wrong.
        """
        found: dict[str, Found] = {}
        prompts = self._collect(message, found)
        images = {camera.name: self._image(camera, found.get(camera.name), decode) for camera in self.contract.cameras}
        return Observation(images=images, state=self._state(found), prompt=self._prompt(prompts))

    def _collect(self, message: Mapping[str, object], found: dict[str, Found]) -> list[Found]:
        """Sort the members by slot name into ``found``, and return the prompts. What no slot knows is refused here."""
        prompts = []
        for key, value, path in _leaves(message, "", "$"):
            if key in self._prompt_keys:
                if value is not None:
                    prompts.append((value, path))
                continue
            if key not in self._slots:
                raise self._unknown(key, value, path)
            slot = self._slots[key]
            if slot is None or value is None:
                continue
            if slot.name in found:
                raise PolicyError(PolicyCode.KEY_DUPLICATE, f"{slot.name} came already under another name", path)
            found[slot.name] = (value, path)
        return prompts

    def _unknown(self, key: str, value: object, path: str) -> PolicyError:
        pictured = isinstance(value, EncodedImage) or (isinstance(value, np.ndarray) and value.ndim >= 3)
        if pictured or "image" in key:
            names = [camera.wire_names[0] for camera in self.contract.cameras if camera.rule != "empty"]
            return PolicyError(PolicyCode.CAMERA_UNKNOWN, f"no camera has this name; known: {', '.join(names)}", path)
        near = difflib.get_close_matches(key[:128], [*self._slots, *self.contract.prompt_keys], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return PolicyError(PolicyCode.KEY_UNKNOWN, f"this policy knows no such key{hint}", path)

    # ---- cameras

    def _image(self, camera: Camera, found: Found | None, decode: ImageDecoder | None) -> Image | None:
        if found is None:
            if camera.rule == "required":
                path = child_path("$", camera.wire_names[0])
                raise PolicyError(
                    PolicyCode.CAMERA_MISSING, f"the camera {camera.name} is missing; send {_asked(camera)}", path
                )
            return None
        value, path = found
        if camera.rule == "empty":
            raise PolicyError(PolicyCode.CAMERA_EMPTY, f"this deployment declares {camera.name} empty", path)
        image = _to_uint8(_to_layout(_to_array(value, path, decode), camera.max_frames, path), path)
        _check_size(image.shape[-3], image.shape[-2], camera, path)
        return image if camera.max_frames > 1 else image[-1]

    # ---- state

    def _state(self, found: dict[str, Found]) -> Float32:
        state = np.zeros(self.contract.state_dim, np.float32)
        at = 0
        for field in self.contract.state:
            if field.name not in found:
                path = child_path("$", field.wire_names[0])
                raise PolicyError(PolicyCode.STATE_MISSING, f"{field.name} is missing; send {_asked(field)}", path)
            vector = _vector(field, *found[field.name])
            state[at : at + vector.size] = vector
            at += field.dim
        return state

    # ---- prompt

    def _prompt(self, given: list[Found]) -> str:
        if len(given) > 1:
            raise PolicyError(PolicyCode.KEY_DUPLICATE, "the prompt came already under another name", given[1][1])
        if given:
            return _prompt_text(*given[0])
        if self.contract.default_prompt is None:
            path = child_path("$", self.contract.prompt_keys[0]) if self.contract.prompt_keys else "$"
            raise PolicyError(PolicyCode.PROMPT_MISSING, "an instruction is needed", path)
        return self.contract.default_prompt


def _leaves(message: Mapping[str, object], prefix: str, path: str) -> Iterator[tuple[str, object, str]]:
    """Values by name, the names of nested maps joined by ``/``."""
    for key, value in message.items():
        where = child_path(path, key)
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/", where)
        else:
            yield f"{prefix}{key}", value, where


def _to_array(value: object, path: str, decode: ImageDecoder | None) -> Array:
    if isinstance(value, memoryview):
        value = sniff_image(value) or value
    if isinstance(value, EncodedImage):
        if decode is None:
            raise PolicyError(PolicyCode.IMAGE_INVALID, "this end reads no PNG or JPEG; send an array", path)
        try:
            image = decode(value)
        except PolicyError as error:
            raise PolicyError(error.code, error.message, path) from None
        if value.shape is not None and value.shape != image.shape:
            raise PolicyError(PolicyCode.IMAGE_SHAPE, "the picture does not have the shape that was said", path)
        return image
    if not isinstance(value, np.ndarray):
        raise PolicyError(PolicyCode.IMAGE_INVALID, "a picture is an array, PNG or JPEG", path)
    return value


def _asked(slot: Camera | StateField) -> str:
    """What an observation is to hold for a slot, and under which names."""
    names = " or ".join(map(repr, slot.wire_names))
    if isinstance(slot, StateField):
        return f"{slot.dim} floats as {names}"
    stack = f"1 to {slot.max_frames}, " if slot.max_frames > 1 else ""
    return f"uint8 [{stack}{slot.height or 'H'}, {slot.width or 'W'}, 3] as {names}"


def _to_layout(image: Array, max_frames: int, path: str) -> Array:
    """``[T, H, W, 3]``: channels last, one or more frames."""
    if image.ndim == 5 and image.shape[0] == 1:
        image = image[0]
    if image.ndim == 3:
        image = image[None]
    if image.ndim != 4:
        raise PolicyError(PolicyCode.IMAGE_SHAPE, f"a picture is [H, W, 3] or [3, H, W], not {list(image.shape)}", path)
    frames, first, _, last = image.shape
    if not 1 <= frames <= max_frames:
        raise PolicyError(PolicyCode.IMAGE_SHAPE, f"{frames} pictures, but this camera takes 1 to {max_frames}", path)
    if first == 3 and last == 3:
        raise PolicyError(PolicyCode.IMAGE_LAYOUT, "channels first or last? both sides are 3 long", path)
    if last == 3:
        return image
    if first == 3:
        return image.transpose(0, 2, 3, 1)
    raise PolicyError(PolicyCode.IMAGE_SHAPE, f"a picture has three channels, this is {list(image.shape[1:])}", path)


def _check_size(height: int, width: int, camera: Camera, path: str) -> None:
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise PolicyError(PolicyCode.IMAGE_SHAPE, f"{height} x {width} pixels; sides are 1 to {MAX_SIDE}", path)
    wanted = (camera.height or height, camera.width or width)
    if (height, width) != wanted:
        raise PolicyError(
            PolicyCode.IMAGE_SHAPE, f"{height} x {width} pixels, this policy takes {wanted[0]} x {wanted[1]}", path
        )


def _to_uint8(image: Array, path: str) -> Image:
    """uint8 as it is; floats in [0, 1] times 255, cut off as openpi does."""
    if image.dtype == _UINT8:
        return image
    if image.dtype.kind != "f":
        raise PolicyError(PolicyCode.IMAGE_DTYPE, f"a picture is uint8 or float, not {image.dtype.name}", path)
    if image.size and not np.isfinite(image).all():
        raise PolicyError(PolicyCode.IMAGE_VALUE, "a pixel is not finite", path)
    if image.size and not (image.min() >= 0 and image.max() <= 1):
        raise PolicyError(PolicyCode.IMAGE_VALUE, "float pixels lie in 0 to 1; send uint8 for 0 to 255", path)
    scaled: Image = (image * 255).astype(np.uint8)
    return scaled


def _vector(field: StateField, value: object, path: str) -> Float32:
    """One state field as float32 ``[n]``, ``min_dim <= n <= dim``."""
    vector = _numbers(value, path)
    while vector.ndim > 1 and vector.shape[0] == 1:
        vector = vector[0]  # a batch or time axis of one
    vector = vector[None] if vector.ndim == 0 else vector
    least = field.dim if field.min_dim is None else min(field.min_dim, field.dim)
    if vector.ndim != 1 or not least <= vector.size <= field.dim:
        wanted = str(field.dim) if least == field.dim else f"{least} to {field.dim}"
        raise PolicyError(PolicyCode.STATE_SHAPE, f"{field.name} has shape {list(vector.shape)}, not [{wanted}]", path)
    made = to_float32(vector)
    if not np.isfinite(made).all():
        raise PolicyError(PolicyCode.STATE_VALUE, f"{field.name} is not finite", path)
    return made


def _numbers(value: object, path: str) -> Array:
    if isinstance(value, list):
        if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
            raise PolicyError(PolicyCode.STATE_DTYPE, "a state is a float array or a list of numbers", path)
        try:
            return np.array(value, np.float64)
        except OverflowError:
            raise PolicyError(PolicyCode.STATE_VALUE, "a number is too large", path) from None
    if isinstance(value, float):
        return np.array(value, np.float64)
    if not isinstance(value, (np.ndarray, np.floating)) or value.dtype.kind != "f":
        found = f", not {value.dtype.name}" if isinstance(value, np.ndarray | np.generic) else ""
        raise PolicyError(PolicyCode.STATE_DTYPE, f"a state is a float array or a list of numbers{found}", path)
    return np.asarray(value)


def _prompt_text(value: object, path: str) -> str:
    """Text, UTF-8 bytes, or an array or list that holds exactly one of them (``[[text]]``)."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "US":
        value = value.reshape(-1)[0]
    if isinstance(value, memoryview | bytes):
        try:
            value = bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            raise PolicyError(PolicyCode.PROMPT_INVALID, "the prompt is not valid UTF-8", path) from None
    if not isinstance(value, str):
        raise PolicyError(PolicyCode.PROMPT_INVALID, "a prompt is one text", path)
    if not value.strip():
        raise PolicyError(PolicyCode.PROMPT_INVALID, "the prompt is empty", path)
    if len(value) > MAX_PROMPT_CHARS:
        raise PolicyError(PolicyCode.PROMPT_INVALID, f"the prompt is longer than {MAX_PROMPT_CHARS} characters", path)
    return str(value)
