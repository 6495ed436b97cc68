"""Ids, generations and graves."""

from __future__ import annotations

from typing import Any

import pytest

from realtime_omni.errors import ArgumentError, SessionGoneError, StateError
from realtime_omni.ids import CountingMint, random_request_id, random_session_id
from realtime_omni.session.registry import MAX_GRAVES, Registry
from realtime_omni.session.values import ChunkIndex, SessionId


def registry() -> Registry[str]:
    return Registry(CountingMint("s"))


def test_an_id_is_minted_when_none_is_given() -> None:
    r = registry()
    assert [r.claim(None)[0], r.claim(None)[0]] == ["s-0", "s-1"]


@pytest.mark.parametrize("wrong", ["", "a b", "a/b", "../a", "x" * 65, "ü", "a\n", 3, b"a", ["a"]], ids=repr)
def test_an_id_that_could_not_be_part_of_a_url_is_refused(wrong: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        registry().claim(wrong)
    assert refused.value.path == "session_id"


@pytest.mark.parametrize("good", ["a", "A.b_c-9", "x" * 64, "..", "default"])
def test_ordinary_ids_are_accepted(good: str) -> None:
    assert registry().claim(good)[0] == good


def test_a_taken_id_cannot_be_claimed_again_until_it_is_buried() -> None:
    r = registry()
    first, generation = r.claim("a")
    r.add(first, "entry")
    with pytest.raises(StateError) as refused:
        r.claim("a")
    assert refused.value.code == "session_exists"
    r.bury(first, "client", 1.0)
    assert r.claim("a")[1] > generation


def test_generations_never_repeat_over_all_ids() -> None:
    r = registry()
    seen = [r.claim(name)[1] for name in ("a", "b", "a", "c", "a")]
    assert len(set(seen)) == 5
    assert seen == sorted(seen)


def test_a_buried_id_is_gone_with_its_reason_and_an_unknown_one_is_not_found() -> None:
    r = registry()
    r.add(SessionId("a"), "entry")
    r.bury(SessionId("a"), "detached_expired", 1.0)
    with pytest.raises(SessionGoneError, match="detached_expired") as gone:
        r.get("a")
    assert gone.value.code == "session_gone"
    with pytest.raises(SessionGoneError) as unknown:
        r.get("b")
    assert unknown.value.code == "session_not_found"
    assert len(r) == 0


def test_graves_are_bounded() -> None:
    r = registry()
    for n in range(MAX_GRAVES + 10):
        r.add(SessionId(f"a{n}"), "entry")
        r.bury(SessionId(f"a{n}"), "client", 0.0)
    assert r.grave("a9") is None
    assert r.grave("a10") is not None


def test_a_session_that_lives_again_has_no_grave() -> None:
    r = registry()
    for _ in range(2):
        r.add(SessionId("a"), "entry")
        assert r.grave("a") is None
        r.bury(SessionId("a"), "client", 0.0)


def test_minted_ids_are_valid_and_request_ids_name_session_and_chunk() -> None:
    assert registry().claim(random_session_id())
    assert random_session_id() != random_session_id()
    assert random_request_id(SessionId("a"), ChunkIndex(7)).startswith("ar-a-7-")
