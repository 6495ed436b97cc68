"""The talker: words of a unit, with what the language model thought at each, to codes of sound, 25 a second.

A Llama over embeddings. A unit is appended to what the turn has said before: one embedding a word (the word's own, plus the
language model's hidden state projected to unit length), one that sound begins with, then code after code. What a turn
remembers is a value: keys and values of a unit are written once. Source of the rules: OpenBMB's ``MiniCPMTTS`` (Apache-2.0),
read as facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, normalize, relu, scaled_dot_product_attention

from realtime_omni.kv.attention.sdpa import kernels_of_any_length
from realtime_omni.models.minicpmo.config import Config45
from realtime_omni.models.minicpmo.network import Decoder, empty, sent
from realtime_omni.models.minicpmo.sampling import CodeChance, choose_codes

CODES = 25
"""Of a second, and so of a unit at most."""

Past = tuple[Tensor, ...]
"""Keys and values [L, 2, n, H, d] of each unit of a turn."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one row is to say: ``condition`` [T, D], behind the turn's ``past``. ``may_end``: its speech may end before the
    unit's last code. ``draws``: a number a code."""

    condition: Tensor
    past: Past
    may_end: bool
    draws: Sequence[float]

    @property
    def position(self) -> int:
        return sum(part.shape[2] for part in self.past)


class Mind(Protocol):
    """What the rows of one tick have said, and how the next embedding is read."""

    def begin(self) -> Tensor:
        """Hidden states [R, D] after every row's condition."""
        ...

    def step(self, rows: Sequence[int], x_BD: Tensor) -> Tensor:
        """Hidden states [B, D] after one more embedding of the named rows."""
        ...

    def remembered(self) -> list[Past]:
        """The rows' pasts with what was said as one part more."""
        ...


class Talker(nn.Module):
    """Weights; parameters are empty until a loader fills them."""

    def __init__(self, config: Config45) -> None:
        super().__init__()
        width = config.talker.hidden_size
        self.audio_bos = config.audio_bos
        self.embed_text = empty(config.text_tokens, width)
        self.embed_code = empty(config.audio_tokens, width)
        self.project1, self.project1_bias = empty(width, config.language.hidden_size), empty(width)
        self.project2, self.project2_bias = empty(width, width), empty(width)
        self.decoder = Decoder(config.talker)
        self.head = empty(config.audio_tokens, width)

    def condition(self, words: Sequence[int], hidden: Sequence[Tensor]) -> Tensor:
        """[n + 1, D] of n words and the language model's hidden state at each, [its D]."""
        ids = sent([*words, self.audio_bos], self.embed_text.device)
        made = embedding(ids, self.embed_text)
        if not words:
            return made
        thought = linear(torch.stack(list(hidden)), self.project1, self.project1_bias)
        thought = normalize(linear(relu(thought), self.project2, self.project2_bias), dim=-1)
        return torch.cat((made[:-1] + thought, made[-1:]))

    def speak(
        self, lines: Sequence[Line], chance: CodeChance, mind: Mind | None = None
    ) -> tuple[list[list[int]], list[Past]]:
        """The unit's codes of every row, at most ``CODES``, and what its turn remembers then. ``mind``: of these lines."""
        mind = mind or _Room(self.decoder, lines)
        hidden = mind.begin()
        codes: list[list[int]] = [[] for _ in lines]
        speaking = list(range(len(lines)))
        for step in range(CODES):
            logits = linear(hidden, self.head).float()
            before, draws = [codes[row] for row in speaking], [lines[row].draws[step] for row in speaking]
            chosen = choose_codes(logits, chance, before, [lines[row].may_end for row in speaking], draws)
            going = [(row, code) for row, code in zip(speaking, chosen, strict=True) if code != self.head.shape[0] - 1]
            if not going:
                break
            speaking = [row for row, _ in going]
            for row, code in going:
                codes[row].append(code)
            said = sent([code for _, code in going], hidden.device)
            hidden = mind.step(speaking, embedding(said, self.embed_code))
        return codes, mind.remembered()


class _Room:
    """Keys and values of several rows that grow, [L, 2, R, n, H, d], with room for a unit; rows share a kernel, masked."""

    def __init__(self, decoder: Decoder, lines: Sequence[Line]) -> None:
        config = decoder.config
        self._decoder, self._conditions = decoder, [line.condition for line in lines]
        self._begins = [line.position for line in lines]
        self._ends = list(self._begins)
        self._pasts = [line.past for line in lines]
        longest = max(line.position + len(line.condition) + CODES for line in lines)
        shape = (config.num_hidden_layers, 2, len(lines), longest, config.num_key_value_heads, config.head_dim)
        self._both = lines[0].condition.new_zeros(shape)
        for row, line in enumerate(lines):
            if line.past:
                self._both[:, :, row, : line.position] = torch.cat(line.past, dim=2)

    def begin(self) -> Tensor:
        return torch.stack([self._pass([row], x_TD[None])[0] for row, x_TD in enumerate(self._conditions)])

    def step(self, rows: Sequence[int], x_BD: Tensor) -> Tensor:
        return self._pass(rows, x_BD[:, None])

    def _pass(self, rows: Sequence[int], x_BTD: Tensor) -> Tensor:
        """Hidden states [B, D] after the last of T."""
        with kernels_of_any_length(x_BTD):
            hidden: Tensor = self._decoder(x_BTD, self._place(rows, x_BTD.shape[1]), self._attend)
        return hidden[:, -1]

    def _place(self, rows: Sequence[int], tokens: int) -> Tensor:
        """Make room for the next tokens of the named rows; returns their positions [B, T]."""
        device, count = self._both.device, len(self._begins)
        self._every = list(rows) == list(range(count))
        self._rows = torch.tensor(list(rows), device=device)
        starts = torch.tensor([self._ends[row] for row in rows], device=device)
        self._columns = starts[:, None] + torch.arange(tokens, device=device)
        for row in rows:
            self._ends[row] += tokens
        self._length = max(self._ends[row] for row in rows)
        seen = torch.arange(self._length, device=device) <= self._columns[..., None]
        mask = torch.ones(
            count, tokens, self._length, dtype=torch.bool, device=device
        )  # rows that do not run see anything
        self._mask = mask.index_copy_(0, self._rows, seen)[:, None]
        return self._columns

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for side, new in enumerate((k, v)):
            self._both[layer, side][self._rows[:, None], self._columns] = new
        keys, values = self._both[layer, :, :, : self._length].transpose(2, 3)
        whole = q if self._every else q.new_zeros(len(self._begins), *q.shape[1:]).index_copy_(0, self._rows, q)
        out = scaled_dot_product_attention(
            whole.transpose(1, 2), keys, values, attn_mask=self._mask, enable_gqa=q.shape[2] != k.shape[2]
        ).transpose(1, 2)
        return out if self._every else out[self._rows]

    def remembered(self) -> list[Past]:
        return [
            (*past, self._both[:, :, row, begin:end].clone(memory_format=torch.contiguous_format))
            for row, (past, begin, end) in enumerate(zip(self._pasts, self._begins, self._ends, strict=True))
        ]
