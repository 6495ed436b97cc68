"""Pictures from clients: limits hold before a pixel is decoded."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from realtime_omni.errors import ArgumentError, ErrorCode
from realtime_omni.server.images import MAX_BYTES, decode_image


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> str:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return base64.b64encode(out.getvalue()).decode()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost nothing."""

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + part(b"IDAT", zlib.compress(b"\0")) + part(b"IEND", b"")


def refused(text: str) -> ArgumentError:
    with pytest.raises(ArgumentError) as error:
        decode_image(text)
    assert error.value.code == ErrorCode.IMAGE_INVALID
    assert error.value.path == "image"
    return error.value


def test_png_and_jpeg_become_rgb_arrays() -> None:
    pixels = np.zeros((5, 7, 3), np.uint8)
    pixels[2, 3] = (10, 200, 30)
    assert np.array_equal(decode_image(encoded(Image.fromarray(pixels))), pixels)
    grey = decode_image(encoded(Image.new("L", (9, 4), 77), "JPEG"))
    assert grey.shape == (4, 9, 3)
    assert decode_image(encoded(Image.new("RGBA", (2, 2)))).shape == (2, 2, 3)


@pytest.mark.parametrize("text", ["", "!!!", "AAAA", base64.b64encode(b"GIF89a").decode(), "ä"])
def test_what_is_no_picture_is_refused(text: str) -> None:
    refused(text)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP", "TIFF"])
def test_other_formats_are_refused(kind: str) -> None:
    refused(encoded(Image.new("RGB", (4, 4)), kind))


@pytest.mark.parametrize(("width", "height"), [(4097, 1), (1, 4097), (60_000, 60_000)])
def test_a_bomb_is_refused_from_its_header(width: int, height: int) -> None:
    assert "4096" in refused(base64.b64encode(png_header(width, height)).decode()).message or width == 60_000


def test_a_truncated_picture_is_refused() -> None:
    whole = encoded(Image.new("RGB", (64, 64), (1, 2, 3)), "JPEG")
    refused(whole[: len(whole) // 2 // 4 * 4])
    refused(base64.b64encode(png_header(64, 64)).decode())


def test_too_many_bytes_are_refused_before_decoding() -> None:
    assert str(MAX_BYTES) in refused("A" * (MAX_BYTES * 4 // 3 + 8)).message
