"""The network in the simulator: scenes to its inputs, a batch at a time, and chunks to robot units; and its flow loss.

Owns: normalisation in torch (LeRobot's MEAN_STD) and the batch. What ``models.common.vla.processing`` does for one
observation of a client, this does for thousands of scenes on their device; a test holds the two together.

Shape legend: B scenes, H actions, A action channels, L prompt tokens, S side of a picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.common.vla.attention import DensePrefixAttention, PrefixKV
from realtime_omni.models.common.vla.flow import StepRule
from realtime_omni.models.common.vla.network import PolicyInputs, sample
from realtime_omni.models.pi0.network import Pi0Network
from recipes.tiny_policy.pictures import pictures, signed
from recipes.tiny_policy.shape import PROMPT_TOKENS, tokens_of
from recipes.tiny_policy.table import INSTRUCTIONS, Scene, state_of

EPS = 1e-8  # LeRobot's
LATE = 1.5  # pi0's Beta(1.5, 1) of the flow time: more of it near the noise
TIME_SCALE, TIME_OFFSET = 0.999, 0.001


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean and deviation [D] of states and actions, in robot units."""

    state_mean: Tensor
    state_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    @staticmethod
    def of(states: Tensor, actions: Tensor) -> Statistics:
        """From states [n, D] and chunks [n, H, A]."""
        flat = actions.flatten(0, 1)
        return Statistics(states.mean(0), states.std(0), flat.mean(0), flat.std(0))

    def to(self, device: torch.device | str) -> Statistics:
        return Statistics(*(value.to(device) for value in self.tensors()))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.state_mean, self.state_std, self.action_mean, self.action_std

    def state(self, state: Tensor) -> Tensor:
        return (state - self.state_mean) / (self.state_std + EPS)

    def model_actions(self, actions: Tensor) -> Tensor:
        return (actions - self.action_mean) / (self.action_std + EPS)

    def robot_actions(self, chunk: Tensor) -> Tensor:
        return chunk * self.action_std + self.action_mean


def prompts(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Tokens and mask [tasks, L] of every instruction, padded on the right."""
    tokens = [torch.tensor(tokens_of(text)) for text in INSTRUCTIONS]
    padded = torch.stack([functional.pad(row, (0, PROMPT_TOKENS - len(row))) for row in tokens])
    mask = torch.stack([torch.arange(PROMPT_TOKENS) < len(row) for row in tokens])
    return padded.to(device), mask.to(device)


def inputs_of(scene: Scene, frames: Tensor, statistics: Statistics, task: Tensor | None = None) -> PolicyInputs:
    """``frames`` uint8 [B, 2, 3, S, S] of the scene; ``task`` [B] stands for the instruction, the scene's own by default."""
    tokens, mask = prompts(frames.device)
    task = scene.task if task is None else task
    return PolicyInputs(
        images=signed(frames),
        image_mask=torch.ones(frames.shape[:2], dtype=torch.bool, device=frames.device),
        tokens=tokens[task],
        token_mask=mask[task],
        state=statistics.state(state_of(scene)),
    )


def encode(network: Pi0Network, inputs: PolicyInputs) -> PrefixKV:
    """The prefix; ``common.vla.network.encode`` when every camera is there, without its search for those that are not."""
    features = network.embed_images(inputs.images.flatten(0, 1)).unflatten(0, inputs.images.shape[:2])
    return network.add_state(network.prefill(network.embed_prefix(features, inputs)), inputs.state)


@torch.no_grad()
def chunks(network: Pi0Network, inputs: PolicyInputs, noise: Tensor, rule: StepRule | None = None) -> Tensor:
    """Chunks [B, H, A] in model space."""
    return sample(network, encode(network, inputs), noise, rule=rule)


class FlowLoss(nn.Module):
    """Flow matching of pi0 (arXiv 2410.24164): the squared error of the velocity noise - action at a random time.

    ``draws``: times and noises per observation, whose prefix is computed once. A chunk may come with a clean beginning to
    continue (training-time real-time chunking, arXiv 2512.05964); what is given does not count.
    """

    def __init__(self, network: Pi0Network, draws: int) -> None:
        super().__init__()
        self.network, self.draws = network, draws

    def forward(self, inputs: PolicyInputs, actions: Tensor, length: Tensor) -> Tensor:
        """The mean loss of chunks [B, H, A] in model space, of which the first ``length`` [B] actions are given."""
        kv = encode(self.network, inputs)
        keys, values = (t.repeat_interleave(self.draws, dim=1) for t in (kv.keys, kv.values))
        kv = PrefixKV(keys, values, self._spread(kv.mask))
        actions = self._spread(actions)
        rows, horizon, _ = actions.shape
        t = torch.rand(rows, 1, device=actions.device) ** (1 / LATE) * TIME_SCALE + TIME_OFFSET
        given = torch.arange(horizon, device=actions.device) < self._spread(length)[:, None]
        t = torch.where(given, 0.0, t)
        noise = torch.randn_like(actions)
        x = torch.lerp(actions, noise, t[..., None])
        v = self.network.denoise_step(x, t, DensePrefixAttention(kv))
        error = (v - (noise - actions)).square().mean(dim=-1)
        return (error * ~given).sum() / (~given).sum()

    def _spread(self, rows: Tensor) -> Tensor:
        return rows.repeat_interleave(self.draws, dim=0)


def look(scene: Scene, size: int) -> Tensor:
    """The scene's pictures, uint8 [B, 2, 3, S, S], a part at a time: painting needs several times their size."""
    return torch.cat([pictures(scene[n : n + 1024], size) for n in range(0, len(scene), 1024)])


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy is asked: ``left`` [B, n, 3] of the chunk that is executed, in robot units (n may be 0), the ``delay``
    after which the answer arrives, and the noise [B, H, 3] of this request."""

    scene: Scene
    left: Tensor
    delay: int
    noise: Tensor
