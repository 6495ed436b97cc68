"""Whole world networks against FastVideo's, traced by ``make_world_golden.py``: a rollout over the end of the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from parity.rebuilt import KEPT, worlds
from parity.world_inputs import (
    CAMERA_FRAME,
    LINGBOT,
    MATRIX_GAME,
    TIMESTEP,
    World,
    actions,
    block,
    camera_path,
    context,
)
from realtime_omni.models.common.wan.transformer import WanTransformer
from realtime_omni.models.common.wan.weights import load_transformer
from realtime_omni.models.lingbot.camera import fold, motions, rays
from realtime_omni.models.lingbot.loader import dimensions as lingbot_dimensions
from realtime_omni.models.matrix_game.controls import Action
from realtime_omni.models.matrix_game.loader import NAMES
from realtime_omni.models.matrix_game.loader import dimensions as matrix_game_dimensions
from realtime_omni.models.matrix_game.model import seen_actions
from realtime_omni.models.matrix_game.network import Acted, MatrixGameTransformer

TOLERANCE = 1e-5
"""Of the flow, whose standard deviation is about one, in float32."""


class Dense:
    """History as plain tensors: what a block sees are the sink's frames and the latest ones, itself included."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._past: list[dict[int, tuple[Tensor, Tensor]]] = []
        self._own: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._own[layer] = (k, v)
        seen = [self._seen(layer, part, current).transpose(1, 2) for part, current in enumerate((k, v))]
        return functional.scaled_dot_product_attention(q.transpose(1, 2), *seen).transpose(1, 2)

    def _seen(self, layer: int, part: int, current: Tensor) -> Tensor:
        frames = [f for past in self._past for f in past[layer][part].chunk(self._world.frames, dim=1)]
        first = max(len(frames) + self._world.frames - (self._world.visible - self._world.sink), self._world.sink)
        return torch.cat([*frames[: self._world.sink], *frames[first:], current], dim=1)

    def commit(self) -> None:
        self._past.append(self._own)
        self._own = {}


def passes(world: World) -> list[tuple[int, str, float]]:
    return [(n, what, t) for n in range(world.blocks) for what, t in (("noise", TIMESTEP), ("clean", 0.0))]


@torch.no_grad()
def test_matrix_game_is_fastvideos_over_five_blocks() -> None:
    world, folder = MATRIX_GAME, worlds() / "matrix-game"
    network = loaded(MatrixGameTransformer(matrix_game_dimensions(folder, head_dim=12)), folder)
    trace, dense = load_file(KEPT / "worlds" / folder.name / "answers.safetensors"), Dense(world)
    looked, pressed = (part.tolist() for part in actions(world))
    done: list[Action] = [(tuple(keys), tuple(mouse)) for keys, mouse in zip(pressed, looked, strict=True)]
    history = network.no_history(world.grid[0] * world.grid[1] // 4)
    features = network.context_cache(context(world)[None])
    for number, what, t in passes(world):
        start = number * world.frames
        keys, mouse = seen_actions(done[max(start - 3, 0) : start], done[start : start + world.frames])
        flow, remembered = network(
            block(world, number, what)[0][None],
            torch.tensor([t]),
            torch.arange(start, start + world.frames)[None],
            features,
            Acted(mouse[None], keys[None]),
            [history],
            dense.attend,
        )
        if what == "noise":
            assert (flow[0] - trace[f"{number}"]).abs().max() <= TOLERANCE, f"block {number}"
        else:
            dense.commit()
            history = history.then(remembered[0], world.visible - world.frames)


@torch.no_grad()
def test_lingbot_is_fastvideos_over_five_blocks_with_its_camera() -> None:
    world, folder = LINGBOT, worlds() / "lingbot"
    network = loaded(WanTransformer(lingbot_dimensions(folder, head_dim=12)), folder)
    trace, dense = load_file(KEPT / "worlds" / folder.name / "answers.safetensors"), Dense(world)
    camera = filmed(world)
    assert (camera[CAMERA_FRAME, ::8] - trace["camera"]).abs().max() <= 1e-6
    text = network.text_cache(context(world)[None])
    for number, what, t in passes(world):
        start = number * world.frames
        flow = network(
            torch.cat(block(world, number, what), dim=1)[None],
            torch.tensor([t]),
            torch.arange(start, start + world.frames)[None],
            text,
            dense.attend,
            camera=network.camera_cache(camera[None, start : start + world.frames]),
        )
        if what == "noise":
            assert (flow[0] - trace[f"{number}"]).abs().max() <= TOLERANCE, f"block {number}"
        else:
            dense.commit()


def loaded(network: Any, folder: Path) -> Any:
    names = NAMES if isinstance(network, MatrixGameTransformer) else None
    load_transformer(network, folder, dtype=torch.float32, device="cpu", names=names)
    return network


def filmed(world: World) -> Tensor:
    """[frames, 384, h, w]."""
    poses, intrinsics = camera_path(world)
    motion = motions(poses[0], list(poses[1:]))
    assert np.isclose(np.linalg.norm(motion[:, :3, 3], axis=1).max(), 1.0)
    return fold(rays(motion, intrinsics, 8 * world.grid[0], 8 * world.grid[1]))
