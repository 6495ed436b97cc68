"""What the language model writes in one unit: the decision, the words, the end. Pure rules on token numbers.

Source of the rules: OpenBMB's duplex runtime (Apache-2.0), read as facts. The first token is the decision:
``<|listen|>``, which is the end, too, or ``<|speak|>``. While a turn of the model has not ended (``<|turn_eos|>``),
listening is not allowed: the token is replaced by ``<|tts_bos|>``, so the model never yields in the middle of a turn.
The last token that a unit may have is ``<|chunk_eos|>``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from realtime_omni.models.minicpmo.vocabulary import Marks


@dataclass(slots=True)
class Unit:
    """A unit that is being written.

    ``most``: tokens, its end included. ``turn_over``: no turn of the model is under way. ``forced``: the decision, where it is
    not the model's. ``tokens``: written so far, the end included.
    """

    marks: Marks
    most: int
    turn_over: bool
    forced: int | None = None
    tokens: list[int] = field(default_factory=list)
    ended_turn: bool = False

    @property
    def chooses(self) -> bool:
        """Whether the next token is the model's choice."""
        return not (self.forced is not None and not self.tokens) and len(self.tokens) < self.most - 1

    @property
    def done(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self.marks.ends

    @property
    def listens(self) -> bool:
        return bool(self.tokens) and self.tokens[0] == self.marks.listen

    def write(self, chosen: int | None) -> int:
        """The next token; ``chosen`` by the model where it ``chooses``."""
        assert not self.done, "a unit ends once"
        token = self._token(chosen)
        self.tokens.append(token)
        if token not in self.marks.ends:
            self.turn_over = token == self.marks.turn_eos
            self.ended_turn |= self.turn_over
        return token

    def _token(self, chosen: int | None) -> int:
        if not self.chooses:
            return self.forced if self.forced is not None and not self.tokens else self.marks.chunk_eos
        assert chosen is not None
        return self.marks.tts_bos if chosen == self.marks.listen and not self.turn_over else chosen
