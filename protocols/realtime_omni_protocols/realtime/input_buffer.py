"""`InputBuffer`: what is known of the audio that no item holds yet, and of the speech in it.

Owns: how much was appended, the odd byte of a sample cut in two, the id announced for the user's next item.
Must not know: audio itself (it goes on to the session at once), events, time.
"""

from __future__ import annotations

from collections.abc import Callable

from .session import AudioFormat, sample_bytes


class InputBuffer:
    def __init__(self, mint: Callable[[str], str]) -> None:
        self._mint = mint
        self._bytes = 0
        self._rest = b""
        self.speaking = False
        self.item_id: str | None = None
        """Announced for what the user says now."""

    @property
    def empty(self) -> bool:
        return self._bytes == 0

    def append(self, audio: bytes, audio_format: AudioFormat) -> bytes:
        """The whole samples there are now; the first byte of one that was cut waits for its second."""
        audio = self._rest + audio
        whole = len(audio) - len(audio) % sample_bytes(audio_format)
        self._rest = audio[whole:]
        self._bytes += whole
        return audio[:whole]

    def forget_rest(self) -> None:
        """The format has changed: half a sample of the old one is noise in the new one."""
        self._rest = b""

    def start(self) -> str:
        """Speech begins: the id of the item that will hold it."""
        self.speaking = True
        if self.item_id is None:
            self.item_id = self._mint("item")
        return self.item_id

    def commit(self) -> str:
        """The buffer becomes an item: its id. It ends the speech under way, too."""
        item_id = self.item_id or self._mint("item")
        self._bytes = 0
        self.speaking = False
        self.item_id = None
        return item_id

    def clear(self) -> None:
        self._bytes = 0
        self._rest = b""
        self.speaking = False
        self.item_id = None
