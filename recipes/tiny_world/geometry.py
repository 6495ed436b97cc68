"""What a picture says of the room: a second task for stage A, of which nothing ships.

Owns: the true distances and steps of a clip, the heads that guess them from a picture's tokens, and their loss.
A wall stops the walker at a distance, and where a picture is after a step follows from how far the step went; the
pixels alone say so late and weakly.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from realtime_omni.models.tiny_world.network import NetworkConfig
from recipes.tiny_world.renderer import axes, cast, rays
from recipes.tiny_world.simulator import MOVE, Maps

COLUMNS = 4  # distances that a token guesses, side by side
NEAREST, FARTHEST = 0.1, 20.0  # cells


def seen_room(maps: Maps, pose_BF4: Tensor, columns: int) -> Tensor:
    """[B, F, columns + 2]: the logarithm of the distance ahead of the wall in each column, and the step that led to the frame,
    (ahead, right) as the frame looks, in lengths of a free step; none led to the first."""
    B, F, _ = pose_BF4.shape
    pose = pose_BF4.flatten(0, 1)
    walls = maps.walls.repeat_interleave(F, dim=0)
    distance = cast(walls, pose[:, :2].contiguous(), rays(pose, columns))[0].clamp(NEAREST, FARTHEST)
    went = torch.zeros(B, F, 2, device=pose.device)
    went[:, 1:] = (pose_BF4[:, 1:, :2] - pose_BF4[:, :-1, :2]) / MOVE
    step = torch.stack([(went.flatten(0, 1) * axis).sum(-1) for axis in axes(pose)], dim=-1)
    return torch.cat((distance.log(), step), dim=-1).unflatten(0, (B, F))


class RoomHead(nn.Module):
    """Tokens to what `seen_room` says of their frames."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.grid = config.grid
        self.norm = nn.LayerNorm(config.width)
        self.distance = nn.Linear(config.width, COLUMNS)
        self.step = nn.Linear(config.width, 2)

    @property
    def columns(self) -> int:
        return self.grid * COLUMNS

    def forward(self, h_BFND: Tensor) -> tuple[Tensor, Tensor]:
        """(distances [B, F, rows of tokens, columns], every row its own guess; steps [B, F, 2])."""
        h = self.norm(h_BFND.float())
        distance = self.distance(h).unflatten(2, (self.grid, self.grid)).flatten(3)
        return distance, self.step(h.mean(dim=2))


def room_loss(guessed: tuple[Tensor, Tensor], room_BFR: Tensor) -> tuple[Tensor, Tensor]:
    """Mean absolute errors [B, F] of the logarithms of distances and of steps."""
    distance, step = guessed
    true = room_BFR.float()
    far = (distance - true[:, :, None, :-2]).abs().mean((2, 3))
    return far, (step - true[..., -2:]).abs().mean(2)
