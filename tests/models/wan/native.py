"""Our network under the names and shapes of Wan's and LingBot's own repositories, written out by hand."""

from __future__ import annotations

import torch

BACK = {
    "patches": "patch_embedding",
    "camera_patches": "patch_embedding_wancamctrl",
    "camera_first": "c2ws_hidden_states_layer1",
    "camera_second": "c2ws_hidden_states_layer2",
    "text_in": "text_embedding.0",
    "text_out": "text_embedding.2",
    "time_in": "time_embedding.0",
    "time_out": "time_embedding.2",
    "time_projection": "time_projection.1",
    "head": "head.head",
}
BLOCK = {
    "attention.q_norm": "self_attn.norm_q",
    "attention.k_norm": "self_attn.norm_k",
    "attention.out": "self_attn.o",
    "camera.first": "cam_injector_layer1",
    "camera.second": "cam_injector_layer2",
    "camera.scale": "cam_scale_layer",
    "camera.shift": "cam_shift_layer",
    "cross.q": "cross_attn.q",
    "cross.q_norm": "cross_attn.norm_q",
    "cross.k_norm": "cross_attn.norm_k",
    "cross.out": "cross_attn.o",
    "cross_norm": "norm3",
    "up": "ffn.0",
    "down": "ffn.2",
}


def native(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The names and shapes of the model's own repository."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in network.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if name == "head_modulation":
            out["head.modulation"] = tensor[None]
        elif name == "patches.weight":
            out["patch_embedding.weight"] = tensor.view(len(tensor), -1, 1, 2, 2)
        elif not name.startswith("layers."):
            out[f"{BACK[stem]}.{kind}"] = tensor
        else:
            _, number, rest = name.split(".", 2)
            inner = rest.rpartition(".")[0]
            if rest == "modulation":
                out[f"blocks.{number}.modulation"] = tensor[None]
            elif inner in ("attention.qkv", "cross.kv"):
                part, letters = ("self_attn", "qkv") if inner == "attention.qkv" else ("cross_attn", "kv")
                for letter, piece in zip(letters, tensor.chunk(len(letters)), strict=True):
                    out[f"blocks.{number}.{part}.{letter}.{kind}"] = piece
            else:
                out[f"blocks.{number}.{BLOCK[inner]}.{kind}"] = tensor
    return {name: tensor.contiguous().clone() for name, tensor in out.items()}
