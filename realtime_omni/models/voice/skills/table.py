"""The table of skills: which sentences are answered by rule, and how. First match wins; no match leaves it to the model.

Owns patterns and their answers. Pure: the time is an argument, and what an answer does (a timer, a call of the client's
tool) is said, not done. A rule matches a whole sentence, stripped of politeness, never a part of one: "stop the music in my
story" is not "stop".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from realtime_omni.models.voice.skills.numbers import NotArithmetic, digits, evaluate, pleasant
from realtime_omni.session.frame import Tool

MAX_TIMER_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Spoken:
    """Say this."""

    text: str


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Say ``text`` now, and ``alarm`` after ``seconds``."""

    seconds: float
    text: str
    alarm: str


@dataclass(frozen=True, slots=True)
class Intent:
    """Call the client's tool, and say ``text``; ``arguments`` is JSON. Where there is no such tool, say so."""

    tool: str
    arguments: str
    text: str


@dataclass(frozen=True, slots=True)
class Act:
    """Something with the conversation itself."""

    what: Literal["hush", "stop", "perhaps_stop", "repeat", "drop_timers"]


Reply = Spoken | StartTimer | Intent | Act

A_LITTLE = "a little"


def _steering(*directions: str) -> dict[str, object]:
    """The parameters of a tool that steers; without ``amount``: on and on (move), or a usual turn."""
    direction = {"type": "string", "enum": list(directions)}
    amount = {"type": "string", "enum": [A_LITTLE]}
    return {
        "type": "object",
        "properties": {"direction": direction, "amount": amount},
        "required": ["direction"],
    }


TOOLS = (
    Tool("move", "Walk in the world.", _steering("forward", "back", "left", "right")),
    Tool("turn", "Look in another direction.", _steering("left", "right", "up", "down", "around")),
    Tool("halt", "Stand still.", {"type": "object", "properties": {}}),
    Tool(
        "set_scene",
        "Change the world's weather, time of day or place.",
        {"type": "object", "properties": {"scene": {"type": "string"}}, "required": ["scene"]},
    ),
    Tool(
        "instruct_robot",
        "Give the robot a task in words.",
        {"type": "object", "properties": {"instruction": {"type": "string"}}, "required": ["instruction"]},
    ),
)
"""What a page or a robot offers so that the voice steers it; a client may offer any of them, under these names."""

CAPABILITIES = (
    "I can tell you the time and the date, do sums, set timers, and steer the world: say turn left, or make it snow. "
    "And we can talk a little."
)


def reply_to(text: str, now: datetime) -> Reply | None:
    """The rule's answer to what was said, or None."""
    said = plain(text)
    for pattern, answer in _RULES:
        if match := pattern.fullmatch(said):
            reply = answer(match, now)
            if reply is not None:
                return reply
    return None


def plain(text: str) -> str:
    """Lower case, without punctuation at word ends and without politeness."""
    said = re.sub(r"(?<=\d),(?=\d{3})", "", text.lower().replace("’", "'"))
    said = re.sub(r"[^\w\s.:%+*/^'-]", " ", said)
    said = re.sub(r"[.:]+(?=\s|$)", " ", said)
    said = re.sub(r"\s+", " ", said).strip()
    before = None
    while said != before:
        before = said
        said = re.sub(_POLITE_START, "", said)
        said = re.sub(_POLITE_END, "", said).strip()
    return said


_POLITE_START = re.compile(
    r"^(?:please|hey|hi|hello|ok|okay|well|so|now|um|uh|and|then|oh|alright|just"
    r"|can you|could you|would you|will you|i want you to|i'd like you to|let's|i need you to|do you know|tell me) "
)
_POLITE_END = re.compile(r" (?:please|now|for me|thanks|thank you|okay|ok|again please|right now|today)$")

_Answer = Callable[[re.Match[str], datetime], Reply | None]


def _time(_: re.Match[str], now: datetime) -> Reply:
    return Spoken(f"It is {now:%I:%M %p}.".replace(" 0", " "))


def _date(_: re.Match[str], now: datetime) -> Reply:
    return Spoken(f"Today is {now:%A}, {now:%B} {now.day}, {now.year}.")


def _year(_: re.Match[str], now: datetime) -> Reply:
    return Spoken(f"It is {now.year}.")


def _sum(match: re.Match[str], _: datetime) -> Reply | None:
    try:
        return Spoken(f"That is {pleasant(evaluate(match['sum']))}.")
    except NotArithmetic:
        return None
    except ZeroDivisionError:
        return Spoken("Nothing can be divided by zero.")
    except OverflowError:
        return Spoken("That number is too long to say.")


_UNIT_S = {"second": 1, "minute": 60, "hour": 3600}


def _timer(match: re.Match[str], _: datetime) -> Reply | None:
    said = re.sub(r"\ban? half hour|half an hour", "30 minutes", match["length"])
    said = re.sub(r"half a minute", "30 seconds", said)
    said = re.sub(r"\ban?(?= (?:second|minute|hour))", "1", said)
    parts = re.findall(r"(\d+(?:\.\d+)?) (second|minute|hour)s?", digits(said))
    left = re.sub(r"(\d+(?:\.\d+)?) (second|minute|hour)s?|and", "", digits(said)).strip()
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    if left or not parts:
        return None
    if not 0 < seconds <= MAX_TIMER_S:
        return Spoken("I can set timers of up to a day.")
    length = " and ".join(f"{number} {unit}{'' if number == '1' else 's'}" for number, unit in parts)
    return StartTimer(seconds, f"Timer set for {length}.", f"Your timer of {length} is over.")


def _tool(name: str, text: str, **arguments: str) -> Intent:
    return Intent(name, json.dumps(arguments), text)


_TOWARDS = {
    "forwards": "forward",
    "ahead": "forward",
    "straight": "forward",
    "straight ahead": "forward",
    "on": "forward",
}
_TOWARDS |= {"backwards": "back", "backward": "back", "lift": "left", "write": "right", "round": "around"}


def _amount(match: re.Match[str]) -> dict[str, str]:
    said = match.groupdict()
    return {"amount": A_LITTLE} if said["before"] or said["after"] or said.get("step") else {}


def _move(match: re.Match[str], _: datetime) -> Reply:
    where = _TOWARDS.get(match["where"], match["where"])
    return _tool("move", f"Walking {where}.", direction=where, **_amount(match))


def _turn(match: re.Match[str], _: datetime) -> Reply:
    where = _TOWARDS.get(match["where"], match["where"])
    doing = "Turning" if where in ("left", "right", "around") else "Looking"
    return _tool("turn", f"{doing} {where}.", direction=where, **_amount(match))


def _halt(_: re.Match[str], now: datetime) -> Reply:
    return _tool("halt", "Standing still.")


def _scene(match: re.Match[str], _: datetime) -> Reply | None:
    scene = match["scene"]
    return None if scene in _NO_SCENES else _tool("set_scene", f"All right, {scene}.", scene=scene)


_NO_SCENES = frozenset({"stop", "short", "quick", "simple", "louder", "quieter", "happen", "work", "better", "so"})


def _robot(match: re.Match[str], _: datetime) -> Reply:
    return _tool("instruct_robot", "The robot is on it.", instruction=match[0])


def _says(text: str) -> _Answer:
    return lambda match, now: Spoken(text)


def _acts(what: Literal["hush", "stop", "perhaps_stop", "repeat", "drop_timers"]) -> _Answer:
    return lambda match, now: Act(what)


_BIT = r"(?:just )?(?:a (?:little )?bit|a little|slightly)"
_BEFORE, _AFTER = rf"(?P<before> {_BIT})?", rf"(?P<after> (?:{_BIT}|a step|one step))?"
_WHERE = r"(?P<where>left|lift|right|write|up|down|around|round)"
_SUM_WORDS = "plus|minus|times|divided|multiplied|squared|cubed|square root|to the power|percent of"
_WHAT_IS = r"(?:what's|whats|what is|how much is|calculate|compute|work out)"
_TIMER = r"(?:timer|alarm|countdown)"
_A = r"(?:a|an|the|another)?"
_RULES: tuple[tuple[re.Pattern[str], _Answer], ...] = tuple(
    (re.compile(pattern), answer)
    for pattern, answer in (
        (r"(?:stop|stop it|stop there|stop now)", _acts("stop")),
        (r"(?:stopped|step|stuck|stock)", _acts("perhaps_stop")),  # a word of one syllable, as it is heard
        (r"(?:stop talking|be quiet|quiet|shut up|hush|enough|that's enough|never ?mind)", _acts("hush")),
        (r"(?:repeat|repeat that|say (?:it|that) again|what did you say|come again|once more|again|pardon)", _acts("repeat")),
        (r"(?:what time (?:is it|it is)|(?:what's |what is )?the time|(?:do you have|have you got) the time)", _time),
        (r"(?:(?:what|which) day (?:is it|it is|is today)|what date is it|(?:what's |what is )?(?:the|today's) date)", _date),
        (r"(?:(?:what|which) year (?:is it|it is)|what's the year)", _year),
        (r"(?:cancel|stop|delete|clear) (?:the|my|all|all the|all my)? ?(?:timer|timers|alarm|alarms)", _acts("drop_timers")),
        (rf"(?:set|start|make|create|give me)(?: me)? {_A} ?{_TIMER} (?:for|of|to|in) (?P<length>.+)", _timer),
        (rf"(?:set|start|make|create)(?: me)? {_A} ?(?P<length>.+?) {_TIMER}", _timer),
        (r"(?:remind|wake|alert) me in (?P<length>.+)", _timer),
        (rf"(?:{_WHAT_IS} )?(?P<sum>.*\d.*|.*(?:{_SUM_WORDS}).*)", _sum),
        (r"(?:(?:what's |what is |say |and )?your name(?: again)?|who are you|what are you called)",
         _says("I am the embedded voice of realtime omni.")),
        (r"(?:what can you do|what are you able to do|help|help me|what can i (?:ask|say)(?: you)?|what do you know)",
         _says(CAPABILITIES)),
        (rf"(?:walk|walked|walking|go|going|move|run|keep walking|keep going|(?P<step>step|take a step)){_BEFORE} (?:to the )?"
         rf"(?P<where>forwards?|straight ahead|straight|ahead|on|back|backwards?|left|right){_AFTER}", _move),
        (rf"(?:turn|turned|turning|look|rotate|spin|steer|head|face){_BEFORE}(?: to)?(?: the)? {_WHERE}(?: side)?{_AFTER}",
         _turn),
        (r"(?:stop (?:walking|moving|turning)|stand still|halt|freeze|stay (?:here|there)|hold still)", _halt),
        (r"(?:make it|let it|let there be|switch to|show me|i want to (?:be in|go to)"
         r"|change (?:it|the (?:scene|world|weather)) to|turn (?:it )?(?:in)?to"
         r"|take (?:me|us) to|go to)(?: a| an| the| be| look)*(?: like)? (?P<scene>[a-z' -]{3,60})", _scene),
        (r"(?:pick up|grasp|grab|put|place|push|pull|lift|drop|stack|hand me|open the gripper|close the gripper|go home)"
         r"(?: (?:the|a|that|this|it|down|up)\b.*)?", _robot),
    )
)  # fmt: skip
