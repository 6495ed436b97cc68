"""What a client asks for in the query of `/api/chat`.

Owns: names, ranges, and that a voice is an id.  Must not know: which voices exist, how a model samples.
Invariant: nothing that came from a client is ever used as a path; a voice that could be one is refused here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from msgspec import Struct

from .errors import MoshiCode, MoshiError

MAX_TEXT_CHARS = 4_000
_VOICE = re.compile(r"(?P<id>[A-Za-z0-9][A-Za-z0-9_-]{0,63})(?:\.(?:pt|wav|safetensors))?\Z")
"""PersonaPlex clients send the name of a file; its ending is dropped, and what is left is an id."""


class MoshiOptions(Struct, frozen=True, kw_only=True):
    """None: the client leaves it to the model.

    Temperatures are 0 or more, ``*_topk`` 1 or more, seeds 0 to 2^63 - 1.  ``voice``: an id.  ``text``: who the agent is
    (PersonaPlex's ``text_prompt``).
    """

    voice: str | None = None
    text: str | None = None
    text_temperature: float | None = None
    text_topk: int | None = None
    audio_temperature: float | None = None
    audio_topk: int | None = None
    pad_mult: float | None = None
    repetition_penalty: float | None = None
    repetition_penalty_context: int | None = None
    text_seed: int | None = None
    audio_seed: int | None = None
    max_steps: int | None = None


_FLOATS = {
    "text_temperature": (0.0, 10.0),
    "audio_temperature": (0.0, 10.0),
    "pad_mult": (-100.0, 100.0),
    "repetition_penalty": (0.0, 100.0),
}
_INTEGERS = {
    "text_topk": (1, 1_000_000),
    "audio_topk": (1, 1_000_000),
    "repetition_penalty_context": (0, 1_000_000),
    "text_seed": (0, 2**63 - 1),
    "audio_seed": (0, 2**63 - 1),
    "max_steps": (1, 2**53),
}


def read_query(query: Iterable[tuple[str, str]]) -> MoshiOptions:
    """The pairs of a query string, decoded. Unknown names (a queue's ``email``, ``worker_auth_id``) mean nothing.

    Raises:
        MoshiError: ``invalid_parameter`` or ``voice_invalid``; ``param`` names it.
    """
    found: dict[str, object] = {}
    for name, value in query:
        if value == "":
            continue  # what web clients send for a field that was left empty
        if name in _FLOATS:
            found[name] = _number(name, value)
        elif name in _INTEGERS:
            found[name] = _integer(name, value)
        elif name == "seed":  # PersonaPlex has one for both; -1 is its word for none
            if value != "-1":
                found["text_seed"] = found["audio_seed"] = _integer("text_seed", value, "seed")
        elif name == "voice_prompt":
            found["voice"] = _voice(value)
        elif name == "text_prompt":
            found["text"] = _text(value)
    return MoshiOptions(**found)  # type: ignore[arg-type]  # every name was checked above


def _number(name: str, value: str) -> float:
    least, most = _FLOATS[name]
    try:
        number = float(value) if len(value) <= 40 else math.nan
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise MoshiError(MoshiCode.INVALID_PARAMETER, f"{name} is a number from {least:g} to {most:g}", name)
    return number


def _integer(name: str, value: str, param: str | None = None) -> int:
    least, most = _INTEGERS[name]
    if re.fullmatch(r"[0-9]{1,19}", value) is None or not least <= int(value) <= most:
        param = param or name
        raise MoshiError(MoshiCode.INVALID_PARAMETER, f"{param} is a whole number from {least} to {most}", param)
    return int(value)


def _voice(value: str) -> str:
    match = _VOICE.match(value)
    if match is None:
        raise MoshiError(MoshiCode.VOICE_INVALID, "a voice is named by its id", "voice_prompt")
    return match["id"]


def _text(value: str) -> str:
    if len(value) > MAX_TEXT_CHARS:
        text = f"text_prompt has at most {MAX_TEXT_CHARS} characters"
        raise MoshiError(MoshiCode.INVALID_PARAMETER, text, "text_prompt")
    return value
