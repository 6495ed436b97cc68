"""Does a question refer to what was said before? One that does not is asked without it.

A model of 135 million parameters copies what it reads: a question that stands for itself it answers best alone, and then its
answer does not depend on what was asked before. English only, as the voice is; in doubt, it refers. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_POINTING = _set(
    "it its he him his she her hers they them their theirs this that these those there then here one ones another other others "
    "else more again same too also instead my mine myself we us our ours say said mean sure true know "
    "next happened better worse explain continue repeat finish"
)
_LINKING = _set("and but or so because then")
_MYSELF = frozenset({("am", "i"), ("did", "i"), ("have", "i")})
"""In "how do I swim?" nobody is meant."""
_COMMON = _set(
    "a an the is are was were be been am do does did can could will would should may might must have has had of in on at to "
    "for from by with as into and or but if not no yes what who whom whose where when why how which i you your me please tell "
    "about any some very much many"
)
_ASKING = _set(
    "what who whom whose where when why how which is are was were am do does did can could will would should"
)
"""First words: a recogniser does not always hear the question mark."""
_FEW = 3
"""Words: fewer are an answer or half a question."""


def refers(text: str, before: Sequence[str]) -> bool:
    """Whether ``text`` needs what was said ``before``, newest last: it points ("it", "my", "another"), goes on ("and Spain?"),
    is very short, answers a question, or has a word, not one of the commonest, that was told and not asked: one capital needs
    none of another."""
    if not before:
        return False
    words = _words(text)
    if len(words) < _FEW or before[-1].rstrip().endswith("?"):
        return True
    if words[0] in _LINKING or words[1] == "about" or not _POINTING.isdisjoint(words):
        return True
    if not _MYSELF.isdisjoint(pairwise(words)):
        return True
    told, asked = set[str](), set[str]()
    for said in before:
        (asked if _asks(said) else told).update(_words(said))
    return not told.isdisjoint(set(words) - asked - _COMMON)


def _asks(text: str) -> bool:
    return text.rstrip().endswith("?") or not _ASKING.isdisjoint(_words(text)[:1])


def _words(text: str) -> list[str]:
    """Lower case, without what follows an apostrophe ("it's", "dog's")."""
    return [
        word.split("'")[0] for word in re.findall(r"[a-z0-9']+", text.lower().replace("’", "'")) if word.split("'")[0]
    ]
