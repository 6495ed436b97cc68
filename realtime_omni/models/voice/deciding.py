"""What a response says when no language model is needed for it: a skill's answer, a tool's result. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from realtime_omni.models.voice.conversation import asked, last_said
from realtime_omni.models.voice.skills.table import Act, Intent, Spoken, StartTimer, reply_to
from realtime_omni.models.voice.state import Call, Entry, Facts, Manners, Offer, Prompt, Response
from realtime_omni.session.frame import Turns

PATIENCE_MS = {"low": 8000.0, "medium": 4000.0, "high": 2000.0, "auto": 4000.0}
_SILENT_RESULTS = frozenset({"", "ok", "done", "true", "null", "none", "success"})
_MOST_RESULT_CHARS = 300


@dataclass(frozen=True, slots=True)
class Decision:
    """``said``: this text; or ``prompt``: what the language model answers. And what happens beside it."""

    said: str | None = None
    prompt: Prompt | None = None
    call: Call | None = None
    timer: StartTimer | None = None
    drop_timers: bool = False


def offer_of(response: Response, facts: Facts) -> Offer:
    """The tools that a response may call: its own, else the session's."""
    tools = facts.offer.tools if response.tools is None else response.tools
    return Offer(tools, response.tool_choice or facts.offer.choice)


def decide(response: Response, entries: Sequence[Entry], facts: Facts, now: datetime) -> Decision | None:
    """The answer by rule to what was said last, or None. A request with instructions of its own is the model's."""
    entry = asked(entries)
    if entry is None or response.instructions is not None:
        return None
    if entry.kind == "result":
        return Decision(said=_result(entry.text))
    match reply_to(entry.text, now):
        case Spoken(text):
            return Decision(said=text)
        case StartTimer() as timer:
            return Decision(said=timer.text, timer=timer)
        case Intent(tool, arguments, text):
            if tool in offer_of(response, facts).names:
                return Decision(said=text, call=Call(tool, arguments))
            return Decision(said="There is nothing here that I could steer.")
        case Act("repeat"):
            return Decision(said=last_said(entries) or "I have not said anything yet.")
        case Act("drop_timers"):
            return Decision(said="All timers are off." if facts.timers else "There is no timer.", drop_timers=True)
        case Act("stop" | "perhaps_stop") if "halt" in offer_of(response, facts).names:
            return Decision(said="", call=Call("halt", "{}"))
        case Act("hush" | "stop"):
            return Decision(said="")
        case _:
            return None


def manners_of(turns: Turns) -> Manners:
    return Manners(
        mode="semantic" if turns.mode == "model" else turns.mode,
        respond=turns.respond,
        threshold=turns.threshold,
        silence_ms=turns.silence_ms,
        patience_ms=PATIENCE_MS[turns.eagerness],
        idle_ms=turns.idle_ms,
    )


def _result(output: str) -> str:
    """What a tool returned is said where it is a sentence; an acknowledgement or a record of fields is not."""
    text = output.strip().strip('"')
    if text.lower() in _SILENT_RESULTS or text[:1] in ("{", "["):
        return ""
    return text[:_MOST_RESULT_CHARS]
