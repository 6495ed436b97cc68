"""The OpenPI policy protocol: codec, observation contract and sans-I/O machines (the spec is protocols/openpi.md)."""

from __future__ import annotations

from .arrays import EncodedImage
from .codec import MAX_FRAME_BYTES, pack, unpack
from .errors import PolicyClose, PolicyCode, PolicyError

__all__ = ["MAX_FRAME_BYTES", "EncodedImage", "PolicyClose", "PolicyCode", "PolicyError", "pack", "unpack"]
