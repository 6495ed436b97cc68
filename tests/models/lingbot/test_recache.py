"""A new prompt that writes the window anew: against a dense forward, in one piece, and what can no longer be gone back to."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.lingbot.test_model import still_camera
from models.lingbot.tiny import tiny_lingbot
from realtime_omni.errors import OmniError, TickError
from realtime_omni.models.common.noise import block_noise
from realtime_omni.models.common.wan import sampler
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine, small_config

FRAMES, SWITCH, CHUNKS = 3, 5, 7
OLD, NEW = "a street", "a red room"
SHAPE: dict[str, Any] = {"window_frames": 9, "sink_frames": 3}

KeysValues = tuple[Tensor, Tensor]
Block = list[KeysValues]
"""Keys and values of a block, layer by layer."""


def engine_of(dtype: torch.dtype = torch.float32, **settings: Any) -> InlineEngine:
    name = str(dtype).removeprefix("torch.")
    return InlineEngine(tiny_lingbot(dtype=dtype, **(SHAPE | {"recache": True} | settings)), small_config(dtype=name))


def walk(engine: InlineEngine, name: str, chunks: int, first: int = 0) -> list[np.ndarray]:
    """With the prompt changed before chunk SWITCH."""
    found = []
    for chunk in range(first, first + chunks):
        if chunk == SWITCH:
            engine.accept(name, 0, prompt=NEW)
        found.append(engine.next(name).artifacts["latents"].data)
    return found


@torch.no_grad()
def test_blocks_after_a_switch_are_those_of_a_dense_forward_over_the_window_written_anew() -> None:
    engine = engine_of(torch.float64)
    engine.create("a", seed=5, prompt=OLD)
    got = walk(engine, "a", CHUNKS)
    model: Any = engine.runner.model
    text = {p: model.network.text_cache(model._text.encode(p).double()[None]) for p in (OLD, NEW)}
    clean = [torch.from_numpy(latents) for latents in got]
    written = [dense(model, clean[0], 0, 0.0, text[OLD], [])[1]]
    for chunk in range(1, CHUNKS):
        prompt = NEW if chunk >= SWITCH else OLD
        if chunk == SWITCH:
            for block in (chunk - 2, chunk - 1):  # sees the sink, and what was written anew before it
                seen = [written[0], *written[SWITCH - 2 : block]]
                written[block] = dense(model, clean[block], block, 0.0, text[NEW], seen)[1]
        seen = [written[0], *written[max(chunk - 2, 1) : chunk]]
        expected = denoised(model, chunk, text[prompt], seen)
        assert np.abs(got[chunk] - expected.numpy()).max() <= 1e-5, f"chunk {chunk}"
        written.append(dense(model, clean[chunk], chunk, 0.0, text[prompt], seen)[1])


def denoised(model: Any, chunk: int, text: Any, seen: list[Block]) -> Tensor:
    levels = sampler.levels(model.settings.labels, model.settings.shift)
    x = block_noise(5, chunk, 0, model.latent_shape)
    for index, level in enumerate(levels):
        x0 = sampler.clean(x, dense(model, x, chunk, level.timestep, text, seen)[0], level.sigma)
        if index + 1 < len(levels):
            x = sampler.renoised(x0, block_noise(5, chunk, index + 1, model.latent_shape), levels[index + 1].renoise)
    return x0


def dense(model: Any, x: Tensor, block: int, t: float, text: Any, seen: list[Block]) -> tuple[Tensor, Block]:
    """The flow of one pass, and the block's keys and values."""
    own: Block = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own.append((k, v))
        whole = [torch.cat([*(past[layer][i] for past in seen), part], dim=1) for i, part in enumerate((k, v))]
        parts = [part.transpose(1, 2) for part in (q, *whole)]
        return functional.scaled_dot_product_attention(*parts).transpose(1, 2)

    latents = torch.cat((x, torch.zeros(FRAMES, 8, *model.latent_shape[2:])), dim=1)[None]
    frames = torch.arange(block * FRAMES, (block + 1) * FRAMES)[None]
    camera = model.network.camera_cache(still_camera(model).double()[None])
    return model.network(latents, torch.tensor([t]), frames, text, attend, camera=camera)[0], own


def test_only_a_prompt_that_is_another_writes_anew() -> None:
    engine, plain = engine_of(), engine_of(recache=False)
    for one in (engine, plain):
        one.create("a", seed=1, prompt=OLD)
    first, other = walk(engine, "a", CHUNKS), walk(plain, "a", CHUNKS)
    assert all(np.array_equal(a, b) for a, b in zip(first[:SWITCH], other[:SWITCH], strict=True))
    assert not np.allclose(first[SWITCH], other[SWITCH], atol=1e-4)
    held = engine.runner.book.pages_of("a")
    engine.accept("a", 1, prompt=NEW)
    engine.next("a")
    assert len(set(held) & set(engine.runner.book.pages_of("a"))) == len(held) - FRAMES, (
        "the same prompt changes nothing"
    )


@pytest.mark.parametrize("point", ["forward:2", "forward:3", "forward:4", "sync", "commit"])
def test_a_switch_that_fails_has_written_nothing_and_runs_again(point: str) -> None:
    engine = engine_of()
    engine.create("a", seed=1, prompt=OLD)
    walk(engine, "a", SWITCH)
    engine.fork("a", "b")
    expected = walk(engine, "b", 2, first=SWITCH)
    bits, free = engine.kv_bits("a"), engine.free_pages
    engine.accept("a", 0, prompt=NEW)
    inject(engine, point)
    with pytest.raises(TickError):
        engine.next("a")
    assert (engine.kv_bits("a"), engine.free_pages) == (bits, free)
    engine.runner.check()
    engine.rollback("a")
    got = [engine.next("a").artifacts["latents"].data for _ in range(2)]
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))


def test_a_fork_keeps_the_old_window_and_nobody_goes_back_beyond_a_switch() -> None:
    engine = engine_of()
    engine.create("a", seed=1, prompt=OLD)
    walk(engine, "a", SWITCH)
    engine.fork("a", "kept")
    bits = engine.kv_bits("kept")
    walk(engine, "a", 1, first=SWITCH)
    assert engine.kv_bits("kept") == bits
    with pytest.raises(OmniError) as caught:
        engine.rewind("a", SWITCH)
    assert caught.value.code == "not_retained"
    engine.next("a")
    engine.rewind("a", SWITCH + 1)
    engine.runner.check()


@pytest.mark.parametrize("later", [0, 1], ids=["at once", "a chunk later"])
def test_a_session_that_was_saved_behind_a_switch_goes_on(later: int) -> None:
    """It has no past, or one block of it, whatever the recipe keeps."""
    config = small_config(dtype="float32")
    config = msgspec.structs.replace(config, kv=msgspec.structs.replace(config.kv, rewind_blocks=3))
    engine = InlineEngine(tiny_lingbot(**SHAPE, recache=True), config)
    engine.create("a", seed=1, prompt=OLD)
    walk(engine, "a", SWITCH + 1 + later)
    engine.restore(engine.snapshot("a"), "b")
    for name in ("a", "b"):
        with pytest.raises(OmniError) as caught:
            engine.rewind(name, SWITCH)
        assert caught.value.code == "not_retained"
    if later:
        engine.rewind("a", SWITCH + 1)
        engine.rewind("b", SWITCH + 1)
    ours, theirs = (engine.next(name).artifacts["latents"].data for name in ("a", "b"))
    assert np.allclose(ours, theirs, atol=1e-6)


@pytest.mark.slow
def test_the_contract_is_kept() -> None:
    report = check_model(tiny_lingbot(**SHAPE, recache=True), dtype="float32")
    assert report.passed, str(report)
