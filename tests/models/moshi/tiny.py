"""Tiny Moshis: the golden checkpoints as a folder like kyutai's, and a PersonaPlex of chance."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace as _replace
from pathlib import Path

import msgspec
import sentencepiece
import torch

from parity.rebuilt import moshi
from realtime_omni.config import Config, EngineSection, KVSection, SessionSection
from realtime_omni.models.moshi.config import mimi_config, read_config
from realtime_omni.models.moshi.mimi import Mimi
from realtime_omni.models.moshi.model import Moshi, Settings
from realtime_omni.models.moshi.network import MoshiLM
from realtime_omni.models.moshi.prompts import PromptCodes, Voice
from realtime_omni.models.moshi.sampling import Chance
from realtime_omni.models.moshi.text import SentencePieces
from realtime_omni.models.moshi.weights import load_mimi, replace_parameters

GOLDEN = moshi()
CORPUS = (
    "hello there i am a small voice that talks and listens how are you today what can i do for you my friend good bye"
)
CODES = PromptCodes(silence=(1, 2, 3, 4), tone=(5, 6, 7, 8))
GREEDY = Chance(0.0, 0)


def vocabulary(file: Path, size: int = 48) -> None:
    """A SentencePiece model with kyutai's control tokens: unknown 0, begin 1, end 2, padding 3."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split()),
        model_writer=made,
        vocab_size=size,
        hard_vocab_limit=False,
        pad_id=3,
        minloglevel=2,
    )
    file.write_bytes(made.getvalue())


def checkpoint(folder: Path) -> Path:
    """Every file that a recipe names."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "lm-8" / name, folder / name)
    shutil.copy(GOLDEN / "mimi" / "mimi_config.json", folder)
    shutil.copy(GOLDEN / "mimi" / "mimi.safetensors", folder / "tokenizer-e351c8d8-checkpoint125.safetensors")
    vocabulary(folder / "tokenizer_spm_32k_3.model")
    return folder


def recipe(folder: Path, dtype: str = "float32", **options: object) -> Config:
    return Config(
        model="moshi",
        dtype=dtype,  # type: ignore[arg-type]
        kv=KVSection(memory_bytes=64 << 20, requested_sessions=4, rewind_blocks=4),
        engine=EngineSection(max_batch=4, threads=1),
        session=SessionSection(max_sessions=4),
        options={"checkpoint": str(folder), "text_top_k": 8, "audio_top_k": 8, **options},
    )


def persona(folder: Path, *, seed: int = 0, captured_rows: int | None = None) -> Moshi:
    """Depth steps for both speakers, two voices, a language model of chance, greedy; the golden codec."""
    config = read_config(GOLDEN / "lm-8")
    assert config is not None
    lm = MoshiLM(msgspec.structs.replace(config, dep_q=8))
    mimi = Mimi(mimi_config(json.loads((GOLDEN / "mimi" / "mimi_config.json").read_text())), 4)
    load_mimi(mimi, GOLDEN / "mimi" / "mimi.safetensors", device="cpu")
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randn(p.shape, generator=generator) / (p.shape[-1] ** 0.5 if "norm" not in name else 1)
        for name, p in lm.named_parameters()
    }
    replace_parameters(lm, made)
    file = folder / "pieces.model"
    vocabulary(file)
    voices = {
        "north": Voice(torch.randn(3, config.dim, generator=generator), None),
        "south": Voice(None, torch.randint(0, 32, (5, 4), generator=generator)),
    }
    settings = _replace(Settings(), text=GREEDY, audio=GREEDY, codes=CODES)
    return Moshi(
        lm,
        mimi,
        SentencePieces(file),
        settings,
        voices=voices,
        fingerprint=f"{seed:064d}",
        captured_rows=captured_rows,
    )
