"""Pictures of scenes: the camera above the table, and the camera on the wrist. Draws on the device of the scene.

Both are orthographic from above and a little from the front, so heights shift things up the picture and show their front
sides. Shapes are signed distances in metres, painted back to front with edges one pixel soft. Must not know tasks: a picture
shows every object of the scene and never the instruction.

Shape legend: B scenes, S side in pixels. A point is a pair (x, y) of tensors that broadcast to [B, S, S]: along a row y is
one number, down a column x is, and shapes that stand straight are the cheaper for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.tiny_policy.table import (
    AT_GOAL,
    BLOCK,
    BODIES,
    FINGER,
    HALF,
    T_BOXES,
    TRAY,
    Scene,
    of_body,
)

CAMERAS = ("top", "wrist")
WRIST_HALF = 0.16  # m, half of what the wrist camera sees
TILT = 0.5  # of a height that shows as a shift up the picture
BLOCK_HEIGHT, PLATE_HEIGHT, LIFT, HOVER = 0.05, 0.012, 0.04, 0.06  # m; lift of a held block, height of open jaws
LIGHT, DARK = (0.87, 0.80, 0.70), (0.83, 0.75, 0.64)
RED, BLUE, GREEN = (0.86, 0.22, 0.18), (0.17, 0.40, 0.85), (0.22, 0.66, 0.32)
PLATE, GOAL, STEEL = (0.97, 0.72, 0.18), (0.45, 0.28, 0.60), (0.20, 0.22, 0.26)
TRAY_RIM, TRAY_FLOOR = (0.97, 0.96, 0.93), (0.72, 0.74, 0.78)
FLOOR, SHINE = (0.30, 0.32, 0.36), (0.93, 0.94, 0.96)
SHADOW = 0.35  # of the light that is missing
SIDE_LAYERS = 6  # of a block's side
SIDE = 0.62  # of the light that a front side gets

Point = tuple[Tensor, Tensor]


def pictures(scene: Scene, size: int) -> Tensor:
    """uint8 [B, 2, 3, S, S]: the cameras in the order of ``CAMERAS``."""
    middle = torch.zeros_like(scene.tool)
    views = (view(scene, middle, HALF, size), view(scene, scene.tool, WRIST_HALF, size))
    return (torch.stack(views, dim=1) * 255).round().to(torch.uint8)


def signed(frames: Tensor) -> Tensor:
    """uint8 to float in [-1, 1], as the serving path does it."""
    return frames.float() / 255 * 2 - 1


def view(scene: Scene, centre: Tensor, half: float, size: int) -> Tensor:
    """Float [B, 3, S, S] in [0, 1] of the square of half side ``half`` m about ``centre`` [B, 2]."""
    canvas = _Canvas(centre, half, size)
    canvas.paint((_length(canvas.away(scene.goal)) - AT_GOAL - 0.012).abs() - 0.007, GOAL)
    for tray in range(2):
        rim = _box(canvas.away(scene.trays[:, tray]), TRAY, TRAY)
        canvas.shade(rim - 0.012, SHADOW * 0.6)
        canvas.paint(rim - 0.008, TRAY_RIM)
        canvas.paint(rim + 0.008, TRAY_FLOOR)
    canvas.plate(scene.bodies[:, 0])
    order, colours = _order(scene)
    heights = _heights(scene)
    for n in range(3):
        body = order[:, n]
        canvas.block(of_body(scene.bodies, body), colours[:, n], heights.gather(1, body[:, None])[:, 0])
    canvas.gripper(scene)
    return canvas.colour


def _order(scene: Scene) -> tuple[Tensor, Tensor]:
    """Numbers [B, 3] and colours [B, 3, 3] of the blocks, back to front: far ones first, then the one moved last."""
    depth = -scene.bodies[:, 1:, 1]
    number = torch.arange(1, len(BODIES), device=depth.device)
    depth = torch.where(number == scene.last[:, None], 10.0, depth)
    order = depth.argsort(dim=1)
    palette = torch.tensor((RED, BLUE, GREEN), device=depth.device)
    return order + 1, palette[order]


def _heights(scene: Scene) -> Tensor:
    """How high each body's lower side is [B, N]: the block that was moved last may lie on another, or hang in the gripper."""
    number = torch.arange(len(BODIES), device=scene.held.device)
    mine = of_body(scene.bodies, scene.last.clamp(min=0))[:, None, :2]
    near = (scene.bodies[..., :2] - mine).abs().amax(dim=-1) < BLOCK
    on_block = (near & (number > 0) & (number != scene.last[:, None])).any(dim=1)
    height = torch.where(scene.held >= 0, LIFT, torch.where(on_block, BLOCK_HEIGHT, 0.0))
    return torch.where(number == scene.last[:, None], height[:, None], 0.0)


def _column(value: Tensor) -> Tensor:
    return value[:, None, None]


def _length(at: Point) -> Tensor:
    return (at[0].square() + at[1].square()).sqrt()


def _box(at: Point, half_x: float, half_y: float) -> Tensor:
    """Signed distance from a box about the origin."""
    x, y = at[0].abs() - half_x, at[1].abs() - half_y
    return _length((x.clamp(min=0), y.clamp(min=0))) + torch.maximum(x, y).clamp(max=0)


def _turned(at: Point, angle: Tensor) -> Point:
    """Points in the frame of a body at ``angle`` [B]."""
    cos, sin = _column(angle.cos()), _column(angle.sin())
    return cos * at[0] + sin * at[1], cos * at[1] - sin * at[0]


class _Canvas:
    """``colour`` [B, 3, S, S], from the far left corner; begins as the bare table."""

    def __init__(self, centre: Tensor, half: float, size: int) -> None:
        self.pixel = 2 * half / size
        steps = (torch.arange(size, device=centre.device) + 0.5) * self.pixel - half
        self.x = _column(centre[:, 0]) + steps
        self.y = _column(centre[:, 1]) - steps[:, None]
        plank = (self.y * 8).floor() % 2 > 0
        light, dark = (torch.tensor(tone, device=centre.device).view(1, 3, 1, 1) for tone in (LIGHT, DARK))
        self.colour = torch.where(plank[:, None], light, dark).expand(-1, -1, size, size)
        self.paint(-_box((self.x, self.y), HALF, HALF), FLOOR)

    def away(self, position: Tensor, height: Tensor | float = 0.0) -> Point:
        """Every pixel as seen from a point [B, 2] at a height (m)."""
        return self.x - _column(position[:, 0]), self.y - _column(position[:, 1] + TILT * height)

    def paint(self, distance: Tensor, colour: Tensor | tuple[float, float, float]) -> None:
        """``colour`` [B, 3] or one for all where ``distance`` [B, S, S] is negative."""
        if isinstance(colour, tuple):
            colour = torch.tensor(colour, device=distance.device)[None]
        cover = (0.5 - distance / self.pixel).clamp(0, 1)[:, None]
        self.colour = torch.lerp(self.colour, colour[..., None, None], cover)

    def shade(self, distance: Tensor, strength: float, soft: float = 0.008) -> None:
        """Darken where ``distance`` is negative, ``soft`` m wide at the edge."""
        self.colour = self.colour * (1 - strength * (0.5 - distance / soft).clamp(0, 1)[:, None])

    def plate(self, pose: Tensor) -> None:
        def shape(height: float) -> Tensor:
            x, y = _turned(self.away(pose[:, :2], height), pose[:, 2])
            bar, stem = (_box((x - box[0], y - box[1]), box[2], box[3]) for box in T_BOXES)
            return torch.minimum(bar, stem)

        self.shade(shape(-0.01), SHADOW)
        self.paint(shape(0.0), (PLATE[0] * SIDE, PLATE[1] * SIDE, PLATE[2] * SIDE))
        self.paint(shape(PLATE_HEIGHT), PLATE)

    def block(self, pose: Tensor, colour: Tensor, height: Tensor) -> None:
        def shape(at: Tensor) -> Tensor:
            return _box(_turned(self.away(pose[:, :2], at), pose[:, 2]), BLOCK - 0.004, BLOCK - 0.004) - 0.004

        self.shade(shape(-0.01 - 0.3 * height), SHADOW)
        # The front side is the union of the box at several heights.
        side = shape(height)
        for part in range(1, SIDE_LAYERS):
            side = torch.minimum(side, shape(height + part / SIDE_LAYERS * BLOCK_HEIGHT))
        self.paint(side, colour * SIDE)
        top = shape(height + BLOCK_HEIGHT)
        self.paint(top, colour)
        self.paint(top + 0.012, colour + (1 - colour) * 0.18)

    def gripper(self, scene: Scene) -> None:
        """Two jaws, apart while open, on a block's sides while one is held, together as a finger otherwise."""
        holds = scene.held >= 0
        height = torch.where(scene.closed & ~holds, 0.0, HOVER)
        gap = torch.where(scene.closed, torch.where(holds, BLOCK + 0.006, 0.006), BLOCK + 0.022)
        self.shade(_length(self.away(scene.tool, -0.01)) - FINGER, SHADOW * 0.7, soft=0.02)
        x, y = self.away(scene.tool, height)
        jaw = _box((x.abs() - _column(gap), y), 0.004, 0.014) - 0.004
        bar = _box((x, y - 0.020), BLOCK + 0.03, 0.003) - 0.003
        for part in (bar, jaw):
            self.paint(part - 0.003, SHINE)
            self.paint(part, STEEL)
