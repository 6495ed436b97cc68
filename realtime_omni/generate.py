"""Our sessions in front of somebody else's engine: ticks through any async ``generate()`` client.

Each tick is one request that carries the typed tick under ``extra_args["ar_diffusion_tick"]`` (rows A9-A17, A25, A29,
A40, A41). The client's own routing id is its business; the tick's ``request_id`` correlates the answer. Several
sessions' requests run side by side. While they run the engine thread looks at its inbox every few milliseconds, so
close, abort and reset act without waiting for them.

Errors, in this order: the engine's own, then missing metadata, then metadata that is malformed; whether it equals the
tick is the session's question. A failed tick closes the worker's state: a foreign engine promises no rollback.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from realtime_omni.engine.accounting import MemoryBytes
from realtime_omni.engine.consumer import Done, PlannedRow, Release
from realtime_omni.errors import (
    ArgumentError,
    ChunkMetadataError,
    CleanupError,
    ConfigError,
    ErrorCode,
    StateError,
    TickError,
)
from realtime_omni.models.base import ControlReducer, LatestWinsReducer, ModelSpec, RowOutput, SessionSetup
from realtime_omni.session.observation import Observation
from realtime_omni.session.values import Artifact, ChunkMetadata, SessionEvent, SessionId, TickRequest

log = logging.getLogger(__name__)

POLL_S = 0.005
"""How long the engine thread waits for answers before it looks at its inbox again."""
CLOSE_TIMEOUT_S = 180.0


class GenerateClient(Protocol):
    """What we need of a foreign engine; vLLM-Omni's ``AsyncOmni`` has this shape."""

    def generate(
        self, prompt: Any, request_id: str, sampling_params_list: Sequence[Any], output_modalities: Sequence[str] | None
    ) -> AsyncIterator[Any]: ...

    async def collective_rpc(
        self, method: str, *, args: tuple[Any, ...], stage_ids: Sequence[int], timeout: float
    ) -> Any: ...


PromptProvider = Callable[[TickRequest], Any]
ArtifactReader = Callable[[Any, ModelSpec], Sequence[Artifact]]


class GenerateConsumer:
    """A :class:`~realtime_omni.engine.consumer.TickConsumer` over a :class:`GenerateClient`.

    Args:
        client: the foreign engine. All its coroutines run on ``loop``.
        spec: what its model yields; ``rollback_safe`` is ignored (it cannot be known).
        prompt_provider: builds the request's prompt from the tick.
        sampling_params_list: one template per stage, deep-copied for every tick and never changed.
        diffusion_stage_id: the stage that owns the session and yields the block.
        replicas: replicas of that stage; anything but one is refused: a tick must reach the worker that holds its session.
        read_artifacts: turns an output into typed artifacts.
    """

    def __init__(
        self,
        client: GenerateClient,
        *,
        spec: ModelSpec,
        prompt_provider: PromptProvider,
        sampling_params_list: Sequence[Any],
        diffusion_stage_id: int = 0,
        output_modalities: Sequence[str] | None = None,
        replicas: int = 1,
        routing_ids: Callable[[TickRequest], str] | None = None,
        read_artifacts: ArtifactReader | None = None,
        reducer_factory: Callable[[], ControlReducer] = LatestWinsReducer,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if replicas != 1:
            raise ConfigError(
                f"stage {diffusion_stage_id} has {replicas} replicas: sessions need affinity, which is not configured",
                code=ErrorCode.UNSUPPORTED,
                path="replicas",
            )
        if not 0 <= diffusion_stage_id < len(sampling_params_list):
            raise ConfigError(
                f"there is no sampling template for stage {diffusion_stage_id}", path="diffusion_stage_id"
            )
        self._client = client
        self._spec = spec
        self._prompt_provider = prompt_provider
        self._templates = tuple(sampling_params_list)
        self._stage = diffusion_stage_id
        self._modalities = output_modalities
        self._routing_ids = routing_ids if routing_ids is not None else _routing_id
        self._read_artifacts = read_artifacts if read_artifacts is not None else payload_artifacts
        self._reducer_factory = reducer_factory
        self._close_timeout_s = close_timeout_s
        self._loop = loop if loop is not None else asyncio.get_running_loop()
        self._order: dict[SessionId, None] = {}

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def understand(self, event: SessionEvent) -> str | None:
        return None

    def check_observation(self, observation: Observation) -> None:
        raise ArgumentError("a foreign engine takes no observations", path="observation")

    @property
    def abortable(self) -> bool:
        return False  # the foreign worker may have committed the block: whether it did is not known

    @property
    def rewind_blocks(self) -> int:
        return 0  # the world is the foreign worker's

    def new_reducer(self) -> ControlReducer:
        return self._reducer_factory()

    def check_setup(self, setup: SessionSetup) -> None:
        """What a foreign model refuses is not known before it is asked."""

    def open(self, setup: SessionSetup) -> None:
        self._order[setup.session_id] = None

    def needs_prefill(self, session_id: SessionId) -> bool:
        return False

    def prefill(self, sessions: Sequence[PlannedRow]) -> GenerateRun:
        raise TickError("a foreign engine prefills by itself")

    def plan(self, rows: Sequence[PlannedRow]) -> GenerateRun:
        for row in rows:
            self._order.pop(row.tick.session_id, None)
            self._order[row.tick.session_id] = None
        return GenerateRun(self, rows)

    def reset(self, setup: SessionSetup) -> Release:
        self._order[setup.session_id] = None  # a failed session was closed at the worker; now it is there again
        return self._rpc("reset_ar_diffusion_session", setup.session_id)

    def fork(self, session_id: SessionId, name: SessionId) -> None:
        raise StateError("a foreign engine cannot fork a session", code=ErrorCode.UNSUPPORTED)

    def rewind(self, session_id: SessionId, chunk_index: int) -> None:
        raise StateError("a foreign engine cannot rewind a session", code=ErrorCode.UNSUPPORTED)

    def retained(self, session_id: SessionId) -> Sequence[int]:
        return ()

    def identity(self) -> NoReturn:
        raise StateError("a foreign engine's sessions cannot be saved", code=ErrorCode.UNSUPPORTED)

    def capture(self, session_id: SessionId) -> NoReturn:
        self.identity()

    def check_saved(self, record: Any, tensors: Mapping[str, Any]) -> NoReturn:
        self.identity()

    def adopt(self, setup: SessionSetup, record: Any, tensors: Mapping[str, Any], chunk_index: int) -> NoReturn:
        self.identity()

    def release(self, session_id: SessionId) -> Release:
        if session_id not in self._order:
            return Done()
        return self._rpc("close_ar_diffusion_session", session_id, then=lambda: self._order.pop(session_id, None))

    def oldest(self, idle: Collection[str]) -> str | None:
        return next((s for s in self._order if s in idle), None)

    @property
    def fault(self) -> None:
        return None

    def is_sticky(self, error: BaseException) -> bool:
        return True  # whatever the foreign worker held for the tick, it gave up

    def pages(self) -> tuple[int, int]:
        return 0, 0

    def pages_of(self, session_id: SessionId) -> int:
        return 0

    def kv_bytes(self, session_id: SessionId) -> int:
        return 0

    def state_bytes(self, session_id: SessionId) -> int:
        return 0

    def memory(self) -> MemoryBytes:
        return MemoryBytes()

    def check(self) -> None:
        """Nothing of ours to recount."""

    def close(self) -> None:
        """The client belongs to whoever made it."""

    def sampling_params(self, tick: TickRequest) -> list[Any]:
        """Copies of the templates, the diffusion stage's with the tick beside its own ``extra_args``."""
        copies = [copy.deepcopy(t) for t in self._templates]
        target = copies[self._stage]
        own = _get(target, "extra_args")
        extra_args = {**(own or {}), TickRequest.EXTRA_ARGS_KEY: tick.to_extra_args()}
        if isinstance(target, dict):
            target["extra_args"] = extra_args
        else:
            target.extra_args = extra_args
        return copies

    async def generate(self, row: PlannedRow) -> RowOutput:
        """One request. Raises TickError, ChunkMetadataError."""
        tick = row.tick
        routing_id = self._routing_ids(tick)
        log.info(
            "tick submitted session_id=%s request_id=%s routing_id=%s", tick.session_id, tick.request_id, routing_id
        )
        final = None
        async for output in self._client.generate(
            prompt=self._prompt_provider(tick),
            request_id=routing_id,
            sampling_params_list=self.sampling_params(tick),
            output_modalities=self._modalities,
        ):
            if _get(output, "stage_id", self._stage) == self._stage and _get(output, "finished", True):
                final = output
        if final is None:
            raise TickError("the engine finished without an output of the diffusion stage")
        error = _get(final, "error")
        if error:
            raise TickError(f"the engine reported an error: {error}")
        metadata = chunk_metadata(final)
        return RowOutput(metadata, tuple(self._read_artifacts(final, self._spec)), None)

    def submit(self, row: PlannedRow) -> concurrent.futures.Future[RowOutput]:
        return asyncio.run_coroutine_threadsafe(self.generate(row), self._loop)

    def _rpc(self, method: str, session_id: SessionId, then: Callable[[], object] | None = None) -> Release:
        call = self._client.collective_rpc(
            method, args=(session_id,), stage_ids=(self._stage,), timeout=self._close_timeout_s
        )
        bounded = asyncio.wait_for(call, self._close_timeout_s)
        return _Call(asyncio.run_coroutine_threadsafe(bounded, self._loop), method, then)


class _Call:
    """A worker RPC under way; only a literal True from somebody and no failure from anybody counts."""

    def __init__(self, future: concurrent.futures.Future[Any], method: str, then: Callable[[], object] | None) -> None:
        self._future = future
        self._method = method
        self._then = then

    def poll(self) -> bool:
        if not self._future.done():
            return False
        try:
            answers = list(_flatten(self._future.result()))
        except (Exception, asyncio.CancelledError, concurrent.futures.CancelledError) as error:
            raise CleanupError(f"{self._method} failed") from error
        refused = [a for a in answers if a is False or (isinstance(a, Mapping) and not a.get("supported", True))]
        if refused or not any(a is True for a in answers):
            raise CleanupError(f"{self._method} was not confirmed by every worker")
        if self._then is not None:
            self._then()
        return True


class GenerateRun:
    """The requests of one batch."""

    stage = "generate"

    def __init__(self, consumer: GenerateConsumer, planned: Sequence[PlannedRow]) -> None:
        self._consumer = consumer
        self._planned: list[PlannedRow] = []
        self._futures: dict[int, concurrent.futures.Future[RowOutput]] = {}
        self._active: dict[int, None] = {}
        self.join(planned)

    @property
    def active(self) -> tuple[int, ...]:
        return tuple(self._active)

    def join(self, rows: Sequence[PlannedRow]) -> Sequence[int]:
        numbers = range(len(self._planned), len(self._planned) + len(rows))
        self._planned += rows
        self._active |= dict.fromkeys(numbers)
        return numbers

    def is_done(self, row: int) -> bool:
        return row in self._futures and self._futures[row].done()

    def advance(self) -> bool:
        for row in self._active:
            if row not in self._futures:
                self._futures[row] = self._consumer.submit(self._planned[row])
        waiting = [self._futures[row] for row in self._active]
        if not waiting:
            return False
        return bool(concurrent.futures.wait(waiting, timeout=POLL_S).not_done)

    def drop(self, row: int) -> None:
        self.rollback(row)

    def outcome(self, row: int) -> RowOutput | Exception:
        try:
            return self._futures[row].result(timeout=0)
        except concurrent.futures.CancelledError:
            return TickError("the request was cancelled")
        except Exception as error:
            return error

    def precommit(self, row: int) -> None:
        """The worker has committed by itself."""

    def commit(self, row: int) -> None:
        self._active.pop(row, None)

    def rollback(self, row: int) -> None:
        self._active.pop(row, None)
        if row in self._futures:
            self._futures[row].cancel()

    def close(self) -> None:
        for row in tuple(self._active):
            self.rollback(row)


def chunk_metadata(output: Any) -> ChunkMetadata:
    """Re-parse ``multimodal_output.metadata.ar_diffusion``. Raises ChunkMetadataError naming what is missing."""
    envelope = _get(output, "multimodal_output")
    metadata = _get(envelope, "metadata") if envelope is not None else None
    if not isinstance(metadata, Mapping) or metadata.get("ar_diffusion") is None:
        raise ChunkMetadataError(
            "the output carries no multimodal_output.metadata.ar_diffusion", path="multimodal_output.metadata"
        )
    return ChunkMetadata.parse(metadata["ar_diffusion"])


def payload_artifacts(output: Any, spec: ModelSpec) -> Sequence[Artifact]:
    """Artifacts from ``multimodal_output.payload``; its keys are artifact names, or modalities that one artifact has."""
    envelope = _get(output, "multimodal_output")
    payload = _get(envelope, "payload") or {}
    found = []
    for declared in spec.artifacts:
        same_modality = [a for a in spec.artifacts if a.modality is declared.modality]
        key = declared.name if declared.name in payload or len(same_modality) > 1 else str(declared.modality)
        if key in payload:
            found.append(
                Artifact(
                    declared.name,
                    declared.modality,
                    declared.representation,
                    declared.layout,
                    payload[key],
                    fps=declared.fps,
                    sample_rate_hz=declared.sample_rate_hz,
                )
            )
    return found


def _routing_id(tick: TickRequest) -> str:
    from realtime_omni.ids import random_request_id

    return "world-" + random_request_id(tick.session_id, tick.chunk_index)


def _get(value: Any, name: str, default: Any = None) -> Any:
    return value.get(name, default) if isinstance(value, Mapping) else getattr(value, name, default)


def _flatten(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    else:
        yield value
