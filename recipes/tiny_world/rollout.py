"""A plain reference loop over the network with its own key/value rows.

Owns: the cached pass over rows that each stand at a block of their own, for training, and the plain loop of rows that
go together, for the evaluation. They are the simplest that are right, not the server's.
The pass's kept blocks lie in ring slots; their keys are already rotated, so their order does not matter.

Shape legend: L layers, B rows, S kept tokens (slots * tokens of a block), h heads, d head_dim.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet, poses
from realtime_omni.models.tiny_world.recall import Past, recall, walked
from realtime_omni.models.tiny_world.sampler import schedule, step

Rollout = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""`rollout(start_frames [B, S, 3, H, W], keys [B, F, 8], places [B, F], seed)` returns [B, F, 3, H, W].

S is whole blocks; keys and places also cover the start frames, which are returned as given.
Pictures are float in [-1, 1].
"""


class CachedPass(nn.Module):
    """One pass of a block that sees the kept rows marked valid; returns its pictures, how fine they are, keys and values."""

    def __init__(self, net: TinyWorldNet) -> None:
        super().__init__()
        self.net = net

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        keys: Tensor,
        place: Tensor,
        pose: Tensor,
        before: Tensor,
        sights: Tensor,
        kept_k_LBShd: Tensor,
        kept_v_LBShd: Tensor,
        valid_BS: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        new_k, new_v = [], []
        config, tokens = self.net.config, x.shape[1] * self.net.config.tokens_per_frame
        block_B = pose[:, 0, 0] // config.frames_per_block
        row = torch.arange(len(x), device=x.device)[:, None]
        views = {}
        for window in set(config.window_of_layers):
            slot, seen = self._view(window, block_B, valid_BS.shape[1] // tokens)
            mask = torch.cat((valid_BS[row, slot] & seen, valid_BS.new_ones(len(x), tokens)), dim=1)
            views[window] = slot, mask[:, None, None].expand(-1, 1, tokens, -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new_k.append(k)
            new_v.append(v)
            slot, mask = views[config.window_of_layers[layer]]
            k = torch.cat((kept_k_LBShd[layer][row, slot].to(k.dtype), k), dim=1).transpose(1, 2)
            v = torch.cat((kept_v_LBShd[layer][row, slot].to(v.dtype), v), dim=1).transpose(1, 2)
            return functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)

        x0, fine = self.net(x, t, keys, place, pose, before, sights, attend)
        return x0, fine, torch.stack(new_k), torch.stack(new_v)

    def _view(self, window: int, block_B: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Which kept tokens a layer reads, [B, M] long, and whether it sees them, [B, M] bool: the near blocks whole, newest
        first, then the last frame of every slot (:class:`KeptRows`), of which those of far blocks are seen."""
        config, device = self.net.config, block_B.device
        frame, tokens = config.tokens_per_frame, config.frames_per_block * config.tokens_per_frame
        dense, far = config.blocks_behind(window)
        behind = torch.arange(1, dense + 1, device=device)
        near = ((block_B[:, None] - behind) % slots * tokens)[..., None] + torch.arange(tokens, device=device)
        index, seen = near.flatten(1), torch.ones_like(near, dtype=torch.bool).flatten(1)
        if dense < far:
            slot = torch.arange(slots, device=device)
            age = (block_B[:, None] - 1 - slot) % slots + 1
            last = (slot * tokens + tokens - frame)[:, None] + torch.arange(frame, device=device)
            index = torch.cat((index, last.flatten().expand(len(index), -1)), dim=1)
            seen = torch.cat((seen, ((age > dense) & (age <= far)).repeat_interleave(frame, dim=1)), dim=1)
        return index, seen


@dataclasses.dataclass
class KeptRows:
    """The kept blocks of B rows: a ring of `slots` blocks per row, each row at its own block number, and a ring, one longer, of
    their last pictures [B, slots + 1, 4, H, W] in [-1, 1] and how fine they are, with where each looks, stood and is."""

    k: Tensor
    v: Tensor
    valid: Tensor
    block: Tensor
    pictures: Tensor
    headings: Tensor
    ats: Tensor
    places: Tensor
    slots: int
    look_limit: int
    turn_steps: int

    @classmethod
    def empty(cls, config: NetworkConfig, rows: int, device: torch.device | str, dtype: torch.dtype) -> KeptRows:
        slots = config.window_frames // config.frames_per_block - 1
        tokens = slots * config.frames_per_block * config.tokens_per_frame
        shape = (config.layers, rows, tokens, config.heads, config.head_dim)
        return cls(
            torch.zeros(shape, device=device, dtype=dtype),
            torch.zeros(shape, device=device, dtype=dtype),
            torch.zeros(rows, tokens, device=device, dtype=torch.bool),
            torch.zeros(rows, device=device, dtype=torch.long),
            torch.zeros(rows, slots + 1, 4, config.image_size, config.image_size, device=device),
            torch.zeros(rows, slots + 1, 2, device=device, dtype=torch.long),
            torch.zeros(rows, slots + 1, 3, device=device, dtype=torch.float64),
            torch.zeros(rows, slots + 1, device=device, dtype=torch.long),
            slots,
            config.look_limit,
            config.turn_steps,
        )

    @property
    def newest(self) -> tuple[Tensor, Tensor]:
        """Index of the rows' latest pictures; before a row's first block it shows one of nothing."""
        return torch.arange(len(self.block), device=self.block.device), (self.block - 1) % (self.slots + 1)

    @property
    def picture(self) -> Tensor:
        """The rows' latest pictures [B, 3, H, W] in [-1, 1]."""
        return self.pictures[self.newest][:, :3]

    def pose(self, keys_BFK: Tensor) -> Tensor:
        """Poses [B, F, 3] of the rows' next block."""
        return poses(self.block * keys_BFK.shape[1], self.headings[self.newest], keys_BFK, self.look_limit)

    def at(self, keys_BFK: Tensor, pose_BF3: Tensor) -> Tensor:
        """Where the rows' next block ends, [B, 3] of `recall.walked`."""
        return walked(self.ats[self.newest], keys_BFK, pose_BF3[..., 1], self.turn_steps)[:, -1]

    def told(self, keys_BFK: Tensor, place_BF: Tensor) -> tuple[Tensor, ...]:
        """What `CachedPass` is told of the rows' next block beside its pictures and levels; the third is its poses."""
        pose, count = self.pose(keys_BFK), self.slots + 1
        age = (self.block[:, None] - 1 - torch.arange(count, device=pose.device)) % count + 1
        past = Past(self.headings, self.ats, self.places, torch.where(age <= self.block[:, None], age, 0))
        index, sights = recall(past, pose[:, -1, 1:], self.at(keys_BFK, pose), place_BF[:, -1], self.turn_steps)
        before = self.pictures[torch.arange(len(index), device=index.device)[:, None], index]
        return keys_BFK, place_BF, pose, before[:, None], sights[:, None], self.k, self.v, self.valid

    def write(self, k_LBThd: Tensor, v_LBThd: Tensor, told: tuple[Tensor, ...], shown: Tensor, fine: Tensor) -> None:
        """Keep a block per row, of the pictures `shown`, so `fine`, as it was `told`, in the slot of its block number, over the
        oldest."""
        keys, place, pose = told[:3]
        at = self.at(keys, pose)
        slot = (torch.arange(len(self.block), device=self.block.device), self.block % (self.slots + 1))
        self.pictures[slot] = torch.cat((shown[:, -1], fine[:, -1].to(shown.dtype)), dim=1)
        self.headings[slot] = pose[:, -1, 1:]
        self.ats[slot], self.places[slot] = at, place[:, -1]
        tokens = k_LBThd.shape[2]
        row = torch.arange(len(self.block), device=self.block.device)[:, None]
        place = (self.block % self.slots)[:, None] * tokens + torch.arange(tokens, device=self.block.device)
        self.k[:, row, place] = k_LBThd.to(self.k.dtype)
        self.v[:, row, place] = v_LBThd.to(self.v.dtype)
        self.valid[row, place] = True
        self.block += 1

    def reset(self, rows: Tensor) -> None:
        """Forget the rows marked in `rows` [B] bool."""
        self.valid &= ~rows[:, None]
        self.block.masked_fill_(rows, 0)
        self.headings.masked_fill_(rows[:, None, None], 0)
        self.ats.masked_fill_(rows[:, None, None], 0)


def clean(told: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What `CachedPass` is told of a block that is to be kept: nothing of other pictures, as in a server's clean pass."""
    return (*told[:4], torch.zeros_like(told[4]), *told[5:])


def draw_noise(shape: tuple[int, ...], seed: int, block: int, index: int, device: torch.device | str) -> Tensor:
    """Noise that depends on (seed, block, step index) alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + block) * 16 + index)
    return torch.randn(shape, generator=generator).to(device)


class ReferencePlay:
    """`rows` sessions of `net`, played block by block in float32; `steps` overrides its config.

    All rows stand at the same block, so a layer's history is a list of blocks, and no mask is needed.
    """

    def __init__(self, net: TinyWorldNet, rows: int, seed: int, steps: int | None = None) -> None:
        config, device = net.config, net.embed.weight.device
        self.net, self.config, self.device, self.seed = net, config, device, seed
        self.levels = schedule(steps or config.sampler_steps, config.sampler_shift)
        behind = [config.blocks_behind(window) for window in config.window_of_layers]
        self.kept = [deque[tuple[Tensor, Tensor]](maxlen=seen) for _, seen in behind]
        self.dense = [dense for dense, _ in behind]
        self.heading = torch.zeros(rows, 2, device=device, dtype=torch.long)
        self.at = torch.zeros(rows, 3, device=device, dtype=torch.float64)
        self.past = deque[tuple[Tensor, ...]](maxlen=config.window_frames // config.frames_per_block)
        self.number = 0

    @torch.inference_mode()
    def block(self, keys_BFK: Tensor, places_BF: Tensor, given: Tensor | None = None) -> Tensor:
        """The next block [B, F, 3, H, W] in [-1, 1]; `given` is taken instead of one of its own."""
        rows, per = keys_BFK.shape[:2]
        first = torch.full((rows,), self.number * per, device=self.device)
        pose = poses(first, self.heading, keys_BFK, self.config.look_limit)
        told = (keys_BFK.float(), places_BF, pose)
        at = walked(self.at, keys_BFK, pose[..., 1], self.config.turn_steps)[:, -1]
        if given is None:
            frames, fine = self._sample(rows, (*told, *self._sources(pose[:, -1, 1:], at, places_BF)))
        else:
            frames, fine = given, torch.ones_like(given[:, :, :1])
        level = frames.new_full((rows, per), self.config.context_noise)
        self.net.commit(frames, level, *told, self._attend_and_keep, self._keep)
        self.heading, self.at = pose[:, -1, 1:], at
        self.past.append((torch.cat((frames, fine), dim=2)[:, -1], self.heading, at, places_BF[:, -1]))
        self.number += 1
        return frames

    def _sources(self, heading_B2: Tensor, at_B2: Tensor, places_BF: Tensor) -> tuple[Tensor, Tensor]:
        pictures, *ends = (torch.stack(part, dim=1) for part in zip(*self.past, strict=True))
        age = torch.arange(len(self.past), 0, -1, device=self.device).expand(len(pictures), -1)
        index, sights = recall(Past(*ends, age), heading_B2, at_B2, places_BF[:, -1], self.config.turn_steps)
        row = torch.arange(len(index), device=self.device)[:, None]
        return pictures[row, index][:, None], sights[:, None]

    def _sample(self, rows: int, told: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        size = self.config.image_size
        shape = (rows, self.config.frames_per_block, 3, size, size)
        x = draw_noise(shape, self.seed, self.number, 0, self.device)
        for level, following in itertools.pairwise(self.levels):
            x0, fine = self.net(x, x.new_full(shape[:2], level), *told, self._attend)
            x = step(x, x0, level, following)
        return x.clamp(-1, 1), fine

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat(parts, dim=1).transpose(1, 2) for parts in zip(*self.kept[layer], (k, v), strict=True))
        return functional.scaled_dot_product_attention(q.transpose(1, 2), k, v).transpose(1, 2)

    def _attend_and_keep(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = self._attend(layer, q, k, v)
        self._keep(layer, k, v)
        return seen

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        kept, dense = self.kept[layer], self.dense[layer]
        kept.append((k, v.clone()))  # v is a view of q, k and v
        if len(kept) > dense:
            kept[-dense - 1] = tuple(part[:, -self.config.tokens_per_frame :] for part in kept[-dense - 1])


def reference_rollout(net: TinyWorldNet, steps: int | None = None) -> Rollout:
    """The rollout of `net` with this file's loop; `steps` overrides its config."""
    per = net.config.frames_per_block

    def rollout(start: Tensor, keys: Tensor, places: Tensor, seed: int) -> Tensor:
        play = ReferencePlay(net, len(start), seed, steps)
        blocks = []
        for first in range(0, keys.shape[1], per):
            part = slice(first, first + per)
            given = start[:, part] if part.stop <= start.shape[1] else None
            blocks.append(play.block(keys[:, part], places[:, part], given))
        return torch.cat(blocks, dim=1)

    return rollout
