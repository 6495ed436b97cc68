"""A start picture brings its own prompt along, unless the client gives one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from realtime_omni.errors import ArgumentError
from realtime_omni.models.base import ModelSpec
from realtime_omni.models.null.model import NullWorld
from realtime_omni.testing.inline import InlineEngine


class Pictures(NullWorld):
    """The null model with two start pictures."""

    @property
    def spec(self) -> ModelSpec:
        return replace(super().spec, starts=("dusk-1", "dawn-1"), start_prompts={"dusk-1": "dusk", "dawn-1": "dawn"})


@pytest.mark.parametrize(
    ("start", "prompt", "expected"),
    [(None, None, "noon"), ("dusk-1", None, "dusk"), ("dusk-1", "dawn", "dawn"), (None, "dawn", "dawn")],
)
def test_a_new_session_takes_the_prompt_of_its_picture(start: str | None, prompt: str | None, expected: str) -> None:
    """The client's prompt wins, then the picture's, then the model's."""
    assert InlineEngine(Pictures()).create(start=start, prompt=prompt).prompt == expected


def test_a_reset_with_a_picture_moves_to_its_place_and_one_without_stays() -> None:
    """A snow picture must not turn into the place of the walk before."""
    engine = InlineEngine(Pictures())
    view = engine.create(prompt="noon")
    assert engine.reset(view.session_id, start="dawn-1").prompt == "dawn"
    assert engine.reset(view.session_id, seed=3).prompt == "dawn"
    assert engine.reset(view.session_id, start="dusk-1", prompt="noon").prompt == "noon"


def test_a_picture_for_a_model_that_takes_none_is_refused_not_ignored() -> None:
    """At creation and at a reset; nothing has changed then."""
    engine = InlineEngine(Pictures())
    picture = np.zeros((8, 8, 3), np.uint8)
    with pytest.raises(ArgumentError, match="no picture"):
        engine.create(image=picture)
    view = engine.create()
    with pytest.raises(ArgumentError, match="no picture"):
        engine.reset(view.session_id, image=picture)
    assert engine.view(view.session_id).epoch == 0
