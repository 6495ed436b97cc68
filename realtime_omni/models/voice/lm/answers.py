"""Answers: who is being answered, in which order the work is done, and the thread that does it.

Owns the queue of questions and the running answers. A question is a sequence of tokens and its answer the greedy
continuation without what is forbidden, a function of the question alone; so an answer that nobody wants any more is simply
dropped, and its pages serve the next question, which begins the same way. Work is done in pieces (:meth:`Answerer.work`):
one chunk of a prompt, or one token of every running answer in one batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from operator import eq
from typing import TypeAlias

import torch
from torch import Tensor

from realtime_omni.models.voice.lm.sequences import Sequences

log = logging.getLogger(__name__)

Guess: TypeAlias = Callable[[Sequence[int], Sequence[int]], list[int]]
Forbid: TypeAlias = Callable[[Sequence[int]], list[int]]


@dataclass(eq=False, slots=True)
class Answer:
    """One question on its way. ``tokens`` only grows, ``done`` only turns True, after the last token: other threads may look.

    ``failed``: it ended without being complete. ``stopped``: nobody wants it any more."""

    prompt: tuple[int, ...]
    limit: int
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    failed: bool = False
    stopped: bool = False
    name: str = ""

    def stop(self) -> None:
        """Nobody wants the rest."""
        self.stopped = True


class Answerer:
    """Questions to answers over :class:`Sequences`; :meth:`ask` from any thread, the work in one."""

    def __init__(
        self,
        sequences: Sequences,
        stops: frozenset[int],
        *,
        most: int = 4,
        guess: Guess | None = None,
        unsaid: Sequence[int] = (),
        forbid: Forbid | None = None,
    ) -> None:
        """``most``: answers at once. ``stops``: tokens that end an answer, not part of it. ``guess``: what may follow on a
        prompt and an answer so far; what is right of it costs no passes of its own. ``unsaid``: tokens no answer has.
        ``forbid``: tokens that must not follow on an answer so far."""
        self._forbid = forbid
        self._guess = guess
        self._unsaid = torch.tensor(unsaid, dtype=torch.int64)
        self._sequences = sequences
        self._stops = stops
        self._most = min(most, sequences.book.capacity - 1)
        self._wake = threading.Condition()
        self._queue: list[Answer] = []
        self._running: dict[str, Answer] = {}
        self._names = count()
        self._pinned: str | None = None
        self._closed = False
        self.notice: Callable[[], None] = _nothing
        """Called by the thread that works, whenever an answer has grown or ended."""
        self._thread: threading.Thread | None = None

    def pin(self, prompt: Sequence[int]) -> None:
        """Compute a beginning that all questions share and keep it. Call it before the thread starts."""
        name = "pinned"
        self._sequences.begin(name, prompt)
        self._read_all(name, prompt)
        self._pinned = name

    def ask(self, prompt: Sequence[int], *, limit: int) -> Answer:
        """``limit`` 0 computes the prompt only, so that a question that begins with it is answered sooner.

        Raises ValueError when the prompt and the answer do not fit the context."""
        if not prompt or len(prompt) + limit > self._sequences.context:
            raise ValueError(f"{len(prompt)} tokens and {limit} to come do not fit {self._sequences.context}")
        answer = Answer(tuple(prompt), limit)
        with self._wake:
            self._queue.append(answer)
            self._wake.notify()
        return answer

    def work(self) -> bool:
        """One piece of work; False when there was none."""
        with self._wake:
            self._admit()
        reading = next((a for a in self._running.values() if self._unread(a)), None)
        if reading is not None:
            self._guarded([reading], self._read)
        elif self._running:
            self._guarded(list(self._running.values()), self._speak)
        else:
            return False
        self.notice()
        return True

    def start(self, torch_threads: int = 1) -> None:
        """Work in a thread of its own until :meth:`close`; every product of matrices there uses ``torch_threads``."""
        self._thread = threading.Thread(target=self._run, args=(torch_threads,), name="voice-lm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its present piece; what runs is left unanswered."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self, torch_threads: int) -> None:
        torch.set_num_threads(torch_threads)  # of this thread
        while not self._closed:
            if not self.work():
                with self._wake:
                    if not self._queue and not self._closed:
                        self._wake.wait()

    def _admit(self) -> None:
        for answer in [a for a in self._running.values() if a.stopped]:
            self._finish(answer, failed=True)
        while self._queue and len(self._running) < self._most:
            answer = self._queue.pop(0)
            if answer.stopped:
                answer.done = answer.failed = True
                continue
            if not answer.limit and self._sequences.knows(answer.prompt):
                answer.done = True
                continue
            if self._sequences.full:
                self._sequences.end(self._idle())
            answer.name = str(next(self._names))
            self._sequences.begin(answer.name, answer.prompt)
            self._running[answer.name] = answer

    def _idle(self) -> str:
        """The least recently used sequence that nobody speaks with; there is one, because ``most`` is below the capacity."""
        return next(n for n in self._sequences.names if n not in self._running and n != self._pinned)

    def _unread(self, answer: Answer) -> tuple[int, ...]:
        """What of the prompt is not computed yet. None of it is once the answer has begun."""
        return () if answer.tokens else answer.prompt[len(self._sequences.tokens(answer.name)) :]

    def _read(self, answers: Sequence[Answer]) -> None:
        [answer] = answers
        unread = self._unread(answer)
        logits = self._sequences.feed({answer.name: unread[: self._sequences.chunk]})
        if len(unread) <= self._sequences.chunk:
            self._take(answer, *self._likeliest(logits, [[]]))

    def _speak(self, answers: Sequence[Answer]) -> None:
        if len(answers) == 1 and (ahead := self._ahead(answers[0])):  # a pass has as many tokens of every row
            self._speak_ahead(answers[0], ahead)
            return
        logits = self._sequences.feed({a.name: a.tokens[-1:] for a in answers})
        for answer, token in zip(answers, self._likeliest(logits, [a.tokens for a in answers]), strict=True):
            self._take(answer, token)

    def _ahead(self, answer: Answer) -> list[int]:
        if self._guess is None:
            return []
        return self._guess(answer.prompt, answer.tokens)[
            : min(answer.limit - len(answer.tokens), self._sequences.chunk - 1)
        ]

    def _speak_ahead(self, answer: Answer, ahead: Sequence[int]) -> None:
        """One pass over the last token and those that may follow; what was guessed wrong is taken back."""
        logits = self._sequences.feed({answer.name: [answer.tokens[-1], *ahead]}, every=True)
        follows = self._likeliest(logits, [[*answer.tokens, *ahead[:n]] for n in range(len(ahead) + 1)])
        right = sum(takewhile(bool, map(eq, ahead, follows)))
        if wrong := len(ahead) - right:
            self._sequences.take_back(answer.name, wrong)
        for token in follows[: right + 1]:
            if not answer.done:
                self._take(answer, token)

    def _likeliest(self, logits: Tensor, said: Sequence[Sequence[int]]) -> list[int]:
        """The greedy choice for every row of ``logits`` [N, V], behind the N beginnings ``said`` of its answer."""
        logits = logits.index_fill(-1, self._unsaid, -torch.inf)
        if self._forbid is not None:
            for row, tokens in zip(logits, said, strict=True):
                row[self._forbid(tokens)] = -torch.inf
        return [int(token) for token in logits.argmax(dim=-1)]

    def _take(self, answer: Answer, token: int) -> None:
        if token not in self._stops and len(answer.tokens) < answer.limit:
            answer.tokens.append(token)
        if token in self._stops or len(answer.tokens) >= answer.limit:
            self._finish(answer)

    def _finish(self, answer: Answer, *, failed: bool = False) -> None:
        self._running.pop(answer.name, None)
        answer.failed = failed
        answer.done = True

    def _guarded(self, answers: Sequence[Answer], piece: Callable[[Sequence[Answer]], None]) -> None:
        """A pass that fails ends the answers it was for, and nothing else."""
        try:
            piece(answers)
        except Exception:
            log.exception("the language model could not go on")
            for answer in answers:
                self._finish(answer, failed=True)
                self._sequences.end(answer.name)

    def _read_all(self, name: str, prompt: Sequence[int]) -> None:
        while rest := prompt[len(self._sequences.tokens(name)) :]:
            self._sequences.feed({name: rest[: self._sequences.chunk]})


def _nothing() -> None:
    """Nobody watches."""
