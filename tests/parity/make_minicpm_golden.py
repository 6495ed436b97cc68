"""Makes the golden files of tests/parity/test_minicpm_parity.py with transformers 5.24; run once, by hand, never in CI.

    python3 -m venv /some/where
    /some/where/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors tokenizers
    OMP_NUM_THREADS=1 /some/where/bin/python tests/parity/make_minicpm_golden.py /path/to/processing_minicpmo.py

The argument is the processor of OpenBMB/MiniCPM-o-Demo (``MiniCPMO45``, Apache-2.0), of which the streaming spectrogram is run.
``minicpm``: config.json and tokenizer.json of a tiny checkpoint, its random weights' names and shapes in the order in
which they were drawn (``rebuilt.py`` draws them again) and ``trace.safetensors``: the networks' own numbers, by
transformers' ``WhisperEncoder``, ``Qwen3ForCausalLM`` and ``LlamaModel`` under the rules of MiniCPM-o's duplex runtime,
written down once more here.
"""

from __future__ import annotations

import ast
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder

GOLDEN = Path(__file__).parent / "golden" / "minicpm"
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<unit>", "</unit>", "<|listen|>", "<|speak|>", "<|tts_bos|>", "<|tts_eos|>"),
    *("<|tts_pad|>", "<|chunk_eos|>", "<|chunk_tts_eos|>", "<|turn_eos|>", "<|audio_start|>", "<|audio_end|>"),
)
VOCAB = 288
CONFIG: dict[str, Any] = {
    "model_type": "minicpmo",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "audio_pool_step": 5,
    "audio_chunk_length": 1.0,
    "audio_config": {
        "d_model": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 80,
        "max_source_positions": 250,
        "activation_function": "gelu",
    },
    "tts_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "num_text_tokens": VOCAB,
        "num_audio_tokens": 40,
        "audio_bos_token_id": 280,
        "num_vq": 1,
        "projector_type": "mlp",
        "condition_type": "hidden_text_merge",
        "backbone_model": "llama",
        "normalize_projected_hidden": True,
        "hidden_act": "silu",
    },
}
WINDOW_S = 4
"""Seconds before the tiny encoder's table of 250 positions is full: 4 * 50 + 52 > 250."""
PROMPT, UNITS, SEEN = 20, 10, 4
"""Tokens of a prompt, units after it, and units that are seen, the present one included."""


class Projector(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(inner, outer), nn.Linear(outer, outer)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(torch.relu(self.linear1(x)))


class Talker(nn.Module):
    def __init__(self, raw: dict[str, Any], llm: int) -> None:
        super().__init__()
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        width = raw["hidden_size"]
        self.emb_text = nn.Embedding(raw["num_text_tokens"], width)
        self.model = LlamaModel(LlamaConfig(vocab_size=64, **{n: raw[n] for n in names}))
        self.projector_spk, self.projector_semantic = Projector(llm, width), Projector(llm, width)
        self.emb_code = nn.ModuleList([nn.Embedding(raw["num_audio_tokens"], width)])
        self.head_code = nn.ModuleList([weight_norm(nn.Linear(width, raw["num_audio_tokens"], bias=False))])


class Model(nn.Module):
    """The published model's modules under its names, without sight."""

    def __init__(self) -> None:
        super().__init__()
        flat = {k: v for k, v in CONFIG.items() if not isinstance(v, dict) and k not in ("model_type", "rope_theta")}
        qwen = Qwen3Config(**flat, rope_parameters={"rope_type": "default", "rope_theta": CONFIG["rope_theta"]})
        self.llm = Qwen3ForCausalLM(qwen)
        ears = WhisperConfig(**CONFIG["audio_config"])
        ears._attn_implementation = "sdpa"
        self.apm = WhisperEncoder(ears)
        self.audio_projection_layer = Projector(ears.d_model, CONFIG["hidden_size"])
        self.tts = Talker(CONFIG["tts_config"], CONFIG["hidden_size"])


def shake(module: nn.Module, seed: int) -> None:
    """As ``rebuilt.shaken``."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(0.2 * noise if name.endswith("bias") else 1 + 0.2 * noise)
            elif parameter.dim() >= 2:
                parameter.copy_(noise / parameter[0].numel() ** 0.5 * 1.3)
            else:
                parameter.copy_(0.1 * noise)


def make_tokenizer(file: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL])
    tokenizer.save(str(file))


def processors(path: Path) -> dict[str, Any]:
    """Two classes of OpenBMB's file, without the rest of what it imports."""
    import copy
    from typing import Optional

    tree = ast.parse(path.read_text())
    wanted = ("MiniCPMAAudioProcessor", "StreamingMelProcessorExact")
    body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
    names: dict[str, Any] = {
        "np": np,
        "torch": torch,
        "copy": copy,
        "logger": logging.getLogger("golden"),
        "Dict": dict,
        "List": list,
        "Optional": Optional,
        "Tuple": tuple,
        "WhisperFeatureExtractor": WhisperFeatureExtractor,
    }
    exec(compile(ast.Module(body, []), str(path), "exec"), names)
    return names


def sound(seconds: int) -> np.ndarray:
    """Noise that is loud and soft by turns, float32 [seconds * 16000]; the test draws it again."""
    random = np.random.default_rng(11)
    loudness = 10 ** random.uniform(-3, -0.5, seconds)
    noise = random.normal(0, 1, (seconds, 16_000)) * loudness[:, None]
    return np.clip(noise, -1, 1).astype(np.float32).reshape(-1)


def mel_units(path: Path, seconds: int) -> list[Tensor]:
    names = processors(path)
    extractor = names["MiniCPMAAudioProcessor"](feature_size=80)
    stream = names["StreamingMelProcessorExact"](
        extractor, 1000, 1035, cnn_redundancy_ms=20, enable_sliding_window=True
    )
    buffer, out = np.concatenate((np.zeros(560, np.float32), sound(seconds))), []
    for _ in range(seconds):
        size = stream.get_chunk_size()
        frames, _ = stream.process(buffer[:size])
        buffer = buffer[size:]
        out.append(torch.as_tensor(np.asarray(frames))[0].float())
    return out


def encode(model: Model, units: list[Tensor]) -> Tensor:
    """All units' tokens: convolutions over the whole clip, layers over ``WINDOW_S`` seconds at a time, block-causal."""
    apm = model.apm
    whole = torch.cat([units[0][:, :100], *(u[:, 2:102] for u in units[1:]), units[-1][:, 102:]], dim=1)
    x = nn.functional.gelu(apm.conv1(whole[None]))
    x = nn.functional.gelu(apm.conv2(x)).transpose(1, 2)[:, : 50 * len(units)]
    out = []
    for first in range(0, len(units), WINDOW_S):
        part = x[:, 50 * first : 50 * (first + WINDOW_S)]
        second = torch.arange(part.shape[1]) // 50
        mask = torch.zeros(part.shape[1], part.shape[1]).masked_fill(second[None] > second[:, None], float("-inf"))
        hidden = part + apm.embed_positions.weight[: part.shape[1]]
        for layer in apm.layers:
            made = layer(hidden, mask[None, None])
            hidden = made[0] if isinstance(made, tuple) else made
        projected = model.audio_projection_layer(apm.layer_norm(hidden))
        out.append(nn.functional.avg_pool1d(projected.transpose(1, 2), 5).transpose(1, 2)[0])
    return torch.cat(out).view(len(units), 10, -1)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def drop(cache: DynamicCache, start: int, count: int, theta: float) -> None:
    """``count`` tokens from ``start`` on leave the cache; the keys behind them are turned back to where they stand now."""
    for layer in cache.layers:
        keys, values = layer.keys, layer.values
        d = keys.shape[-1]
        angle = torch.tensor(-float(count)) * theta ** (-torch.arange(0, d, 2).float() / d)
        angle = torch.cat((angle, angle))
        suffix = keys[:, :, start + count :]
        turned = suffix * angle.cos() + rotate_half(suffix) * angle.sin()
        layer.keys = torch.cat((keys[:, :, :start], turned), dim=2)
        layer.values = torch.cat((values[:, :, :start], values[:, :, start + count :]), dim=2)


def think(model: Model) -> dict[str, Tensor]:
    """A prompt and units of several lengths, of which the oldest leave: the last hidden state of each, and its best words."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(13, 33, (UNITS,), generator=generator)
    total = PROMPT + int(lengths.sum())
    tokens = torch.randint(0, VOCAB, (total,), generator=generator)
    table, cache = model.llm.model.embed_tokens.weight, DynamicCache()
    hidden, held, at = [], [], 0
    for count in (PROMPT, *lengths.tolist()):
        if len(held) > SEEN - 1:
            drop(cache, PROMPT, held.pop(0), CONFIG["rope_theta"])
        before = cache.get_seq_length()
        x = table[tokens[at : at + count]][None]
        positions = torch.arange(before, before + count)[None]
        made = model.llm.model(inputs_embeds=x, position_ids=positions, past_key_values=cache, use_cache=True)
        hidden.append(made.last_hidden_state[0, -1])
        if at:
            held.append(count)
        at += count
    stacked = torch.stack(hidden)
    best = model.llm.lm_head(stacked).topk(5).indices
    return {"tokens": tokens.int(), "lengths": lengths.int(), "hidden": stacked, "words": best.int()}


def talk(model: Model) -> dict[str, Tensor]:
    """Three units of one turn, greedy: the codes."""
    tts, generator = model.tts, torch.Generator().manual_seed(6)
    words = torch.randint(0, VOCAB, (3, 6), generator=generator)
    thoughts = torch.randn(3, 6, CONFIG["hidden_size"], generator=generator)
    counts, cache, position, codes = (6, 3, 0), DynamicCache(), 0, []
    bos = tts.emb_text(torch.tensor([CONFIG["tts_config"]["audio_bos_token_id"]]))
    for unit, count in enumerate(counts):
        said = tts.emb_text(words[unit, :count]) + nn.functional.normalize(
            tts.projector_semantic(thoughts[unit, :count]), dim=-1
        )
        x, made = torch.cat((said, bos))[None], []
        for step in range(26):
            positions = torch.arange(position, position + x.shape[1])[None]
            out = tts.model(inputs_embeds=x, position_ids=positions, past_key_values=cache, use_cache=True)
            position += x.shape[1]
            logits = tts.head_code[0](out.last_hidden_state[0, -1])
            for code in set(made[-16:]):
                factor = 1.05 ** made[-16:].count(code)
                logits[code] = logits[code] * factor if logits[code] < 0 else logits[code] / factor
            if unit:
                logits[-1] = -torch.inf
            best = int(logits.argmax())
            if best == len(logits) - 1 or step == 25:
                break
            made.append(best)
            x = tts.emb_code[0](torch.tensor([[best]]))
        codes.append(made + [-1] * (25 - len(made)))
    return {"spoken": words.int(), "thoughts": thoughts, "codes": torch.tensor(codes).int()}


def keep_shapes(model: nn.Module, seed: int, folder: Path) -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {list(p.shape)}" for name, p in model.named_parameters())
    (folder / "weights.json").write_text(f'{{"seed": {seed}, "shapes": {{\n{lines}\n}}}}\n')


@torch.no_grad()
def main(processor: Path) -> None:
    torch.manual_seed(0)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    model = Model().eval()
    shake(model, 1)
    units = mel_units(processor, 41)
    kept = [0, 3, 4, 28, 29, 38, 39, 40]
    mels = torch.stack([nn.functional.pad(units[n], (0, 104 - units[n].shape[1]))[::9, ::7] for n in kept])
    trace = {"mels": mels, "mel_units": torch.tensor(kept).int(), "heard": encode(model, units[:9])}
    trace |= think(model) | talk(model)
    (GOLDEN / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    make_tokenizer(GOLDEN / "tokenizer.json")
    keep_shapes(model, 1, GOLDEN)
    save_file({k: v.contiguous() for k, v in trace.items()}, GOLDEN / "trace.safetensors")
    print({name: tuple(tensor.shape) for name, tensor in trace.items()})
    print("codes", trace["codes"].tolist())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
