"""``bench vla`` measures what it says, refuses to call wrong chunks valid, and needs openpi's server for its ratio."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from realtime_omni.bench import stock, vla
from realtime_omni.bench.robots import TABLETOP, THREE_CAMERAS, Answer, drive, overdue, state_of
from realtime_omni.models.null.policy import NullPolicy

KEYS = {"conditions", "valid", "latency_ms", "stages_ms", "deadline_misses", "ratio_to_stock"}


@pytest.mark.req("AC-50")
@pytest.mark.parametrize(
    "policy",
    [[], ["--policy", "pi0-geometry", "--set", "options.scale=tiny"], ["--policy", "tiny-policy"]],
    ids=["null", "pi0-geometry", "tiny-policy"],
)
def test_in_process_says_its_conditions_and_every_stage(policy: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--json", "--in-process", "--robots", "2", "--chunks", "8", "--hz", "0", "--warm-up", "2", *policy]
    vla.main(arguments)
    result = json.loads(capsys.readouterr().out)
    assert result.keys() >= KEYS
    assert result["conditions"]["workload"]["robots"] == 2
    assert not [word for word in result["wrong"] if "add up" not in word]  # that one is of a busy machine
    assert result["latency_ms"]["p50"] <= result["latency_ms"]["p99"]
    assert result["stages_ms"]["denoise"] > 0
    assert ("images" in result["stages_ms"]) == bool(policy)
    assert result["ratio_to_stock"] is None


def test_over_sockets_the_servers_stages_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    policy = ["--policy", "pi0-geometry", "--set", "options.scale=tiny"]
    vla.main(["--json", "--chunks", "6", "--hz", "0", "--warm-up", "2", *policy])
    result = json.loads(capsys.readouterr().out)
    assert result.keys() >= KEYS
    told = {"client", "wire", "queue", "decode", "images", "prefix", "denoise", "encode", "send"}
    assert told == result["stages_ms"].keys()
    assert result["sum_of_stages"] > 0


def test_without_openpis_server_it_exits_non_zero(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stock, "is_installed", lambda: False)
    assert vla.main(["--json"]) == 2
    assert "realtime-omni[bench]" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="did not start"):
        vla.main(["--policy", "tiny-policy", "--set", "session.nonsense=1", "--chunks", "1"])
    assert "session.nonsense: unknown field" in capfd.readouterr().err


async def test_wrong_chunks_are_not_valid() -> None:
    answers = iter(
        [np.zeros((50, 32), np.float32), np.zeros((50, 31), np.float32), np.full((50, 32), np.nan, np.float32)]
    )

    async def ask(robot: int, number: int) -> Answer:
        return Answer(next(answers), {})

    load = await drive(THREE_CAMERAS, 1, 3, 0, 0, ask, echoes=True)
    assert load.wrong == ["an answer is no float32 chunk [50, 32]", "an action is not finite"]
    assert np.array_equal(state_of(THREE_CAMERAS, 0, 0), np.zeros(32, np.float32))


def test_of_several_observations_that_were_due_a_robot_sends_the_newest() -> None:
    """Ten a second: after 0.25 s two are due, and the first of them is old; after 0.15 s one is."""
    assert [overdue(spent, 0.1) for spent in (0.05, 0.15, 0.25, 0.95)] == [0, 0, 1, 8]
    assert overdue(5.0, 0.0) == 0


async def test_a_policy_that_is_too_slow_gets_no_queue() -> None:
    """A thousand observations a second, none answered within one: each is sent or skipped, nearly all are skipped, the last
    is not, and no latency grows with the run."""
    sent = []

    async def ask(robot: int, number: int) -> Answer:
        sent.append(number)
        await asyncio.sleep(0.05)
        return Answer(np.zeros((50, 32), np.float32), {})

    load = await drive(THREE_CAMERAS, 1, 300, 1000, 2, ask, echoes=False)
    assert sent[:3] == [0, 1, 2]
    assert sent[-1] == 299
    assert sent == sorted(set(sent))
    assert load.chunks == len(sent) == 300 - load.skipped
    assert len(load.latency_ms) == len(sent) - 2
    assert load.deadline_misses == 298
    assert load.skipped > 200


def test_each_robot_has_its_pace_and_a_flag_changes_it() -> None:
    assert vla.parse([]).hz == THREE_CAMERAS.hz == 15
    tabletop = vla.parse(["--policy", "tiny-policy"])
    assert (tabletop.hz, tabletop.chunks) == (TABLETOP.hz, TABLETOP.observations) == (1.25, 40)
    assert vla.parse(["--policy", "tiny-policy", "--hz", "0", "--chunks", "7"]).hz == 0


def test_the_policy_behind_openpis_server_answers_as_ours() -> None:
    policy = NullPolicy().options
    chunk = stock.StockNullPolicy(0).infer({"state": state_of(THREE_CAMERAS, 1, 2)})["actions"]
    assert chunk.shape == (policy.horizon, policy.action_dim)
    np.testing.assert_array_equal(chunk[3], state_of(THREE_CAMERAS, 1, 2) + 3)
