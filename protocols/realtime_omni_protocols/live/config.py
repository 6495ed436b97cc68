"""What a session is started with: the client's configuration, its overrides for a fork, and the resolved resource.

Owns: fields, bounds, defaults (live.md section 3).  Must not know: events, states, models.
A field that is ``None`` is absent. Unknown fields are refused when decoding. Lists are tuples: values stay frozen.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType, structs

MAX_INPUT_ITEMS = 128
MAX_INSTRUCTION_CHARS = 65_536
"""16,384 tokens are the protocol's bound; a token is about four characters, and only a model can count."""
MAX_ITEM_CHARS = 32_768
"""8,192 tokens over all items are the protocol's bound."""

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
DelayMs: TypeAlias = Annotated[int, Meta(ge=0, le=60_000)]
Encoding: TypeAlias = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]

BUILT_IN_VOICES: Final = frozenset(
    (
        *("alloy", "ash", "ballad", "beacon", "bossa", "cedar", "cinder", "coral", "delta", "echo", "gleam", "marin"),
        *("meridian", "quartz", "ripple", "sage", "shida", "shimmer", "stone", "tempo", "verse", "vesper", "willow"),
    )
)
"""OpenAI's own, which clients name by default; a server that has none of them takes them for its own default."""

_RATES: dict[str, tuple[int, ...]] = {"audio/pcm": (24_000, 16_000), "audio/pcmu": (8_000,), "audio/pcma": (8_000,)}


class Config(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of everything inside ``session``."""


class AudioFormat(Config, frozen=True, kw_only=True):
    """Mono audio in both directions: PCM16 little-endian at 24 or 16 kHz, or G.711 at 8 kHz."""

    type: Encoding
    rate: int

    def __post_init__(self) -> None:
        if self.rate not in _RATES[self.type]:
            rates = " or ".join(str(rate) for rate in _RATES[self.type])
            raise ValueError(f"{self.type} has a rate of {rates}")

    @property
    def bytes_per_sample(self) -> int:
        return 2 if self.type == "audio/pcm" else 1


PCM_24K: Final = AudioFormat(type="audio/pcm", rate=24_000)
"""The default, and what sidebands and fixtures always use."""


class CustomVoice(Config, frozen=True, kw_only=True):
    id: Name


class AudioOutput(Config, frozen=True, kw_only=True):
    voice: Name | CustomVoice | None = None


class AudioConfig(Config, frozen=True, kw_only=True):
    format: AudioFormat | None = None
    output: AudioOutput | None = None


class TextPart(Config, frozen=True, kw_only=True):
    text: Annotated[str, Meta(max_length=MAX_ITEM_CHARS)]
    type: Literal["input_text", "output_text", "text"] | None = None


class InitialItem(Config, frozen=True, kw_only=True):
    """One message of the text history that a session begins with."""

    role: Literal["developer", "user", "assistant"]
    content: Annotated[tuple[TextPart, ...], Meta(min_length=1, max_length=1)]
    type: Literal["message"] | None = None
    id: Name | None = None
    status: Literal["incomplete", "completed"] | None = None

    def __post_init__(self) -> None:
        if self.content[0].type not in (None, *_PART_TYPES[self.role]):
            raise ValueError(f"a message of the {self.role} holds {' or '.join(_PART_TYPES[self.role])}")

    @property
    def text(self) -> str:
        return self.content[0].text


_PART_TYPES: dict[str, tuple[Literal["input_text", "output_text", "text"], ...]] = {
    "developer": ("input_text",),
    "user": ("input_text",),
    "assistant": ("output_text", "text"),
}


class Delegation(Config, frozen=True, kw_only=True):
    """Who handles what the model delegates. ``responses``: settings of a hosted backend; kept opaque."""

    type: Literal["client", "responses"]
    acknowledgement_delay_ms: DelayMs | None = None
    responses: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.type == "client" and self.responses is not None:
            raise ValueError("client delegation has no responses settings")


class SessionConfig(Config, frozen=True, kw_only=True):
    """``session`` of `session.start`. Everything but ``delegation`` and ``triggers`` is immutable."""

    model: Name
    instructions: Annotated[str, Meta(max_length=MAX_INSTRUCTION_CHARS)] | None = None
    audio: AudioConfig | None = None
    input: Annotated[tuple[InitialItem, ...], Meta(max_length=MAX_INPUT_ITEMS)] | None = None
    delegation: Delegation | None = None
    triggers: tuple[Any, ...] | None = None
    store: bool | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    client: Any = None

    @property
    def format(self) -> AudioFormat:
        return (self.audio and self.audio.format) or PCM_24K

    @property
    def voice(self) -> str | None:
        """The voice's id; None when the client leaves the choice to the server."""
        voice = self.audio.output.voice if self.audio is not None and self.audio.output is not None else None
        return voice.id if isinstance(voice, CustomVoice) else voice


class ForkAudio(Config, frozen=True, kw_only=True):
    format: AudioFormat | None = None


class ForkConfig(Config, frozen=True, kw_only=True):
    """``session`` of a fork's `session.start`: overrides of the stored session."""

    audio: ForkAudio | None = None
    delegation: Delegation | None = None
    store: bool | None = None
    client: Any = None

    def over(self, stored: SessionConfig) -> SessionConfig:
        """The stored session's configuration with these overrides. The format belongs to the connection: without one
        it is the default, whatever the stored session had. The text history is in the stored session already."""
        output = stored.audio.output if stored.audio is not None else None
        chosen = self.audio.format if self.audio is not None else None
        return structs.replace(
            stored,
            audio=AudioConfig(format=chosen, output=output),
            delegation=merged(stored.delegation, self.delegation) if self.delegation else stored.delegation,
            store=stored.store if self.store is None else self.store,
            input=None,
        )


class UpdateConfig(Config, frozen=True, kw_only=True):
    """``session`` of `session.update`: sparse."""

    delegation: Delegation | UnsetType | None = UNSET
    triggers: tuple[Any, ...] | UnsetType | None = UNSET


def merged(before: Delegation | None, change: Delegation) -> Delegation:
    """``before`` with the fields that ``change`` has; its type is never changed."""
    before = before or Delegation(type="client")
    delay = change.acknowledgement_delay_ms
    return Delegation(
        type=before.type,
        acknowledgement_delay_ms=before.acknowledgement_delay_ms if delay is None else delay,
        responses=before.responses if change.responses is None else {**(before.responses or {}), **change.responses},
    )


class SessionResource(Config, frozen=True, kw_only=True):
    """The resolved session, as `session.started`, `session.updated` and `session.closed` carry it.

    ``expires_at``: Unix seconds. ``status`` stays ``active`` in the last snapshot too; the event's type says that a
    session is over.
    """

    id: str
    expires_at: int
    model: str
    audio: AudioConfig
    delegation: Delegation
    store: bool
    triggers: tuple[Any, ...]
    status: Literal["active"]
    instructions: str | None = None
    input: tuple[InitialItem, ...] | None = None
    safety_identifier: str | None = None

    def with_delegation(self, delegation: Delegation | None) -> SessionResource:
        return structs.replace(self, delegation=_resolved(delegation))


def resolve(config: SessionConfig, *, session_id: str, expires_at: int, model: str, voice: str) -> SessionResource:
    """The resource of a session that has started; ``model`` and ``voice`` are the ones it really has."""
    return SessionResource(
        id=session_id,
        expires_at=expires_at,
        model=model,
        audio=AudioConfig(format=config.format, output=AudioOutput(voice=voice)),
        delegation=_resolved(config.delegation),
        store=bool(config.store),
        triggers=(),
        status="active",
        instructions=config.instructions or None,
        input=config.input and tuple(_typed(item) for item in config.input),
        safety_identifier=config.safety_identifier,
    )


def _resolved(delegation: Delegation | None) -> Delegation:
    """With the defaults written out. Of a hosted backend, which nobody asks here, only the model is echoed."""
    delegation = delegation or Delegation(type="client")
    backend = {"model": str((delegation.responses or {}).get("model", ""))}
    return Delegation(
        type=delegation.type,
        acknowledgement_delay_ms=delegation.acknowledgement_delay_ms or 0,
        responses=backend if delegation.type == "responses" else None,
    )


def _typed(item: InitialItem) -> InitialItem:
    """The item with the part's type written out."""
    part = structs.replace(item.content[0], type=item.content[0].type or _PART_TYPES[item.role][0])
    return structs.replace(item, content=(part,), type="message")
