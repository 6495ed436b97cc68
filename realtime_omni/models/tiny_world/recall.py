"""What a block's pictures may be taken from: the last one, and of those before it the one that shows most of what comes.

Owns: where a session stands by its keys, which remembered picture a block is shown, and how the two stand to each other.
Pure functions of numbers; a server, the reference loop and training use the same.

By its keys alone a session knows how far it turned, and how far it would have walked without walls, in steps of a frame. And
it knows when it has not walked at all: then what a picture shows is where it was, whatever has been drawn since.
Legend: a sight is (turned right, looked up) in steps, and where it stood: (x, y) in steps, x ahead and y right as it began, and
the way walked until then.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.models.common.keys import KEYS

SOURCES = 2
MOST_TURN, MOST_WALK = 14, 27  # steps apart: beyond these two pictures hardly share anything
LOOK_COST = 1 / 3  # of a step of looking, in steps of turning or walking
NEAREST_AHEAD = 0.1  # of a point in an earlier picture, in its present distances: nearer ones are behind the eye there
AGE_COST = 1e-3  # a block older: of equals the newest


def steps(keys_BFK: Tensor) -> tuple[Tensor, Tensor]:
    """What each frame's keys ask for, each [B, F] in float64: steps ahead, and to the right."""
    pressed = (keys_BFK > 0.5).double()
    w, a, s, d = (pressed[..., KEYS.index(key)] for key in "wasd")
    ahead, aside = w - s, d - a
    length = (ahead**2 + aside**2).clamp_min(1).rsqrt()
    return ahead * length, aside * length


def walked(at_B3: Tensor, keys_BFK: Tensor, turned_BF: Tensor, turn_steps: int) -> Tensor:
    """[B, F, 3] float64: where a session that stood at `at` would stand under `keys` without walls, and the way walked until
    then; `turned` of `poses`."""
    ahead, aside = steps(keys_BFK)
    yaw = turned_BF.double() * (2 * math.pi / turn_steps)
    x, y = yaw.cos() * ahead - yaw.sin() * aside, yaw.sin() * ahead + yaw.cos() * aside
    return at_B3[:, None] + torch.stack((x, y, ahead.abs() + aside.abs()), dim=-1).cumsum(1)


class Past(NamedTuple):
    """Of N remembered pictures of each of B rows: `heading` [B, N, 2], `at` [B, N, 3], `place` [B, N], and `age` [B, N] in
    blocks: 1 for the last one, 0 for none."""

    heading: Tensor
    at: Tensor
    place: Tensor
    age: Tensor

    def of(self, index_B: Tensor) -> tuple[Tensor, Tensor]:
        row = torch.arange(len(index_B), device=index_B.device)
        return self.heading[row, index_B], self.at[row, index_B]


def recall(past: Past, heading_B2: Tensor, at_B3: Tensor, place_B: Tensor, turn_steps: int) -> tuple[Tensor, Tensor]:
    """What a block is shown that ends at `heading` and `at` in `place`: (indices [B, SOURCES] of the last picture and of the
    remembered one nearest to that end, their `sights` [B, SOURCES, 6]). A picture of another place is not recalled."""
    turn = (past.heading[..., 0] - heading_B2[:, None, 0] + turn_steps // 2) % turn_steps - turn_steps // 2
    look = past.heading[..., 1] - heading_B2[:, None, 1]
    walk = (past.at - at_B3[:, None])[..., :2].norm(dim=-1)
    fits = (past.age > 1) & (past.place == place_B[:, None]) & (turn.abs() <= MOST_TURN) & (walk <= MOST_WALK)
    cost = turn.abs() + LOOK_COST * look.abs() + walk + AGE_COST * past.age
    other = torch.where(fits, cost, math.inf).argmin(dim=1)
    found = fits.gather(1, other[:, None])[:, 0]
    last = (past.age == 1).long().argmax(dim=1)
    return torch.stack((last, other), dim=1), sights(*past.of(last), *past.of(other), found, turn_steps)


def sights(
    heading_B2: Tensor, at_B3: Tensor, other_heading_B2: Tensor, other_at_B3: Tensor, found_B: Tensor, turn_steps: int
) -> Tensor:
    """[B, SOURCES, 6] float32 of the last picture and the recalled `other`: steps turned and looked, the way from the other to
    the last (ahead, right as the other looks; in steps), 1 where the picture is one, and 1 where nobody walked since it."""
    yaw = other_heading_B2[:, 0].double() * (2 * math.pi / turn_steps)
    x, y, since = (at_B3 - other_at_B3).double().unbind(-1)
    way = torch.stack((yaw.cos() * x + yaw.sin() * y, yaw.cos() * y - yaw.sin() * x), dim=-1)
    last = torch.cat((heading_B2.double(), torch.zeros_like(way), torch.ones_like(way)), dim=1)
    here = torch.stack((torch.ones_like(since), (since == 0).double()), dim=-1)
    other = torch.cat((other_heading_B2.double(), way, here), dim=1)
    return torch.stack((last, other * found_B[:, None]), dim=1).float()


def relation(sights_BGS6: Tensor, turn_steps: int) -> Tensor:
    """[B, G, 5] float32: how the recalled picture stands to the last one, for a network: sine and cosine of the turn from it,
    the way in tens of steps, 1 where there is one; 0 where there is none."""
    last, other = sights_BGS6.unbind(2)
    turn = (last[..., 0] - other[..., 0]) * (2 * math.pi / turn_steps)
    told = torch.stack((turn.sin(), turn.cos()), dim=-1)
    found = other[..., 4:5]
    return torch.cat((told, other[..., 2:4] / 10, found), dim=-1) * found


def stood(sights_BGS6: Tensor, keys_BFK: Tensor) -> Tensor:
    """[B, F, SOURCES] bool: whether each of a block's frames is seen from the very spot where the source was; `keys` of the
    G blocks."""
    walking = torch.stack(steps(keys_BFK)).ne(0).any(0)
    walking = walking.view(len(keys_BFK), sights_BGS6.shape[1], -1)
    still = walking.long().cumsum(-1) == 0
    return (still[..., None] & (sights_BGS6[:, :, None, :, 5] > 0)).flatten(1, 2)


def reproject(
    before_NCHW: Tensor, motion_N2HW: Tensor, turned_N: Tensor, looked_N2: Tensor, half_fov_tan: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What a picture sees of the one before it: (moved [N, C, H, W], inside [N, 1, H, W]: 1 where the one before shows it,
    pixels of that one to a pixel of this, [N, 1, H, W]: along the axis that is stretched most).

    `before` was seen from a place from which the eye has since turned right by `turned` radians and walked; `looked` are the
    horizons of before and now in half pictures, up. `motion` is how far it walked, (ahead, right) as seen before, in each
    pixel's distance of now: a point (1, x) of now, ahead and right, was at (cos - x sin + ahead, sin + x cos + right).
    Float32; bicubic.
    """
    side = before_NCHW.shape[-1]
    screen = (torch.arange(side, device=before_NCHW.device) + 0.5) / side * 2 - 1
    cos, sin = turned_N.cos()[:, None, None], turned_N.sin()[:, None, None]
    right = screen * half_fov_tan
    ahead = (cos - right * sin + motion_N2HW[:, 0]).clamp_min(NEAREST_AHEAD)
    across = (sin + right * cos + motion_N2HW[:, 1]) / (ahead * half_fov_tan)
    then, now = looked_N2[:, :, None, None].unbind(1)
    down = then - (now - screen[:, None]) / ahead
    at = torch.stack((across, down), dim=-1)
    moved = functional.grid_sample(before_NCHW, at, mode="bicubic", padding_mode="border", align_corners=False)
    inside = (at.abs() <= 1).all(-1)[:, None].to(moved.dtype)
    return moved, inside, pixels(at.detach())[:, None]


def pixels(at_NHW2: Tensor) -> Tensor:
    """[N, H, W]: how far apart, in pixels, neighbours are taken from, along the axis where it is least; `at` in half pictures.

    Over four pixels, as far as there are so many: a guessed motion is not smooth."""
    side = at_NHW2.shape[1]
    pixel = torch.arange(side, device=at_NHW2.device)
    before, after = (pixel - 2).clamp_min(0), (pixel + 2).clamp_max(side - 1)
    scale = side / 2 / (after - before).to(at_NHW2.dtype)
    down = (at_NHW2[:, after] - at_NHW2[:, before]).norm(dim=-1) * scale[:, None]
    across = (at_NHW2[:, :, after] - at_NHW2[:, :, before]).norm(dim=-1) * scale
    return torch.minimum(down, across)
