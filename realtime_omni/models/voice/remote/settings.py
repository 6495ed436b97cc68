"""One endpoint of the recipe: where it is, which model it is asked for, which environment variable holds its key.

Owns the checks of these values. Must not know HTTP.
"""

from __future__ import annotations

import os
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from realtime_omni.errors import ConfigError

Name = Annotated[str, Meta(min_length=1, max_length=255)]
EnvName = Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]{0,254}$")]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``url``: the base that clients of OpenAI call so, such as ``http://127.0.0.1:8080/v1``. ``key_env``: names the
    environment variable with its key, never the key. ``timeout_s``: of silence, which ends a request. ``body``: fields that
    every request gets beside or instead of ours (temperature, language, ...); null takes one of ours away."""

    url: Name
    model: Name
    key_env: EnvName | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=300)] = 10.0
    body: dict[str, Any] = {}

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {self.url!r} is no http:// or https:// address")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("url has a user, a query or a fragment: name a key's variable in key_env")

    def key(self) -> str | None:
        """Raises ConfigError when the variable is named and empty, not set, or holds what no header may: an error of the
        request would quote it."""
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise ConfigError(f"the key of {self.url} is read from {self.key_env}, which is not set", path="options")
        if not all("!" <= c <= "~" for c in key):
            raise ConfigError(f"{self.key_env} has a blank or a character that no key has", path="options")
        return key


class RecognizerEndpoint(Endpoint, frozen=True, kw_only=True):
    """``POST {url}/audio/transcriptions``. ``fall_back``: the embedded recogniser (English) answers where this one fails."""

    fall_back: bool = True


class LanguageEndpoint(Endpoint, frozen=True, kw_only=True):
    """``POST {url}/chat/completions``, streamed, with the client's tools. ``skills``: sentences that the rules know (time,
    sums, timers, steering) are answered by rule first; else all are the endpoint's."""

    max_tokens: Annotated[int, Meta(ge=1, le=4096)] = 300
    skills: bool = False


class SynthesizerEndpoint(Endpoint, frozen=True, kw_only=True):
    """``POST {url}/audio/speech``, a stream of 16-bit samples (``pcm``). ``rate_hz``: of what comes, which its answer does not
    say. ``fall_back``: the embedded voice speaks where this one fails; else such a clause is told as text only."""

    voice: Name = "alloy"
    rate_hz: Annotated[int, Meta(ge=8_000, le=96_000)] = 24_000
    fall_back: bool = True
