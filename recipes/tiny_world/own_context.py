"""Stage C: the truth, learnt on the network's own pictures, for one sampler step.

Owns: playing clips and walks many rows at a time, and the loss of stage C. A clip is first played
without gradients, as a session plays it; then all its blocks are predicted at once, from pure
noise, by stage A's masked pass over the played pictures. So a gradient reaches the keys and
values of the network's own pictures too, which stage B's cached step never trains, and one
masked pass serves nine blocks.

Near the true start the loss is mostly squared: it asks for the mean of what may come, which is
what a squared error measures. Farther out the truth's weight falls and stage B's judge (see
`LateStudent`) says what a picture looks like.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from realtime_omni.models.tiny_world.network import NetworkConfig
from recipes.tiny_world.losses import reconstruction
from recipes.tiny_world.rollout import KeptRows
from recipes.tiny_world.student import Student
from recipes.tiny_world.teacher import MEAN_LEVEL, PURE_NOISE, SPREAD, add_noise, corrupt_context, per_block

SURE = 5  # own blocks over which the truth has its full weight
FADE = 0.7  # of the truth's weight per own block after these
TRUE_ROWS = 0.2  # share of rows that stay a stage A row: true context, damaged a little, all noise levels
SQUARED, ABSOLUTE, EDGE = 1.0, 0.1, 0.1
NEAR = 0.2  # the judge's push is the squared error's pull from this rms distance, times `Balance.push`
SHARP_12, SHARP_48 = 0.78, 0.80  # sharpness that `Balance` aims at; the goal is 0.70 at both frames


@dataclasses.dataclass
class Balance:
    """Two weights steered by held-out sharpness, since one run must find them: a slow proportional control.

    `detail` multiplies the absolute error and the differences, which keep edges where the mean would blur them (frame 12,
    near the truth); `push` is the judge's, who alone is heard at frame 48.
    """

    detail: float = 1.0
    push: float = 1.0

    def steer(self, sharp_12: float, sharp_48: float) -> None:
        self.detail = steered(self.detail, SHARP_12 - sharp_12)
        self.push = steered(self.push, SHARP_48 - sharp_48)


def steered(weight: float, lacking: float) -> float:
    """`weight` grown by three times what is lacking, at most 1.4-fold at once, within 0.2 to 4."""
    return min(4.0, max(0.2, weight * min(1.4, max(0.7, 1 + 3 * lacking))))


class Play:
    """Rows of sessions played with one sampler step through a (compiled) cached pass, without gradients."""

    def __init__(self, cached: nn.Module, config: NetworkConfig, rows: int, device: torch.device) -> None:
        self.cached, self.config, self.device = cached, config, device
        self.kept = KeptRows.empty(config, rows, device, torch.bfloat16)

    @torch.no_grad()
    def block(self, keys: Tensor, place: Tensor, truth: Tensor | None = None, follow: Tensor | None = None) -> Tensor:
        """The next block [B, F, 3, H, W] in [-1, 1]; `truth` in the rows marked by `follow` [B] bool, or in all."""
        kept, per, size = self.kept, self.config.frames_per_block, self.config.image_size
        told = (keys.contiguous(), place.contiguous(), kept.pose(keys), kept.k, kept.v, kept.valid)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            if truth is not None and follow is None:
                shown = truth
            else:
                x = torch.randn(len(keys), per, 3, size, size, device=self.device)
                shown = self.cached(x, x.new_ones(x.shape[:2]), *told)[0].float().clamp(-1, 1)
            if truth is not None and follow is not None:
                shown = torch.where(follow[:, None, None, None, None], truth, shown)
            shown = shown.contiguous()
            _, k, v = self.cached(shown, shown.new_full(shown.shape[:2], self.config.context_noise), *told)
        kept.write(k, v, told[2])
        return shown

    def clip(self, truth: Tensor, keys: Tensor, place: Tensor, given: Tensor | None = None) -> Tensor:
        """Clips [B, F, 3, H, W] played from their first block, or their first `given` [B] blocks, on."""
        self.kept.reset(torch.ones(len(keys), dtype=torch.bool, device=self.device))
        per, shown = self.config.frames_per_block, []
        for index in range(keys.shape[1] // per):
            part = slice(index * per, (index + 1) * per)
            if index == 0:
                shown.append(self.block(keys[:, part], place[:, part], truth[:, part].contiguous()))
            elif given is None:
                shown.append(self.block(keys[:, part], place[:, part]))
            else:
                shown.append(self.block(keys[:, part], place[:, part], truth[:, part].contiguous(), index < given))
        return torch.cat(shown, dim=1)


def draw_given(rows: int, blocks: int, device: torch.device) -> Tensor:
    """True blocks at the start of each clip [B]: one for 70 %, as a session has, else up to all but one."""
    many = torch.randint(2, blocks, (rows,), device=device)
    return torch.where(torch.rand(rows, device=device) < 0.7, 1, many)


def block_weights(given: Tensor, blocks: int) -> Tensor:
    """[B, blocks] of the predictions of blocks 1..blocks: 1 up to SURE own blocks, then falling by FADE each."""
    own = torch.arange(1, blocks + 1, device=given.device)[None] - given[:, None] + 1
    return FADE ** (own - SURE).clamp_min(0)


def own_context_loss(
    model: nn.Module, truth: Tensor, played: Tensor, keys: Tensor, place: Tensor, given: Tensor, per: int, detail: float
) -> tuple[Tensor, Tensor]:
    """(loss, mean squared error of the blocks predicted from own pictures) of a batch of clips in -1..1."""
    B, blocks, device = len(truth), truth.shape[1] // per - 1, truth.device
    damaged, level_c = corrupt_context(truth[:, :-per], blocks, per)
    true_row = torch.rand(B, device=device) < TRUE_ROWS
    context = torch.where(true_row[:, None, None, None, None], damaged, played[:, :-per])
    level_c = torch.where(true_row[:, None], level_c, 0.0)
    level = torch.sigmoid(torch.randn(B, blocks, device=device) * SPREAD + MEAN_LEVEL)
    pure = (torch.rand_like(level) < PURE_NOISE) | ~true_row[:, None]
    level = torch.where(pure, 1.0, level)
    level_n, target = per_block(level, per), truth[:, per:]
    noised = add_noise(target, torch.randn_like(target), level_n)
    x0 = model(context, level_c, noised, level_n, keys, place)
    loss = reconstruction(x0, target, SQUARED, detail * ABSOLUTE, detail * EDGE)
    weight = torch.where(true_row[:, None], 1 / level.clamp_min(0.3), block_weights(given, blocks))
    own = ~true_row[:, None] & (torch.arange(1, blocks + 1, device=device)[None] >= given[:, None])
    squared = (x0.detach().float() - target).square().mean((2, 3, 4)) * per_block(own.float(), per)
    return (loss * per_block(weight, per)).mean(), squared.sum() / (own.sum() * per).clamp_min(1)


class LateStudent(Student):
    """Stage B's rolling rows with the judge alone and one sampler step.

    A row is judged from where its window is full; before that `own_context_loss` says what is right.
    """

    def judge_only(self, strength: float, reduce) -> dict[str, Tensor]:
        """Judge, then (strength > 0) gradients added to .grad, then the rows move on by one block."""
        per, bank, kept = self.config.frames_per_block, self.bank, self.bank.kept
        truth, keys, place, _ = bank.told(self.pool, per)
        told = (keys, place, kept.pose(keys), kept.k, kept.v, kept.valid)
        judged = (kept.block >= torch.maximum(bank.given + 1, torch.full_like(kept.block, kept.slots))).float()
        with torch.autocast(truth.device.type, torch.bfloat16):
            x0 = self.sample(told, False, truth.shape, truth.device)
        loss = self.judge_step(x0.detach(), keys, place, judged, reduce)
        grade = self.push(x0, keys, place, judged, strength)
        self.move_on(x0.detach(), truth, told)
        return {"judge": loss, "grade": grade, "judged": judged.mean()}

    def push(self, x0: Tensor, keys: Tensor, place: Tensor, judged: Tensor, strength: float) -> Tensor:
        """Backward with the judge's gradient, scaled to `strength` times a squared error's pull from NEAR."""
        shown = x0.detach().requires_grad_()
        with torch.autocast(x0.device.type, torch.bfloat16):
            score = self.judge(self.judge_view(self.bank.last, shown), keys, place[:, -1]).float().mean((1, 2, 3))
        (by_judge,) = torch.autograd.grad(-(score * judged).sum(), shown)
        mean = (score.detach() * judged).sum() / judged.sum().clamp_min(1)
        if strength > 0:
            size = by_judge.square().sum((1, 2, 3, 4)).sqrt().sum() / judged.sum().clamp_min(1)
            pull = 2 * SQUARED * NEAR / shown[0].numel() ** 0.5  # norm of the mean squared error's gradient
            x0.backward(by_judge * (strength * pull / (size + 1e-12) / len(x0)))
        return mean


def late_sharpness(student: LateStudent, energy: Tensor, expected: Tensor, age: int = 40) -> tuple[float, float]:
    """(mean sharpness against the place's mean, share below 0.3) of the rows past `age` blocks; NaN without any.

    energy [B] of the rows' last frames, expected [places].
    """
    bank = student.bank
    ratio = (energy / expected[bank.place])[bank.kept.block >= age]
    if not len(ratio):
        return float("nan"), float("nan")
    return ratio.mean().item(), (ratio < 0.3).float().mean().item()
