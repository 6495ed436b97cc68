"""What was said? Moonshine tiny (English, 27 M parameters; Jeffries et al. 2024, MIT) on onnxruntime, greedy.

The encoder takes audio as it is. The merged decoder takes a mask with one entry per *audio sample* and thins it out itself;
one as long as the encoder's output works for short audio and fails beyond nine seconds. Its first step computes the
cross-attention keys and values, which later steps get back unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from realtime_omni.models.voice.onnx import open_session

RATE = 16_000
MIN_SAMPLES = RATE // 4
"""Less is padded with silence: the encoder's three strided convolutions need something to look at."""
MAX_SAMPLES = 30 * RATE
"""More is cut at the front; the network was trained on up to 30 s."""
_BEGIN, _END = 1, 2
_TOKENS_PER_S = 6.5
"""No English is faster; it bounds a decoder that repeats itself. From Moonshine's paper."""


class Recognizer:
    """Text of an utterance. Safe to call from several threads."""

    def __init__(self, encoder: Path, decoder: Path, tokenizer: Path) -> None:
        self._encoder = open_session(encoder)
        self._decoder = open_session(decoder)
        self._pieces = read_pieces(tokenizer.read_bytes())
        self._cache_names = [i.name for i in self._decoder.get_inputs() if i.name.startswith("past_key_values.")]
        self._logits_and_present = [
            "logits",
            *(name.replace("past_key_values", "present") for name in self._cache_names),
        ]

    def __call__(self, audio: np.ndarray) -> str:
        """``audio``: float32 [n] in -1..1 at 16 kHz. Invents a word for silence and noise: ask only about speech."""
        audio = audio[-MAX_SAMPLES:].astype(np.float32)
        audio = np.pad(audio, (0, max(0, MIN_SAMPLES - len(audio))))[None]
        mask = np.ones(audio.shape, np.int64)
        (hidden,) = self._encoder.run(None, {"input_values": audio, "attention_mask": mask})
        limit = 2 + int(audio.shape[1] / RATE * _TOKENS_PER_S)
        return self._text(self._decode(hidden, mask, limit))

    def _decode(self, hidden: np.ndarray, mask: np.ndarray, limit: int) -> list[int]:
        nothing = np.zeros((1, 8, 0, 36), np.float32)
        past: dict[str, Any] = dict.fromkeys(self._cache_names, nothing)
        feed = {"encoder_hidden_states": hidden, "encoder_attention_mask": mask}
        tokens = [_BEGIN]
        while len(tokens) <= limit:
            first = len(tokens) == 1
            feed["input_ids"] = np.array([tokens[-1:]], np.int64)
            feed["use_cache_branch"] = np.array([not first])
            logits, *present = self._decoder.run(self._logits_and_present, feed | past)
            token = int(logits[0, -1].argmax())
            if token == _END:
                break
            tokens.append(token)
            for name, value in zip(self._cache_names, present, strict=True):
                if first or ".decoder." in name:
                    past[name] = value
        return tokens[1:]

    def _text(self, tokens: list[int]) -> str:
        raw = b"".join(self._pieces[t] for t in tokens if t > _END)
        return raw.decode("utf-8", errors="replace").replace("▁", " ").strip()


def read_pieces(data: bytes) -> list[bytes]:
    """Pieces by id; each is written as its length (one byte, or two when the first has its high bit set) and its bytes.

    Raises ValueError for a file that is cut off."""
    pieces: list[bytes] = []
    at = 0
    while at < len(data):
        length, at = data[at], at + 1
        if length >= 0x80:
            if at == len(data):
                raise ValueError("the tokenizer's file ends inside a length")
            length, at = (length & 0x7F) | data[at] << 7, at + 1
        if at + length > len(data):
            raise ValueError("the tokenizer's file ends inside a piece")
        pieces.append(data[at : at + length])
        at += length
    return pieces
