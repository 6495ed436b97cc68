"""The film of the walks: which walk is shown where, and that it is a film."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
av = pytest.importorskip("av")

from recipes.tiny_world.film import RUNS, halves, mosaic, write_film  # noqa: E402

FRAMES, SIDE = 4, 16


def test_the_film_shows_every_walk_at_its_place_and_in_order(tmp_path: Path):
    """Walk b at frame f is one shade of grey, which the film gives back to a few hundredths."""
    shade = torch.linspace(-0.9, 0.9, 2 * RUNS)[:, None] * torch.linspace(1, 0.5, FRAMES)
    walks = shade[:, :, None, None, None].expand(-1, -1, 3, SIDE, SIDE)
    runs = torch.cat((walks[:RUNS], walks[RUNS:]), dim=1)  # a run is two walks
    write_film(mosaic(halves(runs)), tmp_path / "film.mp4", crf=10)
    with av.open(str(tmp_path / "film.mp4")) as film:
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)])
        assert film.streams.video[0].average_rate == 8
    assert shown.shape == (FRAMES, 2 * SIDE, RUNS * SIDE, 3)
    for walk in range(2 * RUNS):
        top, left = walk // RUNS * SIDE, walk % RUNS * SIDE
        seen = shown[:, top + 4 : top + 12, left + 4 : left + 12].mean((1, 2, 3)) / 127.5 - 1
        np.testing.assert_allclose(seen, shade[walk].numpy(), atol=0.04)
