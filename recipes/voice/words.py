"""The voice's language model alone, in one long conversation without sound: ``python -m recipes.voice.words [--seed N]``.

It is prepared for each question of :mod:`recipes.voice.measure`, begun as in a pause, asked, and remembers as in a call. The
answers are the same every time; ``--seed`` puts the questions into another order. Printed are the answers, and in the end:

- ``read_before``, ``read_then``: tokens of the prompt that were computed before a question was there, and with it.
- ``asked_anew``: questions whose prompt was another one in the end than in the pause.
- ``in_circles``: answers that say four words in a row twice. ``alike``: those that share six in a row with another answer.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from realtime_omni.bench.conditions import summary
from realtime_omni.models.voice import conversation
from realtime_omni.models.voice.lm.language import Language
from realtime_omni.models.voice.lm.sequences import Sequences
from realtime_omni.models.voice.state import Entry
from realtime_omni.models.voice.weights import cache_folder
from recipes.voice.measure import QUESTIONS, plain


class Talk:
    """A conversation as a call has it. ``fed``: tokens computed since it was set to 0."""

    def __init__(self) -> None:
        self.fed = 0
        self._language = Language(cache_folder() / "smollm2.gguf", calls=1, threaded=False)
        self._entries: conversation.Entries = ()
        self._count()

    def prepare(self) -> None:
        self._language.prepare(*conversation.reading(None, self._entries))

    def ask(self, question: str) -> tuple[str, int, bool]:
        """(the answer, tokens read with the question, whether that was what had been asked in the pause)."""
        asked = conversation.add(self._entries, Entry("", "user", question))
        begun = self._prompt(asked)
        self._entries = conversation.add(self._entries, Entry("u", "user", question))
        prompt = self._prompt(self._entries)
        self.fed = 0
        self._language._answerer.ask(prompt, limit=0)
        self._language._finish()
        read, draft = self.fed, self._language.draft(prompt)
        self._entries = conversation.shorten(conversation.add(self._entries, Entry("a", "assistant", draft.text)))
        return draft.text, read, prompt == begun

    def _prompt(self, entries: conversation.Entries) -> tuple[int, ...]:
        return self._language.prompt(*conversation.reading(None, entries))

    def _count(self) -> None:
        feed = Sequences.feed

        def counted(sequences: Sequences, rows: Mapping[str, Sequence[int]], every: bool = False) -> Tensor:
            self.fed += sum(map(len, rows.values()))
            return feed(sequences, rows, every)

        Sequences.feed = counted  # type: ignore[method-assign, assignment]


def runs(text: str, length: int) -> list[tuple[str, ...]]:
    """Words in a row."""
    words = plain(text)
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="of the order; without it, as they are asked aloud")
    parser.add_argument("--turns", type=int, default=len(QUESTIONS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    questions = list(QUESTIONS)
    if args.seed is not None:
        random.Random(args.seed).shuffle(questions)
    talk, answers, before, then, anew = Talk(), list[str](), list[float](), list[float](), 0
    for question in questions[: args.turns]:
        talk.fed = 0
        talk.prepare()
        before.append(talk.fed)
        answer, read, same = talk.ask(question)
        answers.append(answer)
        then.append(read)
        anew += not same
        print(f"{question} {answer}", flush=True)
    shared = Counter(run for answer in answers for run in set(runs(answer, 6)))
    report = {
        "read_before": summary(before, 0.5, 1.0),
        "read_then": summary(then, 0.5, 1.0),
        "asked_anew": anew,
        "in_circles": sum(len(set(runs(answer, 4))) < len(runs(answer, 4)) for answer in answers),
        "alike": sum(any(shared[run] > 1 for run in runs(answer, 6)) for answer in answers),
        "words": summary([float(len(plain(answer))) for answer in answers], 0.5, 1.0),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
