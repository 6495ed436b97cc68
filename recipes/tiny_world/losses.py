"""What the pictures are judged by in training: distances to the truth, and a discriminator.

Owns: the reconstruction distance of both stages, and the patch discriminator of stage B with
its losses. The discriminator sees the frame before a block, the block, its keys and its place,
so it judges the motion and the texture together.
"""

from __future__ import annotations

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


class Discriminator(nn.Module):
    """Scores patches of (frame before, block) [B, 3 * (1 + F), H, W] given keys and place; [B, 1, h, w]."""

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

    def forward(self, pictures: Tensor, keys_BFK: Tensor, place_B: Tensor) -> Tensor:
        h = functional.leaky_relu(self.stem(pictures), 0.2)
        h = self.norms[0](self.down[0](h)) + self.keys(keys_BFK.flatten(1))[:, :, None, None]
        h = functional.leaky_relu(h, 0.2)
        h = functional.leaky_relu(self.norms[1](self.down[1](h)), 0.2)
        h = h + functional.leaky_relu(self.deep(h), 0.2)
        likely = (h * self.place(place_B)[:, :, None, None]).mean(dim=1, keepdim=True)
        return self.score(h) + likely


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
    """Hinge loss plus a finite-difference gradient penalty on real pictures (Lin et al. 2025, arXiv 2501.08316)."""
    real_score, fake_score = judge(real, *real_told), judge(fake, *fake_told)
    near_score = judge(real + sigma * torch.randn_like(real), *real_told)
    fake_part = (functional.relu(1 + fake_score).mean((1, 2, 3)) * weight_B).sum() / weight_B.sum().clamp_min(1)
    return functional.relu(1 - real_score).mean() + fake_part + smooth * (near_score - real_score).square().mean()
