"""A plain reference loop over the network with its own key/value rows.

Owns: the cached pass (one block against the kept blocks) and the rollout built on it; training
stage B and the evaluation use both. It is the simplest loop that is right, not the server's.
Kept blocks lie in ring slots; their keys are already rotated, so their order does not matter.

Shape legend: L layers, B rows, S kept tokens (slots * tokens of a block), h heads, d head_dim.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.tiny_world.network import NetworkConfig, TinyWorldNet
from realtime_omni.models.tiny_world.sampler import schedule, step

Rollout = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""`rollout(start_frames [B, S, 3, H, W], keys [B, F, 8], places [B, F], seed)` returns [B, F, 3, H, W].

S is whole blocks; keys and places also cover the start frames, which are returned as given.
Pictures are float in [-1, 1].
"""


class CachedPass(nn.Module):
    """One pass of a block that sees the kept rows marked valid; returns its picture, keys and values."""

    def __init__(self, net: TinyWorldNet) -> None:
        super().__init__()
        self.net = net

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        keys: Tensor,
        place: Tensor,
        frame_index: Tensor,
        kept_k_LBShd: Tensor,
        kept_v_LBShd: Tensor,
        valid_BS: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        new_k, new_v = [], []
        block_tokens = x.shape[1] * self.net.config.tokens_per_frame
        own = valid_BS.new_ones(valid_BS.shape[0], block_tokens)
        mask = torch.cat((valid_BS, own), dim=1)[:, None, None].expand(-1, 1, block_tokens, -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            new_k.append(k)
            new_v.append(v)
            k = torch.cat((kept_k_LBShd[layer].to(k.dtype), k), dim=1).transpose(1, 2)
            v = torch.cat((kept_v_LBShd[layer].to(v.dtype), v), dim=1).transpose(1, 2)
            return functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask).transpose(1, 2)

        x0 = self.net(x, t, keys, place, frame_index, attend)
        return x0, torch.stack(new_k), torch.stack(new_v)


@dataclasses.dataclass
class KeptRows:
    """The kept blocks of B rows: a ring of `slots` blocks per row, each row at its own block number."""

    k: Tensor
    v: Tensor
    valid: Tensor
    block: Tensor
    slots: int

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
            slots,
        )

    def frame_index(self, frames_per_block: int) -> Tensor:
        """Absolute frame numbers [B, frames_per_block] of the rows' next block."""
        return self.block[:, None] * frames_per_block + torch.arange(frames_per_block, device=self.block.device)

    def write(self, k_LBThd: Tensor, v_LBThd: Tensor) -> None:
        """Keep a block per row in the slot of its block number, over the oldest."""
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


def draw_noise(shape: tuple[int, ...], seed: int, block: int, index: int, device: torch.device | str) -> Tensor:
    """Noise that depends on (seed, block, step index) alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + block) * 16 + index)
    return torch.randn(shape, generator=generator).to(device)


def reference_rollout(net: TinyWorldNet, steps: int | None = None, autocast: bool = False) -> Rollout:
    """The rollout of `net` with this file's loop; `steps` overrides its config."""
    config, cached = net.config, CachedPass(net).eval()
    levels = schedule(steps or config.sampler_steps, config.sampler_shift)

    @torch.inference_mode()
    def rollout(start: Tensor, keys: Tensor, places: Tensor, seed: int) -> Tensor:
        per_block = config.frames_per_block
        rows, device = len(start), start.device
        kept = KeptRows.empty(config, rows, device, torch.bfloat16 if autocast else torch.float32)
        frames = []
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            for block in range(keys.shape[1] // per_block):
                part = slice(block * per_block, (block + 1) * per_block)
                told = (keys[:, part].float(), places[:, part], kept.frame_index(per_block), kept.k, kept.v, kept.valid)
                if part.stop <= start.shape[1]:
                    x0 = start[:, part]
                else:
                    x = draw_noise(tuple(start[:, :per_block].shape), seed, block, 0, device)
                    for level, following in itertools.pairwise(levels):
                        x0 = cached(x, x.new_full(x.shape[:2], level), *told)[0].float()
                        x = step(x, x0, level, following)
                    x0 = x.clamp(-1, 1)
                frames.append(x0)
                level = x0.new_full(x0.shape[:2], config.context_noise)
                kept.write(*cached(x0, level, *told)[1:])
        return torch.cat(frames, dim=1)

    return rollout
