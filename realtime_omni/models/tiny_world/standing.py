"""What was seen from where the eye stands is there still: it is shown again, not drawn anew.

Owns: which earlier pictures a block is shown through, and where their pixels go. By its keys alone a session knows when nobody
has walked; who only turns and looks moves nothing but the eye, so that is exact. Pure functions; a server and the reference
loop use the same, a training shows what the network draws.

Invariant: a past is of one spot and one place, its latest picture last; a step or a change of place begins a new one.

Shape legend: F frames of a block, K keys, H W image side; pictures in [-1, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.models.common.keys import KEYS

if TYPE_CHECKING:
    from realtime_omni.models.tiny_world.network import NetworkConfig

Heading = tuple[int, int]  # steps turned right, within one turn; steps looked up
LOOK_COST = 1 / 3  # of a step of looking, in steps of turning
SOFT, MOST_SOFT = 4.0, 0.44
"""What has just come into sight is drawn again for some blocks: a picture counts in full so many times as far from its edges as
it moved, and at most so much of its side from them. A network draws badly what it has just begun to see, and it would stay."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The last picture of a block [3, H, W], and where it looks."""

    picture: Tensor
    heading: Heading


Past = tuple[Seen, ...]


def still(keys_FK: Tensor) -> Tensor:
    """[F] bool: whether nobody has walked since the block began. Keys that cancel walk nowhere."""
    w, a, s, d = ((keys_FK[:, KEYS.index(key)] > 0.5).int() for key in "wasd")
    return ((w != s) | (a != d)).int().cumsum(0) == 0


def remember(past: Past, picture_CHW: Tensor, heading: Heading, keys_FK: Tensor, same_place: bool, most: int) -> Past:
    """The past after a block that ended with this picture; at most so many blocks."""
    stayed = same_place and bool(still(keys_FK)[-1])
    return (*(past if stayed else ()), Seen(picture_CHW, heading))[-most:]


def nearest(past: Past, heading: Heading, turn_steps: int) -> Seen | None:
    """Of the pictures before the last one that which looks nearest to `heading`; of equals the oldest, which is the least
    often shown again. None if there is none."""

    def apart(seen: Seen) -> float:
        turned = (seen.heading[0] - heading[0] + turn_steps // 2) % turn_steps - turn_steps // 2
        return abs(turned) + LOOK_COST * abs(seen.heading[1] - heading[1])

    return min(past[:-1], key=apart, default=None)


def show_again(drawn_FCHW: Tensor, past: Past, keys_FK: Tensor, pose_F3: Tensor, config: NetworkConfig) -> Tensor:
    """A drawn block with what `past` saw of it, while nobody walks: through the last picture, and over it through the one
    that looks nearest to where the block ends, which was there before. `pose_F3` of `network.poses`."""
    count = int(still(keys_FK).sum())
    if not count or not past:
        return drawn_FCHW
    end = (int(pose_F3[-1, 1]), int(pose_F3[-1, 2]))
    earlier = nearest(past, end, config.turn_steps)
    shown = drawn_FCHW[:count].float()
    for seen in (past[-1],) if earlier is None else (past[-1], earlier):
        turned, looked = pose_F3[:count, 1] - seen.heading[0], pose_F3[:count, 2]
        moved, share = reproject(seen.picture.float(), turned, seen.heading[1], looked, config)
        shown = torch.lerp(shown, moved, share)
    return torch.cat((shown.to(drawn_FCHW.dtype), drawn_FCHW[count:]))


def reproject(
    picture_CHW: Tensor, turned_F: Tensor, looked_then: int, looked_F: Tensor, config: NetworkConfig
) -> tuple[Tensor, Tensor]:
    """How a picture looks from the same spot after `turned` steps to the right, its horizon moved: (pictures [F, C, H, W],
    how far they count [F, 1, H, W]: 0 out of its sight, less than 1 near its edges unless it did not move). Bicubic.

    A direction (1, x) of now, ahead and right, was at (cos - x sin, sin + x cos); heights scale with the distance ahead.
    """
    side, device, frames = picture_CHW.shape[-1], picture_CHW.device, len(turned_F)
    screen = (torch.arange(side, device=device) + 0.5) / side * 2 - 1
    angle = (turned_F.to(device).double() * (2 * math.pi / config.turn_steps)).float()[:, None]
    right = screen * config.half_fov_tan
    ahead = (angle.cos() - right * angle.sin()).clamp_min(1e-3)
    across = (angle.sin() + right * angle.cos()) / (ahead * config.half_fov_tan)
    now = looked_F.to(device).float()[:, None, None] * config.look_step
    down = looked_then * config.look_step - (now - screen[:, None]) / ahead[:, None]
    at = torch.stack((across[:, None].expand(-1, side, -1), down), dim=-1)
    shown = picture_CHW.expand(frames, -1, -1, -1)
    moved = functional.grid_sample(shown, at, mode="bicubic", padding_mode="border", align_corners=False).clamp(-1, 1)
    turn = (turned_F.to(device) + config.turn_steps // 2) % config.turn_steps - config.turn_steps // 2
    width = side * (math.pi / config.turn_steps) / math.atan(config.half_fov_tan)  # of a step of turning, in pixels
    went = torch.stack((turn * width, (now.flatten() - looked_then * config.look_step) * side / 2), dim=-1).abs()
    soft = (SOFT * went).clamp(1e-6, MOST_SOFT * side)[:, None, None]
    share = ((1 - at.abs()) * (side / 2) / soft).clamp(0, 1).amin(-1)
    return moved, share[:, None]
