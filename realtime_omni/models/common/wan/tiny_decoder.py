"""A small decoder in the place of Wan's: 25 times less arithmetic, softer pictures.

The layout is that of TAEHV (MIT licence; ``taew2_1`` for Wan 2.1), whose checkpoints' names are ours: three stages of three
memory blocks each, every stage twice as large in both directions, the last two also twice as long in time. A memory block
sees a frame and the one before it, so a session remembers nine frames of features. Input are normalised latents, output
pictures; a session's first latent frame makes four of which one is kept, as with Wan's own decoder.

Shape legend: F latent frames, P pictures, C latent channels, h w the latent grid, H W = 8 h, 8 w pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.wan.vae import SPACE_STRIDE, TIME_STRIDE, CodecState, Slot, SlotShape, SlotShapes
from realtime_omni.models.common.weights import Names, load_weights

WIDTHS = (256, 128, 64, 64)
"""Channels before, between and after the stages."""
_MEMORIES = 3
"""Memory blocks of a stage."""
_NAMES = Names(rules=((r"^decoder\.", "stack."),), ignored=(r"encoder\..*",))


class _Memory(nn.Module):
    """Three convolutions over a frame and the one before it, added to the frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        """x, before [F, width, h, w]."""
        return functional.relu(self.conv(torch.cat((x, before), dim=1)) + x)


class _Grow(nn.Module):
    """``times`` frames of every frame, by a matrix over channels."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width * times, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.conv(x)
        return grown.reshape(-1, *x.shape[1:])


class TinyDecoder(nn.Module):
    """See the module. Every call is a pure function of its arguments."""

    def __init__(self, channels: int = 16, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self._widths = tuple(widths)
        stack: list[nn.Module] = [nn.Identity(), nn.Conv2d(channels, widths[0], 3, padding=1), nn.ReLU()]
        for stage, (width, following) in enumerate(pairwise(widths)):
            stack += [_Memory(width) for _ in range(_MEMORIES)]
            stack += [nn.Upsample(scale_factor=2), _Grow(width, 2 if stage else 1)]
            stack.append(nn.Conv2d(width, following, 3, padding=1, bias=False))
        stack += [nn.ReLU(), nn.Conv2d(widths[-1], 3, 3, padding=1)]
        self.stack = nn.ModuleList(stack)

    @classmethod
    def load(cls, file: Path, *, dtype: torch.dtype, device: torch.device | str) -> TinyDecoder:
        """From TAEHV's safetensors. Raises ConfigError, naming the tensors that do not fit."""
        if not file.is_file():
            raise ConfigError(f"options.decoder: no file {file.name!r}", path="options.decoder")
        decoder = cls()
        load_weights(decoder, file, _NAMES, dtype=dtype, device=device)
        decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs forget it
        return decoder.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def slot_shapes(self, height: int, width: int) -> SlotShapes:
        """Of a state after the first frame of pictures of this size."""
        rows, columns = height // SPACE_STRIDE, width // SPACE_STRIDE
        dtype = next(self.parameters()).dtype
        return tuple(
            SlotShape((1, channels, 1, rows << stage, columns << stage), dtype)
            for stage, channels in enumerate(self._widths[:-1])
            for _ in range(_MEMORIES)
        )

    @torch.no_grad()
    def decode(self, latents: Tensor, state: CodecState) -> tuple[Tensor, CodecState]:
        """Pictures, float32 [P, 3, H, W] in [-1, 1], of normalised latents [F, C, h, w]; P = 4 F, or 4 F - 3 at first."""
        x = torch.tanh(latents.to(next(self.parameters()).dtype) / 3) * 3
        x = x.contiguous(memory_format=torch.channels_last)
        kept = iter(state.slots)
        slots: list[Slot] = []
        for module in self.stack:
            if isinstance(module, _Memory):
                past = next(kept, None)
                first = past[:, :, 0] if isinstance(past, Tensor) else torch.zeros_like(x[:1])
                slots.append(x[-1:, :, None].clone())
                x = module(x, torch.cat((first, x[:-1])))
            else:
                x = module(x)
        pictures = x.float().clamp(0, 1) * 2 - 1
        return pictures[TIME_STRIDE - 1 if state.is_fresh else 0 :], CodecState(tuple(slots))
