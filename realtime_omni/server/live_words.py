"""Transcripts as a wire without corrections wants them: fragments that are joined in order and never taken back.

Owns what was said of each utterance so far, and the space between two of them.
"""

from __future__ import annotations

from realtime_omni.session.signals import InputTranscript, OutputText


class Captions:
    """One side of a session. Methods return the fragment to send; empty: nothing."""

    def __init__(self) -> None:
        self._speaker: str | None = None
        self._said = ""
        """Of the current utterance."""
        self._any = False

    def output(self, text: OutputText) -> str:
        return self._say(text.response, text.text)

    def input(self, transcript: InputTranscript) -> str:
        """A text that replaces the fragments before it waits until it is final; then what it adds to them is said."""
        text = transcript.text
        if transcript.whole:
            said = self._said if transcript.utterance == self._speaker else ""
            if not transcript.final or not text.startswith(said):
                return ""
            text = text[len(said) :]
        return self._say(transcript.utterance, text)

    def _say(self, speaker: str, text: str) -> str:
        if not text:
            return ""
        if speaker != self._speaker:
            self._speaker, self._said = speaker, ""
        self._said += text
        space = " " if self._any and self._said == text and not text[0].isspace() else ""
        self._any = True
        return space + text


__all__ = ["Captions"]
