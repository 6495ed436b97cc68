"""What a call's context begins with: who the agent is, and a sample of the voice that it speaks in.

    <|im_start|>system\\n TEXT \\n<|audio_start|> [the voice's sound] <|audio_end|><|im_end|>

or, without a voice, the text alone. Source of the order: OpenBMB's duplex runtime (Apache-2.0), read as facts.
"""

from __future__ import annotations

import wave
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from realtime_omni.errors import ConfigError
from realtime_omni.models.minicpmo import mel
from realtime_omni.models.minicpmo.ears import Ears
from realtime_omni.models.minicpmo.state import Prompt
from realtime_omni.models.minicpmo.vocabulary import Words
from realtime_omni.session.frame import AddText, Configure, Directive

TEXT = "Streaming Omni Conversation."
LONGEST_S = 30


def prompt_of(words: Words, text: str | None, voice: str | None, most: int) -> tuple[Prompt, int]:
    """The prompt with as much of the text as ``most`` tokens leave room for (the voice's sound not among them), and how
    many of its tokens are left out."""
    head, tail = words.tokens("<|im_start|>system\n"), words.tokens("<|im_end|>")
    if voice is not None:
        tail = [*words.tokens("\n<|audio_start|>"), -1, *words.tokens("<|audio_end|><|im_end|>")]
    said = words.tokens(text if text is not None and text.strip() else TEXT)
    kept = said[: max(0, most - len(head) - len(tail))]
    whole = [*head, *kept, *tail]
    cut = whole.index(-1) if voice is not None else len(whole)
    return Prompt(tuple(whole[:cut]), tuple(whole[cut + 1 :]), voice), len(said) - len(kept)


def read_voices(folder: Path) -> Mapping[str, Tensor]:
    """Every ``NAME.wav`` of a folder that may not be there, by name: float32 [N] at 16 kHz. Raises ConfigError."""
    return {file.stem: _read(file) for file in sorted(folder.glob("*.wav"))}


class Prompts:
    """What calls begin with: ``voices`` (tokens [n, D] by name) and texts, in at most ``frames`` frames of
    ``per_frame`` tokens."""

    def __init__(self, words: Words, voices: Mapping[str, Tensor], frames: int, per_frame: int) -> None:
        self.voices = dict(voices)
        self.frames, self.per_frame = frames, per_frame
        self._words = words

    def of(self, text: str | None, voice: str | None) -> tuple[Prompt, int]:
        """As :func:`prompt_of`."""
        sound = len(self.voices[voice]) if voice is not None else 0
        return prompt_of(self._words, text, voice, self.frames * self.per_frame - sound)

    def told(self, prompt: Prompt, directives: Sequence[Directive]) -> Prompt:
        """What a call's first second makes of the prompt; a text that is too long is cut, because a frame is never refused."""
        voice, texts = prompt.voice, []
        for directive in directives:
            match directive:
                case Configure():
                    voice = directive.voice or voice
                    texts += [directive.instructions] if directive.instructions else []
                case AddText():
                    texts.append(directive.text)
                case _:
                    pass
        return prompt if not texts and voice == prompt.voice else self.of("\n".join(texts) or None, voice)[0]

    def tokens(self, prompt: Prompt) -> int:
        sound = 0 if prompt.voice is None else len(self.voices[prompt.voice])
        return len(prompt.before) + sound + len(prompt.after)

    def held(self, prompt: Prompt, frame: int) -> int:
        """Tokens of one of its frames; the last ones may have none."""
        return min(max(self.tokens(prompt) - frame * self.per_frame, 0), self.per_frame)

    def embedded(self, prompt: Prompt, frame: int, embed: Callable[[Sequence[int]], Tensor]) -> Tensor:
        """The frame's embeddings [T, D]."""
        sound = () if prompt.voice is None else (self.voices[prompt.voice],)
        whole = torch.cat((embed(prompt.before), *sound, embed(prompt.after)))
        return whole[frame * self.per_frame : (frame + 1) * self.per_frame]


def tokens_of(ears: Ears, sound: Tensor) -> Tensor:
    """A voice's sound as tokens of the language model, [n, D]."""
    with torch.no_grad():
        return ears.clip(mel.whole(sound.to(ears.positions.device)))


def _read(file: Path) -> Tensor:
    try:
        with wave.open(str(file), "rb") as source:
            form = (source.getframerate(), source.getsampwidth(), source.getnchannels())
            sound = source.readframes(LONGEST_S * mel.RATE + 1)
    except (OSError, EOFError, RuntimeError, wave.Error):  # RuntimeError: a part that is longer than its file
        raise ConfigError(f"{file.name} cannot be read as a WAV file", path=file.name) from None
    count = len(sound) // 2  # a file that was cut short may end within a number
    if form != (mel.RATE, 2, 1) or not mel.RATE <= count <= LONGEST_S * mel.RATE:
        raise ConfigError(f"{file.name}: a voice is 16-bit mono at 16 kHz, 1 to {LONGEST_S} s", path=file.name)
    samples = np.frombuffer(sound, "<i2", count)
    return torch.from_numpy(samples.astype(np.float32) / 32768)
