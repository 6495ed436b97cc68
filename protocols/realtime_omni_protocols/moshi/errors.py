"""The closed list of codes of the Moshi protocol, and the one exception its reader lets out.

Owns: the strings of moshi.md section 5.  Must not know: messages, sessions, sockets.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class MoshiCode(StrEnum):
    """First word of an error message (kind 5), and the code of a refused upgrade."""

    INVALID_PARAMETER = "invalid_parameter"
    VOICE_INVALID = "voice_invalid"
    MESSAGE_TOO_LARGE = "message_too_large"
    AUDIO_INVALID = "audio_invalid"
    CAPACITY = "capacity"
    EXPIRED = "expired"
    SHUTDOWN = "shutdown"
    INTERNAL = "internal"


class MoshiClose(IntEnum):
    """WebSocket close codes this protocol uses."""

    NORMAL = 1000
    SHUTDOWN = 1001
    BAD_AUDIO = 1007
    POLICY = 1008
    TOO_LARGE = 1009
    INTERNAL = 1011
    CAPACITY = 1013


CLOSES: dict[MoshiCode, MoshiClose] = {
    MoshiCode.INVALID_PARAMETER: MoshiClose.POLICY,
    MoshiCode.VOICE_INVALID: MoshiClose.POLICY,
    MoshiCode.MESSAGE_TOO_LARGE: MoshiClose.TOO_LARGE,
    MoshiCode.AUDIO_INVALID: MoshiClose.BAD_AUDIO,
    MoshiCode.CAPACITY: MoshiClose.CAPACITY,
    MoshiCode.EXPIRED: MoshiClose.NORMAL,
    MoshiCode.SHUTDOWN: MoshiClose.SHUTDOWN,
    MoshiCode.INTERNAL: MoshiClose.INTERNAL,
}


class MoshiError(ValueError):
    """A connection or message was refused. ``param``: the query parameter's name."""

    def __init__(self, code: MoshiCode, message: str, param: str | None = None) -> None:
        super().__init__(f"{code.value}: {message}" + (f" (at {param})" if param else ""))
        self.code = code
        self.message = message
        self.param = param
