"""From a configuration to a running engine: model, KV plan, pools, runner. The only place that joins them.

Everything that can be refused is refused here, before a session exists (rows A28, A32, AC-16, AC-17).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from realtime_omni.clock import Clock
from realtime_omni.engine.consumer import TickConsumer
from realtime_omni.engine.engine import Engine, EngineSettings
from realtime_omni.engine.inbox import Inbox
from realtime_omni.engine.outbox import Outbox
from realtime_omni.engine.runner import ModelRunner
from realtime_omni.errors import ConfigError, ErrorCode
from realtime_omni.kv.capacity import CapacityPlan, KVSpec, plan_capacity
from realtime_omni.kv.manager import KVBook
from realtime_omni.models.base import RankedModel, WarmedModel
from realtime_omni.session.session import RequestIdFactory

if TYPE_CHECKING:
    from realtime_omni.config import Config
    from realtime_omni.models.base import ModelSpec, Ranks, WorldModel

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def engine_settings(config: Config, spec: ModelSpec, sessions: int) -> EngineSettings:
    """The engine's bounds from the recipe, held against what the model declares."""
    check_serial(config, spec)
    return EngineSettings(
        max_batch=1 if spec.serial else config.engine.max_batch,
        max_sessions=min(config.session.max_sessions, sessions),
        max_pending_events=config.engine.max_pending_events,
        evict=config.kv.policy == "lru",
        keep_failed=config.engine.on_failure == "keep" and spec.rollback_safe,
        horizon_frames=config.session.horizon_frames,
        budget_s=None if config.engine.budget_ms is None else config.engine.budget_ms / 1000,
    )


def check_serial(config: Config, spec: ModelSpec) -> None:
    """A serial model takes batches of one: asking for more is refused, never silently reduced."""
    if spec.serial and config.engine.max_batch != 1:
        raise ConfigError(
            f"model {spec.name!r} runs one session at a time: engine.max_batch must be 1, not {config.engine.max_batch}",
            code=ErrorCode.UNSUPPORTED,
            path="engine.max_batch",
        )


def kv_spec(config: Config, spec: ModelSpec) -> KVSpec:
    """The model's KV geometry with the recipe's overrides. The states that a rewind can go back to are paid for, too."""
    kv = spec.kv
    own = kv.model_owned_bytes_per_session
    past = own if spec.past_state_bytes is None else spec.past_state_bytes
    try:
        return replace(
            kv,
            sink_frames=kv.sink_frames if config.kv.sink_frames is None else config.kv.sink_frames,
            window_frames=kv.window_frames if config.kv.window_frames is None else config.kv.window_frames,
            page_tokens=kv.page_tokens if config.kv.page_tokens is None else config.kv.page_tokens,
            rewind_blocks=config.kv.rewind_blocks,
            model_owned_bytes_per_session=own + (config.kv.rewind_blocks * past if spec.rollback_safe else 0),
            requested_sessions=config.kv.requested_sessions,
            max_in_flight=1 if spec.serial else config.engine.max_batch,
            dtype_bytes=DTYPE_BYTES[config.dtype],
        )
    except ValueError as error:  # of a geometry: these frames hold no block of this model
        raise ConfigError(f"kv: {error}", path="kv") from error


def ranks_of(config: Config, model: WorldModel) -> Ranks | None:
    """The other processes of a model, as the recipe wants them. Raises ConfigError when the model has no such thing."""
    ranks = model.ranks if isinstance(model, RankedModel) else None
    found = 1 if ranks is None else ranks.count
    if config.parallel.ranks != found:
        raise ConfigError(
            f"model {model.spec.name!r} computes on {found} device(s), not on {config.parallel.ranks}",
            code=ErrorCode.UNSUPPORTED,
            path="parallel",
        )
    return ranks


def kv_plan(config: Config, spec: ModelSpec, ranks: Ranks | None = None) -> CapacityPlan:
    """How many sessions fit. Raises ConfigError with the numbers when not even one does."""
    geometry = kv_spec(config, spec)
    try:
        return plan_capacity(
            geometry,
            available_bytes=_available_to_rank(config, ranks),
            fraction=config.kv.memory_fraction,
            budget_bytes=config.kv.memory_bytes,
        )
    except ValueError as error:
        raise ConfigError(str(error), code=ErrorCode.CAPACITY, path="kv") from error


def _available_to_rank(config: Config, ranks: Ranks | None) -> int:
    free = None if ranks is None else ranks.available_bytes()
    return available_bytes(config.device) // config.parallel.ranks if free is None else free


def available_bytes(device: str) -> int:
    """Free memory of the device in bytes; on CPU what the system calls available."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return pages * os.sysconf("SC_PAGE_SIZE") or 1 << 32


def build_runner(config: Config, model: WorldModel) -> ModelRunner:
    """The runner of a loaded model: plan, book, pools, attention back-end."""
    import torch

    from realtime_omni.kv.attention import open_backend
    from realtime_omni.kv.storage import KVStorage

    ranks = ranks_of(config, model)
    plan = kv_plan(config, model.spec, ranks)
    book = KVBook.from_plan(plan)
    storage = KVStorage(plan.spec, plan.total_pages, device=config.device, dtype=getattr(torch, config.dtype))
    synchronize: Callable[[], None] | None = None
    if config.device.startswith("cuda"):

        def synchronize() -> None:
            torch.cuda.current_stream(
                torch.device(config.device)
            ).synchronize()  # not what a model does beside its tick

    kv = config.kv
    backend = open_backend(device=config.device, keep_gathered=kv.keep_gathered, fp8=kv.fp8_attention)
    if ranks is not None:
        backend = ranks.allocate(plan, backend, keep_gathered=kv.keep_gathered, fp8=kv.fp8_attention)
    if isinstance(model, WarmedModel):
        model.warm_up(storage)
    return ModelRunner(model, book, storage, backend, synchronize=synchronize, ranks=ranks)


def build_engine(
    config: Config,
    inbox: Inbox,
    outbox: Outbox,
    *,
    clock: Clock,
    mint: Callable[[], str],
    request_ids: RequestIdFactory,
    model: WorldModel | None = None,
    consumer: TickConsumer | None = None,
) -> Engine:
    """Runs on the engine's thread. ``consumer`` replaces the model runner (a foreign engine behind our sessions)."""
    if consumer is None:
        import torch

        torch.set_num_threads(config.engine.threads)
        from realtime_omni.models import catalog

        catalog.check_device(config)
        loaded = model if model is not None else catalog.build(config)
        try:
            check_serial(config, loaded.spec)
            runner = build_runner(config, loaded)
        except BaseException:
            if isinstance(loaded, RankedModel) and loaded.ranks is not None:
                loaded.ranks.close()
            raise
        settings = engine_settings(config, loaded.spec, runner.book.capacity)
        consumer = runner
    else:
        settings = engine_settings(config, consumer.spec, config.session.max_sessions)
    return Engine(consumer, settings, clock=clock, inbox=inbox, outbox=outbox, mint=mint, request_ids=request_ids)
