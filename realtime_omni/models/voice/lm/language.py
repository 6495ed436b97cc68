"""The language model as the voice sees it: a conversation in, its answer so far out.

Owns prompts: which turns fit, and that consecutive ones begin alike, so that only what is new is computed. The answer to a
prompt is asked for again every tick and does not depend on who asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from realtime_omni.models.voice.lm.answers import Answer, Answerer
from realtime_omni.models.voice.lm.convert import load
from realtime_omni.models.voice.lm.network import Llama
from realtime_omni.models.voice.lm.referring import refers
from realtime_omni.models.voice.lm.sequences import Sequences
from realtime_omni.models.voice.lm.tokens import ChatTokens
from realtime_omni.models.voice.speaker import SYSTEM, Draft, Role, Said
from realtime_omni.models.voice.speech import end_of_sentences, enough_said
from realtime_omni.models.voice.state import NO_TOOLS, Offer, Prompt

MOST_TOKENS = 48
"""Of an answer: fifteen seconds of speech."""
_CHUNK = 16
_MOST_TURNS, _LEAST_TURNS = 4, 2
"""Of both sides, before a question: with more, or in half of the room, only the newest stay. A small model answers worse the
more it has read, above all of its own words, which it repeats."""
_EXAMPLE: tuple[tuple[Role, str], ...] = (
    ("user", "How many legs does a spider have?"),
    ("assistant", "A spider has eight legs."),
)
"""Of an answer as it is wanted, where the client gives no instructions: small models follow what they see sooner than what they
are told."""
_MOST_KEPT = 64

T = TypeVar("T")
Tokens = tuple[int, ...]


class Language:
    """See the module. With ``threaded=False`` an answer is complete when it is first asked for."""

    def __init__(
        self, gguf: Path, *, calls: int, context: int = 512, threaded: bool = True, torch_threads: int = 1
    ) -> None:
        """``calls``: how many are answered at once; ``torch_threads``: for one product of matrices.

        Raises ConfigError for a checkpoint it cannot use."""
        self.context = context
        checkpoint = load(gguf)
        self._tokens = ChatTokens(checkpoint.tokenizer)
        network = Llama(checkpoint.config, checkpoint.tensors)
        self._sequences = Sequences(network, places=2 * calls + 1, context=context, chunk=_CHUNK)
        self._answerer = Answerer(
            self._sequences,
            self._tokens.stops,
            most=calls,
            guess=self._tokens.lookup(),
            unsaid=self._tokens.unspoken(),
            forbid=self._tokens.circles,
        )
        self._turn = lru_cache(4096)(self._tokens.turn)
        self._answerer.pin((*self._head(None), *self._tokens.opening("user")))
        self._asked: OrderedDict[Tokens, Answer] = OrderedDict()
        self._done: OrderedDict[Tokens, Draft] = OrderedDict()
        self._threaded = threaded
        if threaded:
            self._answerer.start(torch_threads)

    @property
    def kv_bytes(self) -> int:
        return self._sequences.bytes

    @property
    def most_tokens(self) -> int:
        return MOST_TOKENS

    @property
    def calls_tools(self) -> bool:
        return False

    def prompt(self, system: str | None, said: Sequence[Said], offer: Offer = NO_TOOLS) -> Tokens:
        """Tokens of the conversation up to the assistant's next turn, without its oldest turns where they do not fit; of the
        user's turn alone where that refers to none before and the example stands in front (no instructions of the client's)."""
        turns = _merge(said)
        if (
            system is None
            and turns
            and turns[-1][0] == "user"
            and not refers(turns[-1][1], [text for _, text in turns[:-1][-_MOST_TURNS:]])
        ):
            turns = turns[-1:]
        return (*self._so_far(system, turns), *self._tokens.opening("assistant"))

    def _so_far(self, system: str | None, said: Sequence[tuple[Role, str]]) -> Tokens:
        """The turns that are read."""
        head = self._head(system)
        room = self.context - len(head) - len(self._tokens.opening("assistant")) - MOST_TOKENS
        turns, first = list[Tokens](), 0
        for role, text in said:
            turns.append(self._turn(role, text))
            if role == "assistant":  # what goes does not depend on the question, so that it can be prepared for
                first = _oldest(turns, first, room // 2)
        while first < len(turns) and sum(map(len, turns[first:])) > room:
            first += 2  # an exchange
        body = [token for turn in turns[first:] for token in turn]
        if not body and turns:
            body = list(turns[-1][-room:])
        return (*head, *body)

    def _head(self, system: str | None) -> Tokens:
        turns = (("system", SYSTEM), *_EXAMPLE) if system is None else (("system", system),)
        return tuple(token for role, text in turns for token in self._turn(role, text))[: self.context // 2]

    def draft(self, prompt: Prompt, limit: int = MOST_TOKENS, call: str = "") -> Draft:
        """The answer to ``prompt`` so far; asking begins it. It ends where it begins to say the same again, too.
        Calls that ask the same share it: asked again, it is the same.

        Raises ValueError for an endpoint's prompt."""
        if isinstance(prompt, str):
            raise ValueError("the prompt is an endpoint's")
        draft = self._done.get(prompt)
        if draft is not None:
            return draft
        answer = self._answer(prompt, min(limit, MOST_TOKENS))
        done, tokens = answer.done, list(answer.tokens)  # in this order: the last token comes before ``done``
        text, enough = enough_said(" ".join(self._tokens.decode(tokens).split()))
        if done and not enough and len(tokens) >= answer.limit:
            text = end_of_sentences(text)
        draft = Draft(text, len(tokens), done or enough, answer.failed and not enough, read=len(prompt))
        if draft.done:
            del self._asked[prompt]
            answer.stop()
            _keep(self._done, prompt, draft)
        return draft

    def _answer(self, prompt: Tokens, limit: int) -> Answer:
        answer = self._asked.get(prompt)
        if answer is None:
            answer = self._answerer.ask(prompt, limit=limit)
            for forgotten in _keep(self._asked, prompt, answer):
                forgotten.stop()
            self._finish()
        return answer

    def prepare(self, system: str | None, said: Sequence[Said]) -> None:
        """Compute what the next prompt will begin with: the conversation so far, and that the user speaks."""
        self._answerer.ask((*self._so_far(system, _merge(said)), *self._tokens.opening("user")), limit=0)
        self._finish()

    def watch(self, notice: Callable[[], None]) -> None:
        self._answerer.notice = notice

    def drop(self, prompt: Prompt, call: str = "") -> None:
        """Nobody wants this answer any more; who does asks again."""
        answer = None if isinstance(prompt, str) else self._asked.pop(prompt, None)
        if answer is not None:
            answer.stop()

    def close(self) -> None:
        self._answerer.close()

    def _finish(self) -> None:
        while not self._threaded and self._answerer.work():
            pass


def _keep(known: OrderedDict[Tokens, T], prompt: Tokens, value: T) -> list[T]:
    """Remember ``value`` as the newest; returns the oldest ones that had to go."""
    known[prompt] = value
    return [known.popitem(last=False)[1] for _ in range(len(known) - _MOST_KEPT)]


def _oldest(turns: Sequence[Tokens], first: int, room: int) -> int:
    """Which turn is read first behind the newest one of the assistant, where it was ``first``. Several go at once: the prompts
    until then begin alike."""
    if len(turns) - first <= _MOST_TURNS and sum(map(len, turns[first:])) <= room:
        return first
    return max(first, len(turns) - _LEAST_TURNS)


def _merge(said: Sequence[Said]) -> list[tuple[Role, str]]:
    """Turns of the same speaker in a row are one; of tools it knows nothing."""
    merged: list[tuple[Role, str]] = []
    for turn in said:
        if not isinstance(turn, tuple):
            continue
        role, text = turn
        if merged and merged[-1][0] == role:
            merged[-1] = (role, f"{merged[-1][1]} {text}")
        elif text:
            merged.append((role, text))
    return merged
