"""LingBot-World v2 from its checkpoint: a recipe's options become a model.

Two folder layouts: that of diffusers (``transformer``, ``vae``, ``text_encoder``, ``tokenizer``) and the native one
(``transformers`` with the network's shards; its text encoder and autoencoder are pickles, which are never opened, so
``options.vae`` and ``options.text`` name folders in diffusers' layout instead). Dimensions are read off the tensors; what the
two published forms disagree about is an option each, with no hidden default in code beside the recipe's.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from realtime_omni.config import Config, Device
from realtime_omni.errors import ConfigError
from realtime_omni.models.common.packing import fingerprint_of_files
from realtime_omni.models.common.wan.checkpoint import Progress, Stored, head_size, part_of, root_of
from realtime_omni.models.common.wan.ranks import RankedNetwork, WanReplica
from realtime_omni.models.common.wan.sharded import ShardedTransformer, check_grid
from realtime_omni.models.common.wan.text import UMT5
from realtime_omni.models.common.wan.tiny_decoder import TinyDecoder
from realtime_omni.models.common.wan.transformer import PATCH, WanConfig, WanTransformer
from realtime_omni.models.common.wan.vae import WanVAE
from realtime_omni.models.common.wan.weights import load_transformer, shards
from realtime_omni.models.lingbot.model import LingBot, Settings
from realtime_omni.parallel.mesh import Grid, Mesh
from realtime_omni.parallel.team import Team

Side = Annotated[int, Meta(ge=16, le=4096, multiple_of=16)]
Frames = Annotated[int, Meta(ge=1, le=1024)]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``; see :class:`~realtime_omni.models.lingbot.model.Settings` for what the numbers mean."""

    checkpoint: str
    frames_per_block: Frames
    labels: Annotated[tuple[int, ...], Meta(min_length=1, max_length=64)]
    shift: Annotated[float, Meta(gt=0, le=100)]
    integer_timesteps: bool
    height: Side = 480
    width: Side = 832
    window_frames: Frames = 9
    sink_frames: Annotated[int, Meta(ge=0, le=1024)] = 9
    clean_pass: bool = True
    fps: Annotated[float, Meta(gt=0, le=120)] = 16.0
    horizon: Annotated[int, Meta(ge=9)] | None = None
    prompt_switch: Literal["text", "recache"] = "text"
    """What a new prompt changes: what is to come; or also how the window remembers what was, computed again under it."""
    pixels: bool = True
    """False: latents only, without an autoencoder."""
    decoder_device: Device | None = None
    """Of the autoencoder and the small decoder, where it is not the network's: decoding then takes nothing of its time."""
    vae: str | None = None
    decoder: str | None = None
    """A safetensors file of TAEHV (``taew2_1``): pictures by a small decoder in the place of the autoencoder's."""
    text: str | None = None
    """Folders of ``tokenizer`` and ``text_encoder``, and ``vae`` of the autoencoder, where the checkpoint brings none."""
    compile: bool = False
    graphs: bool = False
    """Replay passes over full windows as CUDA graphs: for networks so small that launching their kernels takes longer than
    computing them. The window's memory then is taken for good. Not on several ranks."""
    fp8: bool = False
    """The layers' matrices in eight bits, quantised while they are loaded; for attention see ``kv.fp8_attention``."""
    head_dim: Annotated[int, Meta(ge=6, le=512)] | None = None
    """Default: what the checkpoint's ``config.json`` says, else 128."""

    def settings(self) -> Settings:
        return Settings(
            height=self.height,
            width=self.width,
            frames_per_block=self.frames_per_block,
            window_frames=self.window_frames,
            sink_frames=self.sink_frames,
            labels=self.labels,
            shift=self.shift,
            table=self.integer_timesteps,
            clean_pass=self.clean_pass,
            fps=self.fps,
            horizon=self.horizon,
            recache=self.prompt_switch == "recache",
        )


def load(config: Config) -> LingBot:
    """Raises ConfigError, naming the option, the file or the tensors that do not fit."""
    options = config.options_as(Options)
    root = root_of(options.checkpoint)
    _check_together(config, options)
    folder = _folder(root)
    network = _local(config, options, folder) if config.parallel.ranks == 1 else _ranked(config, options, folder)
    try:
        return _with_pictures(network, config, options, root, folder)
    except BaseException:
        if isinstance(network, RankedNetwork):
            network.close()
        raise


def _check_together(config: Config, options: Options) -> None:
    """What is no mistake alone. Raises ConfigError."""
    if options.prompt_switch == "recache":
        if config.parallel.ranks > 1:
            raise ConfigError("options.prompt_switch: recache runs on one device only", path="options.prompt_switch")
        if config.kv.window_frames is not None:  # the blocks that a state keeps are those of the options' window
            raise ConfigError(
                "kv.window_frames: with recache the window is options.window_frames", path="kv.window_frames"
            )
    if options.graphs and config.parallel.ranks > 1:
        raise ConfigError("options.graphs: passes are replayed on one device only", path="options.graphs")


def _with_pictures(
    network: WanTransformer | RankedNetwork, config: Config, options: Options, root: Path, folder: Path
) -> LingBot:
    """And with text: what rank 0 has alone."""
    dtype = getattr(torch, config.dtype)
    decoder_device = options.decoder_device or config.device
    vae = WanVAE.load(part_of(root, options.vae, "vae"), dtype=dtype, device=decoder_device) if options.pixels else None
    small = Path(options.decoder).expanduser() if options.pixels and options.decoder is not None else None
    tiny = None if small is None else TinyDecoder.load(small, dtype=dtype, device=decoder_device)
    texts = root if options.text is None else Path(options.text).expanduser()
    return LingBot(
        network,
        UMT5(texts, dtype=dtype, device=config.device),
        options.settings(),
        vae=vae,
        tiny=tiny,
        graphs=options.graphs,
        device=config.device,
        fingerprint=fingerprint_of_files(
            shards(folder), repr(options.settings()), config.dtype, *_variants(options.fp8, small)
        ),
    )


def _variants(fp8: bool, decoder: Path | None) -> list[str]:
    """What else decides how a session goes on."""
    return [
        *(["fp8"] if fp8 else []),
        *([f"decoder {hashlib.sha256(decoder.read_bytes()).hexdigest()}"] if decoder is not None else []),
    ]


def _folder(root: Path) -> Path:
    """Of the network."""
    return next((root / name for name in ("transformer", "transformers") if (root / name).is_dir()), root)


def _local(config: Config, options: Options, folder: Path) -> WanTransformer:
    shape = _shape(options, folder)
    with torch.device("meta"):
        network = WanTransformer(shape)
    _fill(network, config, options, folder, Grid())
    if options.compile:
        network.compile_layers(fp8_attention=config.kv.fp8_attention)
    return network


def _ranked(config: Config, options: Options, folder: Path) -> RankedNetwork:
    """Every rank reads its own share, at the same time."""
    grid = Grid(0, config.parallel.sp, config.parallel.tp)
    tokens = options.height // 16 * (options.width // 16) * options.frames_per_block
    check_grid(_shape(options, folder), tokens, grid)
    team = Team(
        grid,
        device=config.device,
        replica=f"{__name__}:replica",
        arguments=msgspec.msgpack.encode(config),
        timeout_s=config.parallel.timeout_s,
        threads=config.engine.threads,
    )
    try:
        return RankedNetwork(_shared(config, options, folder, team.mesh), team, compile_layers=options.compile)
    except BaseException:
        team.close()
        raise


def replica(mesh: Mesh, arguments: bytes) -> WanReplica:
    """What a rank other than 0 builds from the configuration."""
    config = msgspec.msgpack.decode(arguments, type=Config)
    options = config.options_as(Options)
    folder = _folder(root_of(options.checkpoint))
    return WanReplica(_shared(config, options, folder, mesh), compile_layers=options.compile)


def _shared(config: Config, options: Options, folder: Path, mesh: Mesh) -> ShardedTransformer:
    with torch.device("meta"):
        network = ShardedTransformer(_shape(options, folder), mesh)
    _fill(network, config, options, folder, mesh.grid, device=mesh.device)
    return network


def _fill(
    network: WanTransformer,
    config: Config,
    options: Options,
    folder: Path,
    grid: Grid,
    *,
    device: torch.device | None = None,
) -> None:
    load_transformer(
        network,
        folder,
        dtype=getattr(torch, config.dtype),
        device=config.device if device is None else device,
        progress=Progress("weights") if grid.rank == 0 else None,
        fp8=network.heavy_matrices() if options.fp8 else (),
        grid=grid,
    )


def _shape(options: Options, folder: Path) -> WanConfig:
    shape = dimensions(folder, options.head_dim)
    if options.fp8 and (shape.width % 16 or shape.mlp_width % 16):
        raise ConfigError(f"widths of {shape.width} and {shape.mlp_width} have no 8-bit kernel", path="options.fp8")
    return shape


def dimensions(folder: Path, head_dim: int | None = None) -> WanConfig:
    """Read off the checkpoint's shapes. Raises ConfigError when it holds no such network."""
    stored = Stored.read(folder)
    patch = stored.matrix("patch_embedding.weight")
    width, cells = patch[0], PATCH * PATCH
    size = head_size(folder, width, head_dim)
    camera = "patch_embedding_wancamctrl.weight"
    return WanConfig(
        layers=stored.layers,
        heads=width // size,
        head_dim=size,
        mlp_width=stored.matrix("blocks.0.ffn.0.weight", "blocks.0.ffn.net.0.proj.weight")[0],
        in_channels=patch[1],
        out_channels=stored.matrix("head.head.weight", "proj_out.weight")[0] // cells,
        text_width=stored.matrix("text_embedding.0.weight", "condition_embedder.text_embedder.linear_1.weight")[1],
        frequencies=stored.matrix("time_embedding.0.weight", "condition_embedder.time_embedder.linear_1.weight")[1],
        camera_channels=stored.matrix(camera)[1] // cells if camera in stored.shapes else 0,
    )
