"""What the policy learns from: scenes that robots get into, each with the chunk that the expert would do there.

The expert has no memory, so every visited scene can be labelled, whoever led there: the expert itself, the expert with
disturbed hands (as in DART, arXiv 1703.09327), or the policy (DAgger, arXiv 1011.0686). Scenes are kept as poses; pictures
are painted when a batch is drawn, so half a million scenes are 150 MB.

Owns: the running robots, the pool. Must not know: the network; a policy is a function from observations to chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from recipes.tiny_policy import expert
from recipes.tiny_policy.shape import EXECUTED, HORIZON
from recipes.tiny_policy.table import ACTION_DIM, EPISODE_TICKS, PUSH, TASKS, Scene, new_scenes, step, succeeded

LONGEST_GIVEN = HORIZON // 2
ROUND = EXECUTED  # ticks between two observations of one robot
SPELL = 4  # ticks that a disturbance lasts, and between two labels of one robot
STAYS = 1  # rounds that a robot goes on after it has succeeded
DISTURBED = 0.6  # of the expert's robots
DRIFT, TREMBLE = 0.12, 0.08  # m/s, of a spell and of a tick
FLIP = 0.04  # chance a spell that the gripper does the opposite
LATE = 0.7  # of the led robots: their chunks arrive 1 to LONGEST_GIVEN ticks after the observation
INFORMED = 0.7  # of those: the policy is told
PUSH_WEIGHT = 3.0  # the T is the hardest task: it is drawn so many times as often as another


@dataclass(frozen=True, slots=True)
class Observed:
    """Robots that ask the policy for a chunk: ``left`` [B, ROUND, 3] of their old one, in robot units, of which the policy is
    told that the first ``given`` [B] are executed before the new one arrives."""

    scene: Scene
    left: Tensor
    given: Tensor


Lead = Callable[[Observed], Tensor]
"""Chunks [B, H, 3] in robot units."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """Scenes and chunks [B, H, 3]: ``free``, the expert's; ``continued``: of the expert after ``given`` [B] actions that are
    already decided, be they good or not, as it is for a robot whose chunk comes late. ``led`` [B] bool: by the policy."""

    scene: Scene
    free: Tensor
    continued: Tensor
    given: Tensor
    led: Tensor

    def chosen(self, share: float, told: float) -> tuple[Tensor, Tensor]:
        """Chunks and how many actions of each are given: ``share`` of the rows continue, the others are free.

        ``told`` of those that continue are given their beginning; the others have to make it up, if the policy itself
        decided it: guidance at inference (arXiv 2506.07339) can only hold a chunk to a beginning that the policy thinks
        possible, and the expert alone does the same in equal scenes."""
        continues = _chance(share, self.given)
        tells = _chance(told, self.given)
        continues = continues & (tells | self.led)
        return (
            torch.where(continues[:, None, None], self.continued, self.free),
            torch.where(continues & tells, self.given, 0),
        )


class Collector:
    """``count`` robots, each in its own scene; ``tasks``: those that they are given.

    A led robot does what a served one does: it asks each ``ROUND`` ticks, and its chunk may come late, while the rest of the
    old one is executed. So the policy is corrected where it will be, and executes rows that lie deep in its chunks."""

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
        self._left = torch.zeros(count, ROUND, ACTION_DIM, device=device)
        self._delay = torch.zeros(count, dtype=torch.long, device=device)
        self._informed = torch.zeros(count, dtype=torch.bool, device=device)
        self._begins = torch.ones(count, dtype=torch.bool, device=device)

    def gather(self, policy: Lead | None = None, share: float = 0.0) -> Labelled:
        """All go on for a round; every robot's scenes, each ``SPELL``, with the expert's chunks.

        New episodes are the policy's with a chance of ``share``."""
        scenes, actions = self._round(self._plan(policy) if policy is not None else None)
        labelled = self._labelled(scenes, actions)
        self.scene = scenes[-1]
        self._begin_again(share if policy is not None else 0.0)
        return labelled

    def _plan(self, policy: Lead) -> Tensor:
        """What the led robots execute in this round [B, ROUND, 3]; zeros for the others."""
        plan = torch.zeros_like(self._left)
        led = self._led
        if bool(led.any()):
            # The first chunk is waited for.
            delay = torch.where(self._begins, 0, self._delay)[led]
            given = torch.where(self._informed[led], delay, 0)
            chunk = policy(Observed(self.scene[led], self._left[led], given)).to(plan.dtype)
            old = torch.arange(ROUND, device=delay.device) < delay[:, None]
            plan[led] = torch.where(old[..., None], self._left[led], chunk[:, :ROUND])
            self._left[led] = chunk[:, ROUND:]
        return plan

    def _round(self, plan: Tensor | None) -> tuple[list[Scene], Tensor]:
        """The ``ROUND`` + 1 scenes of a round, and what was done [B, ROUND, 3] between them."""
        scenes, actions = [self.scene], []
        for tick in range(ROUND):
            if tick % SPELL == 0:
                disturb = self._disturbance()
            action = disturb(expert.act(scenes[-1]))
            if plan is not None:
                action = torch.where(self._led[:, None], plan[:, tick], action)
            actions.append(action)
            scenes.append(step(scenes[-1], action))
        return scenes, torch.stack(actions, dim=1)

    def _labelled(self, scenes: list[Scene], actions: Tensor) -> Labelled:
        """The scenes of every ``SPELL`` ticks. The expert answers all of them in one call: many small ones cost more."""
        ticks = range(0, ROUND, SPELL)
        given = [self._up_to(min(LONGEST_GIVEN, ROUND - tick)) for tick in ticks]
        ends = [tick + count for tick, count in zip(ticks, given, strict=True)]
        starts = Scene.cat([scenes[tick] for tick in (*ticks, *ends)])
        free, after = expert.chunk(starts, HORIZON).chunk(2)
        decided = zip(ticks, ends, after.chunk(len(ticks)), strict=True)
        continued = [torch.cat((actions[:, a:b], rest[:, : HORIZON - b + a]), dim=1) for a, b, rest in decided]
        rows = len(self.scene)
        return Labelled(
            starts[: len(free)],
            free,
            torch.cat(continued),
            torch.tensor(given, device=free.device).repeat_interleave(rows),
            self._led.repeat(len(ticks)),
        )

    def _up_to(self, most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=self._generator, device=self._generator.device))

    def _disturbance(self) -> Callable[[Tensor], Tensor]:
        """What the hands of this spell make of the expert's actions."""
        rows = len(self.scene)
        drift = self._normal(rows, 2) * DRIFT * self._chance(0.5)[:, None]
        flips = self._chance(FLIP)

        def disturb(action: Tensor) -> Tensor:
            moved = action[:, :2] + drift + self._normal(rows, 2) * TREMBLE
            gripper = torch.where(flips, 1 - action[:, 2], action[:, 2])
            return torch.where(self._disturbed[:, None], torch.cat((moved, gripper[:, None]), dim=1), action)

        return disturb

    def _begin_again(self, share: float) -> None:
        self._age += ROUND
        self._stays = torch.where(succeeded(self.scene), self._stays + 1, 0)
        over = (self._age >= EPISODE_TICKS) | (self._stays > STAYS)
        self.scene = self.scene.where(over, self._fresh(len(over)))
        self._age = torch.where(over, 0, self._age)
        self._led = torch.where(over, self._chance(share), self._led)
        self._disturbed = torch.where(over, self._chance(DISTURBED), self._disturbed)
        self._delay = torch.where(over, self._delays(), self._delay)
        self._informed = torch.where(over, self._chance(INFORMED), self._informed)
        self._begins = over

    def _delays(self) -> Tensor:
        late = self._chance(LATE)
        ticks = torch.randint(1, LONGEST_GIVEN + 1, late.shape, generator=self._generator, device=late.device)
        return torch.where(late, ticks, 0)

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
            self._kept = _each(lambda t: t.new_zeros(self._capacity, *t.shape[1:]), new)
        rows = len(new.given)
        place = (torch.arange(rows, device=new.given.device) + self._at) % self._capacity
        for kept, added in zip(_tensors(self._kept), _tensors(new), strict=True):
            kept[place] = added
        self._at = (self._at + rows) % self._capacity
        self.count = min(self._capacity, self.count + rows)

    def batch(self, rows: int) -> Labelled:
        """Random scenes and their chunks. Raises ValueError while there are none."""
        if self._kept is None:
            raise ValueError("the pool is empty")
        device = self._kept.given.device
        index = torch.randint(0, self.count, (rows,), generator=self._generator, device=device)
        return _each(lambda t: t[index], self._kept)


def _tensors(labelled: Labelled) -> list[Tensor]:
    scene = labelled.scene
    rest = [getattr(labelled, f.name) for f in fields(Labelled)[1:]]
    return [*(getattr(scene, f.name) for f in fields(Scene)), *rest]


def _each(change: Callable[[Tensor], Tensor], labelled: Labelled) -> Labelled:
    changed = [change(tensor) for tensor in _tensors(labelled)]
    count = len(fields(Scene))
    return Labelled(Scene(*changed[:count]), *changed[count:])


def _chance(share: float, like: Tensor) -> Tensor:
    return torch.rand(like.shape, device=like.device) < share
