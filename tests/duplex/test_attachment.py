"""Who drives a session: the newest holder of the newest token."""

from __future__ import annotations

import pytest

from realtime_omni.duplex.attachment import Attachment
from realtime_omni.errors import ErrorCode, SessionGoneError, StateError


def test_a_token_opens_a_session_and_is_replaced() -> None:
    held = Attachment("one")
    assert held.resume("one", "two") == 2
    assert held.resume("two", "three") == 3
    with pytest.raises(SessionGoneError) as refused:
        held.resume("one", "four")
    assert refused.value.code is ErrorCode.SESSION_NOT_FOUND
    held.require(3)
    with pytest.raises(StateError):
        held.require(2)


def test_a_client_that_never_got_its_new_token_comes_back_with_the_old_one() -> None:
    held = Attachment("one")
    held.resume("one", "lost on its way")
    assert held.resume("one", "two") == 3
    with pytest.raises(SessionGoneError):
        held.resume("lost on its way", "x")


def test_a_token_that_arrived_is_the_only_one() -> None:
    held = Attachment("one")
    generation = held.resume("one", "two")
    held.confirm(generation)
    with pytest.raises(SessionGoneError):
        held.resume("one", "x")
    with pytest.raises(StateError):
        held.confirm(1)


def test_no_token_is_kept() -> None:
    held = Attachment("secret")
    held.resume("secret", "another")
    assert not any("secret" in repr(v) or "another" in repr(v) for v in vars(held).values())
