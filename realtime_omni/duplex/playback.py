"""How much of each response was made, sent, heard and remembered: generated >= sent >= played >= committed.

Owns these four lengths per response, in milliseconds of its own sound. A client that acknowledges nothing is taken to play what
it was sent as it came. Must not know wires or what time it is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

REMEMBERED = 64
"""Responses; a truncation that comes later than that is of a conversation long gone."""


@dataclass(slots=True)
class Playback:
    """One response. ``begun_s``: when its first sound was sent. ``acknowledged``: the client says what it plays."""

    generated_ms: float = 0.0
    sent_ms: float = 0.0
    played_ms: float = 0.0
    committed_ms: float = 0.0
    begun_s: float | None = None
    acknowledged: bool = False

    def estimate(self, now_s: float) -> float:
        """How much was heard by now."""
        if not self.acknowledged and self.begun_s is not None:
            self.played_ms = max(self.played_ms, min(self.sent_ms, (now_s - self.begun_s) * 1000))
        return self.played_ms


class PlaybackLedger:
    """The responses of one session, oldest first."""

    def __init__(self) -> None:
        self._responses: OrderedDict[str, Playback] = OrderedDict()

    def get(self, response: str) -> Playback | None:
        return self._responses.get(response)

    def start(self, response: str) -> None:
        self._responses[response] = Playback()
        while len(self._responses) > REMEMBERED:
            self._responses.popitem(last=False)

    def generated(self, response: str, ms: float) -> None:
        """So much more sound was made."""
        playback = self._responses.get(response)
        if playback is not None:
            playback.generated_ms += ms

    def sent(self, response: str, ms: float, now_s: float) -> None:
        """So much more of it left."""
        playback = self._responses.get(response)
        if playback is not None:
            playback.sent_ms = min(playback.generated_ms, playback.sent_ms + ms)
            if playback.begun_s is None:
                playback.begun_s = now_s

    def played(self, response: str, ms: float) -> float | None:
        """The client has played so much from the response's beginning. What is more than was sent, or less than before, is
        taken for what it can be; returns that, or None for a response that is not known."""
        playback = self._responses.get(response)
        if playback is None:
            return None
        playback.acknowledged = True
        playback.played_ms = max(playback.played_ms, min(ms, playback.sent_ms))
        return playback.played_ms

    def cut(self, response: str, heard_ms: float) -> float | None:
        """It was heard so far and no further; the one way back. Returns what stays, or None for one that is not known."""
        playback = self._responses.get(response)
        if playback is None:
            return None
        heard_ms = min(heard_ms, playback.sent_ms)
        playback.generated_ms = playback.sent_ms = playback.played_ms = playback.committed_ms = heard_ms
        return heard_ms

    def commit(self, response: str, now_s: float) -> None:
        """What was heard of it is what the conversation remembers."""
        playback = self._responses.get(response)
        if playback is not None:
            playback.committed_ms = playback.estimate(now_s)

    def remaining_ms(self, response: str, now_s: float) -> float:
        """Sent and not heard yet."""
        playback = self._responses.get(response)
        return 0.0 if playback is None else playback.sent_ms - playback.estimate(now_s)

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        assert len(self._responses) <= REMEMBERED
        for name, p in self._responses.items():
            order = p.generated_ms >= p.sent_ms >= p.played_ms >= p.committed_ms >= 0
            assert order, f"response {name!r} was played before it was made: {p}"
