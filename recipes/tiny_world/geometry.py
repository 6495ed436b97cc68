"""How a picture moved against the one before its block, exactly: what stage A asks the head's motion to be.

Owns: the true motion of a clip's pixels in the terms of `network.reproject`, and the error of a guess. The pixels alone
teach a motion only where it is nearly right already.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from recipes.tiny_world import palettes
from recipes.tiny_world.renderer import (
    EYE,
    HALF_FOV_TAN,
    NEAREST,
    PROP_REACH,
    axes,
    cast,
    rays,
    row_tangent,
    scene_tables,
    screen,
)
from recipes.tiny_world.simulator import Maps

PROP_TOP = 1.6  # cells; no prop reaches higher


def inverse_depth(maps: Maps, place_B: Tensor, pose_B4: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """(1 / cells ahead [B, side, side] of what each pixel shows, 0 for the sky; where that is known [B, side, side] bool: not
    where a prop may stand)."""
    tangent = row_tangent(pose_B4, side)
    wall = 1 / cast(maps.walls, pose_B4[:, :2].contiguous(), rays(pose_B4, side))[0].clamp_min(1e-3)[:, None]
    scenes = palettes.columns(scene_tables(pose_B4.device)[0][place_B][:, None, None], palettes.SCENE_FIELDS)
    roof = (tangent / (scenes["height"] - EYE)).expand(-1, -1, side)
    floor = (-tangent / EYE).expand_as(roof)
    below_top = wall >= roof
    found = torch.where(below_top, wall, torch.where(scenes["indoor"] > 0.5, roof, 0.0)).maximum(floor)
    known = torch.ones_like(found, dtype=torch.bool)
    offset = maps.props - pose_B4[:, None, :2]
    ahead, aside = ((offset * axis[:, None]).sum(-1)[..., None, None] for axis in axes(pose_B4))
    for prop in range(maps.props.shape[1]):
        far = ahead[:, prop].clamp_min(NEAREST)
        beside = (screen(side, pose_B4.device) * HALF_FOV_TAN * far - aside[:, prop]).abs() < PROP_REACH
        high = EYE + tangent * far
        known &= ~((ahead[:, prop] > NEAREST) & beside & (high > 0) & (high < PROP_TOP) & (far * wall < 1))
    return found, known


def true_motion(maps: Maps, place_BF: Tensor, pose_BF4: Tensor, per: int, side: int) -> tuple[Tensor, Tensor]:
    """Of the clip's pictures from the second block on: (motion [B, F - per, 2, side, side] against the last picture of the
    block before, where it is known [B, F - per, 1, side, side] bool)."""
    B, F, _ = pose_BF4.shape
    now = pose_BF4[:, per:].flatten(0, 1)
    then = pose_BF4[:, per - 1 : F - per : per].repeat_interleave(per, dim=1).flatten(0, 1)
    rows = torch.arange(B, device=pose_BF4.device).repeat_interleave(F - per)
    near, known = inverse_depth(maps.rows(rows), place_BF[:, per:].flatten(), now, side)
    went = now[:, :2] - then[:, :2]
    walked = torch.stack([(went * axis).sum(-1) for axis in axes(then)], dim=-1)
    motion = walked[:, :, None, None] * near[:, None]
    return motion.unflatten(0, (B, F - per)), known[:, None].unflatten(0, (B, F - per))


def motion_error(guessed: Tensor, maps: Maps, place_BF: Tensor, pose_BF4: Tensor, per: int) -> Tensor:
    """Mean absolute error [B, F - per] of guessed [B, F - per, 2, H, W], at half its resolution."""
    coarse = functional.avg_pool2d(guessed.flatten(0, 1), 2).view(
        *guessed.shape[:3], *(s // 2 for s in guessed.shape[3:])
    )
    true, known = true_motion(maps, place_BF, pose_BF4, per, coarse.shape[-1])
    off = (coarse - true).abs().sum(2, keepdim=True) * known
    return off.mean((2, 3, 4))
