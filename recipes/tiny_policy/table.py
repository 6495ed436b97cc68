"""A tabletop with a gripper, for thousands of robots at once: poses, contact, tasks. No pictures (``pictures``), no clock.

A scene is a value; :func:`step` returns the next one, on the device of its tensors. The table is 1 m x 1 m, x to the right,
y away from the robot. The gripper has one degree of freedom beside the plane: open it hovers above everything; closing over
a block grasps and lifts it; closed over anything else it is a finger on the table, and what it meets is pushed. A released
block lies where it was released, on another block or not. The T is a flat plate: blocks do not touch it, nor each other.

Pushing is quasi-static: a body slides under a frictionless contact as under an ellipsoidal limit surface (Goyal, Ruina and
Papadopoulos 1991; Lynch, Maekawa and Tanie 1992), so a unit force along n at lever arm r moves it by n and turns it by
(r x n) / c^2, with c the ratio of torque to force at slip.

Shape legend: B scenes, N bodies (T, red, blue, green), H actions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

TICK_S = 0.1
HALF = 0.5  # m, half a side of the table
REACH = 0.47  # m, what the gripper and the bodies stay within
MAX_SPEED = 0.4  # m/s
FINGER = 0.015  # m, radius of the closed gripper
GRASP = 0.03  # m, largest distance of a block's centre that is grasped
SUBSTEPS = 4  # of a tick, for contact: at most 1 cm of motion each
MAX_PUSH = 0.02  # m a substep: a finger that comes down on a body does not throw it
BLOCK = 0.035  # m, half a side
TRAY = 0.085  # m, half a side
IN_TRAY = 0.065  # m, largest distance per axis of a block's centre from the tray's
ON_BLOCK = 0.028  # m
AT_GOAL = 0.04  # m
EPISODE_TICKS = 150

# Boxes (centre x, y; half sides) of each body about its centre of mass: a bar and a stem, or one block twice.
BAR, STEM = (0.08, 0.0225), (0.0225, 0.055)
_SHIFT = (BAR[1] + STEM[1]) * (STEM[0] * STEM[1]) / (BAR[0] * BAR[1] + STEM[0] * STEM[1])
T_BOXES = ((0.0, _SHIFT, *BAR), (0.0, _SHIFT - BAR[1] - STEM[1], *STEM))
BODY_BOXES = (T_BOXES, *[((0.0, 0.0, BLOCK, BLOCK),) * 2] * 3)
SLIP_RADII = (0.06, 0.027, 0.027, 0.027)  # c of each body, m
BODIES = ("T", "red", "blue", "green")

PUSH, PLACE, STACK = 0, 1, 2
# (instruction, kind, body, destination): a tray's index, or the body to stack on.
TASKS = (
    ("push the T to the goal", PUSH, 0, 0),
    *[
        (f"put the {BODIES[body]} block in the {side} tray", PLACE, body, tray)
        for body in (1, 2, 3)
        for tray, side in enumerate(("left", "right"))
    ],
    ("stack the red block on the blue block", STACK, 1, 2),
    ("stack the blue block on the green block", STACK, 2, 3),
)
INSTRUCTIONS = tuple(task[0] for task in TASKS)


@dataclass(frozen=True, slots=True)
class Scene:
    """``tool`` [B, 2] m, ``velocity`` [B, 2] m/s in the last tick; ``closed`` [B] bool; ``held`` and ``last`` [B] long: the
    body in the gripper, and the one that was there last (it lies on top), -1 for none; ``bodies`` [B, N, 3] m, m, rad;
    ``trays`` [B, 2, 2] and ``goal`` [B, 2] m; ``task`` [B] long, an index of ``TASKS``."""

    tool: Tensor
    velocity: Tensor
    closed: Tensor
    held: Tensor
    last: Tensor
    bodies: Tensor
    trays: Tensor
    goal: Tensor
    task: Tensor

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, rows: Tensor | slice) -> Scene:
        return Scene(*(getattr(self, f.name)[rows] for f in fields(self)))

    def where(self, mask: Tensor, other: Scene) -> Scene:
        """``other``'s rows where ``mask`` [B] is true."""

        def chosen(name: str) -> Tensor:
            mine, theirs = getattr(self, name), getattr(other, name)
            return torch.where(mask.view(-1, *[1] * (mine.ndim - 1)), theirs, mine)

        return Scene(*(chosen(f.name) for f in fields(self)))

    @staticmethod
    def cat(parts: list[Scene]) -> Scene:
        return Scene(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(parts[0])))

    def to(self, device: torch.device | str) -> Scene:
        return Scene(*(getattr(self, f.name).to(device) for f in fields(self)))


def state_of(scene: Scene) -> Tensor:
    """What the robot feels [B, 5]: gripper x, y (m), its velocity (m/s), and how far its jaws are apart (1 open, 0.5 on a
    block, 0 closed)."""
    opening = torch.where(scene.closed, torch.where(scene.held >= 0, 0.5, 0.0), 1.0)
    return torch.cat((scene.tool, scene.velocity, opening[:, None]), dim=1)


STATE_DIM, ACTION_DIM = 5, 3


def step(scene: Scene, action: Tensor) -> Scene:
    """The scene one tick later. ``action`` [B, 3]: velocity x, y in m/s, cut to ``MAX_SPEED``, and the gripper, closed
    above 0.5. The gripper moves as it is, then opens or closes."""
    velocity = limited(action[:, :2], MAX_SPEED)
    closing = action[:, 2] > 0.5
    pushing = scene.closed & (scene.held < 0)
    tool, bodies = scene.tool, scene.bodies
    for _ in range(SUBSTEPS):
        tool = (tool + velocity * (TICK_S / SUBSTEPS)).clamp(-REACH, REACH)
        bodies = _pushed(bodies, tool, pushing)
    carried = torch.arange(len(BODIES), device=tool.device) == scene.held[:, None]
    moved = torch.where(carried[..., None], tool[:, None] - scene.tool[:, None], 0.0)
    bodies = torch.cat(((bodies[..., :2] + moved).clamp(-REACH, REACH), bodies[..., 2:]), dim=-1)
    grasped = _under(bodies, tool, scene.last)
    held = torch.where(closing, torch.where(scene.closed, scene.held, grasped), -1)
    last = torch.where(held >= 0, held, scene.last)
    return replace(scene, tool=tool, velocity=velocity, closed=closing, held=held, last=last, bodies=bodies)


def limited(velocity: Tensor, speed: float) -> Tensor:
    """Velocity [B, 2] with its direction kept and its length at most ``speed``."""
    return velocity * (speed / velocity.norm(dim=-1, keepdim=True).clamp(min=speed))


def succeeded(scene: Scene) -> Tensor:
    """bool [B]: the task is done and nothing is held."""
    kind, body, destination = task_columns(scene)
    at = of_body(scene.bodies, body)[:, :2]
    tray = scene.trays.gather(1, destination.clamp(max=1)[:, None, None].expand(-1, 1, 2))[:, 0]
    below = of_body(scene.bodies, destination)[:, :2]
    pushed = (at - scene.goal).norm(dim=1) < AT_GOAL
    placed = (at - tray).abs().amax(dim=1) < IN_TRAY
    stacked = ((at - below).norm(dim=1) < ON_BLOCK) & (scene.last == body)
    done = torch.where(kind == PUSH, pushed, torch.where(kind == PLACE, placed, stacked))
    return done & (scene.held < 0)


def task_columns(scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
    """Kind, body and destination [B] of every scene's task."""
    table = torch.tensor([task[1:] for task in TASKS], device=scene.task.device)[scene.task]
    return table[:, 0], table[:, 1], table[:, 2]


def of_body(bodies: Tensor, body: Tensor) -> Tensor:
    """The pose [B, 3] of one body each."""
    return bodies.gather(1, body[:, None, None].expand(-1, 1, 3))[:, 0]


# ---------------------------------------------------------------------- contact


def box_distance(point: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Signed distance [...] of a point [..., 2] from a box about the origin, and the outward normal [..., 2]."""
    q = point.abs() - half
    outside = q.clamp(min=0)
    far = outside.norm(dim=-1)
    inside = q.amax(dim=-1).clamp(max=0)
    sideways = torch.stack((q[..., 0] >= q[..., 1], q[..., 0] < q[..., 1]), dim=-1).to(q.dtype)
    sign = torch.where(point < 0, -1.0, 1.0)
    normal = torch.where((far > 1e-9)[..., None], outside / far.clamp(min=1e-9)[..., None], sideways) * sign
    return far + inside, normal


def _pushed(bodies: Tensor, tool: Tensor, pushing: Tensor) -> Tensor:
    """Bodies [B, N, 3] after the finger at ``tool`` has moved them out of its way."""
    boxes = torch.tensor(BODY_BOXES, device=tool.device, dtype=tool.dtype)
    slip = torch.tensor(SLIP_RADII, device=tool.device, dtype=tool.dtype).square()
    cos, sin = bodies[..., 2].cos(), bodies[..., 2].sin()
    away = tool[:, None] - bodies[..., :2]
    local = torch.stack((cos * away[..., 0] + sin * away[..., 1], cos * away[..., 1] - sin * away[..., 0]), dim=-1)
    distances, normals = box_distance(local[:, :, None] - boxes[None, ..., :2], boxes[None, ..., 2:])
    nearest = distances.argmin(dim=2, keepdim=True)
    distance = distances.gather(2, nearest)[..., 0]
    n = normals.gather(2, nearest[..., None].expand(-1, -1, 1, 2))[:, :, 0]
    depth = (FINGER - distance).clamp(0, MAX_PUSH) * pushing[:, None]
    arm = local - n * distance[..., None]
    lever = arm[..., 0] * n[..., 1] - arm[..., 1] * n[..., 0]
    force = depth / (1 + lever.square() / slip)
    world = torch.stack((cos * n[..., 0] - sin * n[..., 1], sin * n[..., 0] + cos * n[..., 1]), dim=-1)
    position = (bodies[..., :2] - world * force[..., None]).clamp(-REACH, REACH)
    return torch.cat((position, (bodies[..., 2] - lever * force / slip)[..., None]), dim=-1)


def _under(bodies: Tensor, tool: Tensor, last: Tensor) -> Tensor:
    """The block [B] that closing the gripper grasps, or -1; of two in one place the upper."""
    distance = (bodies[..., :2] - tool[:, None]).norm(dim=-1)
    number = torch.arange(len(BODIES), device=tool.device)
    upper = (number == last[:, None]) & (distance < GRASP)
    distance = torch.where(number == 0, math.inf, torch.where(upper, distance - GRASP, distance))
    nearest, body = distance.min(dim=1)
    return torch.where(nearest < GRASP, body, -1)


# ---------------------------------------------------------------------- beginnings


def new_scenes(count: int, generator: torch.Generator, task: Tensor | None = None) -> Scene:
    """``count`` beginnings on the generator's device, deterministic by it; ``task`` [B], or one drawn for each."""
    device = generator.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator, device=device) * (high - low) + low

    if task is None:
        task = torch.randint(len(TASKS), (count,), generator=generator, device=device)
    side = torch.tensor([-1.0, 1.0], device=device)
    trays = torch.stack((side * uniform(0.34, 0.39, 2), uniform(-0.2, 0.2, 2)), dim=-1)
    goal = torch.stack((uniform(-0.18, 0.18), uniform(-0.28, 0.28)), dim=-1)
    plate = _apart(goal[:, None], 0.14, 0.36, (0.2, 0.3), generator)
    placed = torch.cat((goal[:, None], plate[:, None]), dim=1)
    for _ in range(3):
        block = _apart(placed, 0.125, math.inf, (0.22, 0.38), generator)
        placed = torch.cat((placed, block[:, None]), dim=1)
    angle = torch.cat((uniform(-math.pi, math.pi, 1), uniform(-0.6, 0.6, 3)), dim=1)
    nothing = torch.full((count,), -1, device=device)
    return Scene(
        tool=torch.stack((uniform(-0.4, 0.4), uniform(-0.4, 0.4)), dim=-1),
        velocity=torch.zeros(count, 2, device=device),
        closed=torch.zeros(count, dtype=torch.bool, device=device),
        held=nothing,
        last=nothing,
        bodies=torch.cat((placed[:, 1:], angle[..., None]), dim=-1),
        trays=trays,
        goal=goal,
        task=task,
    )


def _apart(others: Tensor, least: float, most: float, half: tuple[float, float], generator: torch.Generator) -> Tensor:
    """A place [B, 2] in the middle of the table at least ``least`` m from ``others`` [B, n, 2] and at most ``most`` m from
    the first: the first of 64 tries that is, or the best of them."""
    tries = torch.rand(len(others), 64, 2, generator=generator, device=others.device) * 2 - 1
    tries = tries * torch.tensor(half, device=others.device)
    distance = (tries[:, :, None] - others[:, None]).norm(dim=-1)
    lack = (least - distance.amin(dim=-1)).clamp(min=0) + (distance[..., 0] - most).clamp(min=0)
    return tries.gather(1, lack.argmin(dim=1)[:, None, None].expand(-1, 1, 2))[:, 0]
