"""How a network's stages are run for the rows of a batch. Here: one call after the other; :mod:`graphs` replays them.

Owns the grouping of rows for a stage. Must not know: observations, sessions, engines, what is kept between chunks. All calls
come from one thread, and but for a guided step's backward pass without gradients.

Shape legend: B rows, N camera slots, K tokens per picture, D language width, H actions per chunk, A action channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from realtime_omni.models.common.vla.attention import DensePrefixAttention, PrefixKV
from realtime_omni.models.common.vla.flow import Velocity
from realtime_omni.models.common.vla.images import signed
from realtime_omni.models.common.vla.network import FlowNetwork, PolicyInputs


class Stages:
    """The stages of ``network`` on its device, run plainly."""

    def __init__(self, network: FlowNetwork, device: torch.device) -> None:
        self.network = network
        self.device = device
        self._latest: torch.cuda.Event | None = None

    def pace(self) -> None:
        """Let the device be at most one piece behind: else a whole chunk is queued on it when somebody urgent comes."""
        if self.device.type != "cuda":
            return
        before = self._latest
        self._latest = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._latest.record()
        if before is not None:
            before.synchronize()

    def warm_up(self, rows: int) -> None:
        """Prepare for batches of up to ``rows`` robots, so that none of them waits for it. Here: nothing to prepare."""

    def features(self, images: Tensor) -> Tensor:
        """Pictures, uint8 [n, S, S, 3] or [n, 3, S, S] in [-1, 1], to [n, K, D]."""
        return self.network.embed_images(signed(images))

    def prefixes(self, features: Tensor, inputs: PolicyInputs) -> list[PrefixKV]:
        """The prefix of every row, without the state's own token; ``features`` [B, N, K, D].

        Rows of one length go together: then nothing is padded, nothing masked, and attention takes its fastest kernel."""
        prefix = self.network.embed_prefix(features, inputs)
        found: dict[int, PrefixKV] = {}
        for numbers in _of_one_length(prefix.mask):
            some = prefix if len(numbers) == len(prefix.mask) else prefix.rows(numbers)
            kv = self.network.prefill(some.pack())
            found |= {number: kv.row(index) for index, number in enumerate(numbers)}
        return [found[number] for number in range(len(found))]

    def velocity(self, prefixes: Sequence[PrefixKV], states: Sequence[Tensor]) -> Velocity:
        """The velocity of these rows, over their prefixes (one row each) and states [state_dim]."""
        kv = PrefixKV.stack(list(prefixes))
        if self.network.shape.state_token:
            kv = self.network.add_state(kv, torch.stack(list(states)))
        attention = DensePrefixAttention(kv)
        return lambda x, t: self.network.denoise_step(x, t, attention)


def _of_one_length(mask: Tensor) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(mask.sum(dim=1).tolist()):
        groups.setdefault(length, []).append(number)
    return list(groups.values())
