"""The session object of the Realtime protocol: what it holds, how an update merges into it, what a response overrides.

Owns: fields, defaults, ranges and merge rules of realtime.md section 3.  Must not know: order of events, items, sockets.
Invariant: an update is applied whole or not at all; what is shown is what acts. Fields of the hosted service that have
no meaning here (``tracing``, ``prompt``, ``reasoning``, ``include``, newer ones) are accepted and not shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ..envelope import MAX_SAFE_INT
from .codes import RealtimeCode, RealtimeError

T = TypeVar("T")
JsonObject: TypeAlias = dict[str, Any]
"""Opaque JSON: a patch that is not checked yet, or the JSON schema of a tool's parameters."""

MAX_SESSION_BYTES = 128 * 1024
"""Of the whole session object as JSON; instructions and tools share it."""
HOSTED_VOICES: Final = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "marin", "sage", "shimmer", "verse")
)
"""Names that clients send by default; here each of them means the default voice."""

MAX_SCHEMA_DEPTH = 16
"""Nesting of a tool's parameters."""

Instructions: TypeAlias = Annotated[str, Meta(max_length=65_536)]
TokenLimit: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)] | Literal["inf"]
Modality: TypeAlias = Literal["text", "audio"]
Modalities: TypeAlias = Annotated[tuple[Modality, ...], Meta(min_length=1, max_length=1)]
ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(?!\n)$", max_length=64)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, le=600_000)]
# The SDK's generated models take metadata of strings only: 16 pairs.
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class Pcm(Struct, frozen=True, tag_field="type", tag="audio/pcm"):
    """16-bit little-endian mono."""

    rate: Literal[24000] = 24000


class Pcmu(Struct, frozen=True, tag_field="type", tag="audio/pcmu"):
    """G.711 µ-law, 8 kHz mono."""


class Pcma(Struct, frozen=True, tag_field="type", tag="audio/pcma"):
    """G.711 A-law, 8 kHz mono."""


AudioFormat: TypeAlias = Pcm | Pcmu | Pcma


def bytes_per_ms(audio_format: AudioFormat) -> int:
    return 48 if isinstance(audio_format, Pcm) else 8


def sample_bytes(audio_format: AudioFormat) -> int:
    return 2 if isinstance(audio_format, Pcm) else 1


class ServerVad(Struct, frozen=True, kw_only=True, tag_field="type", tag="server_vad"):
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: Milliseconds | None = None


class SemanticVad(Struct, frozen=True, kw_only=True, tag_field="type", tag="semantic_vad"):
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True


TurnDetection: TypeAlias = ServerVad | SemanticVad


class Transcription(Struct, frozen=True, kw_only=True):
    """Asks for transcripts of what the user says. Which model makes them is the server's matter."""

    model: str = "default"
    language: str | None = None
    prompt: str | None = None


class AudioInput(Struct, frozen=True, kw_only=True):
    format: AudioFormat = Pcm()
    turn_detection: TurnDetection | None = ServerVad()
    transcription: Transcription | None = None
    noise_reduction: None = None


class AudioOutput(Struct, frozen=True, kw_only=True):
    format: AudioFormat = Pcm()
    voice: str = ""
    speed: Annotated[float, Meta(ge=0.25, le=1.5)] = 1.0


class Audio(Struct, frozen=True, kw_only=True):
    input: AudioInput = AudioInput()
    output: AudioOutput = AudioOutput()


class Tool(Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: ToolName
    description: Instructions | UnsetType = UNSET
    parameters: JsonObject = {}


class NamedTool(Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool choice: this one."""

    name: ToolName


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedTool


class SessionConfig(Struct, frozen=True, kw_only=True):
    """What a client can change, as it acts."""

    instructions: Instructions = ""
    output_modalities: Modalities = ("audio",)
    audio: Audio = Audio()
    tools: Annotated[tuple[Tool, ...], Meta(max_length=128)] = ()
    tool_choice: ToolChoice = "auto"
    max_output_tokens: TokenLimit = "inf"


class Profile(Struct, frozen=True, kw_only=True):
    """What the server behind the session is, fixed for its life.

    ``model_decides``: the session behind opens responses at the end of a turn, or whenever it wants; the machine starts none.
    ``model_yields``: it decides, too, whether it gives way to a user who speaks; the machine cancels nothing then.
    ``expires_at``: Unix seconds.
    """

    session_id: str
    model: str
    voices: tuple[str, ...] = ("default",)
    expires_at: int | None = None
    model_decides: bool = False
    model_yields: bool = False


class SessionObject(SessionConfig, frozen=True, kw_only=True):
    """What ``session.created`` and ``session.updated`` show."""

    id: str
    model: str
    object: Literal["realtime.session"] = "realtime.session"
    type: Literal["realtime"] = "realtime"
    truncation: Literal["auto"] = "auto"
    expires_at: int | UnsetType = UNSET


class ResponseConfig(Struct, frozen=True, kw_only=True):
    """What acts in one response: the session's values under the overrides of ``response.create``."""

    instructions: str
    modality: Modality
    format: AudioFormat
    voice: str
    speed: float
    tools: tuple[Tool, ...]
    tool_choice: ToolChoice
    max_output_tokens: TokenLimit
    metadata: Metadata | None = None


class ResponseAudioOutput(Struct, frozen=True, kw_only=True):
    format: AudioFormat | None = None
    voice: str | JsonObject | None = None


class ResponseAudio(Struct, frozen=True, kw_only=True):
    output: ResponseAudioOutput = ResponseAudioOutput()


class ResponseOverrides(Struct, frozen=True, kw_only=True):
    """``response`` of ``response.create``, but for ``input``; an absent or null field is the session's value."""

    conversation: Literal["auto", "none"] | None = None
    instructions: Instructions | None = None
    output_modalities: Modalities | None = None
    audio: ResponseAudio | None = None
    tools: Annotated[tuple[Tool, ...], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    max_output_tokens: TokenLimit | None = None
    metadata: Metadata | None = None


def initial(profile: Profile) -> SessionConfig:
    return SessionConfig(audio=Audio(output=AudioOutput(voice=profile.voices[0])))


def shown_session(config: SessionConfig, profile: Profile) -> SessionObject:
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    expires = UNSET if profile.expires_at is None else profile.expires_at
    return SessionObject(id=profile.session_id, model=profile.model, expires_at=expires, **fields)


def updated(config: SessionConfig, patch: Mapping[str, Any], profile: Profile, *, voice_fixed: bool) -> SessionConfig:
    """``config`` with a ``session.update`` merged into it: absent keeps, null clears, objects merge key by key.

    Raises:
        RealtimeError: ``invalid_value``, ``missing_required_parameter``, ``cannot_update_voice``, ``message_too_large``.
    """
    if patch.get("type", "realtime") != "realtime":
        raise RealtimeError(
            RealtimeCode.INVALID_VALUE, "this server has sessions of type realtime only", "session.type"
        )
    merged: JsonObject = _merge(msgspec.to_builtins(config), _liberal(patch))
    audio = merged.setdefault("audio", {})
    if isinstance(audio, dict):
        if isinstance(audio.get("input"), dict):
            audio["input"].pop("noise_reduction", None)
        output = audio.setdefault("output", {})
        if isinstance(output, dict):
            output["voice"] = known_voice(output.get("voice"), profile, "session.audio.output.voice")
    new = convert(merged, SessionConfig, "session")
    _check_tools(new.tools, "session.tools")
    if voice_fixed and new.audio.output.voice != config.audio.output.voice:
        text = "the voice cannot change once the assistant has spoken"
        raise RealtimeError(RealtimeCode.CANNOT_UPDATE_VOICE, text, "session.audio.output.voice")
    if len(msgspec.json.encode(shown_session(new, profile))) > MAX_SESSION_BYTES:
        raise RealtimeError(RealtimeCode.TOO_LARGE, f"a session has at most {MAX_SESSION_BYTES} bytes", "session")
    return new


def response_config(config: SessionConfig, own: ResponseOverrides, profile: Profile) -> ResponseConfig:
    """The session's values under one response's overrides.

    Raises:
        RealtimeError: ``invalid_value``, ``message_too_large``.
    """
    output = own.audio.output if own.audio else ResponseAudioOutput()
    voice = config.audio.output.voice
    if output.voice is not None:
        voice = known_voice(output.voice, profile, "response.audio.output.voice")
    _check_tools(own.tools or (), "response.tools")
    if len(msgspec.json.encode(own)) > MAX_SESSION_BYTES:
        raise RealtimeError(RealtimeCode.TOO_LARGE, f"a response has at most {MAX_SESSION_BYTES} bytes", "response")
    return ResponseConfig(
        instructions=_first(own.instructions, config.instructions),
        modality=_first(own.output_modalities, config.output_modalities)[0],
        format=_first(output.format, config.audio.output.format),
        voice=voice,
        speed=config.audio.output.speed,
        tools=_first(own.tools, config.tools),
        tool_choice=_first(own.tool_choice, config.tool_choice),
        max_output_tokens=_first(own.max_output_tokens, config.max_output_tokens),
        metadata=own.metadata,
    )


def known_voice(voice: object, profile: Profile, param: str) -> str:
    """The voice that a name means: one of ours, or the default one for a hosted name. A client may send ``{"id": ..}``.

    Raises:
        RealtimeError: ``invalid_value``.
    """
    name = voice.get("id") if isinstance(voice, dict) else voice
    if name is None or name in profile.voices:
        return profile.voices[0] if name is None else str(name)
    if isinstance(name, str) and name in HOSTED_VOICES:
        return profile.voices[0]
    text = f"no such voice; supported are {', '.join(profile.voices[:16])} and the hosted names, which mean the first"
    raise RealtimeError(RealtimeCode.INVALID_VALUE, text, param)


def convert(value: object, to: type[T], param: str) -> T:
    """Checked conversion of decoded JSON.

    Raises:
        RealtimeError: ``invalid_value`` or ``missing_required_parameter``, with the path as ``param``.
    """
    try:
        return msgspec.convert(value, to)
    except (msgspec.ValidationError, ValueError) as error:
        text, _, path = str(error).partition(" - at `$")
        code = RealtimeCode.INVALID_VALUE
        where = param + path.rstrip("`")
        if text.startswith("Object missing required field `"):
            code, where = RealtimeCode.MISSING_PARAMETER, f"{where}.{text.split('`')[1]}"
        raise RealtimeError(code, text.replace("Object missing", "missing"), where.lstrip(".")) from None


def _check_tools(tools: tuple[Tool, ...], param: str) -> None:
    """Parameters are JSON that every implementation reads alike: not too deep, integers that a double holds.

    Raises:
        RealtimeError: ``invalid_value``.
    """

    def check(value: object, depth: int, where: str) -> None:
        if depth > MAX_SCHEMA_DEPTH:
            raise RealtimeError(RealtimeCode.INVALID_VALUE, f"nested deeper than {MAX_SCHEMA_DEPTH}", where)
        if isinstance(value, int) and abs(value) > MAX_SAFE_INT:
            raise RealtimeError(RealtimeCode.INVALID_VALUE, "an integer beyond 2^53", where)
        if isinstance(value, dict | list):
            for part in value.values() if isinstance(value, dict) else value:
                check(part, depth + 1, where)

    for index, tool in enumerate(tools):
        check(tool.parameters, 0, f"{param}[{index}].parameters")


_NULL_MEANS_OFF: Final = frozenset(("turn_detection", "transcription"))


def _merge(old: JsonObject, patch: Mapping[str, Any]) -> JsonObject:
    merged = dict(old)
    for key, value in patch.items():
        before = merged.get(key)
        if value is None and key not in _NULL_MEANS_OFF:
            merged.pop(key, None)  # its default acts
        elif (
            isinstance(value, dict)
            and isinstance(before, dict)
            and value.get("type", None) in (None, before.get("type"))
        ):
            merged[key] = _merge(before, value)
        else:
            merged[key] = value
    return merged


def _liberal(patch: Mapping[str, Any]) -> Mapping[str, Any]:
    """``turn_detection: false`` is what one client says for null."""
    audio = patch.get("audio")
    given = audio.get("input") if isinstance(audio, dict) else None
    if not isinstance(audio, dict) or not isinstance(given, dict) or given.get("turn_detection", True) is not False:
        return patch
    return {**patch, "audio": {**audio, "input": {**given, "turn_detection": None}}}


def _first(own: T | None, session: T) -> T:
    return session if own is None else own
