"""Stage A: teacher-forced denoising of whole clips in one masked pass.

Owns: the sequence of clean and noised blocks, its masks (one for each window of a layer), the corruption
of the context, and the loss. Clean block i sees the clean blocks i - window + 1 .. i; noised block i
sees the clean blocks before it in the window, and itself: what a cache would show it. The first block
is never a target (a session starts from a picture) and the last never context.

Legend: sequence = clean blocks 0 .. n - 2, then noised blocks 1 .. n - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from realtime_omni.models.tiny_world.network import Attend, NetworkConfig, TinyWorldNet, poses
from realtime_omni.models.tiny_world.sampler import add_noise
from recipes.tiny_world.geometry import RoomHead, room_loss
from recipes.tiny_world.losses import reconstruction

MEAN_LEVEL, SPREAD = 0.9, 1.0  # of the logit-normal noise level: few-step sampling lives near noise
PURE_NOISE = 0.6  # share of blocks trained exactly at level 1: the only sampler step, or the first
CONTEXT_NOISE = 0.2
ROOM = 0.05  # weight of the room's errors against the pictures'


def visible(config: NetworkConfig, window: int, blocks: int, query: Tensor, key: Tensor) -> Tensor:
    """Whether token `query` sees token `key` of the sequence (broadcast index tensors) in a layer of `window` frames."""
    tokens = config.frames_per_block * config.tokens_per_frame
    half = (blocks - 1) * tokens
    query_noised, key_noised = query >= half, key >= half
    query_block = torch.where(query_noised, (query - half) // tokens + 1, query // tokens)
    key_block = torch.where(key_noised, (key - half) // tokens + 1, key // tokens)
    dense, far = config.blocks_behind(window)
    age, last = query_block - key_block, key % tokens >= tokens - config.tokens_per_frame
    near = (age <= dense) | (last & (age <= far))
    clean = ~key_noised & torch.where(query_noised, age > 0, age >= 0)
    return near & (clean | (query_noised & key_noised & (age == 0)))


def dense_attend(config: NetworkConfig, blocks: int, device: torch.device | str) -> Attend:
    """The masks as matrices: for tests and the CPU."""
    index = torch.arange(2 * (blocks - 1) * config.frames_per_block * config.tokens_per_frame, device=device)
    masks = {w: visible(config, w, blocks, index[:, None], index[None]) for w in set(config.window_of_layers)}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = masks[config.window_of_layers[layer]]
        return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

    return attend


def flex_attend(config: NetworkConfig, blocks: int, device: torch.device | str) -> Attend:
    """The masks block-sparse, for compiled training on CUDA."""
    length = 2 * (blocks - 1) * config.frames_per_block * config.tokens_per_frame

    def mask_of(window: int) -> BlockMask:
        def rule(batch, head, query, key):
            return visible(config, window, blocks, query, key)

        return create_block_mask(rule, None, None, length, length, device=str(device))

    masks = {window: mask_of(window) for window in set(config.window_of_layers)}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = flex_attention(q, k, v, block_mask=masks[config.window_of_layers[layer]])
        return out.transpose(1, 2)

    return attend


class TeacherPass(nn.Module):
    """Predicts blocks 1 .. n - 1 of a clip from their noised and all clean blocks."""

    def __init__(self, net: TinyWorldNet, attend: Attend) -> None:
        super().__init__()
        self.net, self.attend = net, attend

    def forward(
        self, context: Tensor, level_c: Tensor, noised: Tensor, level_n: Tensor, keys: Tensor, place: Tensor
    ) -> Tensor:
        """context, noised [B, F - frames_per_block, ...]; keys, place of the whole clip; returns like noised."""
        return self.net.decode(*self.hidden(context, level_c, noised, level_n, keys, place))

    def hidden(
        self, context: Tensor, level_c: Tensor, noised: Tensor, level_n: Tensor, keys: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The noised half's tokens after the last layer, and its condition, for `decode`."""
        per_block = self.net.config.frames_per_block
        frames = keys.shape[1]
        begin = torch.zeros(len(keys), 2, dtype=torch.long, device=keys.device)
        pose = poses(begin[:, 0], begin, keys, self.net.config.look_limit)
        told = [
            torch.cat((value[:, : frames - per_block], value[:, per_block:]), dim=1) for value in (keys, place, pose)
        ]
        x, t = torch.cat((context, noised), dim=1), torch.cat((level_c, level_n), dim=1)
        h, condition = self.net.trunk(x, t, told[0], told[1], told[2], self.attend)
        return h[:, context.shape[1] :], condition[:, context.shape[1] :]


class RoomPass(TeacherPass):
    """The same, and a guess of the room and the steps from the same tokens."""

    def __init__(self, net: TinyWorldNet, attend: Attend, head: RoomHead) -> None:
        super().__init__(net, attend)
        self.head = head

    def forward(self, *told: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, condition = self.hidden(*told)
        return self.net.decode(h, condition), self.head(h)


def per_block(values: Tensor, frames: int) -> Tensor:
    return values.repeat_interleave(frames, dim=1)


def corrupt_context(frames: Tensor, blocks: int, per: int) -> tuple[Tensor, Tensor]:
    """Context with the faults of one's own output, and the level the network is told.

    A quarter of the blocks gets noise that is told, a quarter noise that is hidden, and one
    block in five a mild blur: a network that was never shown faults multiplies them.
    """
    B, device = len(frames), frames.device
    kind = torch.rand(B, blocks, device=device)
    level = torch.rand(B, blocks, device=device) * CONTEXT_NOISE * (kind < 0.5)
    told = level * (kind < 0.25)
    soft = functional.avg_pool2d(frames.flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(frames)
    share = torch.rand(B, blocks, device=device) * (torch.rand(B, blocks, device=device) < 0.2)
    frames = torch.lerp(frames, soft, per_block(share, per)[:, :, None, None, None])
    frames = add_noise(frames, torch.randn_like(frames), per_block(level, per))
    return frames, per_block(told, per)


def teacher_loss(
    model: nn.Module, frames: Tensor, keys: Tensor, place: Tensor, per: int, room: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one batch of clips in -1..1; and, at pure noise, the mean squared error and, where a :class:`RoomPass` is
    given the `room` of the clips, the mean absolute errors of distances and steps."""
    blocks = frames.shape[1] // per - 1
    context, level_c = corrupt_context(frames[:, :-per], blocks, per)
    level = torch.sigmoid(torch.randn(len(frames), blocks, device=frames.device) * SPREAD + MEAN_LEVEL)
    level = torch.where(torch.rand_like(level) < PURE_NOISE, 1.0, level)
    truth = frames[:, per:]
    level_n = per_block(level, per)
    noised = add_noise(truth, torch.randn_like(truth), level_n)
    shown = model(context, level_c, noised, level_n, keys, place)
    x0, guessed = (shown, None) if room is None else shown
    loss = reconstruction(x0, truth, squared=1.0, absolute=0.25, edge=0.25)
    found = {"mse": (x0.detach().float() - truth).square().mean((2, 3, 4))}
    if room is not None:
        far, step = room_loss(guessed, room[:, per:])
        loss = loss + ROOM * (far + step)
        found |= {"distance": far.detach(), "step": step.detach()}
    weight = 1 / level_n.clamp_min(0.3)
    pure = (level_n == 1).float()
    return (loss * weight).mean(), {
        name: (value * pure).sum() / pure.sum().clamp_min(1) for name, value in found.items()
    }
