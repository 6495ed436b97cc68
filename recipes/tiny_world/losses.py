"""What the pictures are judged by in training: distances to the truth, and a discriminator.

Owns: the reconstruction distance of both stages, and the patch discriminator of stage B with
its losses. The discriminator sees the frame before a block, the block, its keys and its place,
so it judges the motion and the texture together.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.tiny_world.network import NetworkConfig


def gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :, 1:] - x[..., :, :-1], x[..., 1:, :] - x[..., :-1, :]


def reconstruction(x0_BFCHW: Tensor, truth_BFCHW: Tensor, squared: float, absolute: float, edge: float) -> Tensor:
    """[B, F]: squared and absolute error of the pixels, absolute error of their differences at two scales."""
    x0, truth = x0_BFCHW.float(), truth_BFCHW.float()
    error = x0 - truth
    loss = squared * error.square().mean((2, 3, 4)) + absolute * error.abs().mean((2, 3, 4))
    for scale in (1, 2):
        if scale > 1:
            error = functional.avg_pool2d(error.flatten(0, 1), scale).unflatten(0, x0.shape[:2])
        across, down = gradients(error)
        loss = loss + edge * (across.abs().mean((2, 3, 4)) + down.abs().mean((2, 3, 4)))
    return loss


VIEW = 32  # side of the small picture that the whole view is judged by


class Discriminator(nn.Module):
    """Scores (frame before, block) [B, 3 * (1 + F), H, W] given keys and place; [B, 1, h, 2 * w].

    The left half are patches of all of it: texture and motion. The right half is one score of the block's whole view,
    seen small, without what came before: a wall that follows from a wall is right by every patch, and only the number
    of such views says that a world has closed up.
    """

    def __init__(self, config: NetworkConfig, width: int = 64) -> None:
        super().__init__()
        frames = config.frames_per_block
        self.stem = nn.Conv2d(3 * (1 + frames), width, 4, 2, 1)
        self.down = nn.ModuleList((nn.Conv2d(width, 2 * width, 4, 2, 1), nn.Conv2d(2 * width, 4 * width, 4, 2, 1)))
        self.norms = nn.ModuleList((nn.GroupNorm(8, 2 * width), nn.GroupNorm(8, 4 * width)))
        self.deep = nn.Conv2d(4 * width, 4 * width, 3, 1, 1)
        self.score = nn.Conv2d(4 * width, 1, 3, 1, 1)
        self.keys = nn.Linear(frames * config.num_keys, 2 * width)
        self.place = nn.Embedding(config.num_places, 4 * width)
        channels = (3 * frames, width, 2 * width, 4 * width)
        self.view = nn.ModuleList(nn.Conv2d(a, b, 4, 2, 1) for a, b in itertools.pairwise(channels))
        self.view_norms = nn.ModuleList(nn.GroupNorm(8, b) for b in channels[1:])
        self.view_mix = nn.Linear(4 * width * (VIEW // 8) ** 2, 4 * width)
        self.view_score = nn.Linear(4 * width, 1)
        self.view_place = nn.Embedding(config.num_places, 4 * width)

    def forward(self, pictures: Tensor, keys_BFK: Tensor, place_B: Tensor) -> Tensor:
        h = functional.leaky_relu(self.stem(pictures), 0.2)
        h = self.norms[0](self.down[0](h)) + self.keys(keys_BFK.flatten(1))[:, :, None, None]
        h = functional.leaky_relu(h, 0.2)
        h = functional.leaky_relu(self.norms[1](self.down[1](h)), 0.2)
        h = h + functional.leaky_relu(self.deep(h), 0.2)
        likely = (h * self.place(place_B)[:, :, None, None]).mean(dim=1, keepdim=True)
        patches = self.score(h) + likely
        whole = self.judge_view(pictures[:, 3:], place_B)[:, None, None, None]
        return torch.cat((patches, whole.expand_as(patches)), dim=-1)

    def judge_view(self, block: Tensor, place_B: Tensor) -> Tensor:
        """[B] of the block's frames [B, 3 * F, H, W]."""
        h = functional.adaptive_avg_pool2d(block, VIEW)
        for conv, norm in zip(self.view, self.view_norms, strict=True):
            h = functional.leaky_relu(norm(conv(h)), 0.2)
        h = functional.leaky_relu(self.view_mix(h.flatten(1)), 0.2)
        score: Tensor = self.view_score(h)[:, 0] + (h * self.view_place(place_B)).mean(1)
        return score


def discriminator_loss(
    judge: Discriminator,
    real: Tensor,
    real_told: tuple[Tensor, Tensor],
    fake: Tensor,
    fake_told: tuple[Tensor, Tensor],
    weight_B: Tensor,
    smooth: float = 10.0,
    sigma: float = 0.05,
) -> Tensor:
    """Hinge loss plus finite-difference gradient penalties (Lin et al. 2025, arXiv 2501.08316), on real pictures and on
    false ones (Huang et al. 2024, arXiv 2501.05441: both are needed for the game to settle)."""
    real_score, fake_score = judge(real, *real_told), judge(fake, *fake_told)
    near_real = judge(real + sigma * torch.randn_like(real), *real_told)
    near_fake = judge(fake + sigma * torch.randn_like(fake), *fake_told)
    steep = (near_fake - fake_score).square().mean((1, 2, 3))
    fake_part = functional.relu(1 + fake_score).mean((1, 2, 3)) + smooth * steep
    fake_part = (fake_part * weight_B).sum() / weight_B.sum().clamp_min(1)
    return functional.relu(1 - real_score).mean() + fake_part + smooth * (near_real - real_score).square().mean()
