"""Attacks tasks.images.decode with the bad-input catalogue, self-made odd files and seeded mutations: pixels or BadImage, nothing else."""

from __future__ import annotations

import functools
import io
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tasks.core.artifacts import DecodeSpec
from tasks.images import decode as decoder
from tasks.images.decode import FORMATS, STATUS, BadImage, DecodePolicy, ImageFacts, decode, load_pixels, policy_of, probe, status_of, to_square

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # pytest undoes the filter that decode sets
BAD_INPUTS = Path(os.environ.get("TRAINYARD_BADINPUTS", ROOT.parent / "shared" / "badinputs"))
POLICY = DecodePolicy(max_pixels=50_000_000, max_bytes=52_428_800)
SMALL = DecodePolicy(max_pixels=10_000, max_bytes=1_000_000)


def catalogue() -> list[dict[str, Any]]:
    path = BAD_INPUTS / "cases.json"
    return [case for case in json.loads(path.read_text())["cases"] if case["reader"] == "image"] if path.is_file() else []


@functools.cache
def catalogue_file(name: str) -> bytes:
    with tarfile.open(BAD_INPUTS / "tree.tar.gz") as tree:
        member = tree.extractfile(name)
        assert member is not None
        return member.read()


def test_the_catalogue_is_there() -> None:
    if not catalogue():
        pytest.skip(f"no bad-input catalogue at {BAD_INPUTS}; set TRAINYARD_BADINPUTS")
    assert len(catalogue()) >= 47


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in catalogue()])
def test_every_image_of_the_catalogue_comes_out_as_it_says(case: dict[str, Any]) -> None:
    data = catalogue_file(case["entry"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if case["behaviour"] == "accept":
        pixels, expected = decode(data, POLICY), case["expect"]["decoded"]
        assert [pixels.shape[1], pixels.shape[0]] == expected["size"]
        for pixel in expected["pixels"]:
            x, y = pixel["xy"]
            assert np.abs(pixels[y, x].astype(int) - pixel["rgb"]).max() <= pixel["tol"], pixel
        assert probe(data, POLICY).animated == (case["notice"] == "multi_frame")
    else:
        with pytest.raises(BadImage) as caught:
            decode(data, POLICY)
        assert (caught.value.code, status_of(caught.value.code)) == (case["code"], case["serve_status"])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    assert grown < case["limits"].get("max_rss_growth_mb", 200), f"{grown:.0f} MB"


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: list[bytes], **chunks: bytes) -> bytes:
    """A PNG written by hand, since Pillow writes few bit depths; ``chunks`` go before the pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    extra = b"".join(chunk(name.encode(), body) for name, body in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", zlib.compress(b"".join(b"\x00" + row for row in rows))) + chunk(b"IEND", b"")


def blocks(width: int = 64, height: int = 48) -> Image.Image:
    """Coloured 8-pixel blocks, so that lossy formats keep them."""
    colours = np.random.default_rng(0).integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return Image.fromarray(np.kron(colours, np.ones((8, 8, 1), np.uint8))[:height, :width])


def refused(data: bytes, policy: DecodePolicy = SMALL) -> str:
    with pytest.raises(BadImage) as caught:
        decode(data, policy)
    return caught.value.code


GOOD = {
    "jpeg": encode(blocks(), "JPEG", quality=85),
    "progressive": encode(blocks(), "JPEG", progressive=True),
    "cmyk": encode(blocks().convert("CMYK"), "JPEG"),
    "png": encode(blocks(), "PNG"),
    "palette": encode(blocks().quantize(64), "PNG"),
    "gif": encode(blocks().quantize(64), "GIF"),
    "bmp": encode(blocks(), "BMP"),
    "tiff": encode(blocks(), "TIFF"),
    "lzw": encode(blocks(), "TIFF", compression="tiff_lzw"),
    "deflate": encode(blocks(), "TIFF", compression="tiff_adobe_deflate"),
    "tiff_jpeg": encode(blocks(), "TIFF", compression="jpeg"),
    "fax": encode(blocks().convert("1"), "TIFF", compression="group4"),
    "webp": encode(blocks(), "WEBP"),
    "lossless": encode(blocks(), "WEBP", lossless=True),
    "animated": encode(blocks().convert("RGBA"), "WEBP", save_all=True, append_images=[blocks().rotate(90).convert("RGBA")]),
}


@pytest.mark.parametrize("name", ["png", "bmp", "tiff", "lzw", "deflate", "lossless"])
def test_lossless_formats_come_back_exactly(name: str) -> None:
    assert np.array_equal(decode(GOOD[name], SMALL), np.asarray(blocks()))


@pytest.mark.parametrize("name", ["jpeg", "progressive", "cmyk", "webp", "tiff_jpeg", "gif", "palette"])
def test_lossy_formats_come_back_nearly(name: str) -> None:
    difference = np.abs(decode(GOOD[name], SMALL).astype(int) - np.asarray(blocks()))
    assert difference.mean() < 16, "the colours are others"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(kind: str, orientation: int) -> None:
    """The reference turns the array by the EXIF standard's own words: where the 0th row and column of the scene lie."""
    exif = Image.Exif()
    exif[274] = orientation
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {"lossless": True} if kind == "WEBP" else {}
    stored = np.asarray(blocks(40, 24)).astype(int)
    turned = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.swapaxes(0, 1),
        6: stored[::-1].swapaxes(0, 1),
        7: stored[::-1, ::-1].swapaxes(0, 1),
        8: stored[:, ::-1].swapaxes(0, 1),
    }[orientation]
    data = encode(blocks(40, 24), kind, exif=exif, **options)
    pixels = decode(data, SMALL)
    assert pixels.shape == turned.shape
    assert np.abs(pixels - turned).mean() < (8 if kind == "JPEG" else 0.01)
    assert probe(data, SMALL)[:2] == (40, 24), "probe states the size as stored"


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_impossible_orientation_changes_nothing(value: int) -> None:
    exif = Image.Exif()
    exif[274] = value
    assert np.array_equal(decode(encode(blocks(), "PNG", exif=exif), SMALL), np.asarray(blocks()))


def test_broken_exif_does_not_spoil_a_sound_picture() -> None:
    assert decode(encode(blocks(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff broken"), SMALL).shape == (48, 64, 3)


@pytest.mark.parametrize("container", ["PNG", "TIFF"])
def test_sixteen_bit_grey_is_scaled_and_rounded_never_clipped(container: str) -> None:
    values = np.array([[0, 128, 129, 257, 32767, 32768, 65406, 65535]], np.uint16)
    pixels = decode(encode(Image.fromarray(values), container), SMALL)
    assert pixels[0, :, 0].tolist() == [round(int(value) * 255 / 65535) for value in values[0]]
    assert (pixels == pixels[..., :1]).all()


def test_a_big_endian_sixteen_bit_tiff_is_not_read_byte_swapped() -> None:
    values = np.array([[0x0102, 0xFE00]], ">u2")
    directory = [(256, 2), (257, 1), (258, 16), (259, 1), (262, 1), (273, 8), (278, 1), (279, 4)]
    fields = b"".join(struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in directory)
    data = b"MM\x00*" + struct.pack(">I", 12) + values.tobytes() + struct.pack(">H", len(directory)) + fields + bytes(4)
    assert decode(data, SMALL)[0, :, 0].tolist() == [1, 253]


def test_one_see_through_level_is_matched_in_the_files_own_bit_depth() -> None:
    """A PNG names its see-through grey in its own depth; Pillow widens the samples and not the name."""
    policy = DecodePolicy(100, 10_000, (10, 20, 30))
    four = decode(png(4, 1, 4, 0, [bytes([0x05, 0xAF])], tRNS=struct.pack(">H", 5)), policy)
    assert four[0].tolist() == [[0, 0, 0], [10, 20, 30], [170, 170, 170], [255, 255, 255]]
    one = decode(png(2, 1, 1, 0, [b"\x40"], tRNS=struct.pack(">H", 1)), policy)
    assert one[0].tolist() == [[0, 0, 0], [10, 20, 30]]
    sixteen = decode(png(2, 1, 16, 0, [struct.pack(">HH", 1000, 1001)], tRNS=struct.pack(">H", 1000)), policy)
    assert sixteen[0].tolist() == [[10, 20, 30], [4, 4, 4]]
    colour = decode(png(2, 1, 8, 2, [bytes([1, 2, 3, 1, 2, 4])], tRNS=struct.pack(">HHH", 1, 2, 3)), policy)
    assert colour[0].tolist() == [[10, 20, 30], [1, 2, 4]]
    deep = decode(png(2, 1, 16, 2, [struct.pack(">6H", 258, 0, 0, 2000, 0, 0)], tRNS=struct.pack(">HHH", 258, 0, 0)), policy)
    assert deep[0].tolist() == [[10, 20, 30], [7, 0, 0]]


@pytest.mark.parametrize(("mode", "pixel"), [("RGBA", (255, 0, 0, 0)), ("LA", (9, 0)), ("PA", None)])
def test_hidden_colours_never_show(mode: str, pixel: tuple[int, ...] | None) -> None:
    if pixel is None:
        data = encode(Image.fromarray(np.zeros((1, 1), np.uint8)).convert("P"), "GIF", transparency=0)
    else:
        data = encode(Image.new(mode, (1, 1), pixel), "PNG")
    assert decode(data, DecodePolicy(10, 10_000, (1, 2, 3))).tolist() == [[[1, 2, 3]]]


def test_half_seen_colours_are_mixed_with_the_background() -> None:
    data = encode(Image.new("RGBA", (1, 1), (200, 0, 100, 51)), "PNG")
    expected = [round(0.2 * colour + 0.8 * behind) for colour, behind in zip((200, 0, 100), (0, 100, 250), strict=True)]
    assert np.abs(decode(data, DecodePolicy(10, 10_000, (0, 100, 250)))[0, 0].astype(int) - expected).max() <= 1


def test_floats_and_wide_integers_are_scaled_or_refused_never_guessed() -> None:
    floats = decode(encode(Image.fromarray(np.array([[0.0, 0.5, 1.0]], np.float32)), "TIFF"), SMALL)
    assert floats[0, :, 0].tolist() == [0, 128, 255]
    wide = decode(encode(Image.fromarray(np.array([[0, 1000, 65535]], np.int32)), "TIFF"), SMALL)
    assert wide[0, :, 0].tolist() == [0, 4, 255]
    for samples in ([0.0, 255.0], [0.0, np.nan], [-0.5, 1.0]):
        assert refused(encode(Image.fromarray(np.array([samples], np.float32)), "TIFF")) == "unsupported_format"
    for numbers in ([0, 70000], [-1, 5]):
        assert refused(encode(Image.fromarray(np.array([numbers], np.int32)), "TIFF")) == "unsupported_format"
    assert refused(encode(Image.new("LAB", (2, 2)), "TIFF")) == "unsupported_format"


def test_the_first_picture_of_a_multi_picture_jpeg_is_taken_by_the_plain_reader() -> None:
    data = encode(blocks(), "MPO", save_all=True, append_images=[Image.new("RGB", (64, 48))])
    facts = probe(data, SMALL)
    assert (facts.format, facts.width, facts.height) == ("JPEG", 64, 48)
    assert np.abs(decode(data, SMALL).astype(int) - np.asarray(blocks())).mean() < 16


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript"),
        (b"8BPS\x00\x01" + bytes(30), "Photoshop"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", "HEIC"),
        (b"\x00\x00\x00\x18ftypavif\x00\x00\x00\x00mif1avif", "AVIF"),
        (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(20), "JPEG 2000"),
        (b"\xff\x0a" + bytes(20), "JPEG XL"),
        (b"\x00\x00\x01\x00\x01\x00\x10\x10\x00\x00\x01\x00 \x00", "icon"),
        (b"P6\n2 2\n255\n" + bytes(12), "PNM"),
        (b"DDS |" + bytes(20), "DDS"),
        (bytes(128) + b"DICM" + bytes(40), "DICOM"),
        (b"II*\x00\x10\x00\x00\x00CR\x02\x00" + bytes(40), "camera raw"),
    ],
)
def test_a_picture_in_another_format_is_named(data: bytes, word: str) -> None:
    with pytest.raises(BadImage, match=word) as caught:
        decode(data, SMALL)
    assert caught.value.code == "unsupported_format"
    assert all(name in str(caught.value) for name in FORMATS)


@pytest.mark.parametrize("kind", ["ICO", "JPEG2000", "TGA", "PPM", "PCX", "SGI", "DDS", "ICNS", "AVIF", "QOI", "PDF", "EPS"])
def test_no_other_format_that_pillow_writes_gets_in(kind: str) -> None:
    image = blocks(32, 32) if kind != "PDF" else blocks()
    assert refused(encode(image, kind)) in ("unsupported_format", "not_an_image")


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"\xef\xbb\xbf  <!DOCTYPE html><html>", "HTML"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b'{"error": "rate limit"}', "JSON"),
        (b"%PDF-1.7\n", "PDF"),
        (b"PK\x03\x04rest", "ZIP"),
        (b"\x00\x00\x00\x18ftypisom\x00\x00\x00\x00", "not a picture"),
        (b"BMW is a car, this is a letter about it and not a bitmap", "not a picture"),
        (bytes(5000), "zero bytes"),
        (b"\xff\xd8", "not a picture"),
    ],
)
def test_what_is_no_picture_is_told_apart(data: bytes, word: str) -> None:
    with pytest.raises(BadImage, match=word) as caught:
        decode(data, SMALL)
    assert caught.value.code == "not_an_image"


def test_a_raw_photograph_is_not_taken_for_its_thumbnail() -> None:
    thumbnail = encode(blocks(16, 16), "TIFF", tiffinfo={254: 1})
    assert refused(thumbnail) == "unsupported_format"
    assert refused(encode(blocks(16, 16), "TIFF", tiffinfo={50706: b"\x01\x04\x00\x00"})) == "unsupported_format"


def test_limits_hold_to_the_pixel_and_the_byte() -> None:
    data = encode(blocks(10, 10), "PNG")
    assert decode(data, DecodePolicy(100, len(data))).shape == (10, 10, 3)
    assert refused(data, DecodePolicy(99, len(data))) == "image_too_large"
    assert refused(data, DecodePolicy(100, len(data) - 1)) == "image_too_large"
    assert refused(b"", SMALL) == "empty_file"


def test_a_webp_that_claims_a_giant_canvas_is_refused_before_its_reader_makes_room() -> None:
    """Attack: 30 bytes of VP8X header claim 13000 x 13000, just under the size that Pillow's own check stops."""
    head = b"VP8X" + struct.pack("<I", 10) + b"\x02\x00\x00\x00" + (12999).to_bytes(3, "little") * 2
    data = b"RIFF" + struct.pack("<I", 4 + len(head)) + b"WEBP" + head
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refused(data, POLICY) == "image_too_large"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 20_000


def test_a_tiff_whose_tiles_dwarf_its_picture_is_refused() -> None:
    directory = [(256, 8), (257, 8), (258, 8), (259, 8), (262, 1), (277, 1), (322, 65536), (323, 65536), (324, 200), (325, 10)]
    fields = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in directory)
    data = b"II*\x00\x08\x00\x00\x00" + struct.pack("<H", len(directory)) + fields + bytes(200)
    assert refused(data, POLICY) == "image_too_large"


def test_a_png_checksum_that_lies_is_caught_and_bytes_after_the_end_are_not() -> None:
    data = bytearray(GOOD["png"])
    at = data.index(b"IDAT") - 4
    length = struct.unpack(">I", data[at : at + 4])[0]
    data[at + 8 + length] ^= 1
    assert refused(bytes(data)) == "image_corrupt"
    assert np.array_equal(decode(GOOD["png"] + b"PK\x03\x04 more", SMALL), np.asarray(blocks()))


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_picture_cut_anywhere_is_refused(name: str) -> None:
    """Attack: half downloads. The last bytes may be padding, so the cut stops 3 bytes before the end."""
    data = GOOD[name]
    codes = {refused(data[:cut]) for cut in range(0, len(data) - 3, max(1, len(data) // 60))}
    assert codes <= {"empty_file", "not_an_image", "image_corrupt", "image_truncated"}
    assert refused(data[: len(data) // 2]) == "image_truncated"


@pytest.mark.timeout(60)
def test_mutated_pictures_give_pixels_or_bad_image(capfd: pytest.CaptureFixture[str]) -> None:
    """Attack: flipped bits and bytes, swapped and repeated pieces; also, nothing may be written to stderr by a C library."""
    rng = random.Random(20261201)
    outcomes = {"pixels": 0, "refused": 0}
    decode(GOOD["lzw"], SMALL)
    for data in GOOD.values():
        for _ in range(120):
            broken = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                at = rng.randrange(len(broken)) if rng.random() < 0.5 else rng.randrange(min(80, len(broken)))
                way = rng.randrange(4)
                if way == 0:
                    broken[at] ^= 1 << rng.randrange(8)
                elif way == 1:
                    broken[at] = rng.choice((0, 255, rng.randrange(256)))
                elif way == 2:
                    del broken[at : at + rng.randint(1, 16)]
                else:
                    broken[at:at] = broken[: rng.randint(1, 16)]
            pixels = reason = None
            try:
                probe(bytes(broken), SMALL)
                pixels = decode(bytes(broken), SMALL)
            except BadImage as error:
                reason = error
            if pixels is None:
                outcomes["refused"] += 1
                assert reason is not None
                assert reason.code in STATUS
            else:
                outcomes["pixels"] += 1
                assert pixels.dtype == np.uint8
                assert pixels.ndim == 3
                assert pixels.shape[2] == 3
                assert pixels.shape[0] * pixels.shape[1] <= SMALL.max_pixels
    assert min(outcomes.values()) > 100, outcomes
    assert "Fax4Decode" not in capfd.readouterr().err


def plain_pictures() -> list[bytes]:
    """What ``_plain`` knows: JPEGs of one and three layers, baseline and progressive, with restarts; PNGs of grey and RGB."""
    rng = np.random.default_rng(4)
    noise = Image.fromarray(rng.integers(0, 256, (19, 23, 3), dtype=np.uint8))
    jpegs: list[dict[str, Any]] = [{}, {"progressive": True}, {"subsampling": 0, "quality": 98}, {"restart_marker_rows": 1}, {"optimize": True}]
    files = [encode(picture, "JPEG", **options) for picture in (blocks(), noise, noise.convert("L")) for options in jpegs]
    return files + [encode(picture, "PNG") for picture in (blocks(), noise, noise.convert("L"))]


def outcome(data: bytes, policy: DecodePolicy) -> tuple[Any, Any]:
    """Facts and pixels, or the codes and words of the refusals."""
    found: list[Any] = []
    for read in (probe, lambda data, policy: decode(data, policy).tobytes()):
        try:
            found.append(read(data, policy))
        except BadImage as error:
            found.append((error.code, str(error)))
    facts, pixels = decoder.examine(data, policy)
    assert facts == (found[0] if isinstance(found[0], ImageFacts) else None)
    assert ((pixels.code, str(pixels)) if isinstance(pixels, BadImage) else pixels.tobytes()) == found[1]
    return found[0], found[1]


@pytest.mark.timeout(60)
def test_the_short_way_through_plain_files_changes_no_pixel_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attack: plain files, whole, cut, mutated and with headers of their own making; each also read by Pillow's reader alone, and
    as in a Bento, where simplejpeg is not installed."""
    rng = random.Random(4)
    files = plain_pictures()
    assert all(decoder._plain(data, "PNG" if data[1:4] == b"PNG" else "JPEG", POLICY) for data in files)
    cases = [*files, *GOOD.values()]
    for data in files:
        cases += [data[:cut] for cut in rng.sample(range(len(data)), 20)]
        for _ in range(150):
            broken = bytearray(data)
            at = rng.randrange(len(broken)) if rng.random() < 0.4 else rng.randrange(min(200, len(broken)))
            broken[at] = rng.choice((0, 1, 8, 255, broken[at] ^ 1 << rng.randrange(8)))
            if data[1:4] == b"PNG" and rng.random() < 0.8:  # else nearly all end at the checksum
                size = struct.unpack_from(">I", broken, 33)[0]
                broken[29:33] = zlib.crc32(broken[12:29]).to_bytes(4, "big")
                if 41 + size + 4 <= len(broken):
                    broken[41 + size : 45 + size] = zlib.crc32(broken[37 : 41 + size]).to_bytes(4, "big")
            cases.append(bytes(broken))
    short = [outcome(data, SMALL) for data in cases]
    taken = sum(isinstance(pixels, bytes) for _, pixels in short)
    assert 500 < taken < len(cases) - 500, f"{taken} of {len(cases)}"
    assert decoder.decode_jpeg is not None
    for name, instead in (("decode_jpeg", None), ("_plain", lambda data, kind, policy: None)):
        monkeypatch.setattr(decoder, name, instead)
        for data, found in zip(cases, short, strict=True):
            assert outcome(data, SMALL) == found, data.hex()


def test_refused_plain_files_leave_no_memory_behind() -> None:
    """Attack: a decoder that stops half way through a file, 5,000 times; each holds at least 20 kB until it is let go."""
    files = [data[: len(data) * 2 // 3] for data in plain_pictures()]
    peaks = []
    for _ in range(2):
        for index in range(2_500):
            data = files[index % len(files)]
            assert refused(data) == "image_truncated"
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 10_000, "kB"


def test_threads_decode_as_one_does_and_pillows_globals_stay() -> None:
    from PIL import ImageFile

    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    names = sorted(GOOD) * 20
    alone = {name: decode(GOOD[name], SMALL).tobytes() for name in GOOD}
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda name: decode(GOOD[name], SMALL).tobytes(), names))
    assert all(found == alone[name] for name, found in zip(names, together, strict=True))
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_no_other_reader_of_pillow_is_even_loaded() -> None:
    """Attack: EPS goes to Ghostscript, PDF and others have readers too; a fresh process decodes and lists what it loaded."""
    code = (
        "import sys\nfrom tasks.images.decode import *\n"
        "for data in (open(sys.argv[1], 'rb').read(), b'%!PS-Adobe'):\n"
        "    try: decode(data, DecodePolicy(10**6, 10**6))\n"
        "    except BadImage: pass\n"
        "ours = {'Jpeg', 'Png', 'Bmp', 'Gif', 'Tiff', 'WebP'}\n"
        "print(sorted(m for m in sys.modules if m.endswith('ImagePlugin') and m[4:-11] not in ours), 'tasks.core.errors' in sys.modules)\n"
    )
    picture = ROOT / ".pytest_cache" / "decode.jpg"
    picture.parent.mkdir(exist_ok=True)
    picture.write_bytes(encode(blocks(), "MPO", save_all=True, append_images=[blocks()]))
    done = subprocess.run([sys.executable, "-c", code, str(picture)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[] False"


def test_statuses_cover_every_code() -> None:
    assert {code: status_of(code) for code in STATUS} == {
        "empty_file": 400,
        "image_corrupt": 400,
        "image_truncated": 400,
        "image_too_large": 413,
        "not_an_image": 415,
        "unsupported_format": 415,
    }


@pytest.mark.parametrize("how", ["stretch", "crop", "letterbox"])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 1000), (1000, 1), (7, 13), (16, 16), (301, 299), (2, 3)])
@pytest.mark.parametrize("size", [4, 16, 33])
def test_any_shape_becomes_exactly_square(how: str, height: int, width: int, size: int) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)
    square = to_square(pixels, size, how)
    assert square.shape == (size, size, 3)
    assert square.dtype == np.uint8
    if (height, width) == (size, size):
        assert np.array_equal(square, pixels)
    flat = to_square(np.full((height, width, 3), 77, np.uint8), size, how, background=(77, 77, 77))
    assert (flat == 77).all(), "resampling must keep a flat picture flat"


def test_crop_takes_the_middle_and_letterbox_keeps_all() -> None:
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, :8], pixels[:, 8:16], pixels[:, 16:] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    assert (to_square(pixels, 8, "crop") == (0, 255, 0)).all()
    boxed = to_square(pixels, 24, "letterbox", background=(9, 9, 9))
    assert (boxed[:8] == 9).all()
    assert (boxed[16:] == 9).all()
    assert np.array_equal(boxed[8:16], pixels)
    with pytest.raises(ValueError, match="one of stretch, crop, letterbox"):
        to_square(pixels, 8, "squash")


def test_reduction_does_not_alias() -> None:
    """A fine checkerboard must become grey; nearest or plain bilinear sampling would give black, white or stripes."""
    board = (np.indices((256, 256)).sum(0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, 2)
    assert np.abs(to_square(board, 16, "stretch").astype(int) - 127.5).max() < 4


@pytest.mark.parametrize("how", ["stretch", "crop", "letterbox"])
def test_load_pixels_is_decode_then_to_square(how: str) -> None:
    spec = DecodeSpec(image_size=16, resize=how, max_pixels=10_000, max_bytes=100_000, background=(1, 2, 3))
    for data in GOOD.values():
        expected = to_square(decode(data, policy_of(spec)), 16, how, (1, 2, 3))
        assert np.array_equal(load_pixels(data, spec), expected)
