"""The small decoder: against its layout written out frame by frame, in pieces, its size, and its checkpoint."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import conv2d, interpolate, relu
from torch.utils.flop_counter import FlopCounterMode

from realtime_omni.errors import ConfigError
from realtime_omni.models.common.wan.tiny_decoder import TinyDecoder
from realtime_omni.models.common.wan.vae import CodecState


@pytest.fixture(scope="module")
def decoder() -> TinyDecoder:
    torch.manual_seed(0)
    return TinyDecoder(4, widths=(8, 6, 4, 4)).eval().requires_grad_(False)


def written_out(weights: dict[str, torch.Tensor], latents: torch.Tensor) -> torch.Tensor:
    """One frame after the other through TAEHV's sequence of 23, as its checkpoints number it; pictures [4 F, 3, H, W]."""

    def conv(index: int, x: torch.Tensor, part: str = "") -> torch.Tensor:
        name = f"stack.{index}{part}"
        weight = weights[f"{name}.weight"]
        return conv2d(x, weight, weights.get(f"{name}.bias"), padding=weight.shape[-1] // 2)

    memory: dict[int, torch.Tensor] = {}

    def onward(index: int, x: torch.Tensor) -> list[torch.Tensor]:
        if index == 23:
            return [x]
        if index in (3, 4, 5, 9, 10, 11, 15, 16, 17):
            past = memory.get(index, torch.zeros_like(x))
            memory[index] = x
            h = relu(conv(index, torch.cat((x, past), dim=1), ".conv.0"))
            h = conv(index, relu(conv(index, h, ".conv.2")), ".conv.4")
            return onward(index + 1, relu(h + x))
        if index in (7, 13, 19):
            grown = conv(index, x, ".conv").chunk(1 if index == 7 else 2, dim=1)
            return [picture for part in grown for picture in onward(index + 1, part)]
        if index == 0:
            x = torch.tanh(x / 3) * 3
        elif index in (2, 21):
            x = relu(x)
        elif index in (6, 12, 18):
            x = interpolate(x, scale_factor=2)
        else:
            x = conv(index, x)
        return onward(index + 1, x)

    return torch.cat([picture for frame in latents for picture in onward(0, frame[None])])


def test_it_is_the_published_sequence_frame_by_frame(decoder: TinyDecoder) -> None:
    latents = torch.randn(3, 4, 2, 3, generator=torch.Generator().manual_seed(1))
    wanted = written_out(decoder.state_dict(), latents).clamp(0, 1) * 2 - 1
    got, _ = decoder.decode(latents, CodecState())
    assert got.shape == (9, 3, 16, 24)
    assert torch.allclose(got, wanted[3:], atol=1e-6)


@pytest.mark.parametrize("cut", [(3, 3), (1,) * 6, (2, 4)])
def test_decoding_in_pieces_is_decoding_the_clip(decoder: TinyDecoder, cut: tuple[int, ...]) -> None:
    latents = torch.randn(6, 4, 2, 3, generator=torch.Generator().manual_seed(2))
    whole, _ = decoder.decode(latents, CodecState())
    pieces, state = [], CodecState()
    for end, size in zip(accumulate(cut), cut, strict=True):
        some, state = decoder.decode(latents[end - size : end], state)
        pieces.append(some)
    assert torch.allclose(torch.cat(pieces), whole, atol=1e-6)
    shapes = decoder.slot_shapes(16, 24)
    assert [(slot.shape, slot.dtype) for slot in shapes if slot] == [(s.shape, s.dtype) for s in state.slots]
    tensors, kinds = state.pack()
    assert CodecState.unpack(tensors, kinds, shapes).equals(state)


def test_three_latent_frames_of_832_by_480_cost_what_is_known_of_it() -> None:
    """1.63 TFLOP, counted elsewhere on TAEHV's own code."""
    with torch.device("meta"):
        decoder = TinyDecoder()
        with FlopCounterMode(display=False) as counter:
            decoder.decode(torch.zeros(3, 16, 60, 104), CodecState())
    assert counter.get_total_flops() / 1e12 == pytest.approx(1.63, abs=0.01)


def test_a_checkpoint_is_read_by_its_own_names(tmp_path: Path) -> None:
    torch.manual_seed(3)
    decoder = TinyDecoder()
    stored = {name.replace("stack.", "decoder."): tensor for name, tensor in decoder.state_dict().items()}
    save_file(stored | {"encoder.0.weight": torch.zeros(1)}, tmp_path / "taew2_1.safetensors")
    again = TinyDecoder.load(tmp_path / "taew2_1.safetensors", dtype=torch.float32, device="cpu")
    latents = torch.randn(1, 16, 1, 1)
    assert torch.allclose(again.decode(latents, CodecState())[0], decoder.decode(latents, CodecState())[0], atol=1e-6)
    del stored["decoder.22.bias"]
    save_file(stored, tmp_path / "less.safetensors")
    for name, words in (("less.safetensors", r"missing: stack\.22\.bias"), ("none.safetensors", "no file")):
        with pytest.raises(ConfigError, match=words):
            TinyDecoder.load(tmp_path / name, dtype=torch.float32, device="cpu")
