"""The null model's picture moves by slices of one wide array, and comes round after twice its width."""

from __future__ import annotations

import numpy as np
import pytest

from realtime_omni.models.null.model import SIZE, NullWorld


@pytest.mark.parametrize("shift", [0, 1, SIZE - 1, SIZE, SIZE + 72, 2 * SIZE - 1])
def test_a_shifted_frame_is_a_slice_of_the_picture(shift: int) -> None:
    for picture in NullWorld()._pictures.values():
        rolled = np.roll(picture[:, : 2 * SIZE], -shift, axis=1)[:, :SIZE]
        np.testing.assert_array_equal(picture[:, shift : shift + SIZE], rolled)
