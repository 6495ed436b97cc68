"""Writes protocols/vectors/moshi: messages and queries with what they mean, by hand from moshi.md.

``python tests/protocols/moshi/make_vectors.py``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[3] / "protocols" / "vectors" / "moshi"
Vector = dict[str, Any]


def frame(name: str, wire_hex: str, zeros: int = 0, **expect: Any) -> Vector:
    """``zeros``: bytes that follow."""
    return {"name": name, "wire_hex": wire_hex, "zeros": zeros, "expect": expect}


CLIENT: list[Vector] = [
    frame("audio", "014f676753", audio="4f676753"),
    frame("audio without bytes", "01", ignored=True),
    frame("nothing", "", ignored=True),
    frame("a handshake", "00" + "00000000" * 2, ignored=True),
    frame("text", "026869", ignored=True),
    frame("control: end of turn", "0301", ignored=True),
    frame("metadata", "047b7d", ignored=True),
    frame("ping", "06", ignored=True),
    frame("coloured text", "070548", ignored=True),
    frame("a kind nobody knows", "ff00", ignored=True),
    frame("the largest message", "01", 65_535, audio_bytes=65_535),
    frame("a message that is too large", "01", 65_536, error="message_too_large", close=1009),
]
SERVER: list[Vector] = [
    {"name": "handshake", "say": "ready", "args": {}, "wire_hex": "00"},
    {"name": "audio", "say": "audio", "args": {"data": "4f676753"}, "wire_hex": "014f676753"},
    {"name": "no audio yet", "say": "audio", "args": {"data": ""}, "wire_hex": None},
    {"name": "a piece of text", "say": "text", "args": {"piece": " hé"}, "wire_hex": "022068c3a9"},
    {"name": "no text", "say": "text", "args": {"piece": ""}, "wire_hex": None},
]


def query(name: str, wire: str, /, **expect: Any) -> Vector:
    return {"name": name, "query": wire, "expect": expect}


def bad(name: str, text: str, code: str, param: str) -> Vector:
    return {"name": name, "query": text, "error": {"code": code, "param": param}}


QUERIES: list[Vector] = [
    query("none", ""),
    query(
        "kyutai's page",
        "email=a%40b.c&text_temperature=0.7&text_topk=25&audio_temperature=0.8&audio_topk=250&pad_mult=0"
        "&text_seed=1&audio_seed=2&repetition_penalty_context=64&repetition_penalty=1&image_resolution=",
        text_temperature=0.7,
        text_topk=25,
        audio_temperature=0.8,
        audio_topk=250,
        pad_mult=0.0,
        text_seed=1,
        audio_seed=2,
        repetition_penalty_context=64,
        repetition_penalty=1.0,
    ),
    query("PersonaPlex's page", "text_prompt=You+are+Ann.&voice_prompt=NATF2.pt", text="You are Ann.", voice="NATF2"),
    query("PersonaPlex's one seed", "seed=42424242", text_seed=42424242, audio_seed=42424242),
    query("PersonaPlex's word for no seed", "seed=-1"),
    query("fields left empty", "text_prompt=&voice_prompt=&text_topk="),
    query("a recording as a voice", "voice_prompt=alice_1.wav", voice="alice_1"),
    bad("a path that goes up", "voice_prompt=..%2Fsecret.pt", "voice_invalid", "voice_prompt"),
    bad("an absolute path", "voice_prompt=%2Fetc%2Fpasswd", "voice_invalid", "voice_prompt"),
    bad("a hidden file", "voice_prompt=.pt", "voice_invalid", "voice_prompt"),
    bad("two endings", "voice_prompt=a.pt.pt", "voice_invalid", "voice_prompt"),
    bad("a line after the voice", "voice_prompt=a%0A", "voice_invalid", "voice_prompt"),
    bad("a NUL in the voice", "voice_prompt=a%00.pt", "voice_invalid", "voice_prompt"),
    bad("a temperature below zero", "text_temperature=-1", "invalid_parameter", "text_temperature"),
    bad("a temperature that is no number", "audio_temperature=nan", "invalid_parameter", "audio_temperature"),
    bad("a temperature without end", "audio_temperature=inf", "invalid_parameter", "audio_temperature"),
    bad("a top-k of zero", "text_topk=0", "invalid_parameter", "text_topk"),
    bad("a top-k that is a fraction", "audio_topk=2.5", "invalid_parameter", "audio_topk"),
    bad("a seed of 2^63", "seed=9223372036854775808", "invalid_parameter", "seed"),
    bad("a seed of many digits", "text_seed=" + "9" * 5000, "invalid_parameter", "text_seed"),
    bad("a prompt of 4,001", "text_prompt=" + "x" * 4001, "invalid_parameter", "text_prompt"),
]

FILES = {"client.json": CLIENT, "server.json": SERVER, "queries.json": QUERIES}


def render(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    TARGET.mkdir(parents=True, exist_ok=True)
    for file_name, vectors in FILES.items():
        (TARGET / file_name).write_text(render(vectors), encoding="utf-8")
