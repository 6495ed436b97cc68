"""Actions relative to the state they were planned from, and back.

A relative action is the absolute one minus the state, on the channels of a mask (grippers stay absolute); one state, that of
the observation, for all actions of a chunk (openpi's DeltaActions, lerobot's relative_actions_processor).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def relative_mask(
    action_dim: int, names: Sequence[str] | None = None, excluded: Sequence[str] = ()
) -> tuple[bool, ...]:
    """True for the channels that are relative: all, but those whose name contains an excluded word."""
    if not names or not excluded:
        return (True,) * action_dim
    words = [word.lower() for word in excluded if word]
    mask = [not any(word in name.lower() for word in words) for name in names[:action_dim]]
    return tuple(mask + [True] * (action_dim - len(mask)))


def to_relative(actions: Array, state: Array, mask: Sequence[bool]) -> Array:
    """Absolute actions [..., H, A] to relative ones; ``state`` [..., D] in the same units, D >= A where masked."""
    return (actions - _offset(actions, state, mask)).astype(np.float32)


def to_absolute(actions: Array, state: Array, mask: Sequence[bool]) -> Array:
    """The inverse of :func:`to_relative`."""
    return (actions + _offset(actions, state, mask)).astype(np.float32)


def _offset(actions: Array, state: Array, mask: Sequence[bool]) -> Array:
    width = len(mask)
    if width > actions.shape[-1] or width > state.shape[-1]:
        raise ValueError(f"a mask of {width} channels, actions of {actions.shape[-1]}, a state of {state.shape[-1]}")
    offset = np.zeros((*state.shape[:-1], 1, actions.shape[-1]), np.float32)
    offset[..., 0, :width] = state[..., :width] * np.asarray(mask, np.float32)
    return offset
