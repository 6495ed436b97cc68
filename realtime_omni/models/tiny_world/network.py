"""The network of tiny-world: a block-causal diffusion transformer over pixels.

Owns: the modules, their configuration and the rotary positions. It predicts the clean
picture of one block of frames from its noised picture, the keys, the place and whatever
history `attend` shows it.

Must not know: how history is kept. There is no mask, cache, window or page here; the caller
passes `attend`, which receives the rotated queries and keys of every layer and decides what
they see. Training passes a masked attention over whole clips, a server its paged cache.

Where a token looks is known: the keys say how far a session has turned and looked up since it
began. So rotary positions are those of the world: a token's column is the azimuth it sees and
its row the elevation, and what was seen before a turn is found again where it was.

And what was shown need not be drawn again: the head guesses how a block's pictures moved against the last one, and against
one that is recalled, takes them where they hold and are not worn, and draws the rest (`Head`, `recall`).

Invariants: rows of a batch never mix; frame numbers and azimuths enter only through rotary
angles, so a row may stand at any frame and face anywhere (angles are computed in float64).

Shape legend: B rows, F frames, N tokens of a frame, T = F * N, D width, G = grid side,
C = 3 colours, H W = image side, K keys.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.models.tiny_world.recall import SOURCES, relation, reproject, stood

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`attend(layer, q, k, v)`: each [B, T, heads, head_dim], q and k rotated; returns the same shape."""
Write = Callable[[int, Tensor, Tensor], None]
"""`write(layer, k, v)`: keys and values as `attend` gets them, kept and not attended to."""

ROPE_BASE = 100.0  # positions that are compared lie within one window: 24 frames, 8 rows, 8 columns
HARMONICS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 28)  # of the azimuth: whole numbers, so a full turn is none
NOISE_FREQUENCIES = 64
MOTION_CHANNELS = 12
MOST_TRUST = 20.0
UNTRUSTED = -3.0  # logit of a moved picture against what is drawn, in new weights
COARSE, FINE = 0.3, 0.6
"""How fine a moved picture must be to count at all, and to count in full. Fine is what was just drawn, 1; a pixel loses by
every block that moves it while somebody walks (`KEPT` is left), and by what it is stretched. Moved for ever, walls become
streaks."""
KEPT = 0.9
RETURNED = 8.0
"""Added to the logit of a recalled picture where the eye stands where it stood: what was there before holds against what the
last picture has of it, which the network may have drawn since."""


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
    """The shape of the network and the facts a server needs to run it; kept as config.json."""

    image_size: int = 128
    patch: int = 16
    width: int = 256
    layers: int = 8
    heads: int = 4
    mlp_width: int = 960
    refine_channels: int = 64
    detail_channels: int = 24
    frames_per_block: int = 3
    window_frames: int = 24
    """Frames a query sees at most, its own block included."""
    sink_frames: int = 0
    layer_windows: tuple[int, ...] = ()
    """The same for each layer, where some see fewer; empty: all see the window. They may be set after training."""
    dense_frames: int | None = None
    """Of the frames that a layer sees, so many of the newest are seen whole, the block's own included; of every block before
    them its last frame alone. None: all."""
    num_places: int = 6
    num_keys: int = 8
    turn_steps: int = 72
    """Frames of turning that make a full turn."""
    look_step: float = 0.06
    """What a frame of looking up or down shifts the horizon by, in half pictures; at most `look_limit` such steps."""
    look_limit: int = 6
    half_fov_tan: float = 0.9
    """Tangent of half the angle of view."""
    context_noise: float = 0.0
    """Noise level at which a finished block is written into the history."""
    sampler_steps: int = 1
    sampler_shift: float = 2.0

    def __post_init__(self) -> None:
        if self.image_size % self.patch or self.patch % 4:
            raise ValueError("image_size must be a multiple of patch, and patch of 4")
        if self.width % self.heads or (self.width // self.heads) % 8:
            raise ValueError("head_dim must be a multiple of 8")
        if any(frames % self.frames_per_block for frames in (self.window_frames, *self.layer_windows)):
            raise ValueError("window_frames and layer_windows must be whole blocks")
        if self.layer_windows and len(self.layer_windows) != self.layers:
            raise ValueError(f"{len(self.layer_windows)} layer_windows for {self.layers} layers")
        if self.dense_frames is not None and (
            self.dense_frames % self.frames_per_block or not 0 < self.dense_frames <= self.window_frames
        ):
            raise ValueError("dense_frames must be whole blocks, within the window")

    @property
    def grid(self) -> int:
        return self.image_size // self.patch

    @property
    def tokens_per_frame(self) -> int:
        return self.grid * self.grid

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def window_of_layers(self) -> tuple[int, ...]:
        """Frames that each layer sees."""
        return self.layer_windows or (self.window_frames,) * self.layers

    def blocks_behind(self, window: int) -> tuple[int, int]:
        """Of a layer that sees `window` frames: (blocks before its own seen whole, blocks seen at all)."""
        seen = window // self.frames_per_block - 1
        dense = seen if self.dense_frames is None else self.dense_frames // self.frames_per_block - 1
        return min(dense, seen), seen

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> NetworkConfig:
        """Unknown fields are refused (TypeError), absent ones take their default."""
        fields = json.loads(text)
        return cls(**fields | {"layer_windows": tuple(fields.get("layer_windows", ()))})

    @classmethod
    def load(cls, path: Path) -> NetworkConfig:
        return cls.from_json(path.read_text(encoding="utf-8"))


def rope_dims(head_dim: int) -> tuple[int, int, int, int]:
    """How a head's channels are shared by (time, elevation, column of the picture, azimuth); each is even."""
    time = row = head_dim // 8 * 2
    column = head_dim // 16 * 2
    return time, row, column, head_dim - time - row - column


def poses(first_frame: Tensor, heading: Tensor, keys: Tensor, look_limit: int) -> Tensor:
    """[B, F, 3] long of the frames that come about under `keys` [B, F, 8]: (frame number, steps turned right, looked up).

    `first_frame` [B] is the number of the first of them, `heading` [B, 2] the last two columns of the frame before it.
    """
    pressed = (keys > 0.5).long()
    turned = heading[:, :1] + (pressed[..., 7] - pressed[..., 5]).cumsum(1)
    looked, up = [], heading[:, 1]
    for frame in range(keys.shape[1]):
        up = (up + pressed[:, frame, 4] - pressed[:, frame, 6]).clamp(-look_limit, look_limit)
        looked.append(up)
    number = first_frame[:, None] + torch.arange(keys.shape[1], device=keys.device)
    return torch.stack((number, turned, torch.stack(looked, 1)), dim=-1)


def rope_angles(position: Tensor, dims: int) -> Tensor:
    """Angles [..., dims / 2] in float64 of integer positions [...]."""
    exponent = torch.arange(0, dims, 2, dtype=torch.float64, device=position.device) / dims
    return position.to(torch.float64)[..., None] * ROPE_BASE**-exponent


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + half) of x [..., head_dim]; cos, sin [..., head_dim] as `TinyWorldNet.rope` makes them."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift, x, 1 + scale)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form. On a CPU with (1 + tanh u) / 2 = sigmoid 2u: torch's kernel for it takes twice as long."""
    if x.is_cuda:
        return functional.gelu(x, approximate="tanh")
    slope = 2 * (2 / math.pi) ** 0.5
    return x * torch.sigmoid(x * torch.addcmul(x.new_tensor(slope), x, x, value=0.044715 * slope))


class Layer(nn.Module):
    """Attention and MLP, both modulated per frame; the modulation is computed once for all layers."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.mlp_width
        self.heads, self.head_dim = config.heads, config.head_dim
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        modulation_bias = torch.zeros(6, width)
        modulation_bias[2] = modulation_bias[5] = 1.0  # gates open; out and down start at zero instead
        self.modulation_bias = nn.Parameter(modulation_bias)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, index: int, x_BFND: Tensor, mod_BF6D: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulations(mod_BF6D, x_BFND)
        seen = attend(index, *self.project(x_BFND, shift_a, scale_a, cos, sin)).reshape(x_BFND.shape)
        x_BFND = torch.addcmul(x_BFND, gate_a, self.out(seen))
        h = modulate(self.norm(x_BFND), shift_m, scale_m)
        return torch.addcmul(x_BFND, gate_m, self.down(gelu(self.up(h))))

    def project(
        self, x_BFND: Tensor, shift: Tensor, scale: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, T, heads, head_dim], q and k rotated."""
        B, F, N, _ = x_BFND.shape
        qkv = self.qkv(modulate(self.norm(x_BFND), shift, scale)).view(B, F * N, 3, self.heads, self.head_dim)
        q, k = rotate(self.unit(qkv[:, :, :2]).float(), cos, sin).to(qkv.dtype).unbind(dim=2)
        return q, k, qkv[:, :, 2]

    def modulations(self, mod_BF6D: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate of attention, then of the MLP, each [B, F, 1, D] in the dtype of x."""
        return (mod_BF6D + self.modulation_bias).to(x.dtype)[:, :, None].unbind(dim=3)

    def unit(self, qk: Tensor) -> Tensor:
        """Both norms at once: q and k [B, T, 2, heads, head_dim]. Small tensors cost what their calls cost."""
        gains = torch.stack((self.q_norm.weight, self.k_norm.weight))[:, None]
        return functional.rms_norm(qk, qk.shape[-1:], eps=self.q_norm.eps) * gains


class Head(nn.Module):
    """Tokens to pixels: a linear map to quarter resolution, then convolutions that cross patch seams.

    It guesses every pixel's motion against each source, draws with the moved sources in sight, and says how far each pixel
    is one of theirs; but what is worn is drawn, whatever it says."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.grid, self.cell = config.grid, config.patch // 4
        refine, detail = config.refine_channels, config.detail_channels
        self.spread = nn.Linear(config.width, refine * self.cell * self.cell)
        self.refine_in = nn.Conv2d(refine, refine, 3, padding=1)
        self.refine_out = nn.Conv2d(refine, refine, 3, padding=1)
        self.to_detail = nn.Conv2d(refine, 4 * (detail + MOTION_CHANNELS), 3, padding=1)
        self.to_motion = nn.Conv2d(MOTION_CHANNELS, 8 * SOURCES, 3, padding=1)
        self.detail = nn.Conv2d(detail, detail, 3, padding=1)
        self.compare = nn.Conv2d(detail + 16 * SOURCES, detail, 3, padding=1)
        self.to_rgb = nn.Conv2d(detail, 4 * (3 + SOURCES), 3, padding=1)
        for part in (self.to_motion, self.compare):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(cast("Tensor", part.bias))
        nn.init.zeros_(self.to_rgb.weight[12:])
        nn.init.constant_(cast("Tensor", self.to_rgb.bias)[12:], UNTRUSTED)

    def forward(
        self, h_BFND: Tensor, stood_BFS: Tensor, move: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """(pictures and how fine they are [B, F, 4, H, W], motion [B, F, SOURCES, 2, H, W]); `stood` of `recall`; `move` is
        `reproject` of the sources: of motion [B * F * SOURCES, 2, H, W]."""
        B, F = h_BFND.shape[:2]
        x = self.spread(h_BFND).view(B * F, self.grid, self.grid, self.cell, self.cell, -1)
        x = x.permute(0, 5, 1, 3, 2, 4).reshape(B * F, -1, self.grid * self.cell, self.grid * self.cell)
        x = functional.silu(x + self.refine_out(functional.silu(self.refine_in(functional.silu(x)))))
        x = functional.pixel_shuffle(self.to_detail(x), 2)
        x, motion = x[:, :-MOTION_CHANNELS], x[:, -MOTION_CHANNELS:]
        motion = functional.pixel_shuffle(self.to_motion(functional.silu(motion)), 2).float()
        here = stood_BFS.view(B * F, SOURCES, 1, 1).to(motion.dtype)
        motion = motion.view(B * F * SOURCES, 2, *motion.shape[2:]) * (1 - here).view(-1, 1, 1, 1)
        moved, inside, pixels = (part.view(B * F, SOURCES, *part.shape[1:]) for part in move(motion))
        fine = moved[:, :, 3:].detach().clamp(0, 1)
        fine = torch.where(here[..., None] > 0, fine, fine * pixels.clamp_max(1) * KEPT)
        moved = torch.cat((moved[:, :, :3], fine), dim=2)
        x = x + self.detail(functional.silu(x))
        shown = functional.pixel_unshuffle((moved * inside).flatten(1, 2), 2)
        x = functional.silu(x + self.compare(torch.cat((functional.silu(x), shown.to(x.dtype)), dim=1)))
        drawn = functional.pixel_shuffle(self.to_rgb(x), 2).to(moved.dtype)
        trust = torch.cat((drawn[:, 3:4], drawn[:, 4:] + RETURNED * here[:, 1:]), dim=1)
        share = trust.clamp_max(MOST_TRUST).exp() * inside[:, :, 0]  # against 1 for what is drawn
        share = share / (1 + share.sum(1, keepdim=True)) * ((fine[:, :, 0] - COARSE) / (FINE - COARSE)).clamp(0, 1)
        own = torch.cat((drawn[:, :3], torch.ones_like(drawn[:, :1])), dim=1)
        picture = own + (share[:, :, None] * (moved - own[:, None])).sum(1)
        return picture.view(B, F, *picture.shape[1:]), motion.view(B, F, SOURCES, *motion.shape[1:])


class TinyWorldNet(nn.Module):
    """Predicts the clean pictures of a block; see `forward` for the shapes."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.embed = nn.Linear(3 * config.patch * config.patch, width)
        self.position = nn.Parameter(torch.zeros(config.tokens_per_frame, width))
        self.noise_mlp = nn.Sequential(nn.Linear(2 * NOISE_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.keys_mlp = nn.Sequential(nn.Linear(2 * config.num_keys, width), nn.SiLU(), nn.Linear(width, width))
        self.place = nn.Embedding(config.num_places, width)
        self.recalled = nn.Linear(5, width, bias=False)
        self.condition_in = nn.Linear(width, width)
        self.modulation = nn.Linear(width, 6 * width)
        self.head_modulation = nn.Linear(width, 2 * width)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.head = Head(config)
        nn.init.normal_(self.place.weight, std=0.5)
        nn.init.zeros_(self.recalled.weight)
        for zero in (self.modulation, self.head_modulation):
            nn.init.zeros_(zero.weight)
            nn.init.zeros_(zero.bias)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        keys: Tensor,
        place: Tensor,
        pose: Tensor,
        before: Tensor,
        sights: Tensor,
        attend: Attend,
    ) -> tuple[Tensor, Tensor]:
        """The clean block x0 [B, F, 3, H, W] in about [-1, 1], and how fine each pixel is, [B, F, 1, H, W]: 1 as drawn, less
        the more it was stretched since.

        x [B, F, 3, H, W] noised block; t [B, F] noise level, 0 clean to 1 noise; keys [B, F, 8]
        0 or 1 in the order w a s d i j k l, held while the frame came about; place [B, F] long;
        pose [B, F, 3] long as `poses` gives it. F is a multiple of frames_per_block. What each of the
        F / frames_per_block blocks may be taken from: before [B, blocks, SOURCES, 4, H, W], pictures
        and how fine they are, and sights [B, blocks, SOURCES, 6] as `recall.sights` gives them.
        """
        h, condition = self.trunk(x, t, keys, place, pose, attend, told=relation(sights, self.config.turn_steps))
        pictures, fine, _ = self.decode(h, condition, keys, pose, before, sights)
        return pictures, fine

    def commit(
        self, x: Tensor, t: Tensor, keys: Tensor, place: Tensor, pose: Tensor, attend: Attend, write: Write
    ) -> None:
        """The same pass for its keys and values alone: the last layer's go to `write`, and no picture is made."""
        self.trunk(x, t, keys, place, pose, attend, write)

    def trunk(
        self,
        x: Tensor,
        t: Tensor,
        keys: Tensor,
        place: Tensor,
        pose: Tensor,
        attend: Attend,
        write: Write | None = None,
        told: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens after the last layer [B, F, N, D], or before it where it only writes; and the condition [B, F, D], for
        `decode`. `told` [B, blocks, 5] is the `relation` of the blocks' sources; a clean pass has none."""
        condition = self.condition(t, keys, place, told)
        h = self.embed(self.patches(x)) + self.condition_in(condition)[:, :, None] + self.position
        mod = self.modulation(condition).unflatten(-1, (6, -1))
        cos, sin = self.rope(pose)
        *inner, last = cast("list[Layer]", list(self.blocks))
        for index, layer in enumerate(inner):
            h = layer(index, h, mod, cos, sin, attend)
        if write is None:
            h = last(len(inner), h, mod, cos, sin, attend)
        else:
            shift, scale, *_ = last.modulations(mod, h)
            _, k, v = last.project(h, shift, scale, cos, sin)
            write(len(inner), k, v)
        return h, condition

    def decode(
        self, h_BFND: Tensor, condition_BFD: Tensor, keys_BFK: Tensor, pose_BF3: Tensor, before: Tensor, sights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(pictures [B, F, 3, H, W], how fine they are [B, F, 1, H, W], their motion [B, F, SOURCES, 2, H, W]); see
        `reproject`."""
        config = self.config
        shift, scale = self.head_modulation(condition_BFD)[:, :, None].chunk(2, dim=-1)
        then = sights.repeat_interleave(config.frames_per_block, dim=1)
        turned = (pose_BF3[..., None, 1] - then[..., 0]) * (2 * math.pi / config.turn_steps)
        looked = torch.stack((then[..., 1], pose_BF3[..., None, 2].expand_as(turned)), dim=-1) * config.look_step

        def move(motion_N2HW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            shown = before.repeat_interleave(config.frames_per_block, dim=1).flatten(0, 2).to(motion_N2HW.dtype)
            moved, inside, pixels = reproject(
                shown, motion_N2HW, turned.flatten(), looked.flatten(0, 2), config.half_fov_tan
            )
            return moved, inside * then[..., 4].flatten()[:, None, None, None], pixels

        h_BFND = modulate(self.norm(h_BFND), shift, scale)
        pictures, motion = self.head(h_BFND, stood(sights, keys_BFK), move)
        return pictures[:, :, :3], pictures[:, :, 3:].detach(), motion

    def condition(self, t: Tensor, keys: Tensor, place: Tensor, told: Tensor | None = None) -> Tensor:
        """[B, F, D] of noise level, keys (of the frame, and summed since the block began), place, and what `trunk` is told."""
        frequencies = torch.exp(torch.linspace(0.0, 6.0, NOISE_FREQUENCIES, device=t.device))
        angles = t.float()[..., None] * frequencies
        noise = torch.cat((angles.cos(), angles.sin()), dim=-1)
        B, _, K = keys.shape
        per_block = keys.view(B, -1, self.config.frames_per_block, K)
        summed = per_block.cumsum(dim=2).flatten(1, 2) / self.config.frames_per_block
        held = torch.cat((keys, summed), dim=-1)
        dtype = self.embed.weight.dtype
        mixed = self.noise_mlp(noise.to(dtype)) + self.keys_mlp(held.to(dtype)) + self.place(place)
        if told is not None:
            mixed = mixed + self.recalled(told.to(dtype)).repeat_interleave(self.config.frames_per_block, dim=1)
        return functional.silu(mixed)

    def patches(self, x: Tensor) -> Tensor:
        """[B, F, 3, H, W] to [B, F, N, 3 * patch * patch]."""
        B, F = x.shape[:2]
        grid, patch = self.config.grid, self.config.patch
        x = x.view(B, F, 3, grid, patch, grid, patch).permute(0, 1, 3, 5, 2, 4, 6)
        return x.reshape(B, F, grid * grid, 3 * patch * patch)

    def rope(self, pose_BF3: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, cos) and (-sin, sin) of a token's angles: [B, T, 1, 1, head_dim] in float32."""
        B, F = pose_BF3.shape[:2]
        config, device = self.config, pose_BF3.device
        grid, (time_dims, row_dims, column_dims, azimuth_dims) = config.grid, rope_dims(config.head_dim)
        frame, turned, looked = pose_BF3.unbind(-1)
        side = torch.arange(grid, device=device)
        shape = (B, F, grid, grid, -1)
        time = rope_angles(frame, time_dims)[:, :, None, None].expand(shape)
        rows = side - looked[..., None] * (config.look_step * grid / 2)
        row = rope_angles(rows, row_dims)[:, :, :, None].expand(shape)
        column = rope_angles(side, column_dims)[None, None, None].expand(shape)
        across = torch.atan(((side.double() + 0.5) / grid * 2 - 1) * config.half_fov_tan)
        azimuth = (turned % config.turn_steps)[..., None] * (2 * math.pi / config.turn_steps) + across
        harmonics = [HARMONICS[i % len(HARMONICS)] for i in range(azimuth_dims // 2)]
        seen = (azimuth[..., None] * torch.tensor(harmonics, device=device))[:, :, None].expand(shape)
        angles = torch.cat((time, row, column, seen), dim=-1).view(B, F * grid * grid, 1, 1, -1)
        cos, sin = angles.cos().float(), angles.sin().float()
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
