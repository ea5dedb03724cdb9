"""How a file's bytes become the model's input pixels: the one function that training and the service share.

Needs only numpy and Pillow, and nothing else of ours, since every Bento ships this file; simplejpeg, where it is installed, makes
the same pixels of a small JPEG faster. The format is decided by
content, never by name; a picture outside FORMATS is refused before any parser sees it. Only Pillow's reader of that one
format runs: ``Image.open`` would, for a JPEG, also try the multi-picture reader, and checks sizes against a global.
Limits stand before decoding: bytes first, then width x height as the header states it. No global that decides what is
decoded is touched, so threads may decode at once; only the messages of Pillow and libtiff are silenced, since hostile
files could fill a log with them.

Of a small picture most of the time goes to the Python of Pillow's readers. The headers of the plainest JPEGs and PNGs are
therefore read here (``_plain``) and their data handed to the same decoder in one call, as the reader would, or to simplejpeg, which
refuses all that its libjpeg warns of. Everything else, and whatever those decoders refuse, goes through the reader, so that
verdicts and pixels do not depend on the way (docs/decisions/0011).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

try:
    from simplejpeg import decode_jpeg
except ImportError:  # as in a Bento
    decode_jpeg = None

READERS: dict[str, type[ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "BMP": BmpImageFile,
    "GIF": GifImageFile,
    "TIFF": TiffImageFile,
    "WEBP": WebPImageFile,
}
FORMATS = tuple(READERS)
"""The formats that are taken."""

STATUS = {
    "image_corrupt": 400,
    "image_truncated": 400,
    "empty_file": 400,
    "image_too_large": 413,
    "not_an_image": 415,
    "unsupported_format": 415,
}
"""Code of a BadImage -> HTTP status."""

RESIZES = ("stretch", "crop", "letterbox")
WHITE = (255, 255, 255)
TAKEN = f"send {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"

_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"8BPS", "Photoshop"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\x00\x00\x00\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"II\xbc", "JPEG XR"),
    (b"DDS ", "DDS"),
    (b"v/1\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"#?RGBE", "Radiance HDR"),
    (b"SIMPLE  =", "FITS"),
    (b"qoif", "QOI"),
    (b"gimp xcf", "GIMP"),
    (b"FLIF", "FLIF"),
    (b"BPG\xfb", "BPG"),
    (b"icns", "ICNS"),
    (b"\x8aMNG\r\n\x1a\n", "MNG"),
    (b"\x8bJNG\r\n\x1a\n", "JNG"),
    (b"AT&TFORM", "DjVu"),
    (b"\x01\xda", "SGI"),
    (b"\x59\xa6\x6a\x95", "Sun raster"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"FUJIFILMCCD-RAW", "camera raw"),
    (b"IIRO", "camera raw"),
    (b"IIRS", "camera raw"),
    (b"MMOR", "camera raw"),
    (b"IIU\x00", "camera raw"),
    (b"/* XPM */", "XPM"),
)
_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"crx ": "camera raw",
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
}
_OTHER: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer instead of the picture: run git lfs pull"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"{", "JSON or other text"),
    (b"<", "HTML, SVG or other markup"),
)
_ONE_CALL = 65536
"""Bytes up to which Pillow's reader, too, hands its decoder a file in one call (ImageFile.MAXBLOCK)."""
_CRC_IDAT = zlib.crc32(b"IDAT")
_LAYERS = {1: "L", 3: "RGB"}
_BMP_HEADERS = {12, 16, 40, 52, 56, 64, 108, 124}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION, _SUBFILE, _TILE_WIDTH, _TILE_HEIGHT, _DNG_VERSION = 274, 254, 322, 323, 50706
_OFFSETS, _COUNTS = (273, 324), (279, 325)  # of strips, of tiles
_TIFF_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_TIFF_WORDS = {3: "H", 4: "I", 16: "Q"}
_SIXTEEN_TO_EIGHT = ((np.arange(65536, dtype=np.uint32) + 128) // 257).astype(np.uint8)
"""round(v * 255 / 65535), since 65535 = 255 * 257."""


@dataclass(frozen=True)
class DecodePolicy:
    """Limits of one image, and the colour behind its transparent pixels."""

    max_pixels: int
    max_bytes: int
    background: tuple[int, int, int] = WHITE


class Limits(Protocol):
    """What ``policy_of`` reads: tasks.core.config.DecodeConfig, or any Spec."""

    @property
    def max_pixels(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def background(self) -> tuple[int, int, int]: ...


class Spec(Limits, Protocol):
    """What ``load_pixels`` reads: tasks.core.artifacts.DecodeSpec, or the service's own record of the same fields."""

    @property
    def image_size(self) -> int: ...
    @property
    def resize(self) -> str: ...


class ImageFacts(NamedTuple):
    """What the file's header says: size in pixels as stored (before any turn), Pillow's mode, format, more than one frame."""

    width: int
    height: int
    mode: str
    format: str
    animated: bool = False


class BadImage(ValueError):
    """An image that will not be used. ``code`` is a key of STATUS; the text holds no path and nothing from the file."""

    def __init__(self, code: str, reason: str) -> None:
        assert code in STATUS, f"unlisted code {code!r}"
        super().__init__(reason)
        self.code = code


def status_of(code: str) -> int:
    """HTTP status of a BadImage's ``code``: 413 too large, 415 not a picture that we take, 400 otherwise."""
    return STATUS.get(code, 400)


def policy_of(limits: Limits) -> DecodePolicy:
    """The DecodePolicy of a config section or a Spec."""
    return DecodePolicy(limits.max_pixels, limits.max_bytes, limits.background)


def probe(data: bytes, policy: DecodePolicy) -> ImageFacts:
    """The header of an encoded image, without decoding its pixels; raises BadImage as ``decode`` does for what a header shows."""
    kind = _format(data, policy)
    plain = _plain(data, kind, policy)
    if plain is not None:
        return plain.facts
    with _open(data, kind, policy) as image:
        width, height = image.size
        if isinstance(image, TiffImageFile):  # Pillow has turned its size already
            width, height = int(image.tag_v2[256]), int(image.tag_v2[257])
        try:
            animated = bool(getattr(image, "is_animated", False))
        except Exception:  # to answer, the GIF reader looks for a second frame in hostile bytes
            animated = False
        return ImageFacts(width, height, image.mode, kind, animated)


def decode(data: bytes, policy: DecodePolicy) -> np.ndarray:
    """Decode an encoded image wholly and return its RGB pixels.

    The EXIF orientation is applied once; transparent pixels show ``policy.background``; of several frames the first is
    taken. Sixteen-bit grey is scaled by v * 255 / 65535 and rounded; Pillow keeps the high byte of sixteen-bit colour,
    at most one level away. 32-bit integers must hold 16-bit values and floats must lie in 0..1, or they are refused: any
    other scale would be a guess.

    Args:
        data: the bytes of a JPEG, PNG, BMP, GIF, TIFF or WEBP file, whatever its name.
        policy: limits and background.

    Returns:
        uint8 array [height, width, 3].

    Raises:
        BadImage: ``empty_file``, ``not_an_image``, ``unsupported_format``, ``image_too_large``, ``image_truncated`` or ``image_corrupt``.
    """
    kind = _format(data, policy)
    plain = _plain(data, kind, policy)
    pixels = _decode_plain(plain) if plain is not None else None
    return _array(_rgb(data, kind, policy)) if pixels is None else pixels


def examine(data: bytes, policy: DecodePolicy) -> tuple[ImageFacts | None, np.ndarray | BadImage]:
    """``probe`` and ``decode`` in one: the facts, None where the header is not taken, and the pixels, or why there are none."""
    facts: ImageFacts | None = None
    try:
        plain = _plain(data, _format(data, policy), policy)
        facts = plain.facts if plain is not None else probe(data, policy)
        pixels = _decode_plain(plain) if plain is not None else None
        return facts, decode(data, policy) if pixels is None else pixels
    except BadImage as error:
        return facts, error


def to_square(pixels: np.ndarray, size: int, how: str, background: tuple[int, int, int] = WHITE) -> np.ndarray:
    """Bring uint8 RGB ``pixels`` [H, W, 3] to [size, size, 3].

    ``stretch`` scales each axis for itself; ``crop`` takes the largest centred square; ``letterbox`` keeps the whole picture
    and its proportions, centred on ``background``. Resampling is Pillow's BILINEAR, a triangle filter that widens with the
    reduction, so it does not alias; it works in integers, so every processor gives the same bytes.
    """
    if pixels.shape[:2] == (size, size) and how in RESIZES:
        return pixels
    return _array(_square(Image.fromarray(np.ascontiguousarray(pixels)), size, how, background))


def load_pixels(data: bytes, spec: Spec) -> np.ndarray:
    """``decode`` then ``to_square``: uint8 [S, S, 3] with S = ``spec.image_size``; raises BadImage."""
    return to_square(decode(data, policy_of(spec)), spec.image_size, spec.resize, spec.background)


def _array(image: Image.Image) -> np.ndarray:
    """The pixels of an RGB image; ``np.array(image)`` takes twice as long over a small one."""
    return np.frombuffer(image.tobytes(), np.uint8).reshape(image.height, image.width, 3).copy()


def _square(image: Image.Image, size: int, how: str, background: tuple[int, int, int]) -> Image.Image:
    width, height = image.size
    bilinear = Image.Resampling.BILINEAR
    if how == "stretch":
        return image.resize((size, size), bilinear)
    if how == "crop":
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return image.resize((size, size), bilinear, box=(left, top, left + side, top + side))
    if how == "letterbox":
        longest = max(width, height)
        inner = max(1, round(width * size / longest)), max(1, round(height * size / longest))
        canvas = Image.new("RGB", (size, size), background)
        canvas.paste(image.resize(inner, bilinear), ((size - inner[0]) // 2, (size - inner[1]) // 2))
        return canvas
    raise ValueError(f"resize {how!r} must be one of {', '.join(RESIZES)}")


def _format(data: bytes, policy: DecodePolicy) -> str:
    """The name of the allowed format that ``data`` begins like; raises BadImage for everything else."""
    if not data:
        raise BadImage("empty_file", "the file has no bytes")
    if len(data) > policy.max_bytes:
        raise BadImage("image_too_large", f"the file has {len(data)} bytes; at most {policy.max_bytes} are taken")
    head = bytes(data[:64])
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith((b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+")) and head[8:10] != b"CR":
        return "TIFF"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head.startswith(b"BM") and len(head) >= 18 and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return "BMP"
    _refuse(head, bytes(data[128:132]))


def _refuse(head: bytes, at_128: bytes) -> NoReturn:
    """Say what a file that is none of FORMATS seems to be."""
    name = next((name for magic, name in _FOREIGN if head.startswith(magic)), "")
    if head[4:8] == b"ftyp":
        name = _BRANDS.get(head[8:12], "")
    elif head.startswith((b"II*\x00", b"MM\x00*")):
        name = "camera raw"
    elif head[:4] in (b"\x00\x00\x01\x00", b"\x00\x00\x02\x00") and head[4:6] != b"\x00\x00" and head[9:10] == b"\x00":
        name = "icon"
    elif len(head) > 3 and head[:1] == b"P" and head[1:2] in b"1234567" and head[2:3].isspace():
        name = "PNM"
    elif len(head) > 3 and head[0] == 10 and head[1] in (0, 2, 3, 4, 5) and head[2] == 1 and head[3] in (1, 2, 4, 8):
        name = "PCX"
    elif at_128 == b"DICM":
        name = "DICOM"
    if name:
        raise BadImage("unsupported_format", f"the file is a picture in {name} format; {TAKEN}")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    seems = next((seems for magic, seems in _OTHER if text.startswith(magic)), "")
    if not seems and not head.strip(b"\x00"):
        seems = "zero bytes only"
    raise BadImage("not_an_image", f"the file is not a picture ({seems}); {TAKEN}" if seems else f"the file is not a picture; {TAKEN}")


class _Plain(NamedTuple):
    """A picture without alpha, orientation or anything else that only Pillow's reader knows: what its decoder is called with."""

    facts: ImageFacts
    data: bytes
    decoder: tuple[str, ...]
    baseline: bool = False
    """A JPEG whose every sample comes with one scan: of others, libjpegs smooth what is missing in their own ways."""


def _plain(data: bytes, kind: str, policy: DecodePolicy) -> _Plain | None:
    """None where only the reader will do; raises BadImage for too many pixels."""
    if len(data) > _ONE_CALL:
        return None
    plain = _plain_jpeg(data) if kind == "JPEG" else _plain_png(data) if kind == "PNG" else None
    if plain is not None:
        _check_size(plain.facts[:2], policy)
    return plain


def _decode_plain(plain: _Plain) -> np.ndarray | None:
    """The RGB pixels, uint8 [H, W, 3]; None where the decoder refuses: the reader says what is wrong."""
    try:
        if plain.baseline and decode_jpeg is not None:
            pixels: np.ndarray = decode_jpeg(plain.data, "RGB", strict=True)
            return pixels
        image = Image.frombytes(plain.facts.mode, plain.facts[:2], plain.data, *plain.decoder)
        return _array(image if plain.facts.mode == "RGB" else image.convert("RGB"))
    except (ValueError, MemoryError):
        return None


def _plain_jpeg(data: bytes) -> _Plain | None:
    """A JPEG of 8-bit grey or three colours whose only notes are those of JFIF. Bytes out of order make it not plain."""
    at, mode, width, height, baseline = 2, "", 0, 0, False
    try:
        while True:
            marker, length = struct.unpack_from(">HH", data, at)
            if length < 2 or at + 2 + length > len(data):
                return None
            if marker == 0xFFDA:  # start of scan
                return _Plain(ImageFacts(width, height, mode, "JPEG"), data, ("jpeg", mode, ""), baseline) if mode else None
            if marker == 0xFFDB:  # quantisation tables of 8 bits
                if (length - 2) % 65 or any(data[table] > 15 for table in range(at + 4, at + 2 + length, 65)):
                    return None
            elif marker in (0xFFC0, 0xFFC1, 0xFFC2):  # frame: baseline, extended, progressive
                depth, height, width, layers = struct.unpack_from(">BHHB", data, at + 4)
                if mode or depth != 8 or not width or not height or layers not in _LAYERS or length != 8 + 3 * layers:
                    return None
                mode, baseline = _LAYERS[layers], marker != 0xFFC2
            elif marker == 0xFFE0:  # JFIF without a thumbnail
                if length != 16 or data[at + 4 : at + 9] != b"JFIF\0":
                    return None
            elif marker not in (0xFFC4, 0xFFDD):  # Huffman tables, restart interval
                return None
            at += 2 + length
    except (struct.error, IndexError):
        return None


def _plain_png(data: bytes) -> _Plain | None:
    """A PNG of 8-bit grey or RGB, not interlaced, of the three chunks IHDR, IDAT and IEND, whose checksums hold."""
    if len(data) < 57 or data[8:16] != b"\0\0\0\rIHDR" or data[37:41] != b"IDAT":
        return None
    width, height, depth, colour, _, filtering, interlace, header, size = struct.unpack_from(">IIBBBBBII", data, 16)
    end = 41 + size
    if not width or not height or depth != 8 or colour not in (0, 2) or filtering or interlace:
        return None
    if data[end + 4 : end + 16] != b"\0\0\0\0IEND\xaeB`\x82":
        return None
    pixels = data[41:end]
    if zlib.crc32(data[12:29]) != header or zlib.crc32(pixels, _CRC_IDAT) != int.from_bytes(data[end : end + 4], "big"):
        return None
    mode = "L" if colour == 0 else "RGB"
    return _Plain(ImageFacts(width, height, mode, "PNG"), pixels, ("zip", mode))


def _open(data: bytes, kind: str, policy: DecodePolicy) -> ImageFile:
    """The image with its header read and its size checked, its pixels not yet decoded."""
    if kind == "PNG":
        _check_png(data)
    elif kind == "WEBP":  # its reader makes room for the whole canvas while it opens
        _check_size(_webp_size(data), policy)
    _hush()
    try:
        image = READERS[kind](io.BytesIO(data))
    except Exception as error:  # parsers of hostile bytes raise anything
        raise _reason(error, kind, kind == "TIFF" and _tiff_end(data) > len(data)) from error
    try:
        _check_size(image.size, policy)
        if isinstance(image, TiffImageFile):
            _check_tiff(image, policy)
    except BaseException:
        image.close()
        raise
    return image


@functools.cache
def _hush() -> None:
    """Silence Pillow's warnings about notes in a file, and libtiff, which writes a line to stderr for each broken row."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    with contextlib.suppress(OSError, AttributeError):  # a Pillow with libtiff built in stays talkative
        libtiff = ctypes.CDLL(Image.core.__file__)
        libtiff.TIFFSetErrorHandler(None)
        libtiff.TIFFSetWarningHandler(None)


def _check_size(size: tuple[int, int], policy: DecodePolicy) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise BadImage("image_corrupt", f"the image is {width} x {height} pixels")
    if width * height > policy.max_pixels:
        raise BadImage("image_too_large", f"the image has {width} x {height} pixels; at most {policy.max_pixels} are taken")


def _check_png(data: bytes) -> None:
    """Walk the chunks to the end: Pillow does not check the pixel data's checksums while it decodes."""
    at, end = 8, len(data)
    view = memoryview(data)
    while True:
        if at + 12 > end:
            raise BadImage("image_truncated", "the PNG ends before its last chunk")
        length, name = struct.unpack_from(">I4s", data, at)
        if not name.isalpha():
            raise BadImage("image_corrupt", "the PNG holds something that is not a chunk")
        if at + 12 + length > end:
            raise BadImage("image_truncated", "the PNG ends inside a chunk")
        if zlib.crc32(view[at + 4 : at + 8 + length]) != int.from_bytes(view[at + 8 + length : at + 12 + length], "big"):
            raise BadImage("image_corrupt", "a PNG chunk does not match its checksum")
        if name == b"IEND":
            return
        at += 12 + length


def _webp_size(data: bytes) -> tuple[int, int]:
    """Canvas size of a WebP file, from its first chunk (RFC 9649)."""
    if len(data) < 30 or int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise BadImage("image_truncated", "the WEBP is shorter than its header says")
    chunk = data[12:16]
    if chunk == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    raise BadImage("image_corrupt", "the WEBP begins with an unknown chunk")


def _check_tiff(image: TiffImageFile, policy: DecodePolicy) -> None:
    """Refuse raw photographs, whose first page is only a thumbnail, and tiles far larger than the picture."""
    tags = image.tag_v2
    subfile = tags.get(_SUBFILE, 0)
    if _DNG_VERSION in tags or (isinstance(subfile, int) and subfile & 1):
        raise BadImage("unsupported_format", f"the file is a picture in camera raw format, or its first page is a thumbnail; {TAKEN}")
    tile = tags.get(_TILE_WIDTH, 1), tags.get(_TILE_HEIGHT, 1)
    if not all(isinstance(side, int) for side in tile) or tile[0] * tile[1] > max(policy.max_pixels, 1 << 20):
        raise BadImage("image_too_large", f"the TIFF's tiles have more than {policy.max_pixels} pixels")


def _rgb(data: bytes, kind: str, policy: DecodePolicy) -> Image.Image:
    """The whole image as Pillow mode RGB, upright, by Pillow's reader of ``kind``."""
    with _open(data, kind, policy) as image:
        try:
            image.load()
            turn = None if kind == "TIFF" else _TURNS.get(_orientation(image))  # Pillow turns a TIFF itself
            flat = _flatten(image, _key(image, data, kind), policy.background)
            return flat if turn is None else flat.transpose(turn)
        except BadImage:
            raise
        except Exception as error:  # decoders of hostile bytes raise anything
            raise _reason(error, kind, kind == "TIFF" and _tiff_end(data) > len(data)) from error


def _orientation(image: ImageFile) -> int:
    """The EXIF orientation, 1 where there is none that can be read: broken notes do not spoil a sound picture."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # EXIF is hostile bytes too
        return 1
    return value if isinstance(value, int) else 1


def _key(image: ImageFile, data: bytes, kind: str) -> int | tuple[int, ...] | None:
    """The one grey level or colour that is see-through, in the scale of the decoded samples, or None.

    A PNG states it in the file's own bit depth, whereas Pillow widens the samples to eight bits.
    """
    key = image.info.get("transparency")
    if key is None or image.mode not in ("1", "L", "RGB", "I;16"):
        return None
    if kind == "PNG" and isinstance(key, int | tuple):
        depth = data[24]
        if image.mode == "RGB" and depth == 16 and isinstance(key, tuple):
            return tuple(level >> 8 for level in key)
        if image.mode in ("1", "L") and depth < 8 and isinstance(key, int):
            return (key & ((1 << depth) - 1)) * 255 // ((1 << depth) - 1)
    return key if isinstance(key, int | tuple) else None


def _flatten(image: Image.Image, key: int | tuple[int, ...] | None, background: tuple[int, int, int]) -> Image.Image:
    """A loaded image of any mode as RGB on ``background``."""
    alpha: Image.Image | None = None
    samples: np.ndarray | None = None
    if image.mode.startswith("I") or image.mode == "F":
        samples = np.asarray(image)
        image = Image.fromarray(_eight_bits(samples))
    if image.mode == "LAB":
        raise BadImage("unsupported_format", "the image is in the Lab colour space; send RGB, grey or CMYK")
    if key is not None:
        if samples is None:
            samples = np.asarray(image.convert("L") if image.mode == "1" else image)
        seen = samples != np.asarray(key)
        alpha = Image.fromarray((seen if seen.ndim == 2 else seen.any(axis=2)).astype(np.uint8) * np.uint8(255))
    elif image.has_transparency_data:
        image = image.convert("LA").convert("RGBA") if image.mode == "La" else image.convert("RGBA")
        alpha = image.getchannel("A")
    colour = image if image.mode == "RGB" else image.convert("RGB")
    if alpha is None:
        return colour
    canvas = Image.new("RGB", colour.size, background)
    canvas.paste(colour, mask=alpha)
    return canvas


def _eight_bits(samples: np.ndarray) -> np.ndarray:
    """16-bit, 32-bit integer or float grey samples as uint8."""
    if samples.dtype.kind == "f":
        if not (np.isfinite(samples).all() and samples.min() >= 0.0 and samples.max() <= 1.0):
            raise BadImage("unsupported_format", "the image holds float samples outside 0..1; send 8-bit or 16-bit samples")
        return np.rint(samples * np.float32(255)).astype(np.uint8)
    if samples.dtype.itemsize > 2 and (samples.min() < 0 or samples.max() > 65535):
        raise BadImage("unsupported_format", "the image holds 32-bit samples outside 0..65535; send 8-bit or 16-bit samples")
    narrow: np.ndarray = _SIXTEEN_TO_EIGHT[samples]
    return narrow


def _tiff_end(data: bytes) -> int:
    """The byte after the last one that a TIFF's first directory, its values or its strips and tiles need (TIFF 6.0, BigTIFF).

    Larger than ``len(data)`` in a file that was cut; the directory alone suffices to see it.
    """
    order = "<" if data[:2] == b"II" else ">"
    wide = 43 in data[2:4]
    word, entry, inline = ("Q", 20, 8) if wide else ("I", 12, 4)
    ends, places = [0], {}
    try:
        at = struct.unpack_from(order + word, data, 8 if wide else 4)[0]
        entries = struct.unpack_from(order + ("Q" if wide else "H"), data, at)[0]
        at += 8 if wide else 2
        ends.append(at + entries * entry)
        for start in range(at, min(ends[-1], len(data)), entry):
            tag, kind, count = struct.unpack_from(f"{order}HH{word}", data, start)
            size = count * _TIFF_BYTES.get(kind, 0)
            place = start + entry - inline
            if size > inline:
                place = struct.unpack_from(order + word, data, place)[0]
                ends.append(place + size)
            if tag in (*_OFFSETS, *_COUNTS) and kind in _TIFF_WORDS:
                places[tag] = struct.unpack_from(f"{order}{count}{_TIFF_WORDS[kind]}", data, place)
    except (struct.error, OverflowError):  # the directory or a list of strips lies beyond the end
        return len(data) + 1
    for offsets, counts in zip(_OFFSETS, _COUNTS, strict=True):
        ends += [offset + count for offset, count in zip(places.get(offsets, ()), places.get(counts, ()), strict=False)]
    return max(ends)


def _reason(error: Exception, kind: str, cut: bool) -> BadImage:
    """A reader's exception as BadImage. Only the kind of failure passes on: its text may quote the file."""
    text = str(error).lower()
    if isinstance(error, Image.DecompressionBombError | MemoryError):
        return BadImage("image_too_large", f"the {kind} image needs more memory than there is")
    if cut or isinstance(error, EOFError) or any(word in text for word in ("truncated", "end of file", "not enough", "no more images")):
        return BadImage("image_truncated", f"the {kind} image ends before its data does")
    return BadImage("image_corrupt", f"the {kind} image cannot be decoded")
