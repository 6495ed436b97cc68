"""``realtime-omni bench sessions``: what it costs that a session is a value. Fork, rewind, snapshot, restore, in process.

One session walks until its window is full and everything that it can be rewound to is kept; then each round forks it, takes
the fork back as far as it goes, saves the session and restores it beside. Results are checked first: the branch and the
restored session must make the very chunk that the session itself makes, the rewound one that which it made before; when
anything was wrong, ``valid`` is false and says what.

Definitions (milliseconds, from the call in the event loop to its answer there, so two thread changes are in each):

- ``fork_ms``: ``session.fork()``; ``rewind_ms``: ``rewind(oldest_rewind)`` of that fork.
- ``snapshot_ms``: ``session.snapshot()``, the copy to the CPU; ``restore_ms``: ``manager.restore(snapshot)``.
- ``encode_ms``, ``decode_ms``: between the snapshot and the bytes of its file, checksum included, without a disk.

``bytes``: ``session_kv`` keys and values of the session, ``fork_kv`` what a fork added to them, ``states`` model states of the
session and of everything that it can be rewound to, ``snapshot`` the file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import numpy as np

from realtime_omni.bench.arguments import count
from realtime_omni.bench.conditions import commit, hardware, software, summary
from realtime_omni.build import kv_spec
from realtime_omni.config import Config, load
from realtime_omni.kv.capacity import KVSpec
from realtime_omni.manager import Session, SessionManager
from realtime_omni.session.frame import Frame
from realtime_omni.session.values import Chunk
from realtime_omni.testing.observing import observer

PLACES = 3
"""The session, its fork, the restored one."""
REST_S = 0.5
"""Longer than a clean pass."""
TIMES = ("fork_ms", "rewind_ms", "snapshot_ms", "restore_ms", "encode_ms", "decode_ms")

T = TypeVar("T")


class Stopwatch:
    """Milliseconds by name."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, list[float]] = defaultdict(list)

    async def of(self, name: str, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        result = await call
        self.taken[name].append((time.perf_counter() - began) * 1000)
        return result


async def measure(config: Config, rounds: int, seed: int) -> dict[str, Any]:
    """Everything but the conditions."""
    watch, wrong = Stopwatch(), list[str]()
    async with SessionManager(config=config) as manager:
        kv = kv_spec(config, manager.describe())
        session = await manager.create_session(seed=seed)
        walked = [await _next(manager, session) for _ in range(_blocks(kv))]
        await _rest(manager)
        page_bytes = kv.page_bytes
        before = manager.statistics()
        sizes = {"session_kv": before.pages_used * page_bytes, "fork_kv": 0, "states": before.memory.states}
        for _ in range(rounds):
            used = manager.statistics().pages_used
            fork = await watch.of("fork_ms", session.fork())
            sizes["fork_kv"] = max(sizes["fork_kv"], (manager.statistics().pages_used - used) * page_bytes)
            await watch.of("rewind_ms", fork.rewind(fork.oldest_rewind or 0))
            await fork.close()
            await _save_and_restore(manager, session, watch, sizes)
        wrong += await _differences(manager, session, walked)
    if sizes["fork_kv"]:
        wrong.append(f"a fork took {sizes['fork_kv']} bytes of keys and values")
    times = {name: summary(watch.taken[name], 0.5, 0.99) for name in TIMES}
    return {"valid": not wrong, "wrong": wrong, **times, "bytes": sizes}


async def _rest(manager: SessionManager) -> None:
    """Until no page changes hands: a block whose clean pass was deferred is written when the engine has time."""
    used, before = manager.statistics().pages_used, -1
    while used != before:
        await asyncio.sleep(REST_S)
        used, before = manager.statistics().pages_used, used


async def _save_and_restore(manager: SessionManager, session: Session, watch: Stopwatch, sizes: dict[str, int]) -> None:
    from realtime_omni.snapshot.snapshot import Snapshot

    snapshot = await watch.of("snapshot_ms", session.snapshot())
    data = await watch.of("encode_ms", asyncio.to_thread(snapshot.to_bytes))
    loaded = await watch.of("decode_ms", asyncio.to_thread(Snapshot.from_bytes, data))
    restored = await watch.of("restore_ms", manager.restore(loaded, "restored"))
    await restored.close()
    sizes["snapshot"] = len(data)


async def _differences(manager: SessionManager, session: Session, walked: Sequence[Chunk]) -> list[str]:
    """What is wrong with a fork, a restored session and a rewound one."""
    fork = await session.fork()
    restored = await manager.restore(await session.snapshot(), "restored")
    own, wrong = await _next(manager, session), []
    for what, other in (("the fork", fork), ("the restored session", restored)):
        if not _same(await _next(manager, other), own):
            wrong.append(f"{what} makes another chunk than the session")
    await fork.rewind(fork.oldest_rewind or 0)
    if not _same(await _next(manager, fork), [*walked, own][fork.oldest_rewind or 0]):
        wrong.append("a rewound session makes another chunk than before")
    return wrong


async def _next(manager: SessionManager, session: Session) -> Chunk:
    """The next chunk; a policy is shown what depends on the chunk's index alone."""
    given = observer(manager.describe())(session.chunk_index)
    if isinstance(given, Frame):
        return await session.feed(given)
    return await (session.next_chunk() if given is None else session.act(given))


def _same(one: Chunk, two: Chunk) -> bool:
    names = one.artifacts.keys() == two.artifacts.keys()
    return names and all(np.array_equal(a.data, two.artifacts[n].data) for n, a in one.artifacts.items())


def _blocks(kv: KVSpec) -> int:
    """Chunks until the window is full and a rewind can go all the way."""
    frames = kv.sink_frames + kv.window_frames + kv.window.rewind_frames
    return -(-frames // kv.frames_per_block) + 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="realtime-omni bench sessions", description="Fork, rewind, snapshot and restore of a session, in process."
    )
    parser.add_argument("--model", default="tiny-world", help="a recipe or model: null, tiny-world, ...")
    parser.add_argument("--rounds", type=count(), default=100)
    parser.add_argument("--seed", type=count(0), default=1)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE")
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    places = [f"session.max_sessions={PLACES}", f"kv.requested_sessions={PLACES}"]
    config = load(args.model, os.environ, [*places, *args.set])
    result = asyncio.run(measure(config, args.rounds, args.seed))
    conditions = {
        "commit": commit(),
        "hardware": hardware(),
        "software": software(),
        "config": {"model": args.model, "set": args.set, "rewind_blocks": config.kv.rewind_blocks},
        "workload": {"rounds": args.rounds, "seed": args.seed, "where": "in process, through the session manager"},
    }
    result = {"conditions": conditions, **result}
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name}: {json.dumps(value)}")
    return 0 if result["valid"] else 1


__all__ = ["main", "measure", "parse"]
