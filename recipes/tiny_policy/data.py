"""What the policy learns from: scenes that robots get into, each with the chunk that the expert would do there.

The expert has no memory, so every visited scene can be labelled, whoever led there: the expert itself, the expert with
disturbed hands (as in DART, arXiv 1703.09327), or the policy (DAgger, arXiv 1011.0686). Scenes are kept as poses; pictures
are painted when a batch is drawn, so half a million scenes are 150 MB.

Owns: the running robots, the pool. Must not know: the network; a policy is a function from scenes to chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from recipes.tiny_policy import expert
from recipes.tiny_policy.shape import HORIZON
from recipes.tiny_policy.table import EPISODE_TICKS, PUSH, TASKS, Scene, new_scenes, step, succeeded

Act = Callable[[Scene], Tensor]
"""Scenes to chunks [B, H, 3] in robot units."""

LONGEST_GIVEN = HORIZON // 2
ROUND = 4  # ticks between two labels of one robot
STAYS = 2  # rounds that a robot goes on after it has succeeded
DISTURBED = 0.6  # of the expert's robots
DRIFT, TREMBLE = 0.12, 0.08  # m/s, of a round and of a tick
FLIP = 0.04  # chance a round that the gripper does the opposite
PUSH_WEIGHT = 3.0  # the T is the hardest task: it is drawn so many times as often as another


@dataclass(frozen=True, slots=True)
class Labelled:
    """Scenes and chunks [B, H, 3]: ``free``, the expert's; ``continued``: of the expert after ``given`` [B] actions that are
    already decided, be they good or not, as it is for a robot whose chunk comes late."""

    scene: Scene
    free: Tensor
    continued: Tensor
    given: Tensor

    def chosen(self, share: float) -> tuple[Tensor, Tensor]:
        """Chunks and how many actions of each are given: ``share`` of the rows continue, the others are free."""
        continues = torch.rand(len(self.given), device=self.given.device) < share
        return torch.where(continues[:, None, None], self.continued, self.free), torch.where(continues, self.given, 0)


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

    def gather(self, policy: Act | None = None, share: float = 0.0) -> Labelled:
        """Every robot's scene with the expert's chunks; then all go on for a round.

        New episodes are the policy's with a chance of ``share``."""
        scene, label = self.scene, expert.chunk(self.scene, HORIZON)
        done = self._disturb(label[:, :LONGEST_GIVEN])
        if policy is not None and bool(self._led.any()):
            done[self._led] = policy(scene[self._led])[:, :LONGEST_GIVEN].to(done.dtype)
        given = int(torch.randint(1, LONGEST_GIVEN + 1, (), generator=self._generator, device=self._generator.device))
        continued = torch.cat((done[:, :given], expert.chunk(_after(scene, done[:, :given]), HORIZON - given)), dim=1)
        self.scene = _after(scene, done[:, :ROUND])
        self._begin_again(share if policy is not None else 0.0)
        return Labelled(scene, label, continued, torch.full_like(scene.task, given))

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
        self._kept: Labelled | None = None
        self._at = 0
        self.count = 0

    def add(self, new: Labelled) -> None:
        if self._kept is None:
            self._kept = Labelled(
                _room(new.scene, self._capacity),
                *(_empty(t, self._capacity) for t in (new.free, new.continued, new.given)),
            )
        rows = len(new.given)
        place = (torch.arange(rows, device=new.given.device) + self._at) % self._capacity
        for field in fields(Scene):
            getattr(self._kept.scene, field.name)[place] = getattr(new.scene, field.name)
        self._kept.free[place], self._kept.continued[place], self._kept.given[place] = (
            new.free,
            new.continued,
            new.given,
        )
        self._at = (self._at + rows) % self._capacity
        self.count = min(self._capacity, self.count + rows)

    def batch(self, rows: int) -> Labelled:
        """Random scenes and their chunks. Raises ValueError while there are none."""
        if self._kept is None:
            raise ValueError("the pool is empty")
        kept = self._kept
        index = torch.randint(0, self.count, (rows,), generator=self._generator, device=kept.given.device)
        return Labelled(kept.scene[index], kept.free[index], kept.continued[index], kept.given[index])


def _after(scene: Scene, actions: Tensor) -> Scene:
    for tick in range(actions.shape[1]):
        scene = step(scene, actions[:, tick])
    return scene


def _empty(tensor: Tensor, capacity: int) -> Tensor:
    return tensor.new_zeros(capacity, *tensor.shape[1:])


def _room(scene: Scene, capacity: int) -> Scene:
    return Scene(*(_empty(getattr(scene, field.name), capacity) for field in fields(Scene)))
