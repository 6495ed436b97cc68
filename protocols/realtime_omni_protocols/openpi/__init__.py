"""The OpenPI policy protocol: codec, observation contract and sans-I/O machines (the spec is protocols/openpi.md)."""

from __future__ import annotations

from .arrays import EncodedImage
from .client_side import PolicyClientSide, PolicyServerError
from .codec import MAX_FRAME_BYTES, pack, unpack
from .contract import ActionContract, ActionField, Camera, PolicyContract, StateField
from .errors import PolicyClose, PolicyCode, PolicyError
from .observation import Image, ImageDecoder, Observation, ObservationReader
from .rows import PATH, ROOT_PATH, ROWS, STREAM_PROTOCOL, Row, RowRules, choose_row
from .server_side import Close, Infer, PolicyServerSide, Reset, Send, Turn
from .stream_client import StreamClientSide
from .stream_server import Attach, BeginReset, End, Open, StreamServerSide, StreamState

__all__ = [
    "MAX_FRAME_BYTES",
    "PATH",
    "ROOT_PATH",
    "ROWS",
    "STREAM_PROTOCOL",
    "ActionContract",
    "ActionField",
    "Attach",
    "BeginReset",
    "Camera",
    "Close",
    "EncodedImage",
    "End",
    "Image",
    "ImageDecoder",
    "Infer",
    "Observation",
    "ObservationReader",
    "Open",
    "PolicyClientSide",
    "PolicyClose",
    "PolicyCode",
    "PolicyContract",
    "PolicyError",
    "PolicyServerError",
    "PolicyServerSide",
    "Reset",
    "Row",
    "RowRules",
    "Send",
    "StateField",
    "StreamClientSide",
    "StreamServerSide",
    "StreamState",
    "Turn",
    "choose_row",
    "pack",
    "unpack",
]
