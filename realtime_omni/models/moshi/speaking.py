"""When a Moshi speaks, in the words of the contract: its text stream decides where a response begins and ends.

The model sounds all the time and writes a word when it speaks. A response begins with a word and ends when none has come for
``PAUSE_FRAMES``; its text is told with the frame in which the model wrote it. After a cancel the agent is silent for such a
pause (the model is made to remember silence), and then says what it likes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from realtime_omni.session.frame import Cancel, Directive
from realtime_omni.session.signals import OutputText, ResponseEnded, ResponseStarted, Signal, Speaking, Usage

PAUSE_FRAMES = 15
"""1.2 s: longer than a word sounds, shorter than a turn of the user."""

Count = Annotated[int, Meta(ge=0)]


class Speech(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``response``: the running one. ``count``: responses so far. ``quiet``: frames since the last word. ``muted``: silent
    since a cancel. ``words`` and ``frames``: of the running response."""

    response: str | None = None
    count: Count = 0
    quiet: Count = 0
    muted: bool = False
    words: Count = 0
    frames: Count = 0


def obey(speech: Speech, directives: Sequence[Directive], signals: list[Signal]) -> Speech:
    """Cancel acts; there is nothing else that a model without requests could be told about its speech."""
    for directive in directives:
        named = isinstance(directive, Cancel) and directive.response in (None, speech.response)
        if named and speech.response is not None:
            signals.append(ResponseEnded(speech.response, "cancelled", _usage(speech)))
            speech = replace(speech, response=None, muted=True, words=0, frames=0)
    return speech


def advance(speech: Speech, piece: str, start_ms: float, end_ms: float, signals: list[Signal]) -> Speech:
    """One frame further; ``piece`` is the word that it begins, or empty."""
    speech = replace(speech, quiet=0 if piece else min(speech.quiet + 1, PAUSE_FRAMES))
    if speech.quiet == PAUSE_FRAMES:
        if speech.response is not None:
            signals.append(ResponseEnded(speech.response, "completed", _usage(speech)))
        return replace(speech, response=None, muted=False, words=0, frames=0)
    if speech.muted:
        return speech
    if piece and speech.response is None:
        name = f"moshi-{speech.count}"
        signals.append(ResponseStarted(name))
        speech = replace(speech, response=name, count=speech.count + 1)
    if speech.response is None:
        return speech
    signals.append(Speaking(speech.response))
    if piece:
        signals.append(OutputText(speech.response, piece, start_ms, end_ms))
    return replace(speech, words=speech.words + bool(piece), frames=speech.frames + 1)


def _usage(speech: Speech) -> Usage:
    return Usage(output_text=speech.words, output_audio=speech.frames)
