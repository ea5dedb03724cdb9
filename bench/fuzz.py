"""Broken inputs by the thousand: every image, table, archive and file of arrays is taken, set aside or refused, and nothing else happens.

    python -m bench.fuzz [IMAGES] [TABLES] [ARCHIVES] [SEED]        20000, 5000 and 2000 unless told

Sound files are mutated: bits flipped, bytes overwritten, cut, doubled, spliced with another file's. A case is a function of (kind,
seed, number) and of the files mutated. Anything but a verdict is a failure: another exception, a case of more than LONGEST_S
seconds, a file written, memory that grows by more than MOST_GROWTH_MB.
"""

from __future__ import annotations

import faulthandler
import gzip
import io
import json
import pickle
import random
import signal
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import numpy as np
import psutil
from PIL import Image

from bench.machine import write_result
from tasks.core.config import DecodeConfig
from tasks.images.decode import BadImage, decode, policy_of
from tasks.sources.__main__ import dry_run

LONGEST_S = 20.0
MOST_GROWTH_MB = 200.0
POLICY = policy_of(DecodeConfig())


@dataclass(frozen=True)
class Fuzzed:
    """What came of a kind: verdict -> count, seconds in all and of the slowest case, growth of memory in MB."""

    verdicts: Counter[str]
    seconds: float
    slowest_s: float
    growth_mb: float


def mutate(data: bytes, others: Sequence[bytes], generator: random.Random) -> bytes:
    """``data`` with one to three things done to it: flips, overwritten runs, a cut, a doubled part, a splice with one of ``others``."""
    broken = bytearray(data)
    for _ in range(generator.randint(1, 3)):
        if not broken:
            break
        at = generator.randrange(len(broken))
        length = min(generator.choice((1, 4, 16, 256)), len(broken) - at)
        what = generator.randrange(5)
        if what == 0:
            for _ in range(generator.randint(1, 8)):
                broken[generator.randrange(len(broken))] ^= 1 << generator.randrange(8)
        elif what == 1:
            broken[at : at + length] = generator.choice((b"\0", b"\xff", b"\x7f", generator.randbytes(1))) * length
        elif what == 2:
            del broken[at:]
        elif what == 3:
            broken[at:at] = broken[at : at + length] * generator.randint(1, 4)
        else:
            other = generator.choice(others)
            start = generator.randrange(len(other))
            broken[at : at + length] = other[start : start + length]
    return bytes(broken)


def pictures(generator: np.random.Generator) -> list[bytes]:
    """Sound images of every format and of the modes that decode differently."""
    noise = generator.integers(0, 256, (24, 20, 4), dtype=np.uint8)
    rgba = Image.fromarray(noise)
    deep = Image.fromarray((noise[..., 0].astype(np.uint16) << 8) | noise[..., 1])
    found = []
    kinds: tuple[tuple[Image.Image, str, dict[str, Any]], ...] = (
        *((rgba.convert("RGB"), name, {}) for name in ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP")),
        *((rgba, name, {}) for name in ("PNG", "TIFF", "WEBP")),
        *((rgba.convert("L"), name, {}) for name in ("JPEG", "PNG", "TIFF")),
        *((rgba.convert("P"), name, {}) for name in ("PNG", "GIF", "BMP")),
        *((rgba.convert("1"), name, {}) for name in ("PNG", "TIFF", "BMP")),
        *((rgba.convert("CMYK"), name, {}) for name in ("JPEG", "TIFF")),
        (deep, "PNG", {}),
        (deep, "TIFF", {"compression": "tiff_lzw"}),
        (rgba.convert("RGB"), "JPEG", {"progressive": True, "exif": _turned()}),
        (rgba.convert("RGB"), "GIF", {"save_all": True, "append_images": [rgba.convert("RGB").rotate(90)]}),
    )
    for picture, format_, options in kinds:
        buffer = io.BytesIO()
        picture.save(buffer, format_, **options)
        found.append(buffer.getvalue())
    return found


def _turned() -> bytes:
    exif = Image.Exif()
    exif[274] = 6
    return exif.tobytes()


def tables(folder: Path, images: Sequence[bytes]) -> list[tuple[str, bytes]]:
    """Sound manifests of every form over ``images``, which are written below ``folder``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for number, data in enumerate(images):
        label, name = ("cat", "dog")[number % 2], f"images/{number}.bin"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        rows.append({"path": name, "label": label, "split": ("train", "test")[number % 3 == 0], "group": f"g{number}"})
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    parquet = io.BytesIO()
    names, labels = [row["path"] for row in rows], [row["label"] for row in rows]
    pq.write_table(pa.table({"image": [{"bytes": data, "path": name} for data, name in zip(images, names, strict=True)], "label": labels}), parquet)
    plain = io.BytesIO()
    pq.write_table(pa.table({"path": names, "label": labels}), plain)
    return [
        ("x.csv", "\n".join(",".join(row) for row in cells).encode()),
        ("x.csv", "\r\n".join(",".join(f'"{cell}"' for cell in row) for row in cells).encode("utf-8-sig")),
        ("x.tsv", "\n".join("\t".join(row) for row in cells).encode()),
        ("x.jsonl", "\n".join(json.dumps(row) for row in rows).encode()),
        ("x.parquet", plain.getvalue()),
        ("shard.parquet", parquet.getvalue()),
    ]


def archives(images: Sequence[bytes]) -> list[tuple[str, bytes]]:
    """Sound archives, tar shards and files of arrays."""
    import pyarrow as pa

    files = [(f"{('cat', 'dog')[number % 2]}/{number}.bin.png", data) for number, data in enumerate(images)]
    zipped, tarred, shard = io.BytesIO(), io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files:
            archive.writestr(name, data)
    for sink, members in (
        (tarred, files),
        (shard, [(f"{number}.{end}", part) for number, (_, data) in enumerate(files) for end, part in _pair(data)]),
    ):
        with tarfile.open(fileobj=sink, mode="w") as archive:
            for name, data in members:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    noise = np.random.default_rng(len(images))
    pixels, labels = noise.integers(0, 256, (8, 6, 5, 3), dtype=np.uint8), np.arange(8) % 2
    arrays = io.BytesIO()
    np.savez(arrays, images=pixels, labels=labels)
    rows = noise.integers(0, 256, (4, 3072), dtype=np.uint8)
    cifar = pickle.dumps({b"data": rows, b"labels": [0, 1, 0, 1], b"filenames": [b"a", b"b", b"c", b"d"]}, protocol=2)
    return [
        ("x.zip", zipped.getvalue()),
        ("x.tar", tarred.getvalue()),
        ("x.tar.gz", gzip.compress(tarred.getvalue(), mtime=0)),
        ("x.tar.zst", pa.compress(tarred.getvalue(), codec="zstd", asbytes=True)),
        ("shard-0.tar", shard.getvalue()),
        ("x.npz", arrays.getvalue()),
        ("data_batch_1", cifar),
        ("data_batch_1.bin", b"".join(bytes([number % 2]) + rows[number].tobytes() for number in range(4))),
    ]


def _pair(data: bytes) -> list[tuple[str, bytes]]:
    return [("png", data), ("cls", str(len(data) % 2).encode())]


KINDS = {".csv": "table", ".tsv": "table", ".jsonl": "table", ".npz": "arrays", ".bin": "arrays", "": "arrays"}


def kind_of(name: str) -> str:
    """The source that reads a file of ``tables`` or ``archives``."""
    if name.startswith("shard"):
        return "parquet" if name.endswith(".parquet") else "webdataset"
    return "table" if name.endswith(".parquet") else KINDS.get(Path(name).suffix, "archive")


def look_at_image(data: bytes) -> str:
    """The verdict on an image: "accept", or the code of why it is set aside."""
    try:
        pixels = decode(data, POLICY)
    except BadImage as error:
        return error.code
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    return "accept"


def look_at_source(path: Path) -> str:
    """The verdict on a source: "accept", "quarantine" or the code that it is refused with."""
    told = dry_run(kind_of(path.name), str(path), path.parent, {})
    if "rejected" in told:
        assert "\n" not in told["rejected"]["message"], "an error of more than one line"
        return str(told["rejected"]["code"])
    return "quarantine" if told["quarantined"] else "accept"


def fuzz(kind: str, look: Callable[[int, random.Random], str], count: int, seed: int) -> Fuzzed:
    """``count`` cases. Raises AssertionError naming the case at the first that is no verdict."""
    verdicts: Counter[str] = Counter()
    slowest, begun, process = 0.0, time.monotonic(), psutil.Process()
    warm = max(1, count // 10)
    first = 0
    for number in range(count):
        start = time.monotonic()
        try:
            with at_most(LONGEST_S):
                verdicts[look(number, random.Random(f"{kind} {seed} {number}"))] += 1
        except Exception as error:
            raise AssertionError(f"{kind} {seed} {number}: {type(error).__name__}: {error}") from error
        slowest = max(slowest, time.monotonic() - start)
        if number + 1 == warm:
            first = process.memory_info().rss
    growth = (process.memory_info().rss - first) / 1e6
    assert growth < MOST_GROWTH_MB, f"{kind}: memory grew by {growth:.0f} MB over {count - warm} cases"
    return Fuzzed(verdicts, time.monotonic() - begun, slowest, growth)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after ``seconds``."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def fuzz_images(count: int, seed: int, more: Sequence[bytes] = ()) -> Fuzzed:
    """Mutated images through the decoder."""
    sound = [*pictures(np.random.default_rng(seed)), *more]
    return fuzz("image", lambda number, generator: look_at_image(mutate(sound[number % len(sound)], sound, generator)), count, seed)


def fuzz_sources(kind: str, count: int, seed: int) -> Fuzzed:
    """Mutated tables ("table") or archives and arrays ("archive") through a dry run, whose folder must stay as it is."""
    images = [pictures(np.random.default_rng([seed, number]))[number % 24] for number in range(24)]  # no two alike: they would be copies
    with TemporaryDirectory(prefix="trainyard-fuzz-") as work:
        inner = Path(work) / "outer" / "inner"
        inner.mkdir(parents=True)
        sound = tables(inner, images) if kind == "table" else archives(images)
        others = [data for _, data in sound]
        for name, data in sound:
            (inner / name).write_bytes(data)
            assert look_at_source(inner / name) == "accept", f"{name} is meant to be sound: {dry_run(kind_of(name), str(inner / name), inner, {})}"
            (inner / name).unlink()
        known = set(Path(work).rglob("*"))

        def look(number: int, generator: random.Random) -> str:
            name, data = sound[number % len(sound)]
            path = inner / name
            path.write_bytes(mutate(data, others, generator))
            verdict = look_at_source(path)
            path.unlink()
            assert set(Path(work).rglob("*")) == known, "a file was written or removed"
            return verdict

        return fuzz(kind, look, count, seed)


def main(images: int, table_count: int, archive_count: int, seed: int) -> None:
    """Fuzz and write the result."""
    faulthandler.enable()
    found = {
        "images": fuzz_images(images, seed),
        "tables": fuzz_sources("table", table_count, seed),
        "archives, shards and arrays": fuzz_sources("archive", archive_count, seed),
    }
    rows = "\n".join(
        f"| {name} | {one.verdicts.total():,} | {', '.join(f'{verdict} {count:,}' for verdict, count in one.verdicts.most_common())}"
        f" | {one.seconds:.0f} | {one.slowest_s:.2f} | {one.growth_mb:.0f} |"
        for name, one in found.items()
    )
    head = "| kind | cases | verdicts | s | slowest case, s | growth, MB |\n|---|---|---|---|---|---|"
    command = f"python -m bench.fuzz {images} {table_count} {archive_count} {seed}"
    write_result("fuzz", f"# Broken inputs\n\n`{command}`: no case ended otherwise than with a verdict.\n\n{head}\n{rows}")


if __name__ == "__main__":
    asked = [int(argument) for argument in sys.argv[1:]]
    main(*(asked[index] if index < len(asked) else default for index, default in enumerate((20_000, 5_000, 2_000, 0))))
