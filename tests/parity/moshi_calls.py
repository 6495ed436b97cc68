"""Several calls of one language model on pages, greedy: what the parity tests drive."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from realtime_omni.kv.attention.plan import RowPlan
from realtime_omni.kv.attention.sdpa import SdpaBackend
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.kv.manager import KVBook
from realtime_omni.kv.storage import KVStorage
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.streams import Streams


class Calls:
    """Rows by name; ``step`` moves those that are named, in one batch."""

    def __init__(self, network: MoshiLM, generated: int) -> None:
        config = network.config
        spec = KVSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_heads,
            head_dim=config.head_dim,
            tokens_per_frame=1,
            frames_per_block=1,
            window_frames=config.context,
            requested_sessions=4,
            dtype_bytes=4,
            max_in_flight=4,
        )
        self.network = network
        self.streams = Streams(config, generated)
        self.book = KVBook(spec, sessions=4)
        self._backend = SdpaBackend()
        self._storage = KVStorage(spec, spec.managed_pages(4) + spec.scratch_pages, dtype=torch.float32)
        self._rings: dict[str, Tensor] = {}

    def begin(self, name: str) -> None:
        self.book.begin(name)
        self._rings[name] = self.streams.start()

    def end(self, name: str) -> None:
        self.book.end(name)

    @torch.inference_mode()
    def step(self, user: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The user's codes by call to the newest whole frame by call."""
        names = list(user)
        blocks = [self.book.plan_block(name, 1) for name in names]
        plan = self._backend.plan([RowPlan.of(block.branches[0]) for block in blocks], self._storage)
        steps = torch.tensor([block.first_frame for block in blocks])
        rings = torch.stack([self._rings[name] for name in names])
        tokens, rings = self.streams.read(rings, steps, torch.stack([user[name] for name in names]))
        temporal, rows = self.network.temporal, range(len(names))
        hidden, logits = temporal(
            temporal.embed(tokens),
            steps[:, None],
            lambda layer, q, k, v: plan.attend(layer, q, k, v, rows=rows, commit=True, causal=True),
        )
        text = logits.float().argmax(-1)
        codes = self.network.depth(hidden, text, self.streams.generated - 1, lambda _, each: each.argmax(-1))
        rings = self.streams.write(rings, steps, torch.cat((text[:, None], codes), dim=1))
        plan.close()
        for block in blocks:
            self.book.commit(block)
        self._rings |= dict(zip(names, rings, strict=True))
        return dict(zip(names, self.streams.frame(rings, steps), strict=True))
