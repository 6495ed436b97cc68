"""MiniCPM-o's geometry with random weights, through the engine: how long a second of so many calls takes.

    PYTHONPATH=.:protocols:clients/python python recipes/gpu/minicpm_speed.py [--limit-s 240]    (on one H200)
    ... --parts rooms model --calls 1 16 --graphs on                                              (in half a minute)
    PYTHONPATH=.:protocols:clients/python python recipes/gpu/minicpm_speed.py --device cpu --scale tiny    (its own test)

One JSON line for each part, number of calls (``--calls``), and with and without graphs (``--graphs``), what is quick first:

``operations``  what torch is asked for in a tick of three calls at the tiny size, a replay counted as one.
``equal``       tiny, greedy, in float32: with graphs all calls say in all seconds what they say without.
``rooms``       one layer's attention of 1, 2 and 11 tokens a call over full windows of 240 seconds: microseconds, share of an
                H200's memory speed, error.
``model``       a tick through the engine; its stages, and what they are made of, with a wait after each piece, so these are
                longer: histories copied into rooms, the opening pass, those over a word, the closing one, what is drawn of
                them, pages written; the talker's condition, and its passes over a code. Every call speaks in every second and
                uses all its words, which random weights do: the most that a tick can cost. Windows are of 240 seconds: with
                graphs a pass reads all of it, whatever is there; what is copied is as long as the run. The vocoder hums.
                ``captured_s``: from the weights to the first call. ``gib_a_call``: what the plan counts for one.
``vocoder``     a second of sound of the checkpoint's kind of vocoder: ten steps of the flow, a voice's sample of five seconds.

Exit status 0: nothing failed, and all seconds were equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from realtime_omni.config import Config, EngineSection, KVSection, SessionSection
from realtime_omni.kv.attention.growing import GrowingPlan
from realtime_omni.kv.attention.rooms import Rooms
from realtime_omni.models.base import Step, StepBatch
from realtime_omni.models.common.capture import Capture
from realtime_omni.models.minicpmo.captured import CapturedLines, CapturedThinker
from realtime_omni.models.minicpmo.config import Config45, DecoderConfig, EarConfig
from realtime_omni.models.minicpmo.ears import Ears
from realtime_omni.models.minicpmo.model import MiniCPMO
from realtime_omni.models.minicpmo.mouth import LOOKAHEAD, Job
from realtime_omni.models.minicpmo.network import Language
from realtime_omni.models.minicpmo.sampling import CodeChance, TextChance
from realtime_omni.models.minicpmo.settings import Settings
from realtime_omni.models.minicpmo.talker import CODES, Talker
from realtime_omni.models.minicpmo.thinking import CLOSING, Thinker
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
CALLS = (1, 16, 4)
SECONDS, MEASURED = 14, 8
STAGED = 3
"""Seconds more, which are taken apart."""
PARTS = ("operations", "equal", "rooms", "model", "vocoder")
WINDOW_S = 240
WINDOW = WINDOW_S * 32
H200_BYTES_PER_S = 4.8e12
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


def build(
    scale: Config45, device: str, dtype: torch.dtype, *, greedy: bool = False
) -> Callable[[int | None], MiniCPMO]:
    """The model over one set of weights, with graphs for so many calls, or none."""
    with torch.device("meta"):
        networks = (
            Language(scale.language, scale.vocab_size),
            Ears(scale.ears, scale.language.hidden_size),
            Talker(scale),
        )
    for network in networks:
        drawn(network, device, dtype)
    settings = Settings(prompt_tokens=64, window_units=WINDOW_S if scale is SCALES["real"] else SECONDS + 2)
    if greedy:
        settings = replace(settings, text=TextChance(temperature=0), codes=CodeChance(temperature=0, repetition=1))

    def made(captured_rows: int | None) -> MiniCPMO:
        return MiniCPMO(
            scale,
            *networks,
            Numbers(),
            Hum(Path(), device),
            settings,
            device=device,
            fingerprint="0" * 64,
            captured_rows=captured_rows,
        )

    return made


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def engine_of(model: MiniCPMO, calls: int, device: str, dtype: str) -> InlineEngine:
    config = Config(
        model="minicpm-o",
        device=device,
        dtype=dtype,  # type: ignore[arg-type]
        kv=KVSection(
            memory_fraction=0.9,
            requested_sessions=calls,
            window_frames=model.spec.kv.window_frames,
            keep_gathered=True,
        ),
        engine=EngineSection(max_batch=calls, threads=1),
        session=SessionSection(max_sessions=calls),
    )
    engine = InlineEngine(model, config)
    engine.observe = observer(model.spec)
    for number in range(calls):
        engine.create(f"call-{number}", seed=number)
    return engine


def tick(engine: InlineEngine, calls: int) -> list[Any]:
    chunks = engine.next_all([f"call-{number}" for number in range(calls)])
    for chunk in chunks:
        if isinstance(chunk, Exception):
            raise chunk
    engine.rest()
    return chunks


@contextmanager
def staged(model: MiniCPMO, device: str, spent: list[dict[str, float]]) -> Iterator[None]:
    """Milliseconds of every stage of every tick."""
    step = model.step

    def timed(batch: StepBatch) -> Step:
        times: dict[str, float] = {}
        began_s, stage = time.perf_counter(), "begin"
        work = step(batch)
        while True:
            try:
                checkpoint = next(work)
            except StopIteration as stop:
                result = stop.value
                break
            finally:
                wait(device)
                now_s = time.perf_counter()
                times[stage] = times.get(stage, 0.0) + (now_s - began_s) * 1000
            stage = str(checkpoint.stage)
            yield checkpoint
            began_s = time.perf_counter()
        spent.append(times)
        return result

    with patch.object(model, "step", timed):
        yield


@contextmanager
def pieces(device: str, spent: dict[str, float]) -> Iterator[None]:
    """Milliseconds of what thinking and talking are made of."""

    def timed(name: Callable[..., str], work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            wait(device)
            began_s = time.perf_counter()
            result = work(*args, **kwargs)
            wait(device)
            key = name(*args)
            spent[key] = spent.get(key, 0.0) + (time.perf_counter() - began_s) * 1000
            return result

        return call

    names = {1: "word", 2: "closing"}
    with ExitStack() as stack:
        for kind, method, name in (
            *((kind, "begin", lambda *_: "think: histories") for kind in (Thinker, CapturedThinker)),
            *(
                (kind, "go_on", lambda *args: f"think: {names.get(args[3].shape[1], 'opening')}")
                for kind in (Thinker, CapturedThinker)
            ),
            (Thinker, "_choose", lambda *_: "think: drawn"),
            (GrowingPlan, "finish", lambda *_: "think: pages"),
            (CapturedLines, "begin", lambda *_: "talk: condition"),
            (CapturedLines, "step", lambda *_: "talk: code"),
        ):
            stack.enter_context(patch.object(kind, method, timed(name, getattr(kind, method))))
        yield


def measure(made: Callable[[], MiniCPMO], calls: int, device: str, dtype: str) -> dict[str, object]:
    began_s = time.perf_counter()
    model = made()
    engine = engine_of(model, calls, device, dtype)
    wait(device)
    captured_s = round(time.perf_counter() - began_s, 1)
    took: list[float] = []
    for _ in range(SECONDS):
        began_s = time.perf_counter()
        tick(engine, calls)
        took.append((time.perf_counter() - began_s) * 1000)
    spent: list[dict[str, float]] = []
    apart: list[dict[str, float]] = []
    for _ in range(STAGED):
        with staged(model, device, spent):
            tick(engine, calls)
        apart.append({})
        with pieces(device, apart[-1]):
            tick(engine, calls)
    last = took[-MEASURED:]
    out: dict[str, object] = {"tick_ms": {"p50": round(statistics.median(last), 1), "max": round(max(last), 1)}}
    for name, each in (("stages_ms", spent), ("pieces_ms", apart)):
        out[name] = {key: round(statistics.median(one[key] for one in each), 1) for key in each[-1]}
    out["tokens_a_call"] = engine.state_of("call-0").facts.tokens
    spec = engine.runner.storage.spec
    out["gib_a_call"] = round((spec.required_bytes(2) - spec.required_bytes(1)) / 2**30, 2)
    if device.startswith("cuda"):
        out["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return out | {"captured_s": captured_s}


def equal(made: Callable[[int | None], MiniCPMO], calls: int, device: str, dtype: str) -> dict[str, object]:
    told = []
    for rows in (None, calls):
        engine = engine_of(made(rows), calls, device, dtype)
        told.append([[chunk.signals for chunk in tick(engine, calls)] for _ in range(SECONDS)])
    same = [one == two for ours, theirs in zip(*told, strict=True) for one, two in zip(ours, theirs, strict=True)]
    return {"equal": sum(same), "of": len(same), "good": all(same)}


class Asked(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.replays, self._silent = 0, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self._silent
        return func(*args, **(kwargs or {}))

    def once(self, capture: Capture, work: Callable[[], None]) -> Callable[[], None]:
        """In the place of a capture: what is replayed counts as one."""

        def replay() -> None:
            self._silent = True
            work()
            self._silent, self.replays = False, self.replays + 1

        return replay


def operations(graphs: bool) -> dict[str, object]:
    asked = Asked()
    made = build(SCALES["tiny"], "cpu", torch.float32)
    with patch.object(Capture, "__call__", lambda self, work: asked.once(self, work)):
        model = made(3 if graphs else None)
        engine = engine_of(model, 3, "cpu", "float32")
        speaker = vocoder("tiny", "cpu", torch.float32, 3 if graphs else None)
        for _ in range(3):
            tick(engine, 3)
        before = asked.replays
        with asked:
            tick(engine, 3)
    replays = asked.replays - before
    out: dict[str, object] = {"a_tick": asked.count + replays, "replays": replays}
    voices, codes = [speaker.begin(None)] * 3, tuple(range(CODES + LOOKAHEAD))
    for _ in range(4):
        count, replays = asked.count, asked.replays
        with asked:
            sounds = speaker.sound([Job(voice, codes, False) for voice in voices])
        voices = [voice for _, voice in sounds]
    return out | {"a_second_of_sound": asked.count - count + asked.replays - replays}


def full_rooms(scale: str, device: str, dtype: str, calls: int, new: int) -> dict[str, object]:
    """``new``: tokens a call."""
    size, kind, tokens = SCALES[scale].language, getattr(torch, dtype), WINDOW if scale == "real" else 96
    layers, passes = 2, 20  # two, so that none is found in a cache
    shape = (size.num_key_value_heads, size.head_dim)
    rooms = Rooms(layers, calls, tokens, *shape, dtype=kind, device=device)
    rooms.keys.normal_()
    rooms.values.normal_()
    rooms.place(range(calls), [tokens - new] * calls, new, calls)
    q = torch.randn(calls, new, size.num_attention_heads, size.head_dim, device=device).to(kind)
    k, v = (torch.randn(calls, new, *shape, device=device).to(kind) for _ in range(2))
    out = rooms.look(calls, new)(0, q, k, v)[0, -1].float()
    group = size.num_attention_heads // shape[0]
    seen = [room[0, 0].float().repeat_interleave(group, dim=1) for room in (rooms.keys, rooms.values)]
    weights = torch.softmax(torch.einsum("hd,thd->ht", q[0, -1].float(), seen[0]) * size.head_dim**-0.5, dim=-1)
    expected = torch.einsum("ht,thd->hd", weights, seen[1])
    error = float((out - expected).abs().max() / expected.abs().max())
    read = 2 * calls * tokens * shape[0] * shape[1] * kind.itemsize

    def work() -> None:
        attend = rooms.look(calls, new)
        for number in range(passes):
            attend(number % layers, q, k, v)

    replay, took = Capture(torch.device(device))(work), list[float]()
    for _ in range(6):
        wait(device)
        began_s = time.perf_counter()
        replay()
        wait(device)
        took.append((time.perf_counter() - began_s) / passes)
    return {
        "window": tokens,
        "us": round(min(took) * 1e6, 1),
        "of_memory": round(read / min(took) / H200_BYTES_PER_S, 2),
        "error": error,
        "good": error < 0.02,
    }


def vocoder(scale: str, device: str, dtype: torch.dtype, captured_rows: int | None) -> Token2Wav:
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
    return Token2Wav(flow, hift, {"one": sample}, device, "random", captured_rows=captured_rows, together=True)


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


def vocoder_part(scale: str, device: str, dtype: str, calls: int, graphs: bool) -> dict[str, object]:
    began_s = time.perf_counter()
    made = vocoder(scale, device, getattr(torch, dtype), calls if graphs else None)
    wait(device)
    began = round(time.perf_counter() - began_s, 1)
    return measure_vocoder(made, calls, device) | {"flow_dtype": dtype, "captured_s": began}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--scale", choices=sorted(SCALES), default="real")
    parser.add_argument("--limit-s", type=float, default=240)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--calls", nargs="*", type=int, default=())
    parser.add_argument("--graphs", nargs="*", choices=("off", "on"), default=("on", "off"))
    args = parser.parse_args()
    began_s = time.perf_counter()
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    torch.manual_seed(0)
    failed = False

    def part(name: str, needs_s: float, work: Callable[[], dict[str, object]], **told: object) -> None:
        """``needs_s``: on one H200, as far as it was guessed."""
        nonlocal failed
        if name not in args.parts:
            return
        if time.perf_counter() - began_s + needs_s > args.limit_s:
            print(json.dumps({"part": name, **told, "skipped": "no time is left"}), flush=True)
            return
        part_s = time.perf_counter()
        try:
            found = work()
        except Exception as error:  # the next part runs
            found = {"failed": f"{type(error).__name__}: {error}"[:800]}
        failed = failed or "failed" in found or found.get("good") is False
        seconds = round(time.perf_counter() - part_s, 1)
        print(json.dumps({"part": name, **told, **found, "seconds": seconds}), flush=True)

    real = args.scale == "real"
    ways = [way == "on" for way in args.graphs]
    for graphs in ways:
        part("operations", 5, partial(operations, graphs), graphs=graphs)
    part(
        "equal",
        15,
        lambda: equal(build(SCALES["tiny"], args.device, torch.float32, greedy=True), 3, args.device, "float32"),
    )
    numbers = args.calls or (CALLS if real else CALLS[::2])
    for calls in numbers:
        for new in (1, CLOSING, 11):
            attention = partial(full_rooms, args.scale, args.device, dtype, calls, new)
            part("rooms", 3 if real else 1, torch.no_grad()(attention), calls=calls, new=new, dtype=dtype)
    whole: Callable[[int | None], MiniCPMO] | None = None
    for calls in numbers:
        for graphs in ways:

            def work(calls: int = calls, graphs: bool = graphs) -> dict[str, object]:
                nonlocal whole
                whole = whole or build(SCALES[args.scale], args.device, getattr(torch, dtype))
                return measure(partial(whole, calls if graphs else None), calls, args.device, dtype)

            part("model", (15 if graphs else 60) if real else 2, work, calls=calls, graphs=graphs, dtype=dtype)
        for graphs in ways:
            for flow in ("float32", "bfloat16") if real else ("float32",):
                speaks = partial(vocoder_part, args.scale, args.device, flow, calls, graphs)
                part("vocoder", 20 if real else 2, speaks, calls=calls, graphs=graphs)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
