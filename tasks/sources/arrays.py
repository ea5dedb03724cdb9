"""Arrays of pixels: NumPy's npz and npy, IDX (MNIST's format) and the batches of CIFAR-10 and CIFAR-100, each image made a PNG file.

    images uint8 [N, H, W] or [N, H, W, 1 or 3]; labels whole numbers [N], or text [N]

Nothing of a file is executed: npy files with objects in them are refused, and CIFAR's pickles are read by an unpickler that
builds only plain containers, bytes, text, numbers and arrays of uint8. The PNG's bytes depend on the pixels alone.
"""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import Field

from tasks.core.artifacts import SetAside, Split
from tasks.core.config import Section
from tasks.core.errors import BadInput
from tasks.core.files import sha256_file
from tasks.core.png import encode_png
from tasks.sources import Item, Limits, Source, fingerprint, source
from tasks.sources.columns import label_text, split_of
from tasks.sources.layout import located

if TYPE_CHECKING:
    import numpy as np

KIND = "an npz, npy or IDX file, or a CIFAR batch"
CIFAR_BYTES = 3 * 32 * 32
KNOWN = "ingest.location, ingest.options.images or ingest.options.labels"
DAMAGE = (
    *(OSError, ValueError, LookupError, EOFError, TypeError, AttributeError, NameError, ArithmeticError, RecursionError, MemoryError),
    *(SyntaxError, NotImplementedError, AssertionError, zipfile.BadZipFile, zlib.error, struct.error, pickle.PickleError, tokenize.TokenError),
)
"""What NumPy, zipfile and an unpickler raise on damage."""


class ArraysOptions(Section):
    """Where the pixels and the labels stand, where the file's names do not say it."""

    labels: str = Field("", description="file of the labels (npy, IDX), relative to the project; or the name of the array in an npz")
    images: str = Field("", description="name of the array of images in an npz; empty: the only one that could be")
    split: str = Field("", description="split of all images: train, val or test; empty: none")
    class_names: list[str] = Field([], description="names of the classes 0, 1, 2 ...; empty: the numbers")


class _Pair(NamedTuple):
    """Pixels uint8 [N, H, W, C], C 1 or 3, and labels [N]."""

    images: np.ndarray
    labels: list[Any]


@source("arrays", options=ArraysOptions)
def arrays(location: str, root: Path, limits: Limits, options: ArraysOptions) -> Source:
    """Open the arrays at ``location``; what they are, their first bytes say. They are in memory as long as they are read.

    Raises BadInput ``source_unavailable``, ``manifest_corrupt``, ``too_large``, ``missing_column`` or ``unknown_split``.
    """
    path = located(location, root, KIND)
    if not path.is_file():
        raise BadInput("source_unavailable", "the source is no file", value=location, constraint=KIND, knob="ingest.location")
    split = split_of(options.split, "ingest.options.split")
    pair = _opened(path, root, limits, options)
    return Source(_items(path.name, pair, split, options), tuple(sorted(options.class_names)))


@fingerprint("arrays")
def arrays_fingerprint(location: str, root: Path, options: ArraysOptions) -> str:
    """The sha256 of the file. Raises BadInput ``source_unavailable``."""
    return sha256_file(located(location, root, KIND))


def _opened(path: Path, root: Path, limits: Limits, options: ArraysOptions) -> _Pair:
    try:
        with path.open("rb") as handle:
            head = handle.read(4)
        if head[:2] == b"PK":
            return _npz(path, limits, options)
        if head == b"\x93NUM" or head[:2] == b"\x1f\x8b" or head[:2] == b"\0\0":
            labels = located(options.labels, root, "the labels") if options.labels else _beside(path)
            images = _one(path, limits)
            return _checked(path, images, _one(labels, limits))
        if head[:1] == b"\x80":
            return _cifar_python(path, limits)
        return _cifar_binary(path, limits)
    except DAMAGE as error:
        raise _corrupt(path, str(error) or type(error).__name__) from None


def _corrupt(path: Path, why: str) -> BadInput:
    return BadInput("manifest_corrupt", f"{path.name} holds no arrays of images and labels", value=why[:200], constraint=KIND, knob=KNOWN)


def _beside(path: Path) -> Path:
    """The labels' file beside MNIST's images; raises BadInput ``missing_column``."""
    name = path.name.replace("images-idx3", "labels-idx1").replace("images.idx3", "labels.idx1")
    if name == path.name or not (path.parent / name).is_file():
        raise BadInput("missing_column", f"{path.name} has no labels", constraint="a file of labels", knob="ingest.options.labels")
    return path.parent / name


def _read(handle: IO[bytes], limits: Limits, what: str) -> bytes:
    """All bytes of a stream; raises BadInput ``too_large`` above the limit of an unpacked archive."""
    data = handle.read(limits.max_unpacked_bytes + 1)
    if len(data) > limits.max_unpacked_bytes:
        bound = f"at most {limits.max_unpacked_bytes} bytes"
        raise BadInput(
            "too_large", f"{what} is too large", value=f"over {limits.max_unpacked_bytes} bytes", constraint=bound, knob="ingest.max_unpacked_bytes"
        )
    return data


def _one(path: Path, limits: Limits) -> np.ndarray:
    """The array of an npy or IDX file, packed by gzip or not."""
    import numpy as np

    with path.open("rb") as packed:
        zipped = packed.read(2) == b"\x1f\x8b"
        packed.seek(0)
        data = _read(cast(IO[bytes], gzip.GzipFile(fileobj=packed)) if zipped else packed, limits, path.name)
    if data.startswith(b"\x93NUMPY"):
        array: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
        return array
    zeros, kind, dimensions = struct.unpack_from(">HBB", data)
    if zeros or kind != 8 or not 1 <= dimensions <= 4:
        raise ValueError("no IDX file of bytes")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _npz(path: Path, limits: Limits, options: ArraysOptions) -> _Pair:
    import numpy as np

    with zipfile.ZipFile(path) as archive:
        size = sum(info.file_size for info in archive.infolist())
        if size > limits.max_unpacked_bytes:
            bound = f"at most {limits.max_unpacked_bytes} bytes"
            raise BadInput(
                "too_large", f"{path.name} is too large", value=f"{size} bytes unpacked", constraint=bound, knob="ingest.max_unpacked_bytes"
            )
    with np.load(path, allow_pickle=False) as found:
        names = list(found.files)
        images = [name for name in names if (name == options.images if options.images else found[name].ndim >= 3)]
        labels = [name for name in names if (name == options.labels if options.labels else found[name].ndim == 1)]
        if len(images) != 1 or len(labels) != 1:
            what = f"{path.name} does not hold one array of images and one of labels that could be meant"
            raise BadInput("missing_column", what, value=", ".join(names)[:200], constraint="named", knob="ingest.options.images and .labels")
        return _checked(path, found[images[0]], found[labels[0]])


def _checked(path: Path, images: Any, labels: Any) -> _Pair:
    """Arrays as a _Pair; raises BadInput ``manifest_corrupt`` where their shapes or types do not fit."""
    import numpy as np

    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape[1:]:
        raise _corrupt(path, f"images {images.dtype} {list(images.shape)}, not uint8 [N, H, W] or [N, H, W, 1 or 3]")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or len(labels) != len(images) or labels.dtype.kind not in "iuU":
        raise _corrupt(path, f"labels {labels.dtype} {list(labels.shape)} of {len(images)} images, not whole numbers or text [N]")
    return _Pair(images, labels.tolist())


class _Dtype:
    """A pickled dtype, which must be uint8."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name not in ("u1", b"u1", "|u1", b"|u1"):
            raise pickle.UnpicklingError(f"it holds an array of {name!r}")

    def __setstate__(self, state: Any) -> None:
        pass


class _Pixels:
    """A pickled array of uint8, made from its bytes and shape alone."""

    def __init__(self, *_: Any) -> None:
        self.array: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        import numpy as np

        _, shape, _, fortran, raw = state
        self.array = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


def _latin(text: Any, encoding: Any) -> bytes:
    """How protocol 2 of Python 3 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it names the encoding {encoding!r}")
    return text.encode("latin-1")


SAFE: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Pixels,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _latin,
    ("numpy.core.multiarray", "_reconstruct"): _Pixels,
    ("numpy._core.multiarray", "_reconstruct"): _Pixels,
}


class _Unpickler(pickle._Unpickler):  # the one in C allocates what a damaged file says
    """Builds plain containers, bytes, text, numbers and our own stand-ins for what NumPy pickles; no other name is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        """Our stand-in; raises UnpicklingError for any other name."""
        if (module, name) not in SAFE:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return SAFE[module, name]


def _cifar_python(path: Path, limits: Limits) -> _Pair:
    import numpy as np

    with path.open("rb") as handle:
        found = _Unpickler(io.BytesIO(_read(handle, limits, path.name)), encoding="bytes").load()
    fields = {(key.decode() if isinstance(key, bytes) else key): value for key, value in found.items()} if isinstance(found, dict) else {}
    holder = fields.get("data")
    pixels = holder.array if isinstance(holder, _Pixels) else None
    labels = fields.get("fine_labels", fields.get("labels"))
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != CIFAR_BYTES:
        raise ValueError("no array data of 3,072 bytes for each image")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError("no list of labels")
    return _checked(path, _planes(pixels), np.array(labels, dtype=np.int64))


def _cifar_binary(path: Path, limits: Limits) -> _Pair:
    import numpy as np

    with path.open("rb") as handle:
        data = np.frombuffer(_read(handle, limits, path.name), np.uint8)
    for before in (1, 2):  # CIFAR-100 puts the coarse label before the fine one
        if len(data) and len(data) % (CIFAR_BYTES + before) == 0:
            rows = data.reshape(-1, CIFAR_BYTES + before)
            return _checked(path, _planes(rows[:, before:]), rows[:, before - 1])
    raise ValueError(f"{len(data)} bytes are no whole number of CIFAR's records")


def _planes(rows: np.ndarray) -> np.ndarray:
    """uint8 [N, 3072], red plane first, as [N, 32, 32, 3]."""
    return rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _items(name: str, pair: _Pair, split: Split | None, options: ArraysOptions) -> Iterator[Item | SetAside]:
    names = tuple(options.class_names)
    for index, (pixels, cell) in enumerate(zip(pair.images, pair.labels, strict=True)):
        height, width, channels = pixels.shape
        label, at = label_text(cell, names), f"{name}/{index:08d}.png"
        if label:
            yield Item(at, label, encode_png(pixels.tobytes(), width, height, channels), split)
        else:
            yield SetAside(name=at, code="missing_label" if label is not None else "bad_row")
