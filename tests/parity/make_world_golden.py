"""Makes the golden traces of world models with FastVideo (Apache-2.0): its Matrix-Game 2 and its LingBot-World v2 networks.

Not a test and not run by CI. FastVideo wants another torch than ours, so it is run in an environment of its own::

    python3.11 -m venv /tmp/env-fastvideo
    /tmp/env-fastvideo/bin/pip install --no-deps fastvideo==0.2.1
    /tmp/env-fastvideo/bin/pip install torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 einops scipy safetensors cloudpickle
    /tmp/env-fastvideo/bin/python tests/parity/make_world_golden.py

What it imports and these two networks do not use (torchvision) is left out by an empty module, and its own backend of torch's
attention is chosen, which it does not do on a CPU. LingBot's two attention functions need a GPU and bfloat16; they are
replaced by torch's attention in float32. Everything else is FastVideo's.

Each network is tiny, with weights drawn from a seed under the names of a checkpoint; ``weights.json`` keeps names, shapes and
seed, ``answers.safetensors`` what the network answered: a rollout of five blocks over the end of its window, for each the flow
of a pass over noise, after which a clean pass over another block becomes history. Inputs: ``world_inputs.py``.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from rebuilt import drawn
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from world_inputs import (
    CAMERA_FRAME,
    LINGBOT,
    MATRIX_GAME,
    TIMESTEP,
    World,
    actions,
    block,
    camera_path,
    context,
    picture_actions,
)

GOLDEN = Path(__file__).parent / "golden"
SEED = 11

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", FASTVIDEO_ATTENTION_BACKEND="TORCH_SDPA")


def leave_out(*names: str) -> None:
    for name in names:
        module = MagicMock(name=name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        sys.modules[name] = module


import diffusers  # noqa: E402, F401 - before torchvision is left out: it looks for it
import transformers  # noqa: E402, F401

leave_out("torchvision", "torchvision.utils", "torchvision.transforms", "torchvision.transforms.functional")

from fastvideo.configs.models.dits.lingbotworld2 import (  # noqa: E402
    LingBotWorld2CausalFastArchConfig,
    LingBotWorld2CausalFastVideoConfig,
)
from fastvideo.configs.models.dits.matrixgame2 import (  # noqa: E402
    MatrixGame2WanVideoArchConfig,
    MatrixGame2WanVideoConfig,
)
from fastvideo.distributed.parallel_state import (  # noqa: E402
    init_distributed_environment,
    initialize_model_parallel,
)
from fastvideo.forward_context import set_forward_context  # noqa: E402
from fastvideo.platforms import current_platform  # noqa: E402

type(current_platform).get_attn_backend_cls = classmethod(
    lambda cls, *given, **more: "fastvideo.attention.backends.sdpa.SDPABackend"
)

from fastvideo.models.dits.lingbotworld2 import cam_utils, causal_fast  # noqa: E402
from fastvideo.models.dits.matrixgame2.causal_model import CausalMatrixGame2WanModel  # noqa: E402

STORED = (
    (r"^patch_embedding\.proj\.", "patch_embedding.proj."),
    (r"\.time_embedder\.mlp\.fc_in\.", ".time_embedder.linear_1."),
    (r"\.time_embedder\.mlp\.fc_out\.", ".time_embedder.linear_2."),
    (r"\.time_modulation\.linear\.", ".time_proj."),
    (r"\.image_embedder\.ff\.fc_in\.", ".image_embedder.ff.net.0.proj."),
    (r"\.image_embedder\.ff\.fc_out\.", ".image_embedder.ff.net.2."),
    (r"^(blocks\.\d+)\.to_out\.", r"\1.attn1.to_out.0."),
    (r"^(blocks\.\d+)\.(to_[qkv]|norm_[qk])\.", r"\1.attn1.\2."),
    (r"^(blocks\.\d+)\.attn2\.to_out\.", r"\1.attn2.to_out.0."),
    (r"^(blocks\.\d+)\.ffn\.fc_in\.", r"\1.ffn.net.0.proj."),
    (r"^(blocks\.\d+)\.ffn\.fc_out\.", r"\1.ffn.net.2."),
    (r"^(blocks\.\d+)\.self_attn_residual_norm\.norm\.", r"\1.norm2."),
)
"""FastVideo's own parameter names to those of the checkpoint; ``fill`` proves it with FastVideo's own way back."""


def main() -> None:
    torch.set_num_threads(1)
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
    initialize_model_parallel(tensor_model_parallel_size=1, sequence_model_parallel_size=1)
    with torch.no_grad():
        make("matrix-game", MATRIX_GAME, matrix_game())
        make("lingbot", LINGBOT, lingbot())


def make(name: str, world: World, made: tuple[dict[str, list[int]], dict[str, Tensor]]) -> None:
    shapes, trace = made
    folder = GOLDEN / "worlds" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.json").write_text(json.dumps({"seed": SEED, "shapes": shapes}) + "\n")
    save_file({key: value.contiguous() for key, value in trace.items()}, folder / "answers.safetensors")
    print(name, {key: float(value.std()) for key, value in trace.items()})


def fill(network: torch.nn.Module, stored: tuple[tuple[str, str], ...], back: dict[str, str]) -> dict[str, list[int]]:
    """Draw every parameter under its stored name; ``back`` is FastVideo's table from stored names to its own."""
    found = {}
    for name, parameter in network.named_parameters():
        kept = name
        for pattern, replacement in stored:
            kept = re.sub(pattern, replacement, kept)
        again = next((re.sub(p, r, kept) for p, r in back.items() if re.match(p, kept)), kept)
        assert again == name, (name, kept, again)
        found[kept] = parameter
    generator = torch.Generator().manual_seed(SEED)
    shapes = {kept: list(found[kept].shape) for kept in sorted(found)}
    for kept, shape in shapes.items():
        found[kept].data.copy_(drawn(shape, generator))
    return shapes


def matrix_game() -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    world = MATRIX_GAME
    arch = MatrixGame2WanVideoArchConfig(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=12,
        out_channels=4,
        freq_dim=32,
        ffn_dim=40,
        num_layers=2,
        image_dim=20,
        added_kv_proj_dim=24,
        local_attn_size=world.visible,
        num_frames_per_block=world.frames,
    )
    arch.action_config = arch.action_config | {
        "blocks": [0],
        "heads_num": 2,
        "hidden_size": 8,
        "img_hidden_size": 24,
        "keyboard_hidden_dim": 128,
        "mouse_hidden_dim": 128,
    }
    network = CausalMatrixGame2WanModel(MatrixGame2WanVideoConfig(arch_config=arch), {}).eval()
    shapes = fill(network, STORED, network.param_names_mapping)
    rows, columns = world.grid
    tokens = rows * columns // 4

    def cache(places: int, length: int, heads: int, size: int) -> dict[str, Any]:
        return {
            "k": torch.zeros(places, length, heads, size),
            "v": torch.zeros(places, length, heads, size),
            "global_end_index": torch.tensor([0]),
            "local_end_index": torch.tensor([0]),
        }

    layers = range(arch.num_layers)
    caches: dict[str, Any] = {
        "kv_cache": [cache(1, world.visible * tokens, 2, 12) for _ in layers],
        "kv_cache_mouse": [cache(tokens, world.visible, 2, 64) for _ in layers],
        "kv_cache_keyboard": [cache(1, world.visible, 2, 64) for _ in layers],
        "crossattn_cache": [{"is_init": False} for _ in layers],
    }
    looked, pressed = picture_actions(actions(world))
    trace = {}
    for number in range(world.blocks):
        start = number * world.frames
        pictures = 1 + 4 * (start + world.frames - 1)
        for what, t in (("noise", TIMESTEP), ("clean", 0.0)):
            latents, _ = block(world, number, what)
            with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=None):
                flow = network(
                    latents.transpose(0, 1)[None],
                    None,
                    torch.full((1, world.frames), t),
                    encoder_hidden_states_image=[context(world)[None]],
                    mouse_cond=looked[None, :pictures],
                    keyboard_cond=pressed[None, :pictures],
                    current_start=start * tokens,
                    start_frame=start,
                    num_frame_per_block=world.frames,
                    **caches,
                )
            trace |= {f"{number}": flow[0].transpose(0, 1).float()} if what == "noise" else {}
    return shapes, trace


def lingbot() -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    world = LINGBOT

    def attention(q: Tensor, k: Tensor, v: Tensor, k_lens: Tensor | None = None) -> Tensor:
        parts = [part.transpose(1, 2) for part in (q, k, v)]
        return functional.scaled_dot_product_attention(*parts).transpose(1, 2)

    causal_fast.attention = causal_fast.flash_attention = attention
    arch = LingBotWorld2CausalFastArchConfig(
        text_len=world.context_tokens,
        in_dim=12,
        dim=24,
        ffn_dim=40,
        freq_dim=32,
        text_dim=20,
        out_dim=4,
        num_heads=2,
        num_layers=2,
        local_attn_size=world.visible,
        sink_size=world.sink,
        chunk_size=world.frames,
    )
    config = LingBotWorld2CausalFastVideoConfig(arch_config=arch)
    network = causal_fast.LingBotWorld2CausalFastTransformer3DModel(config, {}).eval()
    shapes = fill(network, (), {})
    rows, columns = world.grid
    tokens = rows * columns // 4
    length = world.visible * tokens
    caches = [
        {
            "k": torch.zeros(1, length, 2, 12),
            "v": torch.zeros(1, length, 2, 12),
            "global_end_index": torch.tensor([0]),
            "local_end_index": torch.tensor([0]),
        }
        for _ in range(arch.num_layers)
    ]
    crossed = [
        {
            "k": torch.zeros(1, world.context_tokens, 2, 12),
            "v": torch.zeros(1, world.context_tokens, 2, 12),
            "is_init": torch.tensor([0]),
        }
        for _ in range(arch.num_layers)
    ]
    camera = camera_channels(world)
    trace = {"camera": camera[0].transpose(0, 1)[CAMERA_FRAME, ::8]}
    for number in range(world.blocks):
        start = number * world.frames
        chunk = camera[:, :, start : start + world.frames]
        for what, t in (("noise", TIMESTEP), ("clean", 0.0)):
            latents, condition = block(world, number, what)
            flow = network(
                x=[latents.transpose(0, 1)],
                t=torch.tensor([t]),
                context=[context(world)],
                seq_len=world.frames * tokens,
                y=[condition.transpose(0, 1)],
                dit_cond_dict={"c2ws_plucker_emb": (chunk,)},
                kv_cache=caches,
                crossattn_cache=crossed,
                current_start=start * tokens,
                frame_seqlen=tokens,
            )[0]
            trace |= {f"{number}": flow.transpose(0, 1).float()} if what == "noise" else {}
    return shapes, trace


def camera_channels(world: World) -> Tensor:
    """[1, 384, frames, h, w] of :func:`camera_path`: its first pose is the anchor, its longest step LingBot's unit."""
    poses, intrinsics = camera_path(world)
    moved = cam_utils.compute_relative_poses(torch.from_numpy(poses), framewise=True)[1:].float()
    rows, columns = world.grid
    rays = cam_utils.get_plucker_embeddings(moved, torch.tensor(intrinsics)[None].float(), 8 * rows, 8 * columns)
    folded = rays.view(-1, rows, 8, columns, 8, 6).permute(0, 1, 3, 5, 2, 4).reshape(-1, rows, columns, 384)
    return folded.permute(3, 0, 1, 2)[None].contiguous()


if __name__ == "__main__":
    main()
