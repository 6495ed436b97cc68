"""A tiny LingBot on several gloo processes, with the weights of the one-process model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import nn

from models.lingbot.tiny import CONFIG, HashedText
from realtime_omni.config import Config, ParallelSection
from realtime_omni.models.common.wan.ranks import RankedNetwork, WanReplica
from realtime_omni.models.common.wan.sharded import ShardedTransformer, share_of
from realtime_omni.models.common.wan.transformer import WanConfig, WanTransformer
from realtime_omni.models.common.wan.weights import parts_of
from realtime_omni.models.lingbot.model import LingBot, Settings
from realtime_omni.parallel.mesh import Grid, Mesh
from realtime_omni.parallel.team import Team
from realtime_omni.testing.inline import small_config

SHAPE = replace(CONFIG, heads=4)
SETTINGS = Settings(height=32, width=64, window_frames=6, sink_frames=3)


def config(sp: int = 1, tp: int = 1) -> Config:
    return msgspec.structs.replace(small_config(dtype="float32"), parallel=ParallelSection(sp=sp, tp=tp))


def whole(config: WanConfig = SHAPE) -> WanTransformer:
    generator = torch.Generator().manual_seed(7)
    network = WanTransformer(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network


def share(mesh: Mesh) -> ShardedTransformer:
    network = ShardedTransformer(SHAPE, mesh)
    fill_share(network, whole(), mesh.grid)
    return network


def fill_share(network: nn.Module, source: nn.Module, grid: Grid) -> None:
    """From the whole network, by the rule that checkpoints are read by."""
    tensors = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            rows = []
            parts = parts_of(name, parameter.shape)
            for part, piece in zip(parts, tensors[name].chunk(len(parts)), strict=True):
                kept = share_of(part.name, piece.shape, grid)
                rows.append(torch.zeros(part.rows) if kept is None else piece[kept])
            parameter.copy_(torch.cat(rows))


def replica(mesh: Mesh, arguments: bytes) -> WanReplica:
    """What another rank builds."""
    if arguments:
        raise ValueError("no arguments are known")
    return WanReplica(share(mesh))


def start(sp: int, tp: int, *, timeout_s: float = 20.0, arguments: bytes = b"") -> LingBot:
    team = Team(
        Grid(0, sp, tp),
        device="cpu",
        replica="parallel.tiny_ranks:replica",
        arguments=arguments,
        timeout_s=timeout_s,
    )
    return lingbot(RankedNetwork(share(team.mesh), team))


def ranked(model: Any) -> RankedNetwork:
    assert isinstance(model.ranks, RankedNetwork)
    return model.ranks


def lingbot(network: WanTransformer | RankedNetwork, **settings: Any) -> LingBot:
    return LingBot(
        network,
        HashedText(SHAPE.text_width),
        replace(SETTINGS, **settings),
        name="tiny-lingbot",
        fingerprint="0" * 64,
    )
