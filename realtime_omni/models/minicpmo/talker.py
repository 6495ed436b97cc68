"""The talker: words of a unit, with what the language model thought at each, to codes of sound, 25 a second.

A Llama over embeddings. A unit is appended to what the turn has said before: one embedding a word (the word's own, plus the
language model's hidden state projected to unit length), one that sound begins with, then code after code. What a turn
remembers is a value: keys and values of a unit are written once. Source of the rules: OpenBMB's ``MiniCPMTTS`` (Apache-2.0),
read as facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, normalize, relu, scaled_dot_product_attention

from realtime_omni.models.minicpmo.config import Config45, DecoderConfig
from realtime_omni.models.minicpmo.network import Decoder, empty
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
        ids = torch.tensor([*words, self.audio_bos], device=self.embed_text.device)
        made = embedding(ids, self.embed_text)
        if not words:
            return made
        thought = linear(torch.stack(list(hidden)), self.project1, self.project1_bias)
        thought = normalize(linear(relu(thought), self.project2, self.project2_bias), dim=-1)
        return torch.cat((made[:-1] + thought, made[-1:]))

    def speak(self, lines: Sequence[Line], chance: CodeChance) -> tuple[list[list[int]], list[Past]]:
        """The unit's codes of every row, at most ``CODES``, and what its turn remembers then."""
        room = _Room(self.decoder.config, lines)
        last = [self._read(room, row, line) for row, line in enumerate(lines)]
        codes: list[list[int]] = [[] for _ in lines]
        speaking, hidden = list(range(len(lines))), torch.stack(last)
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
            said = torch.tensor([[code] for _, code in going], device=hidden.device)
            hidden = self._pass(room, speaking, embedding(said, self.embed_code))
        return codes, room.remembered()

    def _read(self, room: _Room, row: int, line: Line) -> Tensor:
        return self._pass(room, [row], line.condition[None])[0]

    def _pass(self, room: _Room, rows: Sequence[int], x_BTD: Tensor) -> Tensor:
        """Hidden states [B, D] after the last of T."""
        starts = torch.tensor([room.ends[row] for row in rows], device=x_BTD.device)
        positions = starts[:, None] + torch.arange(x_BTD.shape[1], device=x_BTD.device)
        hidden: Tensor = self.decoder(x_BTD, positions, lambda layer, q, k, v: room.attend(layer, q, k, v, rows))
        room.advance(rows, x_BTD.shape[1])
        return hidden[:, -1]


class _Room:
    """Keys and values of several rows that grow, [L, 2, H, n, d] each, with room for a unit."""

    def __init__(self, config: DecoderConfig, lines: Sequence[Line]) -> None:
        self.ends = [line.position for line in lines]
        self._begins = list(self.ends)
        self._pasts = [line.past for line in lines]
        self._rows: list[Tensor] = []
        for line in lines:
            shape = (line.position + len(line.condition) + CODES, config.head_dim)
            row = line.condition.new_empty(config.num_hidden_layers, 2, config.num_key_value_heads, *shape)
            if line.past:
                row[..., : line.position, :] = torch.cat(line.past, dim=2).transpose(2, 3)
            self._rows.append(row)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int]) -> Tensor:
        out = torch.empty_like(q)
        tokens = q.shape[1]
        for place, row in enumerate(rows):
            before = self.ends[row]
            both = self._rows[row][layer]
            both[0, :, before : before + tokens] = k[place].transpose(0, 1)
            both[1, :, before : before + tokens] = v[place].transpose(0, 1)
            keys, values = both[:, None, :, : before + tokens]
            mask = None
            if tokens > 1:
                mask = torch.ones(tokens, before + tokens, dtype=torch.bool, device=q.device).tril(before)
            out[place] = scaled_dot_product_attention(
                q[place].transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=q.shape[2] != k.shape[2]
            )[0].transpose(0, 1)
        return out

    def advance(self, rows: Sequence[int], tokens: int) -> None:
        for row in rows:
            self.ends[row] += tokens

    def remembered(self) -> list[Past]:
        """The rows' pasts with what was written as one part more."""
        return [
            (*past, row[..., begin:end, :].transpose(2, 3).clone(memory_format=torch.contiguous_format))
            for past, row, begin, end in zip(self._pasts, self._rows, self._begins, self.ends, strict=True)
        ]
