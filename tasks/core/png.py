"""PNG files whose bytes depend on the pixels alone: the deflate stream holds stored blocks, so no zlib build can change it."""

from __future__ import annotations

import struct
import zlib

_COLOUR_TYPE = {1: 0, 3: 2}
_STORED_MAX = 65_535


def encode_png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """Encode 8-bit ``pixels`` (row by row, ``width`` x ``height`` x ``channels``) as a PNG of grey (1 channel) or RGB (3).

    Uncompressed, so a little larger than the pixels themselves. Format: PNG (ISO/IEC 15948), RFC 1950, RFC 1951 3.2.4.
    """
    stride = width * channels
    assert channels in _COLOUR_TYPE, f"{channels} channels"
    assert stride > 0, "no pixels"
    assert len(pixels) == height * stride, f"{len(pixels)} bytes for {width} x {height} x {channels}"
    lines = b"".join(b"\0" + pixels[at : at + stride] for at in range(0, len(pixels), stride))
    blocks = [lines[at : at + _STORED_MAX] for at in range(0, len(lines), _STORED_MAX)]
    stored = b"".join(struct.pack("<BHH", block is blocks[-1], len(block), len(block) ^ 0xFFFF) + block for block in blocks)
    data = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(lines))
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
