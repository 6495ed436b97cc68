"""The simulator's camera: a batched raycaster in torch, for CPU and CUDA, without assets.

Owns: from a pose on a map to a picture. One ray per pixel column finds the wall (a grid walk,
Amanatides and Woo 1987), everything else is arithmetic per pixel: floor and ceiling by similar
triangles, sky by direction, props as upright cards. Patterns fade to their mean where they
would alias. Pure functions of their arguments; deterministic.

Shape legend: B cameras, R rows and W columns of the supersampled picture, S side of the map,
P props of a map.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from realtime_omni.models.tiny_world.places import PLACES
from recipes.tiny_world import palettes

EYE = 0.5
HALF_FOV_TAN = 0.9  # 84 degrees across
WALL_KINDS = 3
MAX_STEPS = 26
NEAREST = 0.12  # of a prop, cells ahead
PROP_REACH = 0.8  # cells beside its axis where the last trace of a prop's halo is below 1e-7
SOFTEN = 1.5  # pattern filter width in pixels: wider than one keeps far textures calm


def scene_tables(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(scenes [places, n], walls [places * WALL_KINDS, m]) in the columns of `palettes`."""
    names = [place.name for place in PLACES]
    scenes = palettes.table([palettes.SCENES[name] for name in names], palettes.SCENE_FIELDS)
    walls = palettes.table([kind for name in names for kind in palettes.WALLS[name]], palettes.WALL_FIELDS)
    return scenes.to(device), walls.to(device)


def cast(grid_BSS: Tensor, position_B2: Tensor, ray_BW2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walk the grid along each ray.

    Returns (distance in ray lengths, wall kind 1.., 1.0 where an x face was hit, coordinate
    along the wall), each [B, W].
    """
    B, side = grid_BSS.shape[0], grid_BSS.shape[-1]
    flat = grid_BSS.reshape(B, -1)
    ray_x, ray_y = ray_BW2.unbind(-1)
    x0, y0 = position_B2[:, None].unbind(-1)
    small = 1e-6
    delta_x = 1.0 / ray_x.abs().clamp_min(small)
    delta_y = 1.0 / ray_y.abs().clamp_min(small)
    step_x = torch.where(ray_x < 0, -1, 1)
    step_y = torch.where(ray_y < 0, -1, 1)
    cell_x, cell_y = x0.floor().long() + 0 * step_x, y0.floor().long() + 0 * step_y
    next_x = torch.where(ray_x < 0, x0 - cell_x, cell_x + 1 - x0) * delta_x
    next_y = torch.where(ray_y < 0, y0 - cell_y, cell_y + 1 - y0) * delta_y
    kind = torch.zeros_like(cell_x)
    distance = torch.zeros_like(ray_x)
    x_face = torch.zeros_like(ray_x)
    for _ in range(MAX_STEPS):
        going = kind == 0
        take_x = next_x < next_y
        distance = torch.where(going, torch.minimum(next_x, next_y), distance)
        x_face = torch.where(going, take_x.to(x_face.dtype), x_face)
        cell_x = torch.where(going & take_x, cell_x + step_x, cell_x).clamp(0, side - 1)
        cell_y = torch.where(going & ~take_x, cell_y + step_y, cell_y).clamp(0, side - 1)
        next_x = torch.where(take_x, next_x + delta_x, next_x)
        next_y = torch.where(take_x, next_y, next_y + delta_y)
        kind = torch.where(going, flat.gather(1, cell_y * side + cell_x), kind)
    along = torch.where(x_face > 0.5, y0 + ray_y * distance, x0 + ray_x * distance)
    return distance, kind.clamp_min(1), x_face, along


def pulse(x: Tensor, period: Tensor, half: Tensor, blur: Tensor) -> Tensor:
    """Share of a pixel of width `blur` covered by lines of half width `half` at multiples of `period`."""
    offset = (x / period + 0.5).frac()
    offset = torch.where(offset < 0, offset + 1, offset)
    distance = (offset - 0.5).abs() * period
    cover = ((half - distance) / blur + 0.5).clamp(0, 1)
    detail = (2.0 - 4.0 * blur / period).clamp(0, 1)
    return torch.lerp((2 * half / period).clamp(0, 1), cover, detail)


def mix(a: Tensor, b: Tensor, share: Tensor) -> Tensor:
    return a + (b - a) * share[..., None]


def draw_wall(w: dict[str, Tensor], u: Tensor, v: Tensor, height: Tensor, blur_u: Tensor, blur_v: Tensor):
    """Colour [B, R, W, 3] and emission [B, R, W] of a wall point at (u along, v up)."""
    row = (v / w["period_v"]).floor()
    shift = w["stagger"] * w["period_u"] * 0.5 * (row - 2 * (row / 2).floor())
    joint = pulse(u + shift, w["period_u"], w["line_half"], blur_u)
    bed = pulse(v, w["period_v"], w["line_half"], blur_v)
    line = torch.maximum(joint, bed)
    wave = torch.sin(u * 2.3 + 1.7 * torch.sin(v * 3.1)) * 0.05
    colour = w["base"] * (1 + wave[..., None])
    colour = mix(colour, w["line"] + 0 * colour, line)
    emit = line * w["line_emit"]
    across = (u / w["panel_u"]).frac()
    du = (across - 0.5) * w["panel_u"]
    n = ((v - w["panel_v0"]) / w["panel_v"]).round()
    centre = w["panel_v0"] + n * w["panel_v"]
    dv = v - centre
    allowed = ((centre > w["low_v"]) & (centre < w["high_v"])).to(u.dtype)
    edge_u = ((w["half_u"] - du.abs()) / blur_u + 0.5).clamp(0, 1)
    edge_v = ((w["half_v"] - dv.abs()) / blur_v + 0.5).clamp(0, 1)
    mean_u = (2 * w["half_u"] / w["panel_u"]).clamp(0, 1)
    edge_u = torch.lerp(mean_u, edge_u, (2.0 - 4.0 * blur_u / w["panel_u"]).clamp(0, 1))
    cover = edge_u * edge_v * allowed
    inner_u = ((w["half_u"] * 0.8 - du.abs()) / blur_u + 0.5).clamp(0, 1)
    inner_v = ((w["half_v"] - 0.2 * w["half_u"] - dv.abs()) / blur_v + 0.5).clamp(0, 1)
    frame = cover * (1 - inner_u * inner_v) * (w["half_u"] > 0.15).to(u.dtype)
    colour = mix(colour, w["panel"] + 0 * colour, cover)
    colour = colour * (1 - 0.35 * frame[..., None])
    emit = torch.maximum(emit, cover * w["panel_emit"] * (1 - frame))
    reach = (du.abs() - w["half_u"]).clamp_min(0) ** 2 + (dv.abs() - w["half_v"]).clamp_min(0) ** 2
    glow = w["glow"] * torch.exp(-reach / 0.035) * allowed * (1 - cover)
    foot = ((w["foot_height"] - v) / blur_v + 0.5).clamp(0, 1) * (w["foot_height"] > 0).to(u.dtype)
    colour = mix(colour, w["foot"] + 0 * colour, foot)
    cap = ((v - (height - w["cap_height"])) / blur_v + 0.5).clamp(0, 1) * (w["cap_height"] > 0).to(u.dtype)
    colour = mix(colour, w["cap"] + 0 * colour, cap)
    return colour, emit * (1 - cap) * (1 - foot), glow


def draw_floor(s: dict[str, Tensor], x: Tensor, y: Tensor, blur: Tensor) -> tuple[Tensor, Tensor]:
    """Colour [B, R, W, 3] and emission [B, R, W] of the floor (or ceiling) at world (x, y)."""
    wave = torch.sin(x * 1.9 + 1.3 * torch.sin(y * 1.1)) * torch.sin(y * 2.3 + torch.sin(x * 0.7))
    calm = (1.5 - 1.5 * blur).clamp(0, 1)
    colour = mix(s["floor"], s["floor_second"], 0.5 + 0.5 * torch.sin(x * math.pi) * torch.sin(y * math.pi) * calm)
    colour = colour * (1 + (s["mottle"] * wave * calm)[..., None])
    line = torch.maximum(
        pulse(x, s["floor_period"], s["floor_half"], blur), pulse(y, s["floor_period"], s["floor_half"], blur)
    ) * (s["floor_period"] < 100).to(x.dtype)
    return mix(colour, s["floor_line"] + 0 * colour, line), line * s["floor_emit"]


def draw_sky(s: dict[str, Tensor], azimuth: Tensor, slope: Tensor) -> Tensor:
    """Colour [B, R, W, 3] of the sky; its silhouettes and sun are fixed to compass directions."""
    up = slope.clamp(0, 1.2)
    colour = mix(s["fog"], s["zenith"], 1 - torch.exp(-up * 2.6))
    cloud = torch.sin(azimuth * 3 + 2 * torch.sin(azimuth * 2 + slope * 5)) * torch.sin(
        slope * 11 + torch.cos(azimuth * 4)
    )
    band = torch.exp(-(((slope - 0.45) / 0.25) ** 2))
    colour = mix(colour, torch.ones_like(colour), s["cloud"] * (0.5 + 0.5 * cloud) * band * 2)
    turn = azimuth - s["sun_azimuth"] * (math.pi / 180)
    turn = torch.atan2(turn.sin(), turn.cos())
    radius = (turn**2 + (slope - s["sun_height"]) ** 2).sqrt()
    disc = ((s["sun_radius"] - radius) / 0.02 + 0.5).clamp(0, 1) * (s["sun_radius"] > 0).to(radius.dtype)
    halo = s["sun_halo"] * torch.exp(-((radius / 0.28) ** 2))
    colour = mix(colour, s["sun"] + 0 * colour, torch.maximum(disc, halo))
    for layer, phase, steps in (("far", 0.3, 26.0), ("near", 2.1, 34.0)):
        turn_steps = steps / (2 * math.pi)
        block = (azimuth * turn_steps).floor() / turn_steps
        a = torch.where(s["blocky"] > 0.5, block, azimuth) + phase
        ridge = 0.55 + 0.25 * torch.sin(a * 3) + 0.16 * torch.sin(a * 7 + 1) + 0.10 * torch.sin(a * 13 + phase)
        tooth = 0.45 + 0.55 * (torch.sin(a * 91.7) * 43.75).frac().abs()
        height = s[f"{layer}_height"] * torch.where(s["blocky"] > 0.5, tooth, ridge)
        cover = ((height - slope) / 0.02 + 0.5).clamp(0, 1) * (s[f"{layer}_height"] > 0).to(slope.dtype)
        colour = mix(colour, s[layer] + 0 * colour, cover)
    return colour


def draw_prop(s: dict[str, Tensor], u: Tensor, z: Tensor, blur: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Colour [B, R, W, 3], cover and emission [B, R, W] of the place's prop at card point (u, z)."""
    cover = torch.zeros_like(u)
    emit = torch.zeros_like(u)
    colour = torch.zeros(*u.shape, 3, device=u.device)
    light = 1.0 - 0.9 * u
    for part in "abc":
        z0, z1 = s[f"{part}_z0"], s[f"{part}_z1"]
        rise = ((z - z0) / (z1 - z0)).clamp(0, 1)
        half = torch.lerp(s[f"{part}_w0"] + 0 * u, s[f"{part}_w1"] + 0 * u, rise)
        box = ((half - u.abs()) / blur + 0.5).clamp(0, 1)
        box = box * ((z - z0) / blur + 0.5).clamp(0, 1) * ((z1 - z) / blur + 0.5).clamp(0, 1)
        if part != "a":
            radius = ((u / half.clamp_min(1e-3)) ** 2 + ((z - (z0 + z1) / 2) / ((z1 - z0) / 2)) ** 2).sqrt()
            disc = ((1 - radius) * half.clamp_min(1e-3) / blur + 0.5).clamp(0, 1)
            box = torch.where(s[f"{part}_round"] > 0.5, disc, box)
            emit = torch.lerp(emit, s[f"{part}_emit"] + 0 * emit, box)
        colour = mix(colour, s[f"{part}_colour"] * light[..., None].clamp(0.6, 1.4), box)
        cover = torch.maximum(cover, box)
    centre = (s["c_z0"] + s["c_z1"]) / 2
    halo = s["prop_halo"] * torch.exp(-(u**2 + (z - centre) ** 2) / 0.035) * (1 - cover)
    colour = mix(colour, s["c_colour"] + 0 * colour, (halo > 0).to(u.dtype) * (1 - cover))
    cover, emit = torch.maximum(cover, halo), torch.maximum(emit, (halo > 0.01).to(u.dtype))
    return colour, cover, emit


def background(
    scenes: Tensor, walls: Tensor, place_B: Tensor, pose_B4: Tensor, ray_BW2: Tensor, hit: tuple[Tensor, ...], size: int
) -> Tensor:
    """Everything but the props: [B, R, W, 3], 0..1."""
    distance, kind, x_face, along = hit
    s = palettes.columns(scenes[place_B][:, None, None], palettes.SCENE_FIELDS)
    w = palettes.columns(walls[place_B[:, None] * WALL_KINDS + kind - 1][:, None], palettes.WALL_FIELDS)
    pixel = pixel_blur(size)
    tangent = row_tangent(pose_B4, ray_BW2.shape[1])
    length = ray_BW2.norm(dim=-1)
    facing = torch.where(x_face > 0.5, ray_BW2[..., 0].abs(), ray_BW2[..., 1].abs()) / length
    depth = distance[:, None]
    v = EYE + tangent * depth
    blur_v = (pixel * depth).clamp_min(1e-4) + 0 * v
    blur_u = blur_v / facing[:, None].clamp_min(0.15)
    shade = (torch.where(x_face > 0.5, 1.0, 0.78)[:, None] * (0.82 + 0.18 * (v / 0.6).clamp(0, 1)))[..., None]
    wall, emit, glow = draw_wall(w, along[:, None] + 0 * v, v, s["height"], blur_u, blur_v)
    wall = torch.lerp(wall * shade, wall, emit[..., None])
    wall = wall + (glow[..., None] * w["panel"]) * 0.7
    wall = mix(wall, s["fog"] + 0 * wall, haze(depth, s["fog_density"]) * (1 - 0.55 * emit))

    x, y = pose_B4[:, 0, None, None], pose_B4[:, 1, None, None]
    below = EYE / (-tangent).clamp_min(1e-3)
    ground_x, ground_y = x + ray_BW2[:, None, :, 0] * below, y + ray_BW2[:, None, :, 1] * below
    floor, floor_emit = draw_floor(s, ground_x, ground_y, pixel * below * below / EYE * 0.6 + 0 * ground_x)
    far = haze(below, s["fog_density"]) + 0 * ground_x
    floor = mix(floor, s["fog"] + 0 * floor, far * (1 - 0.5 * floor_emit))

    azimuth = torch.atan2(ray_BW2[..., 1], ray_BW2[..., 0])[:, None]
    slope = tangent / length[:, None]
    sky = draw_sky(s, azimuth + 0 * slope, slope)
    above = (s["height"] - EYE) / tangent.clamp_min(1e-3)
    roof_x = x + ray_BW2[:, None, :, 0] * above
    beam = pulse(roof_x, torch.ones_like(roof_x), 0.12 + 0 * roof_x, pixel * above * above + 0.01)
    roof = s["zenith"] * (1 - 0.35 * beam[..., None])
    roof = mix(roof, s["fog"] + 0 * roof, haze(above, s["fog_density"]) + 0 * roof_x)
    sky = torch.where(s["indoor"][..., None] > 0.5, roof, sky)

    top = ((s["height"] - v) / blur_v * SOFTEN + 0.5).clamp(0, 1)
    bottom = (v / blur_v * SOFTEN + 0.5).clamp(0, 1)
    return mix(floor, mix(sky, wall, top), bottom)


def lay_prop(
    picture_BRW3: Tensor,
    scenes: Tensor,
    place_B: Tensor,
    pose_B4: Tensor,
    depth_BW: Tensor,
    ahead_B: Tensor,
    aside_B: Tensor,
    size: int,
) -> Tensor:
    """Lay one prop a camera, an upright card `ahead` and `aside` of it, over the picture."""
    s = palettes.columns(scenes[place_B][:, None, None], palettes.SCENE_FIELDS)
    side = depth_BW.shape[1]
    tangent = row_tangent(pose_B4, side)
    far = ahead_B[:, None, None].clamp_min(NEAREST)
    u = screen(side, depth_BW.device) * HALF_FOV_TAN * far - aside_B[:, None, None] + 0 * tangent
    colour, cover, emit = draw_prop(s, u, EYE + tangent * far + 0 * u, pixel_blur(size) * far + 0 * u)
    colour = mix(colour, s["fog"] + 0 * colour, haze(far, s["fog_density"]) * (1 - 0.55 * emit))
    shown = (ahead_B[:, None, None] > NEAREST) & (far < depth_BW[:, None])
    return mix(picture_BRW3, colour, cover * shown.to(cover.dtype))


def haze(distance: Tensor, density: Tensor) -> Tensor:
    return 1 - torch.exp(-((distance * density) ** 2) - distance * density * 0.3)


def pixel_blur(size: int) -> float:
    """Width of the pattern filter at distance 1, in cells."""
    return 2 * HALF_FOV_TAN / size * SOFTEN


def screen(side: int, device: torch.device) -> Tensor:
    """Pixel centres from -1 (left, top) to 1."""
    return (torch.arange(side, device=device) + 0.5) / side * 2 - 1


def axes(pose_B4: Tensor) -> tuple[Tensor, Tensor]:
    """Where ahead and right are on the map, each [..., 2] for poses [..., 4]."""
    cos, sin = pose_B4[..., 2].cos(), pose_B4[..., 2].sin()
    return torch.stack((cos, sin), dim=-1), torch.stack((-sin, cos), dim=-1)


def rays(pose_B4: Tensor, columns: int) -> Tensor:
    """[B, columns, 2] on the map; each goes one cell ahead."""
    forward, right = axes(pose_B4)
    across = HALF_FOV_TAN * screen(columns, pose_B4.device)
    return forward[:, None] + right[:, None] * across[None, :, None]


def row_tangent(pose_B4: Tensor, side: int) -> Tensor:
    """Upward slope per unit of depth of each row [B, R, 1]; pitch shifts the horizon."""
    return (pose_B4[:, 3, None] - screen(side, pose_B4.device))[:, :, None] * HALF_FOV_TAN


class Renderer:
    """The camera at one picture size; `compiled` compiles its per-pixel parts (for CUDA and long runs).

    The grid walk is left as it is: it is small, and compiling its chain of gathers takes minutes.
    """

    def __init__(self, size: int, device: torch.device | str, supersample: int = 2, compiled: bool = False) -> None:
        self.size, self.supersample = size, supersample
        self.scenes, self.walls = scene_tables(device)
        wrap = (lambda part: torch.compile(part, dynamic=False)) if compiled else (lambda part: part)
        self._background, self._lay_prop = wrap(background), wrap(lay_prop)

    def __call__(self, walls_BSS: Tensor, props_BP2: Tensor, place_B: Tensor, pose_B4: Tensor) -> Tensor:
        """Pictures [B, 3, size, size] in 0..1 of poses (x, y, yaw, pitch)."""
        forward, right = axes(pose_B4)
        ray_BW2 = rays(pose_B4, self.size * self.supersample)
        hit = cast(walls_BSS, pose_B4[:, :2].contiguous(), ray_BW2)
        picture = self._background(self.scenes, self.walls, place_B, pose_B4, ray_BW2, hit, self.size)
        offset = props_BP2 - pose_B4[:, None, :2]
        ahead, aside = (offset * forward[:, None]).sum(-1), (offset * right[:, None]).sum(-1)
        order = ahead.argsort(dim=1, descending=True)
        ahead, aside = ahead.gather(1, order).T.contiguous(), aside.gather(1, order).T.contiguous()
        farthest = hit[0].amax(dim=1)
        seen = (ahead > NEAREST) & (ahead < farthest) & (aside.abs() < ahead * HALF_FOV_TAN + PROP_REACH)
        for index in seen.any(dim=1).nonzero()[:, 0].tolist():
            picture = self._lay_prop(
                picture, self.scenes, place_B, pose_B4, hit[0], ahead[index].clone(), aside[index].clone(), self.size
            )
        picture = picture.clamp(0, 1).permute(0, 3, 1, 2)
        return functional.avg_pool2d(picture, self.supersample) if self.supersample > 1 else picture.contiguous()
