"""The token streams of a call: what a step reads and what it has written, each stream with its delay.

Stream 0 is the text, then come the agent's codebooks, then the user's. The codes of frame n of a stream with delay ``a`` stand
at place ``n + a``; step t reads place t of every stream and generates place t + 1 of the agent's. So a frame of the agent is
whole once the most delayed of its codes is generated, ``max(delays)`` steps later. Places are kept in a ring of
``max(delays) + 2`` columns: pure functions on tensors, one row a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realtime_omni.models.moshi.config import LMConfig

NOTHING = -1
"""A place that nobody has written."""


class Streams:
    """``generated``: how many streams, text included, the model writes; the others are the user's."""

    def __init__(self, config: LMConfig, generated: int, device: torch.device | str = "cpu") -> None:
        self.generated = generated
        self.most_delayed = max(config.delays)
        self.columns = self.most_delayed + 2
        self.count = config.n_q + 1
        self._delays = torch.tensor(config.delays, device=device)
        self._initial = torch.tensor([config.text_card] + [config.card] * config.n_q, device=device)

    def start(self) -> Tensor:
        """The ring of a fresh call, int64 [K, columns]."""
        return torch.full((self.count, self.columns), NOTHING, device=self._delays.device)

    def read(self, rings: Tensor, steps: Tensor, given: Tensor, *, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Take in what is given of the streams from ``first`` on (by default the user's), int64 [B, K - first], at ``steps``
        int64 [B]; ``rings`` [B, K, columns].

        Returns what the step reads, int64 [B, K], and the rings after. A stream is silent up to its delay."""
        first = self.generated if first is None else first
        places = (steps[:, None] + self._delays[first:]) % self.columns
        rings = rings.clone()
        rings[:, first:].scatter_(2, places[..., None], given[..., None])
        tokens = self._at(rings, steps[:, None].expand(-1, self.count))
        return torch.where(steps[:, None] <= self._delays, self._initial, tokens), rings

    def write(self, rings: Tensor, steps: Tensor, tokens: Tensor) -> Tensor:
        """The rings with what the step has generated (or was made to say), int64 [B, generated]."""
        places = ((steps + 1) % self.columns)[:, None, None].expand(-1, tokens.shape[1], -1)
        rings = rings.clone()
        rings[:, : tokens.shape[1]].scatter_(2, places, tokens[..., None])
        return rings

    def frame(self, rings: Tensor, steps: Tensor) -> Tensor:
        """The newest whole frame after ``steps``, int64 [B, generated]; NOTHING before there is one."""
        delays = self._delays[: self.generated]
        tokens = self._at(rings[:, : self.generated], steps[:, None] + 1 - self.most_delayed + delays)
        return tokens.masked_fill(steps[:, None] < self.most_delayed, NOTHING)

    def _at(self, rings: Tensor, places: Tensor) -> Tensor:
        return rings.gather(2, (places % self.columns)[..., None]).squeeze(2)
