"""A fork of a large world shares all of its pages, in a time that is not that of a copy."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from realtime_omni.engine import commands as c
from realtime_omni.models.base import ModelSpec
from realtime_omni.models.null.model import FRAMES, NullWorld
from realtime_omni.session.values import SessionId
from realtime_omni.testing.inline import InlineEngine

PAGES = 10_000
WINDOW = 12
TOKENS = -(-PAGES // WINDOW)
"""Per frame, and a page each."""
FORKS = 8
BOUND_S = 10e-3
"""Ten times what a fork may take, as a bound against copies; `bench sessions` measures."""


class LargeNull(NullWorld):
    """A null world whose window is 10,000 pages of one token."""

    def __init__(self) -> None:
        super().__init__()
        self._zeros = torch.zeros(1, FRAMES * TOKENS, 1, 1)

    @property
    def spec(self) -> ModelSpec:
        spec = super().spec
        return replace(spec, kv=replace(spec.kv, window_frames=WINDOW, tokens_per_frame=TOKENS, page_tokens=1))


def test_a_fork_of_ten_thousand_pages_takes_no_page_and_no_copy() -> None:
    e = InlineEngine(LargeNull(), sessions=1 + FORKS, dtype="float32")
    e.create("a")
    for _ in range(WINDOW // FRAMES):
        e.next("a")
    used, free, bits = e.view("a").pages_used, e.free_pages, e.kv_bits("a")
    assert used >= PAGES
    took = []
    for number in range(FORKS):
        ticket = e.send(c.Fork(ticket=0, session_id=SessionId("a"), name=f"f{number}"))
        began = time.perf_counter()
        e.absorb()  # and not a cycle, behind which the engine recounts every page
        took.append(time.perf_counter() - began)
        e.result(ticket)
    assert e.free_pages == free
    assert e.runner.book.statistics().shared_pages == used
    assert e.runner.book.pages_of("f0") == e.runner.book.pages_of("a")
    assert e.kv_bits("f0") == bits
    assert min(took) < BOUND_S
    for number in range(FORKS):
        e.close(f"f{number}")
    assert (e.free_pages, e.runner.book.statistics().shared_pages) == (free, 0)
    e.close("a")
    assert e.free_pages == free + used
