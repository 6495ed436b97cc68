"""The vocoder as MiniCPM-o's mouth calls it: memories are values of named tensors. On a GPU calls of equal shapes run as one
batch. Elsewhere each runs alone, so that no bit of its sound depends on another: a product's last digit depends on how many
rows it has, and a second of phase makes 1e-2 of that.

Source of the rules of streaming: ``Token2wav`` of ``minicpmo-utils`` 1.0.6 (Apache-2.0), read as facts. The generator
hears eight frames again and its sound is faded over them; a turn's first sound waits for them behind silence, its last
brings them. What the reference draws anew in every process and call is drawn here from where in the turn it is, so a
second that is made again sounds the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.models.common.capture import Capture
from realtime_omni.models.common.packing import fingerprint_of_files
from realtime_omni.models.minicpmo.mouth import Job, Voice
from realtime_omni.models.minicpmo.vocoder.captured import CapturedVocoder
from realtime_omni.models.minicpmo.vocoder.encoder import LOOKAHEAD, PRE, RATE, UP, EncoderMemory
from realtime_omni.models.minicpmo.vocoder.estimator import TAPS
from realtime_omni.models.minicpmo.vocoder.flow import (
    KEPT_FRAMES,
    LONGEST_CODES,
    LONGEST_FRAMES,
    SILENCE,
    Flow,
    FlowMemory,
)
from realtime_omni.models.minicpmo.vocoder.hift import AGAIN, HARMONICS, HOP, OVERLAP, HiFT
from realtime_omni.models.minicpmo.vocoder.weights import FILE, load

STEPS = 10
VOICE_FILE = "voice-{}.safetensors"
SOUNDS = ("mel", "source", "speech")
"""Of a memory's tensors, the generator's."""
LONGEST_TURN = 50 * 3600 * 24
"""Frames: a day."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A voice: ``codes`` int64 [N] of its sound, ``mel`` float32 [2 N, M], ``speaker`` float32 [S], its embedding."""

    codes: Tensor
    mel: Tensor
    speaker: Tensor


class Token2WavOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``dtype``: the flow's, and of what it remembers. ``steps``: of the flow."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    steps: Annotated[int, Meta(ge=1, le=100)] = STEPS


def open_folder(folder: Path, device: str, options: Token2WavOptions, captured_rows: int | None = None) -> Token2Wav:
    """Of what ``convert`` wrote into a checkpoint's ``assets/token2wav``. Raises ConfigError."""
    files = folder / "assets" / "token2wav"
    if not (files / FILE).is_file():
        raise ConfigError(
            f"there is no assets/token2wav/{FILE}: run python -m realtime_omni.models.minicpmo.vocoder.convert, or name "
            "another vocoder in options.vocoder; see recipes/minicpm-o.md",
            path="options.vocoder",
        )
    flow, hift = load(files / FILE, steps=options.steps, dtype=getattr(torch, options.dtype), device=device)
    paths = sorted(files.glob(VOICE_FILE.format("*")))
    prefix, suffix = VOICE_FILE.split("{}")
    samples = {p.name.removeprefix(prefix).removesuffix(suffix): read_sample(p, flow) for p in paths}
    if not samples:
        raise ConfigError(
            f"there is no {VOICE_FILE.format('NAME')} beside {FILE}: the vocoder speaks in a voice's sample"
        )
    fingerprint = fingerprint_of_files([files / FILE, *paths], repr(options))
    return Token2Wav(flow, hift, samples, device, fingerprint, captured_rows=captured_rows)


def read_sample(path: Path, flow: Flow) -> Sample:
    """Raises ConfigError for one that the flow cannot begin with."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        raise ConfigError(f"{path.name} cannot be read", path=path.name) from None
    codes, mel, speaker = (tensors.get(name, torch.zeros(0)) for name in ("codes", "mel", "speaker"))
    sizes = flow.sizes
    fits = (
        set(tensors) == {"codes", "mel", "speaker"}
        and codes.dtype == torch.int64
        and codes.dim() == 1
        and 0 < RATE * len(codes) <= LONGEST_FRAMES
        and mel.shape == (RATE * len(codes), sizes.estimator.mels)
        and speaker.shape == (sizes.speaker,)
        and int(codes.min()) >= 0
        and int(codes.max()) < sizes.codes
        and bool(mel.isfinite().all() and speaker.isfinite().all())
    )
    if not fits:
        raise ConfigError(f"{path.name} is not a voice for this vocoder; convert it anew", path=path.name)
    return Sample(codes, mel.float(), speaker.float())


class Token2Wav:
    """Meets :class:`~realtime_omni.models.minicpmo.mouth.Vocoder`. ``samples`` by voice, the first of them the default."""

    def __init__(
        self,
        flow: Flow,
        hift: HiFT,
        samples: Mapping[str, Sample],
        device: torch.device | str,
        fingerprint: str,
        *,
        captured_rows: int | None = None,
        together: bool | None = None,
    ) -> None:
        """``captured_rows``: of a batch at most, whose whole seconds are CUDA graphs; None: none are. ``together``: calls
        share a batch; None: on a GPU."""
        self.flow, self.hift, self.fingerprint = flow, hift, fingerprint
        self.device = torch.device(device)
        self._together = self.device.type == "cuda" if together is None else together
        self._narrow, self._wide = flow.encoder_proj.weight.dtype, hift.conv_post.weight.dtype
        self.silence = min(SILENCE, flow.sizes.codes - 1)
        with torch.no_grad():
            self._voices = {name: self._begun(sample) for name, sample in samples.items()}
        longest = max(RATE * len(sample.codes) for sample in samples.values())
        wanted = self._shapes(longest, longest + KEPT_FRAMES)
        self.voice_bytes = sum(
            (self._wide if name in SOUNDS else self._narrow).itemsize * torch.Size(shape).numel()
            for name, shape in wanted.items()
        )
        self._captured = None
        if captured_rows is not None:
            prompts = {RATE * len(sample.codes) for sample in samples.values()}
            self._captured = CapturedVocoder(flow, hift, captured_rows, prompts, Capture(self.device))

    def begin(self, voice: str | None) -> Voice:
        """Raises ArgumentError for a voice without a sample."""
        name = voice if voice is not None else next(iter(self._voices))
        if name not in self._voices:
            raise ArgumentError(f"the vocoder has no sample of the voice {name}; convert it", path="voice")
        return self._voices[name]

    @torch.no_grad()
    def sound(self, jobs: Sequence[Job]) -> list[tuple[Tensor, Voice]]:
        """As :meth:`.mouth.Vocoder.sound`. Raises ArgumentError for a job without a code to sound, or a first one of less than
        eight frames."""
        groups: dict[object, list[int]] = {}
        for place, job in enumerate(jobs):
            fresh = RATE * (len(job.codes) - (0 if job.last else LOOKAHEAD))
            first = not job.voice["speech"].shape[0]
            if not (AGAIN if first and not job.last else 1) <= fresh <= RATE * LONGEST_CODES:
                raise ArgumentError(
                    f"{len(job.codes)} codes are too few or too many for a piece of sound", path="codes"
                )
            shapes = tuple(tensor.shape for tensor in job.voice.values())
            prompt = int(job.voice["prompt"])
            alone = None if self._together else place
            groups.setdefault((len(job.codes), job.last, prompt, shapes, alone), []).append(place)
        made: dict[int, tuple[Tensor, Voice]] = {}
        for places in groups.values():
            made |= dict(zip(places, self._sounded([jobs[place] for place in places]), strict=True))
        return [made[place] for place in range(len(jobs))]

    def check(self, voice: Voice) -> Voice:
        prompt = voice.get("prompt", torch.zeros(0))
        made, past = voice.get("made", torch.zeros(0)), voice.get("past", torch.zeros(0))
        counts = all(n.shape == (1,) and n.dtype == torch.int64 for n in (prompt, made))
        if not counts or not 0 < int(prompt) <= LONGEST_FRAMES or int(prompt) % RATE or past.dim() != 6:
            raise ArgumentError("the vocoder's memory says nothing of its length", path="state.voice")
        frames = int(prompt) + min(int(made), KEPT_FRAMES)
        wanted = self._shapes(int(prompt), frames) if 0 <= int(made) <= LONGEST_TURN else {}
        if not int(made):
            wanted |= {"mel": (self.flow.sizes.estimator.mels, 0), "source": (0,), "speech": (0,)}
        shapes = {name: tuple(tensor.shape) for name, tensor in voice.items() if name not in ("prompt", "made")}
        if shapes != wanted:
            raise ArgumentError("the vocoder's memory has other tensors or sizes", path="state.voice")
        for name in wanted:
            needed = self._wide if name in SOUNDS else self._narrow
            if voice[name].dtype != needed or not bool(voice[name].isfinite().all()):
                raise ArgumentError(f"the vocoder's {name} is not finite, or of another kind", path="state.voice")
        return {name: t if name in ("prompt", "made") else t.to(self.device) for name, t in voice.items()}

    def _begun(self, sample: Sample) -> Voice:
        codes, mel, speaker = (part.to(self.device) for part in (sample.codes, sample.mel, sample.speaker))
        nothing = torch.zeros(0, device=self.device, dtype=self._wide)
        return {
            **_row(self.flow.begin(codes, mel, speaker), 0),
            "mel": nothing.new_zeros(mel.shape[1], 0),
            "source": nothing,
            "speech": nothing,
            "made": torch.zeros(1, dtype=torch.int64),
        }

    def _sounded(self, jobs: Sequence[Job]) -> list[tuple[Tensor, Voice]]:
        """Of rows whose memories and codes have the same sizes."""
        last, voices = jobs[0].last, [job.voice for job in jobs]
        codes = torch.tensor([job.codes for job in jobs], device=self.device)
        if int(codes.min()) < 0 or int(codes.max()) >= self.flow.sizes.codes:
            raise ArgumentError(f"codes are 0 to {self.flow.sizes.codes - 1}", path="codes")
        solve, generate = (
            (None, self.hift) if self._captured is None else (self._captured.solve, self._captured.generate)
        )
        mel, memory = self.flow(codes, _stacked(voices), last=last, solve=solve)
        heard = torch.cat((torch.stack([voice["mel"] for voice in voices]), mel.to(self._wide)), dim=2)
        noise = torch.stack([noise_of(int(voice["made"]), heard.shape[2]) for voice in voices]).to(heard)
        speech, source = generate(heard, noise, torch.stack([voice["source"] for voice in voices]))
        before = torch.stack([voice["speech"] for voice in voices])
        speech = faded(before, speech)
        sound = speech if last else speech[:, :-OVERLAP]
        if not last and not before.shape[1]:
            sound = F.pad(sound, (OVERLAP, 0))
        out: list[tuple[Tensor, Voice]] = []
        for row, voice in enumerate(voices):
            after: dict[str, Tensor] = {
                **_row(memory, row),
                "mel": heard[row, :, -AGAIN:].clone(),
                "source": source[row, -OVERLAP:].clone(),
                "speech": speech[row, -OVERLAP:].clone(),
                "made": voice["made"] + mel.shape[2],
            }
            out.append((sound[row], after))
        return out

    def _shapes(self, prompt: int, frames: int) -> dict[str, tuple[int, ...]]:
        """Of a turn's memory that remembers so many frames, after its first sound."""
        encoder, estimator, steps = self.flow.sizes.encoder, self.flow.sizes.estimator, self.flow.steps
        head = 2 * encoder.channels // encoder.heads
        return {
            "speaker": (estimator.mels,),
            "pre": (encoder.channels, PRE),
            "up": (encoder.channels, UP),
            "codes": (encoder.blocks, encoder.heads, frames // RATE, head),
            "frames": (encoder.up_blocks, encoder.heads, frames, head),
            "convolved": (steps, estimator.depth, 2, 2 * estimator.channels, TAPS),
            "past": (steps, estimator.depth, 2, estimator.heads, frames, 2 * estimator.head_size),
            "mel": (estimator.mels, AGAIN),
            "source": (OVERLAP,),
            "speech": (OVERLAP,),
        }


def faded(before_BS: Tensor, sound_BS: Tensor) -> Tensor:
    """The sound with its beginning faded in over what came before, by the halves of a Hamming window."""
    if not before_BS.shape[1]:
        return sound_BS
    window = torch.hamming_window(2 * OVERLAP, periodic=False, device=sound_BS.device)
    begins = sound_BS[:, :OVERLAP] * window[:OVERLAP] + before_BS * window[OVERLAP:]
    return torch.cat((begins, sound_BS[:, OVERLAP:]), dim=1)


def noise_of(made: int, frames: int) -> Tensor:
    """Standard normal [480 frames, 9], by how many frames of the turn were made before."""
    return torch.randn((frames * HOP, HARMONICS), generator=torch.Generator().manual_seed(made), device="cpu")


def _row(memory: FlowMemory, row: int) -> dict[str, Tensor]:
    """A row's own tensors: a view would keep the whole batch."""
    heard = memory.encoder
    return {
        "prompt": torch.tensor([memory.prompt]),
        "speaker": memory.speaker[row].clone(),
        "pre": heard.pre[row].clone(),
        "up": heard.up[row].clone(),
        "codes": heard.codes[:, row].clone(),
        "frames": heard.frames[:, row].clone(),
        "convolved": memory.convolved[:, :, row].clone(),
        "past": memory.past[:, :, row].clone(),
    }


def _stacked(voices: Sequence[Voice]) -> FlowMemory:
    def together(name: str, dim: int) -> Tensor:
        return torch.stack([voice[name] for voice in voices], dim)

    return FlowMemory(
        int(voices[0]["prompt"]),
        together("speaker", 0),
        EncoderMemory(together("pre", 0), together("up", 0), together("codes", 1), together("frames", 1)),
        together("convolved", 2),
        together("past", 2),
    )
