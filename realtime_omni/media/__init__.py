"""Encoders: a frame in, bytes out. Knows numpy, Pillow and PyAV; knows no session, socket or model.

Every encoder offers the same small interface (:class:`~realtime_omni.media.encoder.Encoder`) and
:func:`~realtime_omni.media.encoder.open_encoder` picks one by the wire's format name.
"""

from realtime_omni.media.encoder import FORMATS, EncodedFrame, Encoder, codec_string, open_encoder
from realtime_omni.media.lane import EncodeLane, EncodePool

__all__ = ["FORMATS", "EncodeLane", "EncodePool", "EncodedFrame", "Encoder", "codec_string", "open_encoder"]
