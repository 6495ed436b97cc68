"""Our sessions in front of a generate()-style engine: the whole path from event to commit, with a fake client.

Expected texts and orders come from the session contract (rows A9-A17, A25, A29), not from the code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from realtime_omni import ControlInput, SessionEvent, SessionManager
from realtime_omni.config import Config, EngineSection
from realtime_omni.errors import AbortedError, ChunkMetadataError, CleanupError, ConfigError, StateError, TickError
from realtime_omni.generate import GenerateConsumer, chunk_metadata
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.models.base import ModelSpec
from realtime_omni.session.values import ArtifactSpec, Modality, Representation, TickRequest

SPEC = ModelSpec(
    name="foreign",
    kv=KVSpec(num_layers=1, num_kv_heads=1, head_dim=1, tokens_per_frame=1, frames_per_block=3, window_frames=9),
    artifacts=(ArtifactSpec("latent", Modality.VIDEO, Representation.LATENT, "CTHW", fps=12.0, primary=True),),
    height=480,
    width=832,
    fps=12.0,
    frames_per_block=3,
    default_prompt="a pier at dawn",
)


class Params:
    """A sampling-params template as a foreign engine has it."""

    def __init__(self, extra_args: dict[str, Any]) -> None:
        self.extra_args = extra_args
        self.seed = 42


class FakeClient:
    """Answers like a two-stage engine; ``edit`` changes the last output, ``gate`` holds it back."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str]] = []
        self.edit: Any = None
        self.gate: asyncio.Event | None = None
        self.rpc_answer: Any = [[True], [{"supported": True}, True]]

    async def generate(
        self, prompt: Any, request_id: str, sampling_params_list: Any, output_modalities: Any
    ) -> AsyncIterator[dict[str, Any]]:
        tick = TickRequest.from_extra_args(sampling_params_list[1].extra_args)
        assert tick is not None
        self.requests.append({"prompt": prompt, "routing_id": request_id, "tick": tick, "params": sampling_params_list})
        if self.gate is not None:
            await self.gate.wait()
        yield {"stage_id": 0, "finished": True}
        output: dict[str, Any] = {
            "stage_id": 1,
            "finished": True,
            "error": None,
            "multimodal_output": {
                "payload": {"video": np.zeros((16, 3, 2, 2), np.float32)},
                "metadata": {
                    "ar_diffusion": {
                        "session_id": tick.session_id,
                        "request_id": tick.request_id,
                        "chunk_index": tick.chunk_index,
                        "applied_event_ids": list(tick.applied_event_ids),
                    }
                },
            },
        }
        if self.edit is not None:
            self.edit(output)
        yield output

    async def collective_rpc(self, method: str, *, args: Any, stage_ids: Any, timeout: float) -> Any:
        self.calls.append((method, args[0]))
        if isinstance(self.rpc_answer, Exception):
            raise self.rpc_answer
        return self.rpc_answer


def consumer(client: FakeClient, templates: list[Any], **more: Any) -> GenerateConsumer:
    return GenerateConsumer(
        client,
        spec=SPEC,
        prompt_provider=lambda tick: {"prompt": tick.prompt},
        sampling_params_list=templates,
        diffusion_stage_id=1,
        **more,
    )


def templates() -> list[Params]:
    return [Params({"stage": "encode"}), Params({"stage": "denoise", "flow_shift": 5.0})]


async def test_a_tick_travels_as_one_request_and_commits_what_comes_back() -> None:
    """The prompt provider sees the tick, the payload becomes the declared artifact, the index advances."""
    client = FakeClient()
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session("pier", seed=1)
        await session.accept_event(SessionEvent(3, prompt="fog"))
        chunk = await session.next_chunk()
        assert client.requests[0]["prompt"] == {"prompt": "fog"}
        assert chunk.metadata.applied_event_ids == (3,)
        assert chunk.artifacts["latent"].data.shape == (16, 3, 2, 2)
        assert (session.chunk_index, session.pending_event_count) == (1, 0)
        await session.close()
        assert client.calls == [("close_ar_diffusion_session", "pier")]


@pytest.mark.req("AC-10")
async def test_the_template_is_never_changed_and_the_copy_keeps_its_own_extra_args() -> None:
    """Each tick gets copies; only the diffusion stage's copy carries the tick."""
    client, mine = FakeClient(), templates()
    async with SessionManager(config=Config(), consumer=consumer(client, mine)) as manager:
        session = await manager.create_session()
        await session.next_chunk()
        await session.next_chunk()
    assert mine[0].extra_args == {"stage": "encode"}
    assert mine[1].extra_args == {"stage": "denoise", "flow_shift": 5.0}
    first, second = (r["params"] for r in client.requests)
    assert first[1].extra_args["flow_shift"] == 5.0
    assert "ar_diffusion_tick" not in first[0].extra_args
    assert first[1] is not second[1]


@pytest.mark.req("AC-11")
async def test_the_routing_id_and_the_ticks_request_id_differ_and_both_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither overwrites the other (row A6)."""
    client = FakeClient()
    with caplog.at_level(logging.INFO, logger="realtime_omni.generate"):
        async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
            session = await manager.create_session()
            chunk = await session.next_chunk()
    request = client.requests[0]
    assert request["routing_id"] != request["tick"].request_id == chunk.metadata.request_id
    assert request["routing_id"] in caplog.text
    assert chunk.metadata.request_id in caplog.text


@pytest.mark.req("AC-06")
async def test_output_without_metadata_is_refused_by_name() -> None:
    """The text names ``multimodal_output.metadata``; nothing is committed."""
    client = FakeClient()
    client.edit = lambda output: output["multimodal_output"].pop("metadata")
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session()
        with pytest.raises(ValueError, match=r"multimodal_output\.metadata"):
            await session.next_chunk()
        assert (session.state, session.chunk_index) == ("failed", 0)


@pytest.mark.req("AC-06")
async def test_event_ids_out_of_order_are_refused() -> None:
    """[8, 7] raises ``unique and strictly increasing``."""
    client = FakeClient()
    client.edit = lambda output: output["multimodal_output"]["metadata"]["ar_diffusion"].update(
        applied_event_ids=[8, 7]
    )
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session()
        with pytest.raises(ChunkMetadataError, match="unique and strictly increasing"):
            await session.next_chunk()


@pytest.mark.req("AC-07")
async def test_the_engines_error_wins_over_missing_metadata() -> None:
    """Both are wrong; the engine's own error is what the caller sees."""
    client = FakeClient()

    def both(output: dict[str, Any]) -> None:
        output["error"] = "out of memory on rank 0"
        output.pop("multimodal_output")

    client.edit = both
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session()
        with pytest.raises(RuntimeError, match="out of memory on rank 0") as caught:
            await session.next_chunk()
        assert not isinstance(caught.value, ChunkMetadataError)


async def test_a_failed_tick_closes_the_workers_state_and_allows_no_rollback() -> None:
    """A foreign engine promises no transaction: reset or close, never the same chunk again (row A19)."""
    client = FakeClient()
    client.edit = lambda output: output["multimodal_output"].pop("metadata")
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session("w")
        with pytest.raises(ChunkMetadataError):
            await session.next_chunk()
        # The release began before the failure was told; the loop makes the call a few turns later.
        while ("close_ar_diffusion_session", "w") not in client.calls:
            await asyncio.sleep(0)
        with pytest.raises(StateError, match="released"):
            await session.rollback()
        client.edit = None
        await session.reset()
        assert (await session.next_chunk()).chunk_index == 0


async def test_an_abort_is_ambiguous_for_a_foreign_worker_so_the_session_fails() -> None:
    """Nobody knows whether the block was committed: the chunk is not run again (row A36)."""
    client = FakeClient()
    client.gate = asyncio.Event()
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session()
        chunk = asyncio.create_task(session.next_chunk())
        while not client.requests:
            await asyncio.sleep(0)
        assert await session.abort() == 0
        with pytest.raises(AbortedError):
            await chunk
        assert session.state == "failed"


async def test_a_foreign_world_is_no_value_so_it_can_be_logged_and_replayed_but_neither_forked_nor_rewound() -> None:
    client = FakeClient()
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session("w")
        await session.accept_event(SessionEvent(4, prompt="rain"))
        await session.next_chunk()
        for call in (session.fork(), session.rewind(0)):
            with pytest.raises(StateError) as refused:
                await call
            assert refused.value.code == "unsupported"
        assert (session.oldest_rewind, session.state, len(manager.sessions())) == (None, "active", 1)
        log = await session.log()
        assert [chunk.prompt async for chunk in session.replay(log)] == ["rain"]
        assert ("reset_ar_diffusion_session", "w") in client.calls


async def test_close_does_not_wait_for_the_request_that_runs() -> None:
    """The request is cancelled, the worker is told, the id is free."""
    client = FakeClient()
    client.gate = asyncio.Event()
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session("w")
        chunk = asyncio.create_task(session.next_chunk())
        while not client.requests:
            await asyncio.sleep(0)
        await asyncio.wait_for(session.close(), 5)
        with pytest.raises(StateError):
            await chunk
        await manager.create_session("w")


@pytest.mark.parametrize(
    "answer", [[], [None], [[False], [True]], [{"supported": False, "error": "no"}], RuntimeError("worker died")]
)
async def test_a_close_that_no_worker_confirms_leaves_a_tombstone(answer: Any) -> None:
    """Only a literal True counts, and nobody may object; a later retry ends the tombstone."""
    client = FakeClient()
    client.rpc_answer = answer
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session("w")
        with pytest.raises(CleanupError):
            await session.close()
        assert session.state == "cleanup_failed"
        with pytest.raises(StateError):
            await manager.create_session("w")
        client.rpc_answer = [True]
        await session.close()
        await manager.create_session("w")


@pytest.mark.req("AC-16")
async def test_two_replicas_without_affinity_are_refused_before_any_request() -> None:
    """A tick must reach the worker that holds its session."""
    client = FakeClient()
    with pytest.raises(ConfigError, match="affinity"):
        consumer(client, templates(), replicas=2)
    with pytest.raises(ConfigError, match="affinity"):
        Config(engine=EngineSection(replicas=2))
    assert not client.requests


def test_metadata_is_parsed_again_not_trusted() -> None:
    """Wrong types inside the envelope are refused with their path."""
    bad = {"session_id": "s", "request_id": "r", "chunk_index": True, "applied_event_ids": []}
    with pytest.raises(ChunkMetadataError, match="chunk_index"):
        chunk_metadata({"multimodal_output": {"metadata": {"ar_diffusion": bad}}})


def test_a_tick_round_trips_through_extra_args_and_an_absent_one_invents_no_session() -> None:
    """No ``default`` session (a hazard named in the contract's gaps)."""
    control = ControlInput("camera", "lingbot.camera_actions.v1", {"mode": "script", "frames": [["w"], [], []]})
    tick = TickRequest("s", "r", 2, (4, 7), "fog", (control,), reset=True)  # type: ignore[arg-type]
    assert TickRequest.from_extra_args({"ar_diffusion_tick": tick.to_extra_args(), "other": 1}) == tick
    assert TickRequest.from_extra_args({"session_id": "flat"}) is None


async def test_an_output_without_a_final_block_fails_the_tick() -> None:
    """A stream that only speaks for another stage is not an answer."""
    client = FakeClient()
    client.edit = lambda output: output.update(stage_id=0)
    async with SessionManager(config=Config(), consumer=consumer(client, templates())) as manager:
        session = await manager.create_session()
        with pytest.raises(TickError, match="without an output"):
            await session.next_chunk()
