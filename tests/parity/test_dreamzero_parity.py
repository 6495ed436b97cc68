"""DreamZero's network against its own code, traced by ``make_dreamzero_golden.py``: three ticks of one window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from parity import dreamzero_inputs as given
from parity.rebuilt import KEPT, drawn
from realtime_omni.models.common.wan.weights import load_transformer
from realtime_omni.models.dreamzero.loader import NAMES, dimensions
from realtime_omni.models.dreamzero.network import DreamZeroTransformer, Registers

TOLERANCE = 1e-5
"""Of flows whose standard deviations are 1 and 0.2, in float32."""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> DreamZeroTransformer:
    """Through the loader, under the names of the checkpoint."""
    kept = json.loads((KEPT / "dreamzero" / "weights.json").read_text())
    generator = torch.Generator().manual_seed(kept["seed"])
    root: Path = tmp_path_factory.mktemp("dreamzero")
    save_file({name: drawn(shape, generator) for name, shape in kept["shapes"].items()}, root / "model.safetensors")
    with torch.device("meta"):
        made = DreamZeroTransformer(dimensions(root, given.HEAD_DIM))
    load_transformer(made, root, dtype=torch.float32, device="cpu", names=NAMES)
    return made.eval()


class History:
    """Keys and values of the clean passes, layer by layer."""

    def __init__(self) -> None:
        self.past: dict[int, tuple[Tensor, Tensor]] = {}
        self.keeps = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.past:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.past[layer], (k, v), strict=True))
        if self.keeps:
            self.past[layer] = (k, v)
        return functional.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v))).transpose(1, 2)


@torch.no_grad()
def test_every_flow_of_a_window_is_that_of_dreamzeros_own_code(network: DreamZeroTransformer) -> None:
    want = load_file(KEPT / "dreamzero" / "answers.safetensors")
    text, image = network.text_cache(given.text()), network.image_cache(given.features())
    history, start = History(), 0

    def latents(block: Tensor, at: int) -> tuple[Tensor, Tensor]:
        return torch.cat((block, given.condition()[at : at + len(block)]), dim=1)[None], at + torch.arange(len(block))[
            None
        ]

    for tick in range(given.TICKS):
        block = given.seen(tick)
        history.keeps = True
        clean, frames = latents(block, start)
        network.joint(clean, torch.zeros(1), frames, text, image, history.attend)
        history.keeps = False
        start += len(block)
        noisy, frames = latents(given.noisy(tick), start)
        index = torch.tensor([(start - 1) // given.FRAMES])
        registers = Registers(given.actions(tick), given.state(tick), torch.tensor([given.ACTION_T]), index)
        t = torch.tensor([given.VIDEO_T])
        flow, acted = network.joint(noisy, t, frames, text, image, history.attend, registers)
        assert acted is not None
        assert (flow[0] - want[f"flow{tick}"]).abs().max() <= TOLERANCE, f"pictures of tick {tick}"
        assert (acted[0] - want[f"actions{tick}"]).abs().max() <= TOLERANCE, f"actions of tick {tick}"
