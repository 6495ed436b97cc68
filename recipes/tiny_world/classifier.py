"""Which place a picture shows: a small network trained on simulator frames, for the evaluation only.

    python -m recipes.tiny_world.classifier     # trains on the CPU in about three minutes

Owns: the network, its training and its weights beside this file.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.tiny_world.places import PLACES
from recipes.tiny_world.data import to_signed
from recipes.tiny_world.simulator import Player, Simulator, random_maps

WEIGHTS = Path(__file__).with_name("classifier.safetensors")
SIZE = 32


class PlaceClassifier(nn.Module):
    """Pictures [B, 3, H, W] in -1..1 of any side that is a multiple of 32, to logits [B, places]."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 24, 48, 64)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(channels))
        self.out = nn.Linear(channels[-1], len(PLACES))

    def forward(self, pictures: Tensor) -> Tensor:
        h = functional.avg_pool2d(pictures, pictures.shape[-1] // SIZE)
        for layer in self.layers:
            h = functional.relu(layer(h))
        return self.out(h.mean((2, 3)))


def load_classifier(device: torch.device | str) -> PlaceClassifier:
    classifier = PlaceClassifier()
    classifier.load_state_dict({name: value.float() for name, value in load_file(str(WEIGHTS)).items()})
    return classifier.to(device).eval()


def train(seed: int = 7, clips: int = 1500, steps: int = 1800) -> float:
    """Train, save, and return the share of held-out frames that it names right."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    simulator = Simulator(64, "cpu", supersample=1)
    maps = random_maps(clips, generator, "cpu")
    _, place, pose = simulator.drive(maps, 12, Player(switch=0.0), generator)
    place, pose = place[:, 3::4], pose[:, 3::4]
    frames = to_signed(simulator.draw(maps, place, pose, chunk=48)).flatten(0, 1)
    place = place.flatten()
    held = len(frames) // 8
    classifier = PlaceClassifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        pick = torch.randint(held, len(frames), (64,), generator=generator)
        x = frames[pick]
        tint = 0.04 * torch.randn(64, 3, 1, 1, generator=generator)
        x = x * (0.9 + 0.2 * torch.rand(64, 1, 1, 1, generator=generator)) + tint
        x = x + 0.06 * torch.randn(x.shape, generator=generator)
        loss = functional.cross_entropy(classifier(x), place[pick])
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.inference_mode():
        right = (classifier(frames[:held]).argmax(-1) == place[:held]).float().mean().item()
    save_file({name: value.half().contiguous() for name, value in classifier.state_dict().items()}, str(WEIGHTS))
    return right


if __name__ == "__main__":
    print(f"held-out accuracy {train():.4f}")
