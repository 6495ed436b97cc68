"""Makes the golden files of tests/parity/test_moshi_parity.py with kyutai's moshi 0.2.13; run once, by hand, never in CI.

    python3 -m venv /some/where
    /some/where/bin/pip install --no-deps moshi==0.2.13 einops sphn sentencepiece aiohttp
    /some/where/bin/pip install torch safetensors huggingface-hub numpy
    OMP_NUM_THREADS=1 NO_TORCH_COMPILE=1 /some/where/bin/python tests/parity/make_moshi_golden.py [lm] [mimi]

``lm-8`` and ``lm-16``: config.json of a tiny checkpoint, its random weights' names and shapes in the order in which they were
drawn (``rebuilt.py`` draws them again) and ``trace.safetensors``: what
three calls with execution masks of chance heard and what greedy steps made of it, well past the window. In ``lm-16`` the depth
transformer writes both speakers' streams. ``mimi``: the same for the codec: codes of two calls' frames, and the sound that
other codes decode to, every seventh sample of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["NO_TORCH_COMPILE"] = "1"

import numpy as np
import torch
from moshi.models.compression import MimiModel
from moshi.models.lm import LMGen, LMModel
from moshi.modules import SEANetDecoder, SEANetEncoder, transformer
from moshi.quantization import SplitResidualVectorQuantizer
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent / "golden" / "moshi"
FIXED = {
    "causal": True,
    "layer_scale": None,
    "max_period": 10000,
    "gating": "silu",
    "norm": "rms_norm_f32",
    "positional_embedding": "rope",
    "depformer_layer_scale": None,
    "depformer_multi_linear": True,
    "depformer_max_period": 10000,
    "depformer_gating": "silu",
    "depformer_pos_emb": "none",
    "depformer_weights_per_step": True,
    "existing_text_padding_id": 3,
    "hidden_scale": 4.125,
}
LM = {
    "lm-8": {
        "dim": 32,
        "num_heads": 4,
        "num_layers": 2,
        "context": 16,
        "n_q": 8,
        "dep_q": 4,
        "card": 32,
        "text_card": 48,
        "delays": [0, 0, 1, 1, 1, 0, 1, 1, 1],
        "depformer_dim": 16,
        "depformer_num_heads": 2,
        "depformer_num_layers": 2,
        "depformer_dim_feedforward": 66,
        "depformer_context": 4,
    },
    "lm-16": {
        "dim": 32,
        "num_heads": 2,
        "num_layers": 1,
        "context": 8,
        "n_q": 16,
        "dep_q": 16,
        "card": 24,
        "text_card": 32,
        "delays": [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1],
        "depformer_dim": 16,
        "depformer_num_heads": 2,
        "depformer_num_layers": 1,
        "depformer_dim_feedforward": 66,
        "depformer_context": 16,
    },
}
FRAMES, CALLS = 56, 3
MIMI = {
    "sample_rate": 24000,
    "channels": 1,
    "frame_rate": 12.5,
    "seanet": {
        "channels": 1,
        "dimension": 16,
        "causal": True,
        "n_filters": 2,
        "n_residual_layers": 1,
        "activation": "ELU",
        "compress": 2,
        "dilation_base": 2,
        "disable_norm_outer_blocks": 0,
        "kernel_size": 7,
        "residual_kernel_size": 3,
        "last_kernel_size": 3,
        "norm": "none",
        "pad_mode": "constant",
        "ratios": [8, 6, 5, 4],
        "true_skip": True,
    },
    "quantizer": {"dimension": 8, "n_q": 6, "bins": 32, "input_dimension": 16, "output_dimension": 16},
    "transformer": {
        "d_model": 16,
        "num_heads": 2,
        "num_layers": 2,
        "causal": True,
        "layer_scale": 0.01,
        "context": 10,
        "conv_layout": True,
        "max_period": 10000,
        "gating": "none",
        "norm": "layer_norm",
        "positional_embedding": "rope",
        "dim_feedforward": 32,
        "input_dimension": 16,
        "output_dimensions": [16],
    },
}
CODEBOOKS, SOUND_FRAMES, CLIPS = 4, 16, 2


def shake(module: torch.nn.Module, seed: int) -> None:
    """Random numbers in every parameter: fresh ones are too alike for a token to depend on them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("alpha") or "norm" in name or "scale" in name:
                parameter.copy_(1 + 0.2 * noise if parameter.dim() != 1 or "weight" in name else 0.2 * noise)
                if "layer_scale" in name:
                    parameter.copy_(0.5 + 0.1 * noise)
            elif parameter.dim() >= 2:
                parameter.copy_(noise / parameter[0].numel() ** 0.5 * 1.3)
            else:
                parameter.copy_(0.1 * noise)


def keep_shapes(model: torch.nn.Module, seed: int, folder: Path) -> None:
    """``weights.json``: parameters and buffers in the order in which they were drawn."""
    parts = [f'"seed": {seed}']
    parameters = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    buffers = {name: list(buffer.shape) for name, buffer in model.state_dict().items() if name not in parameters}
    for title, shapes in (("shapes", parameters), ("buffers", buffers)):
        lines = ",\n".join(f"  {json.dumps(name)}: {shape}" for name, shape in shapes.items())
        parts.append(f'"{title}": {{\n{lines}\n}}')
    (folder / "weights.json").write_text("{" + ", ".join(parts) + "}\n")


def make_lm(name: str) -> None:
    config = {**FIXED, **LM[name]}
    model = LMModel(**config, device="cpu", dtype=torch.float32).eval()
    shake(model, 1)
    heard = config["n_q"] - config["dep_q"]
    generator = torch.Generator().manual_seed(7)
    user = torch.randint(0, config["card"], (FRAMES, CALLS, heard), generator=generator)
    running = torch.rand(FRAMES, CALLS, generator=generator) < 0.75
    running[:, 0] = True

    def run(batch: int, rows: list[int], mask: torch.Tensor) -> torch.Tensor:
        gen = LMGen(model, use_sampling=False, support_out_of_sync=True)
        out = []
        with torch.no_grad(), gen.streaming(batch):
            for frame in range(FRAMES):
                gen.set_exec_mask(mask[frame])
                out.append(gen.step(user[frame, rows][..., None])[..., 0].clone())
        return torch.stack(out)

    together = run(CALLS, list(range(CALLS)), running)
    for call in range(CALLS):  # what one call says does not depend on the others: in the reference, either
        alone = run(1, [call], running[:, call : call + 1])
        assert torch.equal(alone[running[:, call]][:, 0], together[running[:, call], call])
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    keep_shapes(model, 1, folder)
    trace = {"user": user.to(torch.int32), "running": running, "frames": together.to(torch.int32)}
    save_file({k: v.contiguous() for k, v in trace.items()}, folder / "trace.safetensors")
    spread = [len(set(together[4:, :, k].flatten().tolist())) for k in range(together.shape[2])]
    print(name, "distinct tokens by stream:", spread)


def make_mimi() -> None:
    hop = MIMI["sample_rate"] / np.prod(MIMI["seanet"]["ratios"])
    model = MimiModel(
        SEANetEncoder(**MIMI["seanet"]),
        SEANetDecoder(**MIMI["seanet"]),
        SplitResidualVectorQuantizer(**MIMI["quantizer"]),
        channels=1,
        sample_rate=MIMI["sample_rate"],
        frame_rate=MIMI["frame_rate"],
        encoder_frame_rate=hop,
        causal=True,
        resample_method="conv",
        encoder_transformer=transformer.ProjectedTransformer(device="cpu", **MIMI["transformer"]),
        decoder_transformer=transformer.ProjectedTransformer(device="cpu", **MIMI["transformer"]),
    ).eval()
    shake(model, 2)
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():  # the codebooks; left as they are every code would be 0
        if name.endswith("embedding_sum"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
        elif name.endswith("cluster_usage"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    model.set_num_codebooks(CODEBOOKS)
    size = 1920
    sound = np.random.default_rng(5).normal(0, 0.3, (CLIPS, SOUND_FRAMES * size)).astype(np.float32)
    heard = torch.from_numpy(sound)[:, None]
    said = torch.randint(0, MIMI["quantizer"]["bins"], (CLIPS, CODEBOOKS, SOUND_FRAMES), generator=generator)
    codes, spoken = [], []
    with torch.no_grad(), model.streaming(CLIPS):
        for at in range(SOUND_FRAMES):
            codes.append(model.encode(heard[..., at * size : (at + 1) * size]))
            spoken.append(model.decode(said[..., at : at + 1]))
    with (
        torch.no_grad()
    ):  # a stream sees one position less than a whole clip does: its ring has the newest two in it already
        print("codes unlike those of whole clips:", int((model.encode(heard) != torch.cat(codes, -1)).sum()))
        print("sound unlike:", float((model.decode(said) - torch.cat(spoken, -1)).abs().max()))
    folder = GOLDEN / "mimi"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mimi_config.json").write_text(json.dumps(MIMI, indent=1) + "\n")
    keep_shapes(model, 2, folder)
    trace = {
        "codes": torch.cat(codes, -1).to(torch.int32),
        "said": said.to(torch.int32),
        "sound": torch.cat(spoken, -1)[:, 0, ::7],
    }
    save_file({k: v.contiguous() for k, v in trace.items()}, folder / "trace.safetensors")
    used = [len(set(trace["codes"][:, k].flatten().tolist())) for k in range(CODEBOOKS)]
    print("mimi distinct codes:", used, "loudest", float(trace["sound"].abs().max()), "of", trace["sound"].std())


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["lm", "mimi"]
    torch.set_num_threads(1)
    if "lm" in wanted:
        for each in LM:
            make_lm(each)
    if "mimi" in wanted:
        make_mimi()
