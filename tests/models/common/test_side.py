"""Data that is late: a chunk that is committed while a device still copies, to an in-process caller."""

from __future__ import annotations

import threading

import numpy as np
import torch
from msgspec.structs import replace

from models.lingbot.tiny import tiny_lingbot
from realtime_omni.models.common.side import OnHost, Side
from realtime_omni.models.common.wan.tiny_decoder import TinyDecoder
from realtime_omni.models.lingbot.model import LingBot
from realtime_omni.testing.inline import InlineEngine, small_config


class LateSide(Side):
    """Fills an array only when it is waited for, and counts who drains it."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.drained = 0

    def to_host(self, x: torch.Tensor) -> OnHost:
        data = np.zeros(x.shape, np.uint8)
        return OnHost(data, lambda: np.copyto(data, x.numpy()))

    def drain(self) -> None:
        self.drained += 1


def with_tiny_decoder() -> LingBot:
    torch.manual_seed(4)
    model = tiny_lingbot()
    return LingBot(
        model.network, model._text, model.settings, tiny=TinyDecoder(4, widths=(8, 6, 4, 4)), fingerprint="0" * 64
    )


def test_a_chunk_is_committed_before_its_pictures_are_there_and_the_next_one_may_run_meanwhile() -> None:
    model = with_tiny_decoder()
    wanted = InlineEngine(model, small_config(dtype="float32"))
    wanted.create("a", seed=1)
    pictures = [wanted.next("a", outputs=("frames",)).artifacts["frames"].data for _ in range(2)]
    model._side = late = LateSide()
    engine = InlineEngine(model, small_config(dtype="float32"))
    engine.create("a", seed=1)
    tickets = [engine.post_next("a", outputs=("frames",)) for _ in range(2)]
    engine.rest()
    chunks = [engine.result(ticket) for ticket in tickets]
    assert [chunk.is_filled for chunk in chunks] == [False, False]
    assert not any(chunk.artifacts["frames"].data.any() for chunk in chunks)
    for chunk in chunks:
        thread = threading.Thread(target=chunk.fill)
        thread.start()
        thread.join()
    for chunk, picture in zip(chunks, pictures, strict=True):
        assert np.array_equal(chunk.artifacts["frames"].data, picture)
    assert [picture.shape for picture in pictures] == [(9, 3, 32, 48), (12, 3, 32, 48)]
    assert not late.drained
    engine.close("a")
    assert late.drained, "what was decoded of the session was not waited for"


def test_a_saved_state_waits_for_what_decodes_beside_it() -> None:
    model = with_tiny_decoder()
    model._side = late = LateSide()
    engine = InlineEngine(model, small_config(dtype="float32"))
    engine.create("a", seed=1)
    engine.next("a", outputs=("frames",))
    engine.snapshot("a")
    assert late.drained


def test_chunks_without_late_data_are_filled() -> None:
    engine = InlineEngine(tiny_lingbot(), small_config(dtype="float32"))
    engine.create("a", seed=1)
    chunk = engine.next("a")
    assert chunk.is_filled
    waited: list[int] = []
    late = replace(chunk.artifacts["latents"], ready=lambda: waited.append(1))
    chunk = replace(chunk, artifacts={"latents": late})
    assert not chunk.is_filled
    chunk.fill()
    assert waited == [1]
