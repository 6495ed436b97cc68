"""One session's tick over several processes: the same world as in one, and nothing left behind on any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from parallel.tiny_ranks import SHAPE, config, fill_share, lingbot, ranked, start, whole
from realtime_omni.build import kv_plan
from realtime_omni.config import Config
from realtime_omni.engine import commands as c
from realtime_omni.errors import AbortedError, ConfigError, ErrorCode, StateError
from realtime_omni.models.base import RankedModel
from realtime_omni.models.common.wan.ranks import RankedNetwork
from realtime_omni.models.common.wan.sharded import check_grid
from realtime_omni.models.lingbot.model import LingBot
from realtime_omni.parallel.mesh import Grid
from realtime_omni.session.values import ControlInput, SessionId
from realtime_omni.testing.inline import InlineEngine

BLOCKS = 4
"""The third block is the first that does not see all before it: three sink frames and six of the window."""
CLOSE = 1e-5
Latents = list[np.ndarray]


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["two", "four"])
def spread(request: pytest.FixtureRequest) -> Iterator[tuple[LingBot, Config]]:
    """Two ranks that share tokens; two times two, whose pairs also share matrices (two that only do: test_checkpoint)."""
    model = start(*request.param)
    yield model, config(*request.param)
    ranked(model).close()


@pytest.fixture(scope="module")
def expected() -> dict[str, Latents]:
    """Of one process."""
    return life(InlineEngine(lingbot(whole()), config()))


def life(engine: InlineEngine) -> dict[str, Latents]:
    """Two sessions that share batches, over sink and window; a camera, a prompt on the way; a reset; closed at the end."""
    engine.create("a", seed=5, prompt="a street")
    engine.create("b", seed=6)
    held = ControlInput("camera", "realtime_omni.held_keys.v1", {"keys": ["w", "l"]})
    engine.accept("a", 0, controls=[held])
    seen: dict[str, Latents] = {"a": [], "b": [], "again": []}
    for block in range(BLOCKS):
        if block == 2:
            engine.accept("a", 1, prompt="a red room")
        for name, chunk in zip("ab", engine.next_all(["a", "b"]), strict=True):
            assert not isinstance(chunk, Exception)
            seen[name].append(chunk.artifacts["latents"].data)
    engine.reset("a", seed=6)
    engine.close("b")
    seen["again"] = [engine.next("a").artifacts["latents"].data for _ in range(2)]
    engine.close("a")
    return seen


def assert_same(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for block, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert np.abs(ours - theirs).max() <= CLOSE, f"block {block}"


def assert_nothing_is_held(engine: InlineEngine) -> None:
    assert engine.runner.pages()[0] == 0
    for report in ranked(engine.runner.model).reports():
        assert (report.texts, report.cameras, report.plans) == (0, 0, 0)
        assert report.pages == engine.runner.storage.pages


def test_the_world_is_that_of_one_process(spread: tuple[LingBot, Config], expected: dict[str, Latents]) -> None:
    engine = InlineEngine(*spread)
    found = life(engine)
    for name, wanted in expected.items():
        assert_same(found[name], wanted)
    assert_nothing_is_held(engine)


def test_a_rank_has_its_own_heads_and_is_planned_with_them(spread: tuple[LingBot, Config]) -> None:
    model, settings = spread
    heads = SHAPE.heads // settings.parallel.ranks
    engine = InlineEngine(*spread)
    assert model.spec.kv.num_kv_heads == heads
    assert {report.kv_heads for report in ranked(model).reports()} == {heads}
    alone = kv_plan(config(), lingbot(whole()).spec)
    assert engine.runner.book.spec.page_bytes * settings.parallel.ranks == alone.spec.page_bytes


@pytest.mark.parametrize("point", ["forward:2", "forward:4", "sync"])
def test_a_chunk_that_is_aborted_between_two_passes_comes_again_as_it_was(
    spread: tuple[LingBot, Config], expected: dict[str, Latents], point: str
) -> None:
    engine = InlineEngine(*spread)
    engine.create("b", seed=6)
    send = [lambda: engine.send(c.Abort(ticket=0, session_id=SessionId("b")))]

    def fault(at: str, sessions: Sequence[str]) -> None:
        if at == point and send:
            send.pop()()

    first = engine.next("b").artifacts["latents"].data
    engine.runner.faults = fault
    with pytest.raises(AbortedError):
        engine.next("b")
    second = engine.next("b").artifacts["latents"].data
    assert_same([first, second], expected["b"][:2])
    engine.close("b")
    assert_nothing_is_held(engine)


def test_a_session_that_is_closed_between_two_passes_leaves_nothing_on_any_rank(
    spread: tuple[LingBot, Config],
) -> None:
    engine = InlineEngine(*spread)
    engine.create("a", seed=5)

    def close(at: str, sessions: Sequence[str]) -> None:
        if at == "forward:3":
            engine.post_close("a")

    engine.runner.faults = close
    ticket = engine.post_next("a")
    engine.rest()
    assert engine.error(ticket) is not None
    assert_nothing_is_held(engine)


def test_forks_and_rewinds_are_the_book_s(spread: tuple[LingBot, Config], expected: dict[str, Latents]) -> None:
    engine = InlineEngine(*spread)
    engine.create("b", seed=6)
    found = [engine.next("b").artifacts["latents"].data for _ in range(2)]
    engine.fork("b", "fork")
    engine.rewind("b", 1)
    found += [engine.next(name).artifacts["latents"].data for name in ("b", "fork")]
    assert_same(found, [*expected["b"][:2], *expected["b"][1:3]])
    for name in ("b", "fork"):
        engine.close(name)
    assert_nothing_is_held(engine)


def test_sessions_whose_pages_lie_on_several_ranks_cannot_be_saved(spread: tuple[LingBot, Config]) -> None:
    engine = InlineEngine(*spread)
    engine.create("a", seed=5)
    with pytest.raises(StateError, match="several devices") as refused:
        engine.snapshot("a")
    assert refused.value.code == ErrorCode.UNSUPPORTED
    engine.close("a")


def test_what_cannot_be_shared_evenly_is_refused() -> None:
    check_grid(SHAPE, 24, Grid(0, 2, 2))
    for grid, tokens, path in ((Grid(0, 3, 1), 24, "parallel"), (Grid(0, 2, 2), 18, "parallel")):
        with pytest.raises(ConfigError) as refused:
            check_grid(SHAPE, tokens, grid)
        assert refused.value.path == path


def test_a_model_in_one_process_refuses_a_recipe_of_several() -> None:
    for model in (lingbot(whole()), None):
        with pytest.raises(ConfigError, match="on 1 device") as refused:
            InlineEngine(model, config(sp=2))
        assert refused.value.path == "parallel"


def test_shares_make_up_the_whole_network() -> None:
    """Every number of every matrix is on some rank, and a bias behind a sum on one."""
    from types import SimpleNamespace

    from realtime_omni.models.common.wan.sharded import ShardedTransformer

    source = whole()
    shares = []
    for rank in range(2):
        grid = Grid(rank, 1, 2)
        network = ShardedTransformer(SHAPE, SimpleNamespace(grid=grid))  # type: ignore[arg-type]
        fill_share(network, source, grid)
        shares.append(network)
    first, second = (share.layers[0] for share in shares)
    layer = source.layers[0]
    assert torch.equal(torch.cat([first.down.weight, second.down.weight], dim=1), layer.down.weight)
    assert torch.equal(first.down.bias, layer.down.bias)
    assert not second.down.bias.any()
    queries = [share.attention.qkv.weight.chunk(3)[0] for share in (first, second)]
    assert torch.equal(torch.cat(queries), layer.attention.qkv.weight.chunk(3)[0])
    assert torch.equal(first.camera.scale.weight, second.camera.scale.weight)


def test_only_a_model_with_ranks_is_ranked() -> None:
    model = lingbot(whole())
    assert isinstance(model, RankedModel)
    assert model.ranks is None
    assert not isinstance(model.network, RankedNetwork)
