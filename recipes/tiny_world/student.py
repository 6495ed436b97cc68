"""Stage B: the network plays on its own pictures, judged by a discriminator.

Owns: a bank of rows that roll on from step to step, as sessions do on a server (same cache,
same sampler, same commit), and one training step on it. A row starts with 1 to 7 true blocks,
then lives on its own pictures, some within their clip, the others for up to `MAX_LIFE` blocks.
While the simulator's clip lasts the truth pulls too, less with every own block: what comes after
is not certain, and a squared error on it would only teach blur. What true blocks showed from where a
row still stands is certain, and pulls in full when the row turns back to it. Then the row follows the keys of
other clips, a clip at a time, and in most rows a player that turns where its picture is plain: a
session's player has eyes, and a network that was never asked to leave its own walls stays there.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from realtime_omni.models.tiny_world.network import NetworkConfig
from realtime_omni.models.tiny_world.sampler import schedule, step
from recipes.tiny_world.data import ClipPool
from recipes.tiny_world.evaluate import PLAIN, gradient_energy
from recipes.tiny_world.losses import Discriminator, discriminator_loss, reconstruction
from recipes.tiny_world.rollout import KeptRows, clean
from recipes.tiny_world.simulator import D, J, L

MAX_LIFE = 240
NEAR_TRUTH = 0.45  # share of rows that end within their clip
HEED = 0.7  # share of rows whose player turns where its picture is plain
ALONE = 0.3  # share of rows that are shown no picture to move: what is drawn must stand by itself
SWITCH = 0.03
TRUST_DECAY = 0.85  # weight of the truth after each own block
ADVERSARIAL = 0.45  # size of the discriminator's gradient against the truth's, per picture
YIELD = 0.7  # of it is taken away where the truth has its full weight: what is certain needs no taste


@dataclasses.dataclass
class Bank:
    """Rows that roll on, and which clip each follows."""

    kept: KeptRows
    clip: Tensor
    given: Tensor
    life: Tensor
    place: Tensor
    tune: Tensor
    beat: Tensor
    way: Tensor
    expected: Tensor
    seen: Tensor
    half_fov_tan: float
    near_life: int
    alone: Tensor
    max_life: int = MAX_LIFE
    """`tune` and `beat`: the clip and block whose keys a row plays after its own clip; `way`: the key it turns away from
    plain walls by, or none (-1); `expected` [places]: the places' mean sharpness; `seen` [B, turn_steps]: directions, a step of
    turning wide, that true blocks showed of the place and from the spot where a row is; `near_life`: most blocks, beyond
    eight, of rows that end within their clip; `alone` [B]: rows that draw everything, and are shown no picture to move."""

    @classmethod
    def fresh(
        cls, config: NetworkConfig, pool: ClipPool, rows: int, expected: Tensor, max_life: int = MAX_LIFE
    ) -> Bank:
        device = pool.frames.device
        kept = KeptRows.empty(config, rows, device, torch.bfloat16)
        long = torch.zeros(rows, dtype=torch.long, device=device)
        bank = cls(
            kept,
            long,
            long.clone(),
            long.clone(),
            long.clone(),
            long.clone(),
            torch.full_like(long, pool.frames.shape[1]),
            long.clone(),
            expected,
            torch.zeros(rows, config.turn_steps, dtype=torch.bool, device=device),
            config.half_fov_tan,
            max(4, pool.frames.shape[1] // config.frames_per_block - 8),
            torch.arange(rows, device=device) % 10 < 10 * ALONE,
            max_life,
        )
        bank.restart(pool, torch.ones(rows, dtype=torch.bool, device=device))
        return bank

    def restart(self, pool: ClipPool, rows: Tensor) -> None:
        count, device = len(rows), rows.device
        self.kept.reset(rows)
        self.seen &= ~rows[:, None]
        self.clip = torch.where(rows, pool.pick(count), self.clip)
        few = torch.randint(1, 4, (count,), device=device)
        many = torch.randint(4, 8, (count,), device=device)
        given = torch.where(torch.rand(count, device=device) < 0.7, few, many)
        self.given = torch.where(rows, given, self.given)
        chance = torch.rand(3, count, device=device)
        near = torch.arange(count, device=device) < NEAR_TRUTH * count
        life = torch.where(near, chance[0] * self.near_life, chance[0] ** 2 * self.max_life).long() + 8
        self.life = torch.where(rows, life, self.life)
        way = torch.where(chance[1] < 0.5, J, L)
        self.way = torch.where(rows, torch.where(chance[2] < HEED, way, -1), self.way)
        self.place = torch.where(rows, pool.place[self.clip, 0], self.place)

    def told(self, pool: ClipPool, per: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(truth, keys, place, whether the truth is known) of every row's next block."""
        last_block = pool.frames.shape[1] // per - 1
        known = self.kept.block <= last_block
        block = self.kept.block.clamp_max(last_block)
        truth, keys, place = pool.blocks(self.clip, block, per)
        count, device = len(known), known.device
        other = pool.pick(count)
        change = torch.rand(count, device=device) < SWITCH
        strange = torch.where(change, pool.place[other, 0], self.place)
        ended = self.beat > last_block
        self.tune = torch.where(ended, other, self.tune)
        self.beat = torch.where(ended, torch.randint(1, last_block + 1, (count,), device=device), self.beat) + 1
        played = self.turned_away(pool.blocks(self.tune, self.beat - 1, per)[1])
        keys = torch.where(known[:, None, None], keys, played)
        place = torch.where(known[:, None], place, strange[:, None])
        self.seen &= (place[:, 0] == self.place)[:, None]
        self.place = place[:, -1]
        return truth, keys, place, known

    def certain(self, keys: Tensor, pose: Tensor, width: int) -> Tensor:
        """[B, F, width] bool: the columns of the next block's pictures that show what is `seen`."""
        column = (torch.arange(width, device=pose.device) + 0.5) / width * 2 - 1
        across = torch.atan(column * self.half_fov_tan) / (2 * math.pi) * self.seen.shape[1]
        toward = (pose[..., 1:2] + across).round().long() % self.seen.shape[1]
        still = ~(keys[..., : D + 1] > 0.5).any(-1).cumsum(1).bool() & (pose[..., 2] == 0)
        return self.seen.gather(1, toward.flatten(1)).view_as(toward) & still[..., None]

    def look(self, keys: Tensor, pose: Tensor, true: Tensor) -> None:
        """After a block, a `true` one in the rows so marked: who moved has seen nothing of where it is, else what it showed."""
        steps = self.seen.shape[1]
        self.seen &= ~(keys[..., : D + 1] > 0.5).flatten(1).any(1)[:, None]
        last = pose[:, -1]
        off = (torch.arange(steps, device=pose.device) - last[:, 1:2] + steps // 2) % steps - steps // 2
        shown = off.abs() + 0.5 <= math.atan(self.half_fov_tan) / (2 * math.pi) * steps
        self.seen |= shown & (true & (last[:, 2] == 0))[:, None]

    def turned_away(self, keys: Tensor) -> Tensor:
        """`keys` [B, F, 8], or the one that turns a row away from a picture that is plain for its place."""
        plain = (self.way >= 0) & (gradient_energy(self.kept.picture) < PLAIN * self.expected[self.place])
        turning = torch.nn.functional.one_hot(self.way.clamp_min(0), keys.shape[-1]).to(keys.dtype)
        return torch.where(plain[:, None, None], turning[:, None], keys)


def alone(told: tuple[Tensor, ...], rows: Tensor) -> tuple[Tensor, ...]:
    """What `KeptRows.told` tells, without the pictures that may be moved in the rows so marked."""
    return (*told[:4], told[4] * ~rows[:, None, None, None], *told[5:])


@dataclasses.dataclass
class Student:
    """The parts of a stage B step."""

    config: NetworkConfig
    cached: nn.Module
    judge: Discriminator
    judge_optimizer: torch.optim.Optimizer
    pool: ClipPool
    bank: Bank

    def judge_view(self, last: Tensor, block: Tensor) -> Tensor:
        return torch.cat((last[:, None], block), dim=1).flatten(1, 2)

    def sample(self, told: tuple, two_steps: bool, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
        """The sampler as served; only its last step keeps a gradient (Self Forcing, arXiv 2506.08009)."""
        levels = schedule(2 if two_steps else 1, self.config.sampler_shift)
        x = torch.randn(shape, device=device)
        if two_steps:
            with torch.no_grad():
                x0 = self.cached(x, x.new_full(shape[:2], levels[0]), *told)[0].float()
            x = step(x, x0, levels[0], levels[1])
        x0, fine, *_ = self.cached(x, x.new_full(shape[:2], levels[-2]), *told)
        return x0.float(), fine.float()

    def step(self, two_steps: bool, strength: float, reduce) -> dict[str, Tensor]:
        """Judge, then the network's gradients (left in .grad), then the rows move on by one block."""
        per, bank, kept = self.config.frames_per_block, self.bank, self.bank.kept
        truth, keys, place, known = bank.told(self.pool, per)
        told = alone(kept.told(keys, place), bank.alone)
        with torch.autocast(truth.device.type, torch.bfloat16):
            x0, fine = self.sample(told, two_steps, truth.shape, truth.device)
        judged = (kept.block > 0).float()
        judge_loss = self.judge_step(x0.detach(), keys, place, judged, reduce)
        own = (kept.block - bank.given).clamp_min(0)
        certain = bank.certain(keys, told[2], truth.shape[-1])[:, :, None, None]
        trust = (judged * known).view(-1, 1, 1, 1, 1) * torch.where(
            certain, 1.0, (TRUST_DECAY**own).view(-1, 1, 1, 1, 1)
        )
        error, grade = self._pull(x0, truth, keys, place, judged, trust, strength)
        self.move_on(x0.detach(), fine, truth, told)
        plain = (gradient_energy(kept.picture) < PLAIN * bank.expected[bank.place]).float().mean()
        return {"truth": error, "judge": judge_loss, "grade": grade, "plain": plain}

    @torch.no_grad()
    def move_on(self, x0: Tensor, fine: Tensor, truth: Tensor, told: tuple) -> None:
        """Every row keeps its block, the true one while it follows its clip, and starts over at its life's end."""
        bank, kept = self.bank, self.bank.kept
        follow = kept.block < bank.given
        truly = follow[:, None, None, None, None]
        final = torch.where(truly, truth, x0.clamp(-1, 1)).contiguous()
        with torch.autocast(truth.device.type, torch.bfloat16):
            level = final.new_full(final.shape[:2], self.config.context_noise)
            *_, k, v = self.cached(final, level, *clean(told))
        kept.write(k, v, told, final, torch.where(truly, 1.0, fine))
        bank.look(told[0], told[2], follow)
        bank.restart(self.pool, kept.block >= bank.life)

    def judge_step(self, fake: Tensor, keys: Tensor, place: Tensor, judged: Tensor, reduce) -> Tensor:
        per, count, device = self.config.frames_per_block, len(fake), fake.device
        clip = self.pool.pick(count)
        block = torch.randint(1, self.pool.frames.shape[1] // per, (count,), device=device)
        real, real_keys, real_place = self.pool.blocks(clip, block, per)
        before = self.pool.blocks(clip, block - 1, per)[0][:, -1]
        self.judge_optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = discriminator_loss(
                self.judge,
                self.judge_view(before, real),
                (real_keys, real_place[:, -1]),
                self.judge_view(self.bank.kept.picture, fake),
                (keys, place[:, -1]),
                judged,
            )
        loss.backward()
        reduce(list(self.judge.parameters()))
        self.judge_optimizer.step()
        return loss.detach()

    def _pull(
        self, x0: Tensor, truth: Tensor, keys: Tensor, place: Tensor, judged: Tensor, trust: Tensor, strength: float
    ) -> tuple[Tensor, Tensor]:
        """Backward through the network with the truth's gradient and a rescaled judge's gradient.

        The rescaling makes both the same size per picture (times ADVERSARIAL), whatever the
        judge's own scale is at that moment.
        """
        shown = x0.detach().requires_grad_()
        error = reconstruction(shown, truth, squared=0.5, absolute=0.5, edge=0.25).mean(1)
        (by_truth,) = torch.autograd.grad(error.sum(), shown)
        with torch.autocast(x0.device.type, torch.bfloat16):
            score = (
                self.judge(self.judge_view(self.bank.kept.picture, shown), keys, place[:, -1]).float().mean((1, 2, 3))
            )
        (by_judge,) = torch.autograd.grad(-score.sum(), shown)
        size_truth = by_truth.square().mean().sqrt()
        size_judge = by_judge.square().mean((1, 2, 3, 4), keepdim=True).sqrt().mean()
        pull = by_truth * trust
        weight = judged.view(-1, 1, 1, 1, 1) * (1 - YIELD * trust)
        push = by_judge * (weight * strength * ADVERSARIAL * size_truth / (size_judge + 1e-12))
        x0.backward((pull + push) / len(x0))
        share = trust.mean((1, 2, 3, 4))
        known = (error.detach() * share).sum() / share.sum().clamp_min(1e-6)
        return known, (score.detach() * judged).sum() / judged.sum().clamp_min(1)
