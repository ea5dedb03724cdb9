"""Files of former caches, kept machine-locally, so that prepare links or copies what it has decoded before.

DVC removes a stage's outputs before it runs, so the former artifacts/cache is gone when the next is made. Each one therefore also
lies, hard-linked where that works, in .trainyard/pixels/KEY of the project: KEY is the digest of all that decides an image's pixels
(decode spec, decode.py's own code, Pillow and its codecs). Nothing there is believed without its digest, and losing it costs time only
(docs/decisions/0011).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.artifacts import CacheForm, DecodeSpec, ImageCache
from tasks.core.errors import BadInput
from tasks.core.files import STATE, digest_of, link_or_copy, publish_dir, sha256_file, try_lock

if TYPE_CHECKING:
    from tasks.images.cache import CacheWriter

PIXELS = STATE / "pixels"
LOCK = STATE / "locks" / "pixels.lock"
STEP = 8 << 20
"""Bytes that are copied at once."""


def key_of(decode: DecodeSpec, form: CacheForm) -> str:
    """Hex digest of everything beside an image's bytes that its pixels depend on."""
    from importlib.metadata import PackageNotFoundError, version

    import numpy as np
    from PIL import __version__, features

    from tasks.images import decode as module

    codecs = {name: features.version(name) for name in ("jpg", "libjpeg_turbo", "zlib", "webp", "libtiff", "jpg_2000")}
    try:
        codecs["simplejpeg"] = version("simplejpeg")
    except PackageNotFoundError:
        codecs["simplejpeg"] = None
    code = sha256_file(Path(module.__file__))
    versions = {"pillow": __version__, "numpy": np.__version__, "codecs": codecs}
    return digest_of({"decode": decode.model_dump(mode="json"), "form": form, "code": code, **versions})


def copy_former(home: Path, decode: DecodeSpec, writer: CacheWriter) -> int:
    """Give ``writer`` every entry that is kept for ``decode`` below the project ``home``; returns how many.

    The file of a shard that holds the same images is linked; of others, rows of pixels are copied. A damaged store is removed and gives
    nothing, and one that another run holds gives nothing either.
    """
    store = home / PIXELS / key_of(decode, writer.form)
    if not ImageCache.exists(store):
        return 0
    with try_lock(home / LOCK) as mine:
        if not mine:
            return 0
        try:
            former = ImageCache.load(store).verify()
            if (former.decode, former.form) != (decode, writer.form):
                raise BadInput("artifact_foreign", "the kept pixels are another spec's")
            return sum(_take(former, writer))
        except (BadInput, OSError):
            shutil.rmtree(store, ignore_errors=True)
            return 0


def _take(former: ImageCache, writer: CacheWriter) -> Iterator[int]:
    """The images taken from each file."""
    from tasks.images.cache import file_of, members_of

    for shard, names in members_of(former).items():
        name = file_of(shard, former.form)
        if writer.members.get(shard) == names:
            writer.link(shard, former.path(name), former.files[name])
            yield len(names)
        elif former.form == "pixels":
            with former.path(name).open("rb") as handle:
                for start, stop in runs(names, writer):
                    data = os.pread(handle.fileno(), (stop - start) * writer.row_bytes, start * writer.row_bytes)
                    if len(data) != (stop - start) * writer.row_bytes:
                        raise OSError("the kept pixels end early")
                    writer.put_rows(names[start:stop], data)
                    yield stop - start


def runs(names: list[str], writer: CacheWriter) -> Iterator[tuple[int, int]]:
    """[start, stop) of rows whose places in ``writer`` follow each other too, each of at most STEP bytes."""
    most, start, last = max(1, STEP // writer.row_bytes), 0, None
    for row, name in enumerate(names):
        place = writer.place.get(name) if writer.lacks(name) else None
        follows = last is not None and place is not None and place == (last[0], last[1] + 1) and row - start < most
        if not follows:
            if last is not None:
                yield start, row
            start = row
        last = place
    if last is not None:
        yield start, len(names)


def keep(home: Path, cache: ImageCache, most_mb: float) -> None:
    """Keep ``cache`` for the next prepare, and of those kept before the newest, ``most_mb`` MB (10^6 bytes) in all; 0 keeps none.

    Left undone where another run holds the store or the disk refuses: it only saves time.
    """
    with try_lock(home / LOCK) as mine, suppress(OSError):
        if not mine:
            return
        left = most_mb * 1e6 - _bytes(cache.folder)
        store = home / PIXELS / key_of(cache.decode, cache.form)
        others = sorted((path for path in (home / PIXELS).glob("[!.]*") if path != store), key=lambda path: path.stat().st_mtime, reverse=True)
        for other in others:
            left -= _bytes(other)
            if left < 0:
                shutil.rmtree(other, ignore_errors=True)
        if _bytes(cache.folder) > most_mb * 1e6:
            shutil.rmtree(store, ignore_errors=True)
            return
        for stale in (home / PIXELS).glob(".*.part"):
            shutil.rmtree(stale, ignore_errors=True)
        with publish_dir(store) as work:
            folder = (work / ImageCache.PATH).parent
            folder.mkdir(parents=True)
            for name in (*cache.files, Path(ImageCache.PATH).name):
                link_or_copy(cache.folder / name, folder / name)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
