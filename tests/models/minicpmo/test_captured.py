"""With graphs a call says what it says without: calls that join, leave, fork, go back and fail, turns that end, words and codes
by chance. On the CPU everything runs but the capture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.minicpmo.tiny import checkpoint, recipe, with_vocoder
from realtime_omni.engine import commands as c
from realtime_omni.errors import OmniError
from realtime_omni.models import catalog
from realtime_omni.models.minicpmo.model import MiniCPMO
from realtime_omni.session.frame import Cancel, Directive, Frame, Respond
from realtime_omni.session.values import Chunk, SessionId
from realtime_omni.testing.check_model import check_model
from realtime_omni.testing.faults import inject
from realtime_omni.testing.inline import InlineEngine


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("minicpm") / "tiny", talkative=4.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("own", [False, True])
def test_every_rule_of_a_model_holds_with_graphs(tmp_path: Path, own: bool) -> None:
    """With a hum, and with the checkpoint's kind of vocoder; half a minute of a core each."""
    made = checkpoint(tmp_path / "tiny", talkative=4.0)
    options = {"vocoder": "", "vocoder_options": {"steps": 2}} if own else {}
    folder = with_vocoder(made) if own else made
    report = check_model(
        recipe(folder, graphs=True, unit_words=4, code_temperature=0.0, code_repetition=1.0, **options)
    )
    assert report.passed, str(report)


class Conversation:
    def __init__(self, folder: Path, **options: object) -> None:
        config = recipe(folder, **options)
        model = catalog.build(config)
        assert isinstance(model, MiniCPMO)
        assert (model._talks is not None) == bool(options.get("graphs"))
        self.engine = InlineEngine(model, config)
        self.said: list[tuple[np.ndarray, object]] = []

    def hear(self, names: str, number: int, *directives: Directive) -> None:
        """One tick of all named calls."""
        tickets = []
        for name in names:
            sound = np.random.default_rng((ord(name), number)).normal(0, 0.1, 16_000).astype(np.float32)
            frame = Frame(sound, directives)
            tickets.append(self.engine.send(c.Next(ticket=0, session_id=SessionId(name), frame=frame)))
        self.engine.rest()
        for ticket in tickets:
            chunk = self.engine.result(ticket)
            assert isinstance(chunk, Chunk), chunk
            self.said.append((np.asarray(chunk.artifacts["speech"].data), chunk.signals))


def _whole(folder: Path, **options: object) -> Conversation:
    made = Conversation(folder, **options)
    for number, name in enumerate("abc"):
        made.engine.create(name, seed=number)
    for number in range(8):  # five seconds are seen
        made.hear("abc" if number % 3 else "ca", number, *((Respond(f"r{number}"),) if number in (1, 4) else ()))
    made.engine.fork("a", "d")
    made.engine.rewind("c", 6)
    made.hear("dbca", 8, Cancel())
    with inject(made.engine, "forward:3"), pytest.raises(OmniError):
        made.engine.ask(c.Next(ticket=0, session_id=SessionId("b"), frame=Frame(np.zeros(16_000, np.float32))))
    made.engine.rollback("b")
    made.engine.close("d")
    for number in range(9, 12):
        made.hear("bca", number, Respond(f"r{number}"))
    return made


def test_calls_that_join_leave_fork_fail_and_go_back_say_what_they_do_without_graphs(folder: Path) -> None:
    plain, graphs = (_whole(folder, graphs=each) for each in (False, True))
    assert len(plain.said) == len(graphs.said) > 30
    for (sound, signals), (expected, told) in zip(graphs.said, plain.said, strict=True):
        assert signals == told
        assert np.abs(sound - expected).max() <= 1e-5
    assert any(np.abs(sound).max() > 0 for sound, _ in plain.said)
