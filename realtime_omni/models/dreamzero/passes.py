"""The passes of one tick: what is seen becomes history, then pictures and actions are denoised behind it.

Owns how sessions and guidance branches make a batch: the rows of one branch, then those of the other, each over pages of its
own. Pictures are guided, ``u + g (c - u)``; actions are the conditional branch's. Must not know where scenes come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from realtime_omni.models.base import StepBatch
from realtime_omni.models.common.conditioning import KeysValues, stacked
from realtime_omni.models.common.wan.transformer import Attend
from realtime_omni.models.dreamzero.network import DreamZeroTransformer, Registers
from realtime_omni.models.dreamzero.sampler import Memory, Schedule, step
from realtime_omni.models.dreamzero.scene import IMAGE, TEXT, Scene

Given = tuple[tuple[KeysValues, ...], tuple[KeysValues, ...] | None]
"""Text and image of a batch, per layer."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """Of one session: pictures may end before they are clean, actions never do; both have as many steps."""

    video: Schedule
    actions: Schedule

    @classmethod
    def of(cls, steps: int, shift: float, final_noise: float) -> Schedules:
        actions = Schedule.of(steps, shift)
        return cls(Schedule.of(steps, shift, final_noise=final_noise) if final_noise else actions, actions)

    @property
    def steps(self) -> int:
        return self.actions.steps

    @property
    def alike(self) -> bool:
        """Both are at the same level in every step."""
        return self.video == self.actions


@dataclass(slots=True)
class Sample:
    """One session's pictures [F, C, h, w] and actions [N, action_width] on their way; ``robot`` [S, state_width]: its state, as
    the network reads it."""

    schedules: Schedules
    robot: Tensor
    video: Tensor
    actions: Tensor
    video_memory: Memory | None = None
    action_memory: Memory | None = None


class Passes:
    """Of one tick; made for it and forgotten with it."""

    def __init__(
        self,
        network: DreamZeroTransformer,
        batch: StepBatch,
        scenes: Mapping[int, Scene],
        *,
        branches: Sequence[str],
        guidance: float,
        category: int,
    ) -> None:
        self._network, self._batch, self._scenes = network, batch, scenes
        self._branches, self._guidance, self._category = branches, guidance, category
        self._device = network.patches.weight.device
        self._given: tuple[tuple[int, ...], Given] | None = None

    def commit(self, rows: tuple[int, ...]) -> None:
        """The clean pass over what becomes history, without registers. All rows have as many frames."""
        scenes = [self._scenes[r] for r in rows]
        latents = torch.stack([_conditioned(scene, scene.context, scene.start) for scene in scenes])
        text, image = self._conditioning(rows)
        self._network.history(
            self._in_branches(latents),
            torch.zeros(len(rows) * len(self._branches), device=self._device),
            self._in_branches(self._frames([scene.start for scene in scenes], latents.shape[1])),
            text,
            image,
            self._attend(rows, commit=True),
            partial(self._write, rows),
        )

    def denoise(self, rows: tuple[int, ...], index: int, samples: Mapping[int, Sample]) -> None:
        """One step of every row, pictures and actions together; ``samples`` are moved on."""
        scenes, moved = [self._scenes[r] for r in rows], [samples[r] for r in rows]
        latents = torch.stack([_conditioned(s, x.video, s.ahead) for s, x in zip(scenes, moved, strict=True)])
        ahead = [scene.ahead for scene in scenes]
        blocks = torch.tensor([(start - 1) // latents.shape[1] for start in ahead], device=self._device)
        text, image = self._conditioning(rows)
        alike = all(x.schedules.alike for x in moved)
        flow, acted = self._network.joint(
            self._in_branches(latents),
            self._in_branches(self._timesteps([x.schedules.video for x in moved], index)),
            self._in_branches(self._frames(ahead, latents.shape[1])),
            text,
            image,
            self._attend(rows, ahead=True),
            Registers(
                self._in_branches(torch.stack([x.actions for x in moved])),
                self._in_branches(torch.stack([x.robot for x in moved])),
                None if alike else self._in_branches(self._timesteps([x.schedules.actions for x in moved], index)),
                self._in_branches(blocks),
            ),
            category=self._category,
        )
        assert acted is not None
        flow, acted = guided(flow, acted, len(rows), self._guidance)
        for x, video, actions in zip(moved, flow, acted, strict=True):
            x.video, x.video_memory = step(x.schedules.video, index, x.video, video, x.video_memory)
            x.actions, x.action_memory = step(x.schedules.actions, index, x.actions, actions, x.action_memory)

    def _attend(self, rows: Sequence[int], *, commit: bool = False, ahead: bool = False) -> Attend:
        plans = [self._batch.attention(branch) for branch in self._branches]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            each = zip(plans, *(part.chunk(len(plans)) for part in (q, k, v)), strict=True)
            return torch.cat([plan.attend(layer, *qkv, rows=rows, commit=commit, ahead=ahead) for plan, *qkv in each])

        return attend

    def _write(self, rows: Sequence[int], layer: int, k: Tensor, v: Tensor) -> None:
        plans = [self._batch.attention(branch) for branch in self._branches]
        for plan, *kv in zip(plans, k.chunk(len(plans)), v.chunk(len(plans)), strict=True):
            plan.write(layer, *kv, rows=rows)

    def _conditioning(self, rows: tuple[int, ...]) -> Given:
        """Of these rows in every branch; put together once for all passes over the same rows."""
        if self._given is None or self._given[0] != rows:
            held = [self._scenes[r].conditioning.branches[branch] for branch in self._branches for r in rows]
            image = stacked([each[IMAGE] for each in held]) if IMAGE in held[0].parts else None
            self._given = rows, (stacked([each[TEXT] for each in held]), image)
        return self._given[1]

    def _frames(self, starts: Sequence[int], count: int) -> Tensor:
        """int64 [B, count]: numbers in the window."""
        return torch.tensor(starts, device=self._device)[:, None] + torch.arange(count, device=self._device)

    def _timesteps(self, schedules: Sequence[Schedule], index: int) -> Tensor:
        return torch.tensor([schedule.timestep(index) for schedule in schedules], device=self._device)

    def _in_branches(self, x: Tensor) -> Tensor:
        return torch.cat([x] * len(self._branches))


def _conditioned(scene: Scene, latents: Tensor, start: int) -> Tensor:
    """The network's input [F, C_in, h, w]: latents, and what the window's picture says of these frames."""
    return torch.cat((latents, scene.window.condition[start : start + len(latents)]), dim=1)


def guided(flow: Tensor, acted: Tensor, rows: int, guidance: float) -> tuple[Tensor, Tensor]:
    """Both branches' flows [2 rows, ...], or one's, to one [rows, ...]: ``u + g (c - u)`` for pictures, ``c`` for actions."""
    if len(flow) == rows:
        return flow, acted
    conditional, unconditional = flow[:rows], flow[rows:]
    return unconditional + guidance * (conditional - unconditional), acted[:rows]
