"""The same things in the words of the Realtime protocol and in those of a call, as plain functions.

Owns the translations that need no state.  Must not know: sockets, a session.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from realtime_omni.duplex.spec import DuplexSpec
from realtime_omni.server.sound import PCM_24K, SoundFormat
from realtime_omni.session import frame as d
from realtime_omni.session import signals as s
from realtime_omni_protocols.realtime import commands as c
from realtime_omni_protocols.realtime.codes import RealtimeClose, RealtimeCode, RealtimeError
from realtime_omni_protocols.realtime.items import FunctionCallItem, FunctionCallOutputItem, Item, MessageItem, Usage
from realtime_omni_protocols.realtime.session import (
    AudioFormat,
    NamedTool,
    Pcm,
    Pcmu,
    Profile,
    SemanticVad,
    Tool,
    ToolChoice,
    TurnDetection,
    bytes_per_ms,
)

_STOPPED: dict[s.EndReason, Literal["max_output_tokens", "turn_detected", "client_cancelled"]] = {
    "cancelled": "client_cancelled",
    "yielded": "turn_detected",
    "max_tokens": "max_output_tokens",
}


def profile_of(spec: DuplexSpec, session_id: str, model: str, expires_at: int | None) -> Profile:
    return Profile(
        session_id=session_id,
        model=model,
        voices=spec.voices or ("default",),
        expires_at=expires_at,
        model_decides=True,
        model_yields=spec.yields,
    )


def end_fact(wire: str, reason: s.EndReason, usage: s.Usage) -> c.Fact:
    counted = Usage.of(
        text_in=usage.input_text,
        audio_in=usage.input_audio,
        cached=usage.input_cached,
        text_out=usage.output_text,
        audio_out=usage.output_audio,
    )
    if reason == "completed":
        return c.ResponseCompleted(wire, counted)
    if reason == "failed":
        return c.ResponseFailed(wire, "the model could not finish this response", usage=counted)
    return c.ResponseStopped(wire, _STOPPED[reason], counted)


def ending(reason: str) -> tuple[RealtimeError, RealtimeClose]:
    """Why a call ended by itself, for its client."""
    if reason == "shutdown":
        return RealtimeError(RealtimeCode.SHUTDOWN, "the server stops"), RealtimeClose.SHUTDOWN
    if reason == "failed":
        text = "the session failed; the server's log says why"
        return RealtimeError(RealtimeCode.INTERNAL, text), RealtimeClose.INTERNAL
    return RealtimeError(RealtimeCode.EXPIRED, "the session has ended"), RealtimeClose.SHUTDOWN


def sound_format(audio_format: AudioFormat) -> SoundFormat:
    if isinstance(audio_format, Pcm):
        return PCM_24K
    return SoundFormat("pcmu" if isinstance(audio_format, Pcmu) else "pcma", bytes_per_ms(audio_format) * 1000)


def turns_of(detection: TurnDetection | None, spec: DuplexSpec) -> d.Turns:
    """The nearest that the model can do."""
    able = spec.turn_modes
    if detection is None:
        return d.Turns("client" if "client" in able else able[0], respond=False)
    wanted: tuple[d.TurnMode, ...] = ("energy", "semantic")
    if isinstance(detection, SemanticVad):
        wanted = ("semantic", "energy")
    mode = next((mode for mode in (*wanted, "model") if mode in able), able[0])
    if isinstance(detection, SemanticVad):
        return d.Turns(mode, respond=detection.create_response, eagerness=detection.eagerness)
    return d.Turns(
        mode,
        respond=detection.create_response,
        threshold=detection.threshold,
        silence_ms=detection.silence_duration_ms,
        idle_ms=detection.idle_timeout_ms,
    )


def tools_of(tools: Iterable[Tool]) -> tuple[d.Tool, ...]:
    return tuple(
        d.Tool(tool.name, tool.description if isinstance(tool.description, str) else "", tool.parameters)
        for tool in tools
    )


def choice_of(choice: ToolChoice) -> str:
    return choice.name if isinstance(choice, NamedTool) else choice


def text_of(item: Item) -> str:
    """What a model without items reads instead."""
    match item:
        case MessageItem():
            return item.text
        case FunctionCallItem(name=name, arguments=arguments):
            return f"{name}({arguments}) was called."
        case FunctionCallOutputItem(output=output):
            return f"A function returned: {output}"
