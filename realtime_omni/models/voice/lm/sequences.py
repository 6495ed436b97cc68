"""Token sequences on pages: who has computed what, and the forward pass over several of them at once.

Owns the KV book and pages of the language model. One token is one frame is one page, so that a sequence can go back to any
token, a fork shares every page of what it has in common with its source (a system prompt is computed once for all calls),
and nothing that two sequences share is ever written again. Keys of a sequence are a function of its tokens alone, so pages
are a cache: losing one costs time, never an answer.

Use from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import BranchBlock, KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.voice.lm.network import Llama


@dataclass(frozen=True, slots=True)
class _Row:
    """Slots that a pass writes, and those that it reads: its own come last. ``mask`` bool [T, S]: each token up to itself."""

    reserved: Tensor
    seen: Tensor
    mask: Tensor

    @classmethod
    def of(cls, block: BranchBlock, storage: KVStorage) -> _Row:
        reserved, seen = storage.slots(block.frames), storage.slots((*block.history, *block.frames))
        mask = torch.ones(len(reserved), len(seen), dtype=torch.bool).tril(len(seen) - len(reserved))
        return cls(reserved, seen, mask)


class Sequences:
    """Sequences by name, each a list of tokens whose keys and values are on pages."""

    def __init__(self, network: Llama, *, places: int, context: int, chunk: int) -> None:
        """``places``: sequences at once; ``context``: tokens of one; ``chunk``: tokens of one sequence in one pass."""
        size = network.config
        if context > size.context:
            raise ValueError(f"the network reads {size.context} tokens, not {context}")
        self.context = context
        self.chunk = chunk
        spec = KVSpec(
            num_layers=size.layers,
            num_kv_heads=size.kv_heads,
            head_dim=size.head_dim,
            tokens_per_frame=1,
            frames_per_block=chunk,
            window_frames=context
            + chunk,  # a block counts among what it sees, so this evicts nothing within the context
            requested_sessions=places,
            dtype_bytes=4,
            max_in_flight=places,
        )
        self._network = network
        self.book = KVBook(spec, sessions=places)
        self._storage = KVStorage(spec, spec.managed_pages(places) + spec.scratch_pages, dtype=torch.float32)
        self._tokens: dict[str, list[int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Least recently used first."""
        return self.book.sessions

    @property
    def full(self) -> bool:
        return len(self._tokens) >= self.book.capacity

    @property
    def bytes(self) -> int:
        """Of all pages."""
        return self._storage.bytes

    def tokens(self, name: str) -> tuple[int, ...]:
        """What is computed of a sequence. Raises KeyError."""
        return tuple(self._tokens[name])

    def begin(self, name: str, prompt: Sequence[int]) -> int:
        """Open a sequence with the longest beginning of ``prompt`` that another one has computed already; returns its length.

        At least the last token of the prompt stays to be fed. Raises CapacityError when all places are taken."""
        source, shared = self._closest(prompt[:-1])
        if source is None:
            self.book.begin(name)
        else:
            self.book.fork(source, name)
            self.book.rewind(name, len(self._tokens[source]) - shared)
            self.book.touch(source)
            self.book.touch(name)
        self._tokens[name] = list(prompt[:shared])
        return shared

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether a sequence begins with all of ``tokens``, which is used by being asked for."""
        source, shared = self._closest(tokens)
        if source is None or shared < len(tokens):
            return False
        self.book.touch(source)
        return True

    def end(self, name: str) -> None:
        """Forget a sequence; its pages live on where others share them. Raises KeyError."""
        self.book.end(name)
        del self._tokens[name]

    def feed(self, rows: Mapping[str, Sequence[int]], every: bool = False) -> Tensor:
        """Append as many tokens to each named sequence, the same number to all; returns logits [rows, V] after the last, or
        [rows * tokens, V] after ``every`` one.

        Raises ValueError when a row is longer than ``chunk`` or does not fit the context. A pass that fails leaves every
        sequence as it was."""
        count = self._check(rows)
        blocks = [self.book.plan_block(name, count) for name in rows]
        rows_of = [_Row.of(block.branches[0], self._storage) for block in blocks]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = [self._attend(layer, row, q[i], k[i], v[i]) for i, row in enumerate(rows_of)]
            return torch.stack(parts)

        committed = False
        try:
            tokens = torch.tensor([list(row) for row in rows.values()])
            starts = torch.tensor([[block.first_frame] for block in blocks])
            with torch.inference_mode():
                logits = self._network.logits(tokens, starts + torch.arange(count), attend, every)
            committed = True
        finally:
            for block in blocks:
                if committed:
                    self.book.commit(block)
                else:
                    self.book.rollback(block)
        for name, row in rows.items():
            self._tokens[name].extend(row)
        return logits

    def take_back(self, name: str, count: int) -> None:
        """The last ``count`` tokens of a sequence. Raises KeyError."""
        self.book.rewind(name, count)
        del self._tokens[name][len(self._tokens[name]) - count :]

    def check(self) -> None:
        """Recount. Raises AssertionError."""
        self.book.check()
        assert {n: len(t) for n, t in self._tokens.items()} == {
            n: self.book.completed_frames(n) for n in self.book.sessions
        }, "tokens and pages disagree"

    def _attend(self, layer: int, row: _Row, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, d], k and v [T, K, d] of one row, whose reserved pages are written first: history and block are read from
        the pool at once, with a third of the calls of a plan that other models' probes need. Returns [T, H, d]."""
        self._storage.write_slots(layer, row.reserved, k, v)
        pools = self._storage.flat_k[layer], self._storage.flat_v[layer]
        keys, values = (pool.index_select(0, row.seen).transpose(0, 1).unsqueeze(0) for pool in pools)
        if len(q) == 1:  # the heads that share keys are so many queries
            return scaled_dot_product_attention(q.view(1, k.shape[1], -1, q.shape[-1]), keys, values).view(q.shape)
        out = scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), keys, values, row.mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    def _check(self, rows: Mapping[str, Sequence[int]]) -> int:
        counts = {len(row) for row in rows.values()}
        if len(counts) != 1 or not 1 <= (count := counts.pop()) <= self.chunk:
            raise ValueError(f"rows have the same number of tokens, 1 to {self.chunk}")
        longest = max(len(self._tokens[name]) for name in rows)
        if longest + count > self.context:
            raise ValueError(f"{longest} tokens and {count} more: the context has {self.context}")
        return count

    def _closest(self, prompt: Sequence[int]) -> tuple[str | None, int]:
        """The sequence that shares the longest beginning, and how long that is."""
        best, length = None, 0
        for name, tokens in self._tokens.items():
            shared = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), None)
            shared = min(len(tokens), len(prompt)) if shared is None else shared
            if shared > length:
                best, length = name, shared
        return best, length
