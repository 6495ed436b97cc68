"""MiniCPM-o's geometry with random weights, through the engine: how long a second of so many calls takes.

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/minicpm_speed.py [--limit-s 240]    (on one H200)
    PYTHONPATH=.:protocols:clients/python python recipes/gpu/minicpm_speed.py --device cpu --scale tiny    (its own test)

One JSON line for each number of calls. Every call speaks in every second and uses all its words, which random weights do: the
most that a tick can cost. There the vocoder hums; what a second of sound of so many calls takes its own vocoder, ten steps of
the flow behind a voice's sample of five seconds, is in the lines with the part ``vocoder``. Histories are as long as the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from realtime_omni.config import Config, EngineSection, KVSection, SessionSection
from realtime_omni.models.minicpmo.config import Config45, DecoderConfig, EarConfig
from realtime_omni.models.minicpmo.ears import Ears
from realtime_omni.models.minicpmo.model import MiniCPMO
from realtime_omni.models.minicpmo.mouth import LOOKAHEAD, Job
from realtime_omni.models.minicpmo.network import Language
from realtime_omni.models.minicpmo.settings import Settings
from realtime_omni.models.minicpmo.talker import CODES, Talker
from realtime_omni.models.minicpmo.vocabulary import Marks
from realtime_omni.models.minicpmo.vocoder.encoder import EncoderSizes
from realtime_omni.models.minicpmo.vocoder.estimator import EstimatorSizes
from realtime_omni.models.minicpmo.vocoder.flow import Flow, FlowSizes
from realtime_omni.models.minicpmo.vocoder.hift import HiFT, HiFTSizes
from realtime_omni.models.minicpmo.vocoder.token2wav import STEPS, Sample, Token2Wav
from realtime_omni.testing.inline import InlineEngine
from realtime_omni.testing.observing import observer
from realtime_omni.testing.vocoder import Hum

SCALES = {
    "real": Config45(
        DecoderConfig(4096, 12288, 36, 32, 8, 128, 40960, 1e6, 1e-6, True),
        151748,
        EarConfig(),
        DecoderConfig(768, 3072, 20, 12, 12, 64, 4096),
        152064,
        6562,
        151687,
    ),
    "tiny": Config45(
        DecoderConfig(32, 64, 2, 4, 2, 16, 4096, 1e6, 1e-6, True),
        288,
        EarConfig(16, 2, 2, 64),
        DecoderConfig(16, 32, 2, 2, 2, 8, 4096),
        288,
        40,
        280,
    ),
}
VOCODERS = {
    "real": (FlowSizes(), HiFTSizes()),
    "tiny": (FlowSizes(40, 12, EncoderSizes(16, 2, 24, 1, 1), EstimatorSizes(16, 1, 2, 8, 32, 8)), HiFTSizes(8, 16, 8)),
}
SAMPLE_CODES = 125
"""Five seconds of a voice."""
SPOKEN = 8
"""Seconds of a turn: the first four are not timed."""
VOICES = (1, 8, 16)
CALLS = (1, 4, 8, 16, 32)
SECONDS, MEASURED = 14, 8
MARKS = Marks(
    unit=0, unit_end=1, listen=2, speak=3, tts_bos=4, chunk_eos=5, chunk_tts_eos=6, turn_eos=7, forbidden=(2, 5, 6, 7)
)


class Numbers:
    """A vocabulary of numbers: random weights have no words."""

    marks = MARKS

    def tokens(self, text: str) -> list[int]:
        return [16 + ord(letter) % 200 for letter in text]

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def drawn(network: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """Random numbers in every parameter, made on the device."""
    for name, parameter in list(network.named_parameters()):
        path, _, leaf = name.rpartition(".")
        made = torch.randn(parameter.shape, device=device, dtype=dtype) * 0.02 + ("norm" in leaf and "bias" not in leaf)
        setattr(network.get_submodule(path), leaf, nn.Parameter(made, requires_grad=False))
    return network


def build(scale: Config45, device: str, dtype: torch.dtype) -> MiniCPMO:
    with torch.device("meta"):
        networks = (
            Language(scale.language, scale.vocab_size),
            Ears(scale.ears, scale.language.hidden_size),
            Talker(scale),
        )
    for network in networks:
        drawn(network, device, dtype)
    settings = Settings(prompt_tokens=64, window_units=SECONDS + 2)
    return MiniCPMO(scale, *networks, Numbers(), Hum(Path(), device), settings, device=device, fingerprint="0" * 64)


def measure(model: MiniCPMO, calls: int, device: str, dtype: str) -> dict[str, object]:
    config = Config(
        model="minicpm-o",
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        kv=KVSection(requested_sessions=calls, window_frames=SECONDS + 2, keep_gathered=True),
        engine=EngineSection(max_batch=calls, threads=1),
        session=SessionSection(max_sessions=calls),
    )
    engine = InlineEngine(model, config)
    engine.observe = observer(model.spec)
    names = [f"call-{n}" for n in range(calls)]
    for number, name in enumerate(names):
        engine.create(name, seed=number)
    took: list[float] = []
    for _ in range(SECONDS):
        began = time.perf_counter()
        for chunk in engine.next_all(names):
            if isinstance(chunk, Exception):
                raise chunk
        engine.rest()
        took.append((time.perf_counter() - began) * 1000)
    last = took[-MEASURED:]
    tokens = engine.state_of(names[0]).facts.tokens
    return {"tick_ms": {"p50": round(statistics.median(last), 1), "max": round(max(last), 1)}, "tokens_a_call": tokens}


def vocoder(scale: str, device: str, dtype: torch.dtype) -> Token2Wav:
    flow_sizes, hift_sizes = VOCODERS[scale]
    with torch.device("meta"):
        flow, hift = Flow(flow_sizes, STEPS), HiFT(hift_sizes)
    drawn(flow, device, dtype)
    drawn(hift, device, torch.float32)
    mels = flow_sizes.estimator.mels
    sample = Sample(
        torch.arange(SAMPLE_CODES) % flow_sizes.codes,
        torch.randn(2 * SAMPLE_CODES, mels),
        torch.randn(flow_sizes.speaker),
    )
    return Token2Wav(flow, hift, {"one": sample}, device, "random")


def measure_vocoder(made: Token2Wav, calls: int, device: str) -> dict[str, object]:
    codes = tuple(number % made.flow.sizes.codes for number in range(CODES + LOOKAHEAD))
    voices = [made.begin(None)] * calls
    took: list[float] = []
    for _ in range(SPOKEN):
        began = time.perf_counter()
        sounds = made.sound([Job(voice, codes, False) for voice in voices])
        heard = [sound.cpu() for sound, _ in sounds]
        took.append((time.perf_counter() - began) * 1000)
        voices = [voice for _, voice in sounds]
    if not all(bool(sound.isfinite().all()) for sound in heard):
        raise ArithmeticError("the sound is not finite")
    last = took[SPOKEN // 2 :]
    out: dict[str, object] = {"second_ms": {"p50": round(statistics.median(last), 1), "max": round(max(last), 1)}}
    out["memory_mib_a_call"] = round(made.voice_bytes / 2**20)
    if device.startswith("cuda"):
        out["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return out


def vocoder_lines(scale: str, device: str) -> None:
    for dtype in ("float32", "bfloat16") if scale == "real" else ("float32",):
        made: Token2Wav | None = None
        for calls in VOICES if scale == "real" else VOICES[:2]:
            line: dict[str, object] = {"part": "vocoder", "calls": calls, "device": device, "flow_dtype": dtype}
            try:
                made = made or vocoder(scale, device, getattr(torch, dtype))
                line |= measure_vocoder(made, calls, device)
            except Exception as error:  # the next part runs
                line["failed"] = f"{type(error).__name__}: {error}"[:300]
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--scale", choices=sorted(SCALES), default="real")
    parser.add_argument("--limit-s", type=float, default=240)
    args = parser.parse_args()
    began = time.perf_counter()
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    torch.manual_seed(0)
    vocoder_lines(args.scale, args.device)
    model = build(SCALES[args.scale], args.device, getattr(torch, dtype))
    for calls in CALLS if args.scale == "real" else CALLS[:2]:
        if time.perf_counter() - began > args.limit_s * 0.7:
            print(json.dumps({"calls": calls, "skipped": "no time left"}), flush=True)
            continue
        line: dict[str, object] = {"part": "minicpm-o", "calls": calls, "device": args.device, "dtype": dtype}
        try:
            line |= measure(model, calls, args.device, dtype)
        except Exception as error:  # the next part runs
            line["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
