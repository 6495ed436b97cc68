"""Sizes of graphs, and the refusal of graphs where there are no kernels for them."""

from __future__ import annotations

import pytest

from realtime_omni.errors import ConfigError
from realtime_omni.models.common import capture


def test_the_sizes_of_a_batch_end_with_the_one_it_is_filled_up_to() -> None:
    assert capture.sizes_up_to(1) == [1]
    assert capture.sizes_up_to(5) == [1, 2, 4, 8]
    assert capture.sizes_up_to(130)[-2:] == [128, 130]


def test_graphs_on_a_gpu_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "find_spec", lambda name: None)
    capture.check_kernels("cpu", "options.graphs")
    with pytest.raises(ConfigError, match="need Triton") as refused:
        capture.check_kernels("cuda:1", "options.graphs")
    assert refused.value.path == "options.graphs"
