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
from realtime_omni.models.tiny_world.recall import Past, recall, relation, walked
from realtime_omni.models.tiny_world.sampler import add_noise
from recipes.tiny_world.geometry import motion_error
from recipes.tiny_world.losses import reconstruction
from recipes.tiny_world.simulator import Maps

MEAN_LEVEL, SPREAD = 0.9, 1.0  # of the logit-normal noise level: few-step sampling lives near noise
PURE_NOISE = 0.6  # share of blocks trained exactly at level 1: the only sampler step, or the first
CONTEXT_NOISE = 0.2
ALONE = 0.2  # share of blocks that are shown no picture to move
MOTION = 0.3  # weight of the motion's error against the pictures'


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
        self,
        context: Tensor,
        level_c: Tensor,
        noised: Tensor,
        level_n: Tensor,
        keys: Tensor,
        place: Tensor,
        before: Tensor,
        sights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """context, noised [B, F - frames_per_block, ...]; keys, place of the whole clip; before, sights of the noised blocks as
        `sources` says; returns (pictures like noised, how fine they are, their motion)."""
        per_block = self.net.config.frames_per_block
        frames = keys.shape[1]
        begin = torch.zeros(len(keys), 2, dtype=torch.long, device=keys.device)
        pose = poses(begin[:, 0], begin, keys, self.net.config.look_limit)
        told = [
            torch.cat((value[:, : frames - per_block], value[:, per_block:]), dim=1) for value in (keys, place, pose)
        ]
        x, t = torch.cat((context, noised), dim=1), torch.cat((level_c, level_n), dim=1)
        relations = relation(sights, self.net.config.turn_steps)
        relations = torch.cat((torch.zeros_like(relations), relations), dim=1)
        h, condition = self.net.trunk(x, t, told[0], told[1], told[2], self.attend, told=relations)
        later = slice(context.shape[1], None)
        return self.net.decode(
            h[:, later], condition[:, later], keys[:, per_block:], pose[:, per_block:], before, sights
        )


def sources(config: NetworkConfig, keys: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """What the blocks of a clip, from the second on, are shown of those before: (their numbers [B, blocks - 1, SOURCES], their
    `sights` [B, blocks - 1, SOURCES, 6])."""
    B, F, per = *place.shape, config.frames_per_block
    blocks, device = F // per, place.device
    begin = torch.zeros(B, 3, dtype=torch.long, device=device)
    pose = poses(begin[:, 0], begin[:, :2], keys, config.look_limit)
    at = walked(begin.double(), keys, pose[..., 1], config.turn_steps)
    ends = [value[:, per - 1 :: per] for value in (pose[..., 1:], at, place)]
    number = torch.arange(blocks, device=device)
    age = (number[1:, None] - number[:-1]).clamp_min(0)
    age = torch.where(age <= config.window_frames // per, age, 0).expand(B, -1, -1).flatten(0, 1)
    past = [
        value[:, :-1].repeat_interleave(blocks - 1, dim=0) for value in ends
    ]  # every block the same, by its own ages
    index, seen = recall(Past(*past, age), *(value[:, 1:].flatten(0, 1) for value in ends), config.turn_steps)
    return index.unflatten(0, (B, -1)), seen.unflatten(0, (B, -1))


def per_block(values: Tensor, frames: int) -> Tensor:
    return values.repeat_interleave(frames, dim=1)


def corrupt_context(frames: Tensor, blocks: int, per: int) -> tuple[Tensor, Tensor, Tensor]:
    """Context with the faults of one's own output, the level the network is told, and the context without its noise.

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
    noised = add_noise(frames, torch.randn_like(frames), per_block(level, per))
    return noised, per_block(told, per), frames


def teacher_loss(
    model: nn.Module, frames: Tensor, keys: Tensor, place: Tensor, config: NetworkConfig, where: tuple[Maps, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one batch of clips in -1..1, `where` their maps and poses; and at pure noise the mean squared error and the mean
    absolute errors of the motions against the last and the recalled picture."""
    per = config.frames_per_block
    blocks = frames.shape[1] // per - 1
    context, level_c, clean = corrupt_context(frames[:, :-per], blocks, per)
    level = torch.sigmoid(torch.randn(len(frames), blocks, device=frames.device) * SPREAD + MEAN_LEVEL)
    level = torch.where(torch.rand_like(level) < PURE_NOISE, 1.0, level)
    truth = frames[:, per:]
    level_n = per_block(level, per)
    noised = add_noise(truth, torch.randn_like(truth), level_n)
    index, sights = sources(config, keys, place)
    sights = sights * (torch.rand(sights.shape[:2], device=sights.device) >= ALONE)[..., None, None]
    row, last = torch.arange(len(frames), device=frames.device)[:, None, None], index * per + per - 1
    before = clean[row, last]
    before = torch.cat((before, torch.ones_like(before[..., :1, :, :])), dim=-3)
    x0, _, motion = model(context, level_c, noised, level_n, keys, place, before, sights)
    found = sights[..., 4]
    error = motion_error(motion, where[0], place, where[1], where[1][row, last], found)
    loss = reconstruction(x0, truth, squared=1.0, absolute=0.25, edge=0.25) + MOTION * error.sum(2)
    told = {"mse": ((x0.detach().float() - truth).square().mean((2, 3, 4)), torch.ones_like(level_n))}
    for name, part, there in zip(("motion", "recalled"), error.detach().unbind(2), found.unbind(2), strict=True):
        told[name] = (part, per_block(there, per))
    pure = (level_n == 1).float()
    weight = 1 / level_n.clamp_min(0.3)
    return (loss * weight).mean(), {
        name: (value * pure * there).sum() / (pure * there).sum().clamp_min(1) for name, (value, there) in told.items()
    }
