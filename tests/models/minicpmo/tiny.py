"""Tiny MiniCPM-os: the golden checkpoint as a folder like OpenBMB's, with a hum for a vocoder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from parity.rebuilt import KEPT, minicpm, token2wav_weights
from realtime_omni.config import Config, EngineSection, KVSection, SessionSection
from realtime_omni.models.minicpmo.vocabulary import TokenizerFile
from realtime_omni.models.minicpmo.vocoder.convert import convert_weights


def recipe(folder: object, *, window: int = 5, rewind: int = 4, **options: object) -> Config:
    """Five seconds are seen, so that seconds leave soon; a unit has at most six words, so that tests are quick."""
    return Config(
        model="minicpm-o",
        dtype="float32",
        kv=KVSection(memory_bytes=64 << 20, requested_sessions=4, rewind_blocks=rewind, window_frames=window),
        engine=EngineSection(max_batch=4, threads=1),
        session=SessionSection(max_sessions=4),
        options={
            "checkpoint": str(folder),
            "vocoder": "realtime_omni.testing.vocoder:Hum",
            "unit_words": 6,
            "prompt_tokens": 64,
            **options,
        },
    )


def checkpoint(folder: Path, *, talkative: float = 0.0) -> Path:
    """The golden checkpoint with one layer a network, so that a tick is quick. ``talkative``: how much likelier units
    listen and end, and turns end, than drawn; 0: as drawn, where turns go on and on."""
    folder.mkdir(parents=True, exist_ok=True)
    source = minicpm() / "minicpm"
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] = config["audio_config"]["encoder_layers"] = 1
    config["tts_config"]["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", folder)
    tensors = {n: t for n, t in load_file(source / "model.safetensors").items() if ".layers.1." not in n}
    words = TokenizerFile(folder).marks
    if talkative:
        for token, factor in (
            (words.listen, -2 * talkative),
            (words.chunk_eos, talkative),
            (words.turn_eos, talkative),
        ):
            tensors["llm.lm_head.weight"][token] *= factor  # the signs are those with which this draw listens, too
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_vocoder(folder: Path) -> Path:
    """The same with the golden vocoder, converted, and a sample of each of the checkpoint's voices."""
    files = folder / "assets" / "token2wav"
    files.mkdir(parents=True)
    for name, tensors in token2wav_weights().items():
        torch.save(tensors, files / f"{name}.pt")
    convert_weights(files)
    trace = load_file(KEPT / "token2wav" / "trace.safetensors")
    sample = {name: trace[f"voice_{name}"] for name in ("codes", "mel", "speaker")}
    for name in sorted(wav.stem for wav in (folder / "voices").glob("*.wav")) or ["north"]:
        save_file(sample, files / f"voice-{name}.safetensors")
    return folder
