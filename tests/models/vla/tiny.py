"""Tiny networks with random weights, and observations for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from realtime_omni.models.common.vla.decoder import DecoderConfig
from realtime_omni.models.common.vla.network import PolicyInputs
from realtime_omni.models.common.vla.siglip import VisionConfig
from realtime_omni.models.pi0.network import Pi0Config, Pi0Network
from realtime_omni.models.smolvla.network import SmolVLAConfig, SmolVLANetwork

VISION = VisionConfig(image_size=32, patch=8, width=16, layers=2, heads=2, mlp_width=24)
LANGUAGE = DecoderConfig(width=32, layers=3, mlp_width=48, heads=4, kv_heads=1, head_dim=8)
EXPERT = DecoderConfig(width=16, layers=3, mlp_width=32, heads=4, kv_heads=1, head_dim=8)
LLAMA = DecoderConfig(32, 3, 48, 4, 2, 8, family="llama", eps=1e-5)
HORIZON, STATE, ACTION, STEPS, CAMERAS, WORDS = 6, 5, 4, 3, 3, 50
FAMILIES = ("pi0", "pi05", "smolvla")


def network(family: str) -> Pi0Network | SmolVLANetwork:
    torch.set_num_threads(1)
    sizes = {"vision": VISION, "vocabulary": WORDS, "horizon": HORIZON, "state_dim": STATE, "action_dim": ACTION}
    made: Pi0Network | SmolVLANetwork
    if family == "smolvla":
        made = SmolVLANetwork(SmolVLAConfig(language=LLAMA, expert_width=24, shuffle=2, steps=STEPS, **sizes))
    else:
        made = Pi0Network(Pi0Config(family == "pi05", language=LANGUAGE, expert=EXPERT, steps=STEPS, **sizes))
    randomise(made)
    return made.eval().requires_grad_(False)


def randomise(module: nn.Module) -> None:
    """Logits of order one, no zero gate, no unit norm."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 25
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)


def row(seed: int, cameras: Sequence[bool] = (True, True, True), words: int = 7) -> PolicyInputs:
    """One observation; masked cameras are black, as ``Processing`` makes them."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([list(cameras)])
    images = torch.rand(1, CAMERAS, 3, 32, 32, generator=generator) * 2 - 1
    images[~mask] = -1.0
    return PolicyInputs(
        images,
        mask,
        torch.randint(1, WORDS, (1, words), generator=generator),
        torch.ones(1, words, dtype=torch.bool),
        torch.randn(1, STATE, generator=generator),
    )


def noise(rows: int = 1, seed: int = 9) -> torch.Tensor:
    return torch.randn(rows, HORIZON, ACTION, generator=torch.Generator().manual_seed(seed))
