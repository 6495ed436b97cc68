"""What the policy learns from: scenes that robots get into, each with the chunk that the expert would do there.

The expert has no memory, so every visited scene can be labelled, whoever led there: the expert itself, the expert with
disturbed hands (as in DART, arXiv 1703.09327), or the policy (DAgger, arXiv 1011.0686). Scenes are kept as poses; pictures
are painted when a batch is drawn, so half a million scenes are 150 MB.

Owns: the running robots, the pool. Must not know: the network; a policy is a function from scenes to chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from recipes.tiny_policy import expert
from recipes.tiny_policy.shape import HORIZON
from recipes.tiny_policy.table import EPISODE_TICKS, PUSH, TASKS, Scene, new_scenes, step, succeeded

Act = Callable[[Scene], Tensor]
"""Scenes to chunks [B, H, 3] in robot units."""

ROUND = 4  # ticks between two labels of one robot
STAYS = 2  # rounds that a robot goes on after it has succeeded
DISTURBED = 0.6  # of the expert's robots
DRIFT, TREMBLE = 0.12, 0.08  # m/s, of a round and of a tick
FLIP = 0.04  # chance a round that the gripper does the opposite
PUSH_WEIGHT = 3.0  # the T is the hardest task: it is drawn so many times as often as another


class Collector:
    """``count`` robots, each in its own scene; ``tasks``: those that they are given."""

    def __init__(self, count: int, generator: torch.Generator, tasks: Sequence[int] = range(len(TASKS))) -> None:
        self._generator = generator
        weights = [(PUSH_WEIGHT if TASKS[n][1] == PUSH else 1.0) if n in tasks else 0.0 for n in range(len(TASKS))]
        self._weights = torch.tensor(weights, device=generator.device)
        self.scene = self._fresh(count)
        device = generator.device
        # Robots begin at different ages, so that their episodes do not end together.
        self._age = torch.randint(0, EPISODE_TICKS, (count,), generator=generator, device=device)
        self._stays = torch.zeros(count, dtype=torch.long, device=device)
        self._disturbed = self._chance(DISTURBED)
        self._led = torch.zeros(count, dtype=torch.bool, device=device)

    def gather(self, policy: Act | None = None, share: float = 0.0) -> tuple[Scene, Tensor]:
        """Every robot's scene with the expert's chunk [B, H, 3]; then all go on for a round.

        New episodes are the policy's with a chance of ``share``."""
        scene, label = self.scene, expert.chunk(self.scene, HORIZON)
        done = self._disturb(label[:, :ROUND])
        if policy is not None and bool(self._led.any()):
            done[self._led] = policy(scene[self._led])[:, :ROUND]
        for tick in range(ROUND):
            self.scene = step(self.scene, done[:, tick])
        self._begin_again(share if policy is not None else 0.0)
        return scene, label

    def _disturb(self, actions: Tensor) -> Tensor:
        rows, ticks, _ = actions.shape
        drift = self._normal(rows, 1, 2) * DRIFT * self._chance(0.5)[:, None, None]
        moved = actions[..., :2] + drift + self._normal(rows, ticks, 2) * TREMBLE
        gripper = torch.where(self._chance(FLIP)[:, None], 1 - actions[..., 2], actions[..., 2])
        disturbed = torch.cat((moved, gripper[..., None]), dim=-1)
        return torch.where(self._disturbed[:, None, None], disturbed, actions)

    def _begin_again(self, share: float) -> None:
        self._age += ROUND
        self._stays = torch.where(succeeded(self.scene), self._stays + 1, 0)
        over = (self._age >= EPISODE_TICKS) | (self._stays > STAYS)
        self.scene = self.scene.where(over, self._fresh(len(over)))
        self._age = torch.where(over, 0, self._age)
        self._led = torch.where(over, self._chance(share), self._led)
        self._disturbed = torch.where(over, self._chance(DISTURBED), self._disturbed)

    def _fresh(self, count: int) -> Scene:
        task = torch.multinomial(self._weights, count, replacement=True, generator=self._generator)
        return new_scenes(count, self._generator, task)

    def _chance(self, share: float) -> Tensor:
        return torch.rand(len(self.scene), generator=self._generator, device=self._generator.device) < share

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self._generator.device)


class Pool:
    """The latest ``capacity`` labelled scenes."""

    def __init__(self, capacity: int, generator: torch.Generator) -> None:
        self._capacity = capacity
        self._generator = generator
        self._scene: Scene | None = None
        self._label: Tensor | None = None
        self._at = 0
        self.count = 0

    def add(self, scene: Scene, label: Tensor) -> None:
        if self._scene is None or self._label is None:
            self._scene, self._label = _room(scene, self._capacity), label.new_empty(self._capacity, *label.shape[1:])
        place = (torch.arange(len(label), device=label.device) + self._at) % self._capacity
        for field in fields(Scene):
            getattr(self._scene, field.name)[place] = getattr(scene, field.name)
        self._label[place] = label
        self._at = (self._at + len(label)) % self._capacity
        self.count = min(self._capacity, self.count + len(label))

    def batch(self, rows: int) -> tuple[Scene, Tensor]:
        """Random scenes and their chunks."""
        if self._scene is None or self._label is None:
            raise ValueError("the pool is empty")
        index = torch.randint(0, self.count, (rows,), generator=self._generator, device=self._label.device)
        return self._scene[index], self._label[index]


def _room(scene: Scene, capacity: int) -> Scene:
    def room(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(capacity, *tensor.shape[1:])

    return Scene(*(room(getattr(scene, field.name)) for field in fields(Scene)))
