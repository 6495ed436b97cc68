"""What a recipe decides of a MiniCPM-o."""

from __future__ import annotations

from dataclasses import dataclass

from realtime_omni.models.minicpmo.sampling import CODES, TEXT, CodeChance, TextChance


@dataclass(frozen=True, slots=True)
class Settings:
    """How words and codes are drawn, and sizes. ``unit_words``: tokens that the model writes in a second, the end included.
    ``prompt_tokens``: room of a call's prompt. ``window_units``: seconds that the model sees, the present one included.
    ``rewind_units``: seconds that a call may go back."""

    text: TextChance = TEXT
    codes: CodeChance = CODES
    unit_words: int = 20
    prompt_tokens: int = 256
    window_units: int = 240
    rewind_units: int = 1
