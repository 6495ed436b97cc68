"""The scripted expert: what to do in any scene, by looking at the poses. It has no memory, so it can take over anywhere.

Owns: the way to solve each task. A closed gripper is its only sign of intent: closed and empty it is pushing, closed on the
task's block it is carrying, closed on anything else it lets go. It speeds up and slows down gently, as arms have to.

Shape legend: B scenes, H actions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.tiny_policy.table import (
    GRASP,
    MAX_SPEED,
    PUSH,
    REACH,
    STACK,
    TICK_S,
    Scene,
    limited,
    of_body,
    step,
    succeeded,
    task_columns,
)

GAIN = 0.35  # of the way that one tick goes, once near
RAMP = 0.14  # m/s, most change of the velocity in a tick: from MAX_SPEED the GAIN brakes no harder
AT = 0.010  # m, near enough to close or to open
PUSH_SPEED = 0.16  # m/s
BEHIND = 0.135  # m from the T's centre where the finger comes down: outside of it whatever its angle
STEP_BACK = 0.075  # m further, where a block is in the way: closing over it would grasp it
LATERAL = 0.035  # m the finger may be beside the line from the T to its goal before it starts over
PUSHED = 0.012  # m from the goal where it stops; success is wider


def act(scene: Scene) -> Tensor:
    """The expert's action [B, 3]."""
    kind, _, _ = task_columns(scene)
    action = torch.where((kind == PUSH)[:, None], _push(scene), _pick_and_place(scene))
    action = torch.where(_finished(scene, kind)[:, None], torch.zeros_like(action), action)
    velocity = scene.velocity + limited(action[:, :2] - scene.velocity, RAMP)
    return torch.cat((velocity, action[:, 2:]), dim=1)


def chunk(scene: Scene, horizon: int) -> Tensor:
    """The expert's next actions [B, H, 3] when it acts alone from here."""
    actions = []
    for _ in range(horizon):
        actions.append(act(scene))
        scene = step(scene, actions[-1])
    return torch.stack(actions, dim=1)


def _finished(scene: Scene, kind: Tensor) -> Tensor:
    close = (scene.bodies[:, 0, :2] - scene.goal).norm(dim=1) < PUSHED
    return succeeded(scene) & ((kind != PUSH) | close)


def _towards(scene: Scene, target: Tensor, speed: float = MAX_SPEED) -> Tensor:
    return limited((target - scene.tool) * (GAIN / TICK_S), speed)


def _stops_at(scene: Scene, target: Tensor) -> Tensor:
    """bool [B]: the gripper is there and slow enough to stop within the tick."""
    return ((target - scene.tool).norm(dim=1) < AT) & (scene.velocity.norm(dim=1) <= RAMP)


def _with_gripper(velocity: Tensor, closed: Tensor) -> Tensor:
    return torch.cat((velocity, closed.to(velocity.dtype)[:, None]), dim=1)


def _pick_and_place(scene: Scene) -> Tensor:
    kind, body, destination = task_columns(scene)
    block = of_body(scene.bodies, body)[:, :2]
    tray = scene.trays.gather(1, destination.clamp(max=1)[:, None, None].expand(-1, 1, 2))[:, 0]
    place = torch.where((kind == STACK)[:, None], of_body(scene.bodies, destination)[:, :2], tray)
    carrying = scene.held == body
    # It is the block that has to arrive; the gripper may hold it off its centre.
    target = torch.where(carrying[:, None], scene.tool + place - block, block)
    there = _stops_at(scene, target)
    closed = torch.where(carrying, ~there, there & ~scene.closed)
    blocked = scene.closed & ~carrying
    velocity = torch.where((blocked | there)[:, None], torch.zeros_like(target), _towards(scene, target))
    return _with_gripper(velocity, closed)


def _push(scene: Scene) -> Tensor:
    plate = scene.bodies[:, 0, :2]
    way = scene.goal - plate
    distance = way.norm(dim=1, keepdim=True)
    along = way / distance.clamp(min=1e-6)
    across = torch.stack((-along[:, 1], along[:, 0]), dim=1)
    offset = scene.tool - plate
    beside = (offset * across).sum(dim=1, keepdim=True)
    behind = (offset * along).sum(dim=1, keepdim=True) < 0
    start = plate - along * BEHIND
    occupied = (scene.bodies[:, 1:, :2] - start[:, None]).norm(dim=2).amin(dim=1) < GRASP + 0.005
    start = (start - along * (occupied * STEP_BACK)[:, None]).clamp(-REACH, REACH)
    down = _stops_at(scene, start)
    # The line is met again over about 3 cm, and the last centimetres go slower.
    speed = (distance * 2.5).clamp(0.05, PUSH_SPEED)
    heading = along - across * (beside / 0.03).clamp(-1, 1)
    pushing = scene.closed & (scene.held < 0) & behind[:, 0] & (beside.abs()[:, 0] < LATERAL)
    push = _with_gripper(heading / heading.norm(dim=1, keepdim=True) * speed, pushing)
    moving = ~scene.closed & ~down
    approach = _with_gripper(_towards(scene, start) * moving[:, None], ~scene.closed & down)
    return torch.where(pushing[:, None], push, approach)
