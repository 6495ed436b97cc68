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

MOST_MOTION = 1.0  # of a pixel's distance: who walked farther sees it from elsewhere
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


def true_motion(maps: Maps, place_BF: Tensor, pose_BF4: Tensor, then_BGS4: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Of the clip's pictures from the second block on, against S pictures a block of the poses `then`: (motion
    [B, F - per, S, 2, side, side], where it is known [B, F - per, S, side, side] bool: not where a prop may stand, nor from
    too far)."""
    B, F, _ = pose_BF4.shape
    per = F // (then_BGS4.shape[1] + 1)
    now = pose_BF4[:, per:].flatten(0, 1)
    then = then_BGS4.repeat_interleave(per, dim=1).flatten(0, 1)
    rows = torch.arange(B, device=pose_BF4.device).repeat_interleave(F - per)
    near, known = inverse_depth(maps.rows(rows), place_BF[:, per:].flatten(), now, side)
    went = now[:, None, :2] - then[..., :2]
    walked = torch.stack([(went * axis).sum(-1) for axis in axes(then)], dim=-1)
    motion = walked[..., None, None] * near[:, None, None]
    seen = known[:, None] & (motion.abs().amax(2) < MOST_MOTION)
    return motion.unflatten(0, (B, F - per)), seen.unflatten(0, (B, F - per))


def motion_error(
    guessed: Tensor, maps: Maps, place_BF: Tensor, pose_BF4: Tensor, then_BGS4: Tensor, found_BGS: Tensor
) -> Tensor:
    """Mean absolute error [B, F - per, S] of guessed [B, F - per, S, 2, H, W] where there is such a picture (`found`), at half
    its resolution."""
    coarse = functional.avg_pool2d(guessed.flatten(0, 2), 2)
    coarse = coarse.view(*guessed.shape[:4], *coarse.shape[2:])
    true, known = true_motion(maps, place_BF, pose_BF4, then_BGS4, coarse.shape[-1])
    found = found_BGS.repeat_interleave(guessed.shape[1] // found_BGS.shape[1], dim=1)
    return ((coarse - true).abs().sum(3) * known).mean((3, 4)) * found
