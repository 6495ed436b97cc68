"""When a MiniCPM-o speaks, in the words of the contract: units become responses.

A response begins with a unit that speaks and ends when the model has ended its turn and the last of its sound is told. One may
be asked for: the next unit in which no response runs is made to speak. After a cancel the unit is made to listen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from realtime_omni.models.minicpmo.vocabulary import MOST_UNREAD
from realtime_omni.session.frame import Cancel, Directive, Respond
from realtime_omni.session.signals import OutputText, ResponseEnded, ResponseStarted, Signal, Speaking, Usage

Count = Annotated[int, Meta(ge=0)]
MOST_REQUESTED = 64


class Speaker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``response``: the running one. ``count``: responses that the model began by itself. ``requested``: those asked for, in
    order. ``over``: the turn has ended, its sound has not. ``unread``: tokens that make no whole letter yet. ``words`` and
    ``codes``: of the running response."""

    response: str | None = None
    count: Count = 0
    requested: Annotated[tuple[str, ...], Meta(max_length=MOST_REQUESTED)] = ()
    over: bool = False
    unread: Annotated[tuple[Count, ...], Meta(max_length=MOST_UNREAD)] = ()
    words: Count = 0
    codes: Count = 0


def obey(speaker: Speaker, directives: Sequence[Directive], signals: list[Signal]) -> tuple[Speaker, bool]:
    """Requests wait, a cancel acts. Returns the speaker, and whether what it said was cancelled."""
    silenced = False
    for directive in directives:
        match directive:
            case Respond() if len(speaker.requested) < MOST_REQUESTED:
                speaker = replace(speaker, requested=(*speaker.requested, directive.id))
            case Respond():
                signals += (ResponseStarted(directive.id), ResponseEnded(directive.id, "failed"))
            case Cancel(response=None):
                speaker, stopped = _stop(_withdraw(speaker, speaker.requested, signals), signals)
                silenced |= stopped
            case Cancel(response=named) if named == speaker.response:
                speaker, stopped = _stop(speaker, signals)
                silenced |= stopped
            case Cancel(response=named):
                speaker = _withdraw(speaker, tuple(r for r in speaker.requested if r == named), signals)
            case _:
                pass
    return speaker, silenced


def _withdraw(speaker: Speaker, names: Sequence[str], signals: list[Signal]) -> Speaker:
    """These have no turn any more."""
    for name in names:
        signals += (ResponseStarted(name), ResponseEnded(name, "cancelled"))
    return replace(speaker, requested=tuple(name for name in speaker.requested if name not in names))


def _stop(speaker: Speaker, signals: list[Signal]) -> tuple[Speaker, bool]:
    if speaker.response is None:
        return speaker, False
    signals.append(ResponseEnded(speaker.response, "cancelled", _usage(speaker)))
    return replace(speaker, response=None, over=False, unread=(), words=0, codes=0), True


def begin(speaker: Speaker, signals: list[Signal]) -> Speaker:
    """The unit speaks: a response begins, unless one runs whose turn goes on."""
    if speaker.response is not None and not speaker.over:
        return speaker
    speaker = finish(speaker, signals)
    name, rest, count = f"minicpm-o-{speaker.count}", speaker.requested, speaker.count + 1
    if rest:
        name, rest, count = rest[0], rest[1:], speaker.count
    signals.append(ResponseStarted(name))
    return replace(speaker, response=name, requested=rest, count=count)


def say(speaker: Speaker, text: str, start_ms: float, end_ms: float, signals: list[Signal]) -> None:
    """This tick's sound is the running response's; ``text`` is what is new of it."""
    if speaker.response is not None:
        signals.append(Speaking(speaker.response))
        if text:
            signals.append(OutputText(speaker.response, text, start_ms, end_ms))


def finish(speaker: Speaker, signals: list[Signal]) -> Speaker:
    """The last of a response was told."""
    if speaker.response is not None:
        signals.append(ResponseEnded(speaker.response, "completed", _usage(speaker)))
    return replace(speaker, response=None, over=False, unread=(), words=0, codes=0)


def _usage(speaker: Speaker) -> Usage:
    return Usage(output_text=speaker.words, output_audio=speaker.codes)
