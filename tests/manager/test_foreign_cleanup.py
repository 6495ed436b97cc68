"""Cleanup of sessions whose worker is somebody else's engine and answers later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from realtime_omni.config import Config, SessionSection
from realtime_omni.errors import CapacityError, CleanupError, TickError
from realtime_omni.generate import GenerateConsumer
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.manager import SessionManager
from realtime_omni.models.base import ModelSpec
from realtime_omni.session.values import ArtifactSpec, ChunkMetadata, Modality, Representation, TickRequest

SPEC = ModelSpec(
    name="foreign",
    kv=KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, tokens_per_frame=1, frames_per_block=3, window_frames=9),
    artifacts=(ArtifactSpec("latent", Modality.VIDEO, Representation.LATENT, "CTHW", primary=True),),
    height=8,
    width=8,
    fps=12.0,
    frames_per_block=3,
    default_prompt="a pier",
)


class SlowWorker:
    """A foreign engine whose clean-up calls take a moment. ``calls`` is what it was asked, ``done`` what it finished."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.done: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.tick_gate = asyncio.Event()
        self.tick_gate.set()
        self.ticks = 0
        self.fail_ticks = False
        self.fail_calls = 0

    async def generate(
        self, prompt: Any, request_id: str, sampling_params_list: Any, output_modalities: Any
    ) -> AsyncIterator[Any]:
        tick = TickRequest.from_extra_args(sampling_params_list[0]["extra_args"])
        assert tick is not None
        self.ticks += 1
        await self.tick_gate.wait()
        yield {
            "error": "out of memory" if self.fail_ticks else None,
            "multimodal_output": {
                "payload": {"video": np.zeros((1, 1, 1, 1), np.float32)},
                "metadata": {"ar_diffusion": ChunkMetadata.from_tick(tick).to_dict()},
            },
        }

    async def collective_rpc(self, method: str, *, args: Any, stage_ids: Any, timeout: float) -> Any:
        call = f"{method.split('_')[0]} {args[0]}"
        self.calls.append(call)
        await self.gate.wait()
        await asyncio.sleep(0)
        if self.fail_calls:
            self.fail_calls -= 1
            raise OSError("the worker is busy")
        self.done.append(call)
        return [True]


def managed(worker: SlowWorker, **session: Any) -> SessionManager:
    consumer = GenerateConsumer(
        worker, spec=SPEC, prompt_provider=lambda tick: tick.prompt, sampling_params_list=[{"extra_args": {}}]
    )
    return SessionManager(config=Config(session=SessionSection(**session)), consumer=consumer)


async def test_a_session_that_failed_and_was_reset_is_closed_at_the_worker_too() -> None:
    worker = SlowWorker()
    async with managed(worker) as manager:
        session = await manager.create_session("a")
        worker.fail_ticks = True
        with pytest.raises(TickError):
            await session.next_chunk()
        await session.reset()
        await session.close()
        assert worker.done == ["close a", "reset a", "close a"]


async def test_a_reset_right_after_a_failure_waits_for_the_workers_release() -> None:
    worker = SlowWorker()
    async with managed(worker) as manager:
        session = await manager.create_session("a")
        worker.fail_ticks = True
        worker.gate.clear()
        with pytest.raises(TickError):
            await session.next_chunk()
        reset = asyncio.create_task(session.reset())
        await manager.create_session("other")  # the engine has looked at the reset by now
        assert worker.calls == ["close a"]
        worker.fail_ticks = False
        worker.gate.set()
        await reset
        assert worker.done[:2] == ["close a", "reset a"]
        assert (await session.next_chunk()).chunk_index == 0


async def test_stop_waits_for_the_worker_to_let_go() -> None:
    worker = SlowWorker()
    manager = managed(worker)
    await manager.start()
    for name in "ab":
        await (await manager.create_session(name)).next_chunk()
    worker.gate.clear()
    stopping = asyncio.create_task(manager.stop())
    while len(worker.calls) < 2:
        await asyncio.sleep(0.001)
    assert not stopping.done()
    worker.gate.set()
    await stopping
    assert sorted(worker.done) == ["close a", "close b"]


async def test_an_abort_whose_effect_at_the_worker_is_unknown_fails_the_session_and_everybody_is_told() -> None:
    worker = SlowWorker()
    async with managed(worker) as manager:
        session = await manager.create_session("a")
        notices: list[str] = []
        session.subscribe(lambda notice: notices.append(f"{notice.kind} {notice.code}"))
        worker.tick_gate.clear()
        chunks = [asyncio.create_task(session.next_chunk()) for _ in range(2)]
        while not worker.ticks:
            await asyncio.sleep(0.001)
        assert await session.abort() == 0
        outcomes = await asyncio.gather(*chunks, return_exceptions=True)
        assert [getattr(o, "code", o) for o in outcomes] == ["aborted", "session_failed"]
        assert session.state == "failed"
        assert notices == ["failed aborted"]
        worker.tick_gate.set()
        await session.reset()
        assert (await session.next_chunk()).chunk_index == 0


async def test_closes_that_overlap_at_a_slow_worker_are_one_call_and_one_outcome() -> None:
    worker = SlowWorker()
    async with managed(worker) as manager:
        session = await manager.create_session("a")
        worker.fail_calls = 1
        outcomes = await asyncio.gather(*(session.close() for _ in range(4)), return_exceptions=True)
        assert [type(o) for o in outcomes] == [CleanupError] * 4
        assert worker.calls == ["close a"]
        await session.close()
        assert worker.calls == ["close a"] * 2
        assert manager.sessions() == ()


async def test_a_place_is_taken_until_a_slow_close_is_over() -> None:
    worker = SlowWorker()
    async with managed(worker, max_sessions=1) as manager:
        session = await manager.create_session("a")
        worker.gate.clear()
        closing = asyncio.create_task(session.close())
        while not worker.calls:
            await asyncio.sleep(0.001)
        with pytest.raises(CapacityError):
            await manager.create_session("b")
        worker.gate.set()
        await closing
        await manager.create_session("b")
