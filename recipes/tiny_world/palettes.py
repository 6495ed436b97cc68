"""How the six places of the simulator look: colours and pattern sizes, no code paths.

Owns: one row of numbers per place (sky, floor, props) and per wall kind. Every place is drawn
by the same formulas; only these numbers differ, so a change of place keeps the geometry.
Lengths are in cells, colours in 0..1, angles in degrees. The order is that of `places.PLACES`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tables, one row a line:
# fmt: off

NONE = 1e4  # a period so long that its line is never met

WALL_FIELDS = {
    # name: width
    "base": 3, "line": 3, "period_u": 1, "period_v": 1, "stagger": 1, "line_half": 1, "line_emit": 1,
    "panel": 3, "panel_u": 1, "panel_v": 1, "panel_v0": 1, "half_u": 1, "half_v": 1, "low_v": 1, "high_v": 1,
    "panel_emit": 1, "glow": 1, "foot": 3, "foot_height": 1, "cap": 3, "cap_height": 1,
}
SCENE_FIELDS = {
    "height": 1, "fog": 3, "fog_density": 1, "indoor": 1,
    "floor": 3, "floor_second": 3, "floor_line": 3, "floor_period": 1, "floor_half": 1, "floor_emit": 1, "mottle": 1,
    "zenith": 3, "cloud": 1, "far": 3, "far_height": 1, "near": 3, "near_height": 1, "blocky": 1,
    "sun": 3, "sun_azimuth": 1, "sun_height": 1, "sun_radius": 1, "sun_halo": 1,
    "a_colour": 3, "a_z0": 1, "a_z1": 1, "a_w0": 1, "a_w1": 1,
    "b_colour": 3, "b_z0": 1, "b_z1": 1, "b_w0": 1, "b_w1": 1, "b_round": 1, "b_emit": 1,
    "c_colour": 3, "c_z0": 1, "c_z1": 1, "c_w0": 1, "c_w1": 1, "c_round": 1, "c_emit": 1, "prop_halo": 1,
}


def wall(base, line, period_u=NONE, period_v=NONE, stagger=0.0, line_half=0.03, line_emit=0.0, panel=(0, 0, 0),
         panel_u=1.0, panel_v=NONE, panel_v0=0.5, half_u=0.0, half_v=0.0, low_v=0.0, high_v=9.0, panel_emit=0.0,
         glow=0.0, foot=(0, 0, 0), foot_height=0.0, cap=(0, 0, 0), cap_height=0.0) -> dict:
    """One wall kind: a lattice of lines, one panel (door, window, torch) repeated, a foot and a cap band."""
    return dict(locals())


def scene(height, fog, fog_density, floor, floor_second, floor_line, zenith, a, b, c, indoor=0.0, floor_period=1.0,
          floor_half=0.03, floor_emit=0.0, mottle=0.08, cloud=0.0, far=(0, 0, 0), far_height=-1.0, near=(0, 0, 0),
          near_height=-1.0, blocky=0.0, sun=(0, 0, 0), sun_azimuth=0.0, sun_height=0.3, sun_radius=0.0, sun_halo=0.0,
          b_round=0.0, c_round=0.0, b_emit=0.0, c_emit=0.0, prop_halo=0.0) -> dict:
    """One place: a, b, c are the parts of its prop, each (colour, z0, z1, half width at z0, half width at z1)."""
    values = dict(locals())
    for part in "abc":
        colour, z0, z1, w0, w1 = values.pop(part)
        values |= {f"{part}_colour": colour, f"{part}_z0": z0, f"{part}_z1": z1, f"{part}_w0": w0, f"{part}_w1": w1}
    return values


SCENES = {
    "dungeon": scene(
        height=1.0, fog=(0.07, 0.05, 0.04), fog_density=0.14, indoor=1.0,
        floor=(0.44, 0.38, 0.32), floor_second=(0.37, 0.32, 0.28), floor_line=(0.20, 0.16, 0.14),
        zenith=(0.20, 0.16, 0.13), mottle=0.06,
        a=((0.46, 0.42, 0.38), 0.0, 1.0, 0.13, 0.13), b=((0.56, 0.51, 0.45), 0.0, 0.16, 0.22, 0.17),
        c=((0.56, 0.51, 0.45), 0.84, 1.0, 0.17, 0.22)),
    "snow": scene(
        height=0.95, fog=(0.80, 0.87, 0.94), fog_density=0.10,
        floor=(0.90, 0.93, 0.97), floor_second=(0.85, 0.90, 0.96), floor_line=(0.72, 0.80, 0.90),
        floor_period=NONE, mottle=0.10, zenith=(0.36, 0.60, 0.88), cloud=0.10,
        far=(0.62, 0.72, 0.85), far_height=0.22, near=(0.42, 0.53, 0.66), near_height=0.08,
        sun=(1.0, 0.97, 0.86), sun_azimuth=60, sun_height=0.42, sun_radius=0.07, sun_halo=0.25,
        a=((0.33, 0.22, 0.15), 0.0, 0.3, 0.07, 0.06), b=((0.13, 0.34, 0.27), 0.18, 0.72, 0.36, 0.06),
        c=((0.84, 0.91, 0.95), 0.58, 1.12, 0.24, 0.0)),
    "desert": scene(
        height=1.15, fog=(0.97, 0.83, 0.60), fog_density=0.10,
        floor=(0.90, 0.72, 0.45), floor_second=(0.86, 0.67, 0.41), floor_line=(0.74, 0.55, 0.32),
        floor_period=NONE, mottle=0.12, zenith=(0.25, 0.53, 0.84), cloud=0.03,
        far=(0.86, 0.66, 0.44), far_height=0.10, near=(0.78, 0.55, 0.33), near_height=0.02,
        sun=(1.0, 0.95, 0.75), sun_azimuth=200, sun_height=0.50, sun_radius=0.09, sun_halo=0.45,
        a=((0.47, 0.32, 0.19), 0.0, 0.95, 0.07, 0.045), b=((0.20, 0.46, 0.18), 0.80, 1.06, 0.40, 0.40),
        c=((0.34, 0.60, 0.24), 0.90, 1.14, 0.26, 0.26), b_round=1.0, c_round=1.0),
    "garden": scene(
        height=0.85, fog=(0.74, 0.87, 0.93), fog_density=0.085,
        floor=(0.36, 0.64, 0.25), floor_second=(0.42, 0.69, 0.29), floor_line=(0.78, 0.72, 0.55),
        floor_period=4.0, floor_half=0.28, mottle=0.09, zenith=(0.22, 0.50, 0.90), cloud=0.20,
        far=(0.42, 0.62, 0.50), far_height=0.11, near=(0.24, 0.48, 0.28), near_height=0.05,
        sun=(1.0, 0.98, 0.85), sun_azimuth=130, sun_height=0.55, sun_radius=0.07, sun_halo=0.25,
        a=((0.40, 0.26, 0.15), 0.0, 0.5, 0.065, 0.05), b=((0.14, 0.42, 0.14), 0.36, 1.02, 0.32, 0.32),
        c=((0.30, 0.58, 0.20), 0.58, 1.06, 0.22, 0.22), b_round=1.0, c_round=1.0),
    "city": scene(
        height=1.9, fog=(0.13, 0.10, 0.22), fog_density=0.10,
        floor=(0.17, 0.17, 0.21), floor_second=(0.15, 0.15, 0.19), floor_line=(0.62, 0.56, 0.30),
        floor_period=3.0, floor_half=0.05, mottle=0.05, zenith=(0.02, 0.02, 0.09),
        far=(0.09, 0.08, 0.18), far_height=0.34, near=(0.05, 0.05, 0.11), near_height=0.16, blocky=1.0,
        sun=(0.95, 0.95, 0.88), sun_azimuth=300, sun_height=0.62, sun_radius=0.08, sun_halo=0.15,
        a=((0.10, 0.10, 0.12), 0.0, 0.95, 0.035, 0.025), b=((0.10, 0.10, 0.12), 0.0, 0.08, 0.09, 0.06),
        c=((1.0, 0.87, 0.55), 0.88, 1.06, 0.09, 0.09), c_round=1.0, c_emit=1.0, prop_halo=0.55),
    "lava": scene(
        height=1.3, fog=(0.17, 0.045, 0.02), fog_density=0.13, indoor=1.0,
        floor=(0.26, 0.16, 0.13), floor_second=(0.31, 0.19, 0.15), floor_line=(1.0, 0.45, 0.08),
        floor_period=2.0, floor_half=0.10, floor_emit=1.0, mottle=0.09, zenith=(0.13, 0.06, 0.05),
        a=((0.30, 0.19, 0.17), 0.0, 0.85, 0.27, 0.02), b=((0.95, 0.38, 0.08), 0.0, 0.07, 0.36, 0.28),
        c=((0.44, 0.27, 0.21), 0.1, 0.6, 0.08, 0.02), b_emit=1.0),
}

WALLS = {
    "dungeon": (
        wall((0.60, 0.35, 0.26), (0.30, 0.21, 0.18), 0.5, 0.25, 1.0, 0.022, foot=(0.28, 0.24, 0.22), foot_height=0.10),
        wall((0.60, 0.35, 0.26), (0.30, 0.21, 0.18), 0.5, 0.25, 1.0, 0.022, panel=(1.0, 0.72, 0.28), panel_v0=0.66,
             half_u=0.05, half_v=0.09, panel_emit=1.0, glow=0.85, foot=(0.28, 0.24, 0.22), foot_height=0.10),
        wall((0.44, 0.42, 0.40), (0.24, 0.23, 0.22), 1.0, 0.5, 1.0, 0.025, panel=(0.42, 0.25, 0.12), panel_v0=0.36,
             half_u=0.27, half_v=0.38, low_v=0.0, high_v=1.0)),
    "snow": (
        wall((0.45, 0.29, 0.18), (0.26, 0.16, 0.10), NONE, 0.19, 0.0, 0.022, cap=(0.95, 0.97, 1.0), cap_height=0.20,
             foot=(0.86, 0.90, 0.96), foot_height=0.08),
        wall((0.50, 0.33, 0.21), (0.29, 0.18, 0.12), NONE, 0.19, 0.0, 0.022, panel=(1.0, 0.84, 0.45), panel_v0=0.47,
             half_u=0.19, half_v=0.15, panel_emit=0.8, glow=0.2, cap=(0.95, 0.97, 1.0), cap_height=0.20,
             foot=(0.86, 0.90, 0.96), foot_height=0.08),
        wall((0.60, 0.74, 0.86), (0.80, 0.89, 0.96), 1.0, 0.5, 1.0, 0.03, cap=(0.97, 0.98, 1.0), cap_height=0.14)),
    "desert": (
        wall((0.82, 0.64, 0.41), (0.60, 0.44, 0.26), 1.0, 0.3, 1.0, 0.022, cap=(0.88, 0.72, 0.50), cap_height=0.13),
        wall((0.80, 0.61, 0.39), (0.60, 0.44, 0.26), NONE, NONE, panel=(0.30, 0.19, 0.12), panel_v0=0.38, half_u=0.24,
             half_v=0.40, cap=(0.72, 0.40, 0.24), cap_height=0.20, foot=(0.66, 0.49, 0.31), foot_height=0.08),
        wall((0.70, 0.46, 0.30), (0.86, 0.70, 0.48), 0.5, NONE, 0.0, 0.055, cap=(0.90, 0.75, 0.52), cap_height=0.20,
             foot=(0.90, 0.75, 0.52), foot_height=0.14)),
    "garden": (
        wall((0.17, 0.44, 0.15), (0.11, 0.33, 0.11), NONE, 0.42, 0.0, 0.02, cap=(0.30, 0.58, 0.22), cap_height=0.10,
             foot=(0.12, 0.30, 0.10), foot_height=0.08),
        wall((0.18, 0.45, 0.16), (0.11, 0.33, 0.11), panel=(0.90, 0.32, 0.46), panel_u=0.5, panel_v=0.36, panel_v0=0.28,
             half_u=0.075, half_v=0.075, low_v=0.12, high_v=0.72, cap=(0.30, 0.58, 0.22), cap_height=0.10),
        wall((0.92, 0.90, 0.84), (0.72, 0.70, 0.66), 1.0, NONE, 0.0, 0.07, panel=(0.30, 0.52, 0.66), panel_v0=0.44,
             half_u=0.2, half_v=0.19, cap=(0.74, 0.36, 0.26), cap_height=0.15, foot=(0.60, 0.56, 0.50),
             foot_height=0.08)),
    "city": (
        wall((0.23, 0.22, 0.31), (0.14, 0.14, 0.20), 1.0, NONE, 0.0, 0.04, panel=(0.98, 0.80, 0.42), panel_u=0.5,
             panel_v=0.5, panel_v0=0.5, half_u=0.11, half_v=0.13, low_v=0.25, high_v=1.8, panel_emit=0.9, glow=0.08),
        wall((0.15, 0.21, 0.31), (0.09, 0.13, 0.21), NONE, 0.5, 0.0, 0.05, panel=(0.45, 0.76, 0.95), panel_u=1.0,
             panel_v=0.5, panel_v0=0.25, half_u=0.40, half_v=0.12, low_v=0.05, high_v=1.8, panel_emit=0.8),
        wall((0.30, 0.17, 0.21), (0.20, 0.11, 0.14), NONE, NONE, panel=(0.98, 0.30, 0.62), panel_v0=0.62, half_u=0.36,
             half_v=0.10, panel_emit=1.0, glow=0.45, foot=(0.10, 0.10, 0.14), foot_height=0.30)),
    "lava": (
        wall((0.36, 0.23, 0.19), (0.22, 0.13, 0.11), 1.0, 0.45, 1.0, 0.05, foot=(0.55, 0.17, 0.06), foot_height=0.07),
        wall((0.36, 0.23, 0.20), (1.0, 0.42, 0.08), 1.0, 0.65, 1.0, 0.035, 0.9, foot=(0.95, 0.40, 0.10),
             foot_height=0.06),
        wall((0.32, 0.20, 0.18), (0.19, 0.11, 0.10), NONE, NONE, panel=(1.0, 0.52, 0.10), panel_v0=0.65, half_u=0.17,
             half_v=0.65, panel_emit=1.0, glow=0.4)),
}


def table(rows: list[dict], fields: dict[str, int]) -> Tensor:
    """[rows, sum of widths] of the rows' values in the order of `fields`."""
    flat = [[float(n) for name in fields for n in _numbers(row[name])] for row in rows]
    return torch.tensor(flat)


def columns(values: Tensor, fields: dict[str, int]) -> dict[str, Tensor]:
    """Split the last dimension of `values` by `fields`; scalars lose it, colours keep 3."""
    parts = values.split(list(fields.values()), dim=-1)
    return {name: part if fields[name] == 3 else part[..., 0] for name, part in zip(fields, parts, strict=True)}


def _numbers(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)
