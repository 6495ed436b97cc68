"""What a call remembers of the codec: bounded, whole where attention reaches, never changed."""

from __future__ import annotations

import torch

from realtime_omni.models.moshi.codec import SEGMENT, CodecState
from realtime_omni.models.moshi.config import MimiConfig

CONFIG = MimiConfig(dimension=4, filters=1, heads=1, layers=1, context=50)


def test_the_past_is_whole_where_attention_reaches_and_bounded() -> None:
    """For 200 frames of two positions, each marked: the last 48 are there in order, never more bytes than said."""
    state, memory = CodecState.start(0, "cpu"), torch.zeros(0)
    limit = CodecState.most_bytes(CONFIG, 0)
    for frame in range(200):
        before = (state.joined, state.recent)
        marks = torch.tensor([2.0 * frame, 2.0 * frame + 1]).view(1, 1, 2, 1, 1).expand(1, 2, 2, 1, 4)
        after = state.after(memory, marks.clone(), CONFIG.context)
        assert (state.joined, state.recent) == before
        state = after
        parts = (*state.joined, *state.recent)
        held = torch.cat(parts, dim=2)[0, 0, :, 0, 0].tolist()
        reach = min(2 * (frame + 1), CONFIG.context - 2)
        assert held[-reach:] == [float(p) for p in range(2 * (frame + 1) - reach, 2 * (frame + 1))]
        assert sum(part.nbytes for part in parts) <= limit
        assert (len(state.joined), len(state.recent)) == CodecState.parts(frame + 1, CONFIG)
        assert len(parts) <= 2 * SEGMENT
