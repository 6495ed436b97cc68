"""Reuse by content: equal to the plain path, a full key, an off switch, a bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.vla import tiny
from realtime_omni.models.common.vla.network import FlowNetwork, PolicyInputs, encode, sample
from realtime_omni.models.common.vla.reuse import ContentCache, Identity, Reuse, digest

IDENTITY = Identity("weights", "statistics", "float32", 32, "cpu")
MIB = 1 << 20


def reuse(pictures: int = MIB, prefixes: int = MIB, identity: Identity = IDENTITY) -> Reuse:
    return Reuse(identity, ContentCache(pictures), ContentCache(prefixes))


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def network(request: pytest.FixtureRequest) -> FlowNetwork:
    return tiny.network(request.param)


def chunk(network: FlowNetwork, caches: Reuse, row: PolicyInputs) -> Tensor:
    return sample(network, caches.encode(network, row), tiny.noise())


def test_a_reused_prefix_gives_the_same_chunk(network: FlowNetwork) -> None:
    caches, row = reuse(), tiny.row(1, (True, False, True))
    plain = sample(network, encode(network, row), tiny.noise())
    assert (chunk(network, caches, row) - plain).abs().max() <= 1e-6
    assert (chunk(network, caches, row) - plain).abs().max() <= 1e-6
    assert caches.prefixes.statistics().hits == 1
    assert caches.pictures.statistics().misses == 2


def test_a_new_state_reuses_the_prefix_only_where_the_prefix_does_not_read_it(network: FlowNetwork) -> None:
    caches, row = reuse(), tiny.row(1)
    moved = replace(row, state=row.state + 1)
    chunk(network, caches, row)
    got = chunk(network, caches, moved)
    assert caches.prefixes.statistics().hits == (0 if network.shape.state_in_prefix else 1)
    assert (got - sample(network, encode(network, moved), tiny.noise())).abs().max() <= 1e-6


def test_one_other_pixel_of_one_camera_costs_one_picture_and_the_prefix(network: FlowNetwork) -> None:
    caches, row = reuse(), tiny.row(1)
    changed = replace(row, images=row.images.clone())
    changed.images[0, 1, 0, 0, 0] += 0.01
    chunk(network, caches, row)
    got = chunk(network, caches, changed)
    assert caches.prefixes.statistics().hits == 0
    assert (caches.pictures.statistics().hits, caches.pictures.statistics().misses) == (2, 4)
    assert (got - sample(network, encode(network, changed), tiny.noise())).abs().max() <= 1e-6


@pytest.mark.parametrize("field", Identity._fields)
def test_every_part_of_the_identity_is_part_of_the_key(field: str) -> None:
    network, row = tiny.network("pi0"), tiny.row(1)
    caches = reuse()
    other = replace(caches, identity=IDENTITY._replace(**{field: "another"}))
    caches.encode(network, row)
    other.encode(network, row)
    assert caches.prefixes.statistics().hits == 0
    assert caches.pictures.statistics().hits == 0


def test_the_same_pictures_in_other_slots_are_another_prefix() -> None:
    network, row = tiny.network("pi0"), tiny.row(1)
    caches = reuse()
    caches.encode(network, row)
    caches.encode(network, replace(row, images=row.images.flip(1)))
    assert caches.prefixes.statistics().hits == 0
    assert caches.pictures.statistics().hits == 3


def test_another_prompt_is_another_prefix_but_the_same_pictures() -> None:
    network, row = tiny.network("pi0"), tiny.row(1)
    caches = reuse()
    caches.encode(network, row)
    caches.encode(network, replace(row, tokens=row.tokens.flip(1)))
    assert caches.prefixes.statistics().hits == 0
    assert caches.pictures.statistics().hits == 3


def test_zero_bytes_turn_a_cache_off() -> None:
    network, caches = tiny.network("pi0"), reuse(0, 0)
    for _ in range(2):
        caches.encode(network, tiny.row(1))
    for cache in (caches.pictures, caches.prefixes):
        assert (cache.statistics().entries, cache.statistics().hits) == (0, 0)


def test_the_least_recently_used_leave_first_and_bytes_stay_bounded() -> None:
    cache: ContentCache[str] = ContentCache(10)
    cache.put("a", "A", 4)
    cache.put("b", "B", 4)
    assert cache.get("a") == "A"
    cache.put("c", "C", 5)
    assert (cache.get("b"), cache.get("a"), cache.get("c")) == (None, "A", "C")
    cache.put("huge", "H", 11)
    assert cache.get("huge") is None
    assert cache.statistics().nbytes == 9
    cache.put("a", "A2", 1)
    assert cache.statistics().nbytes == 6
    cache.clear()
    assert (cache.statistics().entries, cache.statistics().nbytes) == (0, 0)


def test_a_digest_tells_shape_and_dtype_apart() -> None:
    zeros = torch.zeros(4)
    assert len({digest(zeros), digest(zeros.reshape(2, 2)), digest(zeros.int()), digest(zeros.half())}) == 4
    assert digest(zeros) == digest(torch.zeros(8)[::2])


def test_rows_are_compared_one_by_one() -> None:
    with pytest.raises(ValueError, match="row by row"):
        reuse().encode(tiny.network("pi0"), PolicyInputs.stack([tiny.row(1), tiny.row(2)]))
