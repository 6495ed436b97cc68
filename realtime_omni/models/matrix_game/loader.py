"""Matrix-Game 2 from its checkpoint in diffusers' layout: a recipe's options become a model.

The folder has ``transformer``, ``vae`` and ``image_encoder``, as the published conversions have. The first form of the weights
keeps its autoencoder and image encoder as pickles, which are never opened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from msgspec import Meta

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.packing import fingerprint_of_files
from realtime_omni.models.common.wan.checkpoint import Progress, Stored, head_size, part_of, root_of
from realtime_omni.models.common.wan.clip import CLIPVision
from realtime_omni.models.common.wan.transformer import PATCH
from realtime_omni.models.common.wan.vae import WanVAE
from realtime_omni.models.common.wan.weights import DIFFUSERS, load_transformer, shards
from realtime_omni.models.common.weights import Names
from realtime_omni.models.matrix_game.actions import MOUSE, PICTURES
from realtime_omni.models.matrix_game.controls import KEYBOARD
from realtime_omni.models.matrix_game.model import MatrixGame, Settings
from realtime_omni.models.matrix_game.network import MatrixGameConfig, MatrixGameTransformer

if TYPE_CHECKING:
    from realtime_omni.config import Config

Side = Annotated[int, Meta(ge=16, le=4096, multiple_of=16)]
Frames = Annotated[int, Meta(ge=1, le=1024)]

NAMES = Names(
    rules=(
        (r"^patch_embedding\.proj\.", "patch_embedding."),
        (r"^condition_embedder\.image_embedder\.norm1\.", "context_norm_in."),
        (r"^condition_embedder\.image_embedder\.norm2\.", "context_norm_out."),
        (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "context_in."),
        (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "context_out."),
        (r"\.action_model\.mouse_mlp\.0\.", ".action.mouse_in."),
        (r"\.action_model\.mouse_mlp\.2\.", ".action.mouse_out."),
        (r"\.action_model\.mouse_mlp\.3\.", ".action.mouse_norm."),
        (r"\.action_model\.t_qkv\.", ".action.mouse_qkv."),
        (r"\.action_model\.img_attn_([qk])_norm\.", r".action.mouse_\1_norm."),
        (r"\.action_model\.proj_mouse\.", ".action.mouse_proj."),
        (r"\.action_model\.keyboard_embed\.0\.", ".action.key_in."),
        (r"\.action_model\.keyboard_embed\.2\.", ".action.key_out."),
        (r"\.action_model\.mouse_attn_q\.", ".action.key_q."),
        (r"\.action_model\.keyboard_attn_kv\.", ".action.key_kv."),
        (r"\.action_model\.key_attn_([qk])_norm\.", r".action.key_\1_norm."),
        (r"\.action_model\.proj_keyboard\.", ".action.key_proj."),
        *DIFFUSERS.rules,
    ),
    ignored=DIFFUSERS.ignored,
)
"""Names of the conversions to diffusers' layout. ``mouse_attn_q`` is theirs for the keyboard's query."""
_ACTION = "blocks.0.action_model"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The recipe's ``options``; see :class:`~realtime_omni.models.matrix_game.model.Settings` for what the numbers mean."""

    checkpoint: str
    height: Side = 352
    width: Side = 640
    frames_per_block: Frames = 3
    window_frames: Frames = 6
    labels: Annotated[tuple[int, ...], Meta(min_length=1, max_length=64)] = (1000, 666, 333)
    shift: Annotated[float, Meta(gt=0, le=100)] = 5.0
    fps: Annotated[float, Meta(gt=0, le=120)] = 25.0
    pixels: bool = True
    """False: latents only, without an autoencoder."""
    vae: str | None = None
    image_encoder: str | None = None
    """Folders, where the checkpoint does not bring them."""
    head_dim: Annotated[int, Meta(ge=6, le=512)] | None = None
    """Default: what the checkpoint's ``config.json`` says, else 128."""

    def settings(self) -> Settings:
        return Settings(
            height=self.height,
            width=self.width,
            frames_per_block=self.frames_per_block,
            window_frames=self.window_frames,
            labels=self.labels,
            shift=self.shift,
            fps=self.fps,
        )


def load(config: Config) -> MatrixGame:
    """Raises ConfigError, naming the option, the file or the tensors that do not fit."""
    options = config.options_as(Options)
    root = root_of(options.checkpoint)
    if options.window_frames < options.frames_per_block:
        raise ConfigError("options.window_frames: fewer than a block has", path="options.window_frames")
    folder = root / "transformer" if (root / "transformer").is_dir() else root
    dtype = getattr(torch, config.dtype)
    shape = dimensions(folder, options.head_dim)
    with torch.device("meta"):
        network = MatrixGameTransformer(shape)
    load_transformer(network, folder, dtype=dtype, device=config.device, progress=Progress("weights"), names=NAMES)
    vae = WanVAE.load(part_of(root, options.vae, "vae"), dtype=dtype, device=config.device) if options.pixels else None
    encoder = part_of(root, options.image_encoder, "image_encoder")
    return MatrixGame(
        network,
        CLIPVision(encoder, dtype=dtype, device=config.device),
        options.settings(),
        vae=vae,
        device=config.device,
        fingerprint=fingerprint_of_files(shards(folder), repr(options.settings()), config.dtype),
    )


def dimensions(folder: Path, head_dim: int | None = None) -> MatrixGameConfig:
    """Read off the checkpoint's shapes. Raises ConfigError when it holds no such network, or one for another keyboard."""
    stored = Stored.read(folder)
    patch = stored.matrix("patch_embedding.proj.weight", "patch_embedding.weight")
    width, cells = patch[0], PATCH * PATCH
    size = head_size(folder, width, head_dim)
    keys = stored.matrix(f"{_ACTION}.keyboard_embed.0.weight")
    if keys[1] != len(KEYBOARD):
        raise ConfigError(
            f"{folder.name}: {_ACTION}.keyboard_embed.0.weight is for {keys[1]} keys; only the universal model's "
            f"{len(KEYBOARD)} are served",
            path=folder.name,
        )
    inner = stored.matrix(f"{_ACTION}.mouse_mlp.0.weight")
    if inner[1] != width + MOUSE * PICTURES:
        raise ConfigError(f"{folder.name}: {_ACTION}.mouse_mlp.0.weight is {list(inner)}", path=folder.name)
    action_size = stored.shapes.get(f"{_ACTION}.img_attn_q_norm.weight", (64,))[0]
    layers = {int(m.group(1)) for name in stored.shapes if (m := re.match(r"blocks\.(\d+)\.action_model\.", name))}
    if layers != set(range(len(layers))):
        raise ConfigError(f"{folder.name}: action modules are not in the first layers only", path=folder.name)
    return MatrixGameConfig(
        layers=stored.layers,
        heads=width // size,
        head_dim=size,
        mlp_width=stored.matrix("blocks.0.ffn.net.0.proj.weight")[0],
        in_channels=patch[1],
        out_channels=stored.matrix("proj_out.weight")[0] // cells,
        frequencies=stored.matrix("condition_embedder.time_embedder.linear_1.weight")[1],
        context_width=stored.matrix("condition_embedder.image_embedder.ff.net.0.proj.weight")[1],
        action_layers=len(layers),
        action_heads=inner[0] // action_size,
        action_head_dim=action_size,
        key_width=keys[0],
    )
