"""Encoders: one payload per frame, at once; key frames where they are asked for; pixels that survive."""

from __future__ import annotations

import io
import sys

import av
import numpy as np
import pytest
from PIL import Image

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.media import codec_string, open_encoder
from realtime_omni.media.pixels import packed


def picture(height: int, width: int, shift: int = 0) -> np.ndarray:
    """Four flat quarters (red, green, blue, grey), rolled sideways."""
    frame = np.zeros((height, width, 3), np.uint8)
    frame[: height // 2, : width // 2] = (220, 20, 20)
    frame[: height // 2, width // 2 :] = (20, 200, 20)
    frame[height // 2 :, : width // 2] = (20, 20, 230)
    frame[height // 2 :, width // 2 :] = (128, 128, 128)
    return np.roll(frame, shift, axis=1)


def nal_types(access_unit: bytes) -> list[int]:
    return [part[0] & 0x1F for part in access_unit.replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1")[1:]]


def decode_h264(payloads: list[bytes]) -> list[np.ndarray]:
    """Frames as an independent decoder sees them, each out before the next packet goes in."""
    decoder = av.CodecContext.create("h264", "r")
    decoder.thread_count = 1
    frames = []
    for payload in payloads:
        frames += decoder.decode(av.Packet(payload))
    return [frame.to_ndarray(format="rgb24") for frame in [*frames, *decoder.decode(None)]]


def test_h264_gives_one_annex_b_packet_per_frame_and_only_the_first_is_a_key_frame() -> None:
    encoder = open_encoder("h264", 64, 48, 20.0)
    out = [encoder.encode(picture(48, 64, shift)) for shift in range(40)]
    assert [key for _, key in out] == [True] + [False] * 39
    assert nal_types(out[0][0])[:2] == [7, 8]  # parameter sets in band
    assert nal_types(out[0][0])[-1] == 5
    assert all(nal_types(payload) == [1] for payload, _ in out[1:])


def test_h264_makes_a_key_frame_on_request_and_decoding_can_start_there() -> None:
    encoder = open_encoder("h264", 64, 48, 20.0)
    out = []
    for shift in range(8):
        if shift == 5:
            encoder.request_key()
        out.append(encoder.encode(picture(48, 64, shift)))
    assert [key for _, key in out] == [True, *[False] * 4, True, False, False]
    assert nal_types(out[5][0])[:2] == [7, 8]
    decoded = decode_h264([payload for payload, _ in out[5:]])
    assert len(decoded) == 3
    assert np.abs(decoded[2].astype(int) - picture(48, 64, 7)).mean() < 6


def test_h264_colours_survive_an_independent_decoder() -> None:
    encoder = open_encoder("h264", 64, 64, 20.0)
    [decoded] = decode_h264([encoder.encode(picture(64, 64))[0]])
    for y, x in ((8, 8), (8, 56), (56, 8), (56, 56)):
        assert np.abs(decoded[y, x].astype(int) - picture(64, 64)[y, x]).max() <= 6


@pytest.mark.parametrize(("width", "height"), [(63, 48), (64, 47), (33, 31), (1, 1)])
def test_h264_pads_odd_sizes_at_the_right_and_bottom(width: int, height: int) -> None:
    encoder = open_encoder("h264", width, height, 20.0)
    frame = np.full((height, width, 3), 90, np.uint8)
    [decoded] = decode_h264([encoder.encode(frame)[0]])
    assert decoded.shape == (height + height % 2, width + width % 2, 3)
    assert np.abs(decoded[:height, :width].astype(int) - 90).max() <= 4


def test_the_codec_string_is_what_the_stream_says() -> None:
    encoder = open_encoder("h264", 128, 128, 12.0)
    payload, _ = encoder.encode(picture(128, 128))
    at = payload.index(b"\0\0\1\x67") + 4
    assert codec_string("h264", 128, 128, 12.0) == f"avc1.{payload[at : at + 3].hex()}"
    assert encoder.codec == codec_string("h264", 128, 128, 12.0)
    assert payload[at] == 66  # baseline
    assert payload[at + 1] & 0x40  # constrained
    assert codec_string("jpeg", 128, 128, 12.0) is None


def test_a_frame_of_another_size_is_a_bug_not_a_picture() -> None:
    encoder = open_encoder("h264", 64, 48, 20.0)
    with pytest.raises(ValueError, match="shape"):
        encoder.encode(picture(48, 62))


def test_jpeg_is_a_key_frame_that_any_reader_opens() -> None:
    payload, key = open_encoder("jpeg", 64, 48, 20.0).encode(picture(48, 64))
    assert key
    decoded = np.array(Image.open(io.BytesIO(payload)))
    assert decoded.shape == (48, 64, 3)
    assert np.abs(decoded.astype(int) - picture(48, 64)).mean() < 3


def test_rgb24_is_exact_also_from_a_view_in_another_order() -> None:
    chw = np.ascontiguousarray(picture(5, 7).transpose(2, 0, 1))
    payload, key = open_encoder("rgb24", 7, 5, 20.0).encode(chw.transpose(1, 2, 0))
    assert key
    assert payload == picture(5, 7).tobytes()


def test_latents_are_little_endian_float16() -> None:
    payload, _ = open_encoder("latent", 1, 1, 20.0).encode(np.array([1.0, -2.0, 65_504.0, 1e9], np.float32))
    assert payload.hex() == "003c" + "00c0" + "ff7b" + "007c"


@pytest.mark.parametrize(("format_name", "package"), [("h264", "av"), ("jpeg", "simplejpeg")])
def test_a_format_without_its_library_is_refused_and_names_it(
    monkeypatch: pytest.MonkeyPatch, format_name: str, package: str
) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == package or n == f"realtime_omni.media.{format_name}"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ArgumentError) as refused:
        open_encoder(format_name, 64, 48, 20.0)
    assert refused.value.code == ErrorCode.UNSUPPORTED
    assert refused.value.path == "format"
    assert f"package {package}" in refused.value.message


@pytest.mark.parametrize("size", [(0, 4), (5000, 4)])
def test_a_size_h264_cannot_do_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError):
        open_encoder("h264", *size, 20.0)


def test_planes_are_packed_into_one_piece_and_a_packed_picture_is_not_copied() -> None:
    planes = np.random.default_rng(1).integers(0, 256, (3, 5, 7), dtype=np.uint8)
    picture = packed(planes.transpose(1, 2, 0))
    assert picture.flags.c_contiguous
    np.testing.assert_array_equal(picture, planes.transpose(1, 2, 0))
    assert packed(picture) is picture
    assert packed(np.ones((2, 2, 3), np.float32)).dtype == np.uint8
    assert packed(np.zeros((2, 4), np.uint8)[:, ::2]).shape == (2, 2)
