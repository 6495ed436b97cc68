"""Makes the golden trace of DreamZero's network with its own code (github.com/dreamzero0/dreamzero, Apache-2.0).

Not a test and not run by CI. It needs a checkout of that repository and no installation of it::

    git clone https://github.com/dreamzero0/dreamzero /tmp/dreamzero && git -C /tmp/dreamzero checkout ab790c1
    python tests/parity/make_dreamzero_golden.py /tmp/dreamzero

Its attention functions need a GPU and bfloat16; they are replaced by torch's attention in float32. Everything else is theirs:
the inference path, with its cache of keys and values, over three ticks of one window.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import dreamzero_inputs as given
import torch
from rebuilt import drawn
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

GOLDEN = Path(__file__).parent / "golden" / "dreamzero"
SEED = 13
MODULES = "groot.vla.model.dreamzero.modules"


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    heads_first = [part.transpose(1, 2) for part in (q, k, v)]
    return functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)


class Attention(torch.nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v)


def network(checkout: str) -> Any:
    sys.path.insert(0, checkout)
    dit = importlib.import_module(f"{MODULES}.wan_video_dit_action_casual_chunk")
    importlib.import_module(f"{MODULES}.wan2_1_submodule").flash_attention = attention
    dit.AttentionModule = Attention
    made = dit.CausalWanModel(
        model_type="i2v",
        frame_seqlen=given.GRID[0] * given.GRID[1] // 4,
        text_len=given.TEXT_TOKENS,
        in_dim=given.CHANNELS + given.CONDITION,
        dim=given.HEADS * given.HEAD_DIM,
        ffn_dim=given.MLP,
        freq_dim=given.FREQUENCIES,
        text_dim=given.TEXT,
        out_dim=given.CHANNELS,
        num_heads=given.HEADS,
        num_layers=given.LAYERS,
        max_chunk_size=given.BLOCKS,
        num_frame_per_block=given.FRAMES,
        action_dim=given.ACTION_WIDTH,
        max_state_dim=given.STATE_WIDTH,
        hidden_size=given.HIDDEN,
        num_action_per_block=given.ACTIONS,
    )
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for _, parameter in sorted(made.named_parameters()):
            parameter.copy_(drawn(list(parameter.shape), generator))
    return made.eval()


@torch.no_grad()
def main(checkout: str) -> None:
    model = network(checkout)
    tokens = given.GRID[0] * given.GRID[1] // 4
    cache = [torch.zeros(2, 1, 0, given.HEADS, given.HEAD_DIM) for _ in range(given.LAYERS)]
    answers: dict[str, Tensor] = {}

    def run(latents: Tensor, start: int, **more: Any) -> Any:
        count = len(latents)
        return model._forward_inference(
            x=latents.transpose(0, 1)[None],
            context=given.text(),
            seq_len=count * tokens,
            kv_cache=cache,
            crossattn_cache=[],
            current_start_frame=start,
            y=given.condition()[start : start + count].transpose(0, 1)[None],
            clip_feature=given.features(),
            **more,
        )

    start = 0
    for tick in range(given.TICKS):
        block = given.seen(tick)
        _, _, cache = run(block, start, timestep=torch.zeros(1, len(block)))
        start += len(block)
        flow, acted, _ = run(
            given.noisy(tick),
            start,
            timestep=torch.full((1, given.FRAMES), given.VIDEO_T),
            action=given.actions(tick),
            timestep_action=torch.full((1, given.ACTIONS), given.ACTION_T),
            state=given.state(tick),
        )
        answers[f"flow{tick}"], answers[f"actions{tick}"] = flow[0].transpose(0, 1).contiguous(), acted[0].contiguous()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    shapes = {f"action_head.model.{name}": list(p.shape) for name, p in sorted(model.named_parameters())}
    (GOLDEN / "weights.json").write_text(json.dumps({"seed": SEED, "shapes": shapes}))
    save_file(answers, GOLDEN / "answers.safetensors")
    print({name: float(tensor.std()) for name, tensor in answers.items()})


if __name__ == "__main__":
    main(sys.argv[1])
