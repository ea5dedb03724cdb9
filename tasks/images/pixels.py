"""Pixels of a split where they lie: rows of the cache's files, read or decoded when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tasks.core.artifacts import DecodeSpec
from tasks.core.errors import BadInput
from tasks.images.decode import BadImage, load_pixels

CHUNK_IMAGES = 8
"""A thread decodes so many at a time."""


class Layout(NamedTuple):
    """Where N images lie: image i is ``length[i]`` bytes of ``files[file[i]]`` from byte ``start[i]`` (three int64 [N])."""

    files: list[Path]
    file: np.ndarray
    start: np.ndarray
    length: np.ndarray


class Pixels:
    """Pixels uint8 [N, S, S, 3] of N images, read-only. A row, a slice or an array of rows gives what an array would give, as a copy.

    Memory holds the rows that were asked for and no more.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(self, layout: Layout, size: int) -> None:
        self.layout = layout
        self.shape = (len(layout.start), size, size, 3)
        self._rows = np.arange(len(layout.start))
        self._maps = [np.asarray(np.memmap(path, np.uint8, "r")) for path in layout.files]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> int:
        """Numbers in all: N x S x S x 3."""
        return self.shape[0] * self.shape[1] * self.shape[2] * self.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all pixels."""
        return self.size

    def __getitem__(self, rows: int | np.integer | slice | np.ndarray) -> np.ndarray:
        chosen = self._rows[rows]
        return self._read(np.atleast_1d(chosen)).reshape(*np.shape(chosen), *self.shape[1:])

    def _read(self, rows: np.ndarray) -> np.ndarray:
        """Pixels uint8 [K, S, S, 3] of ``rows`` int64 [K]."""
        raise NotImplementedError


class PackedPixels(Pixels):
    """Pixels that lie there as they are, C order; each file is whole images and nothing else."""

    def __init__(self, layout: Layout, size: int) -> None:
        super().__init__(layout, size)
        row_bytes = size * size * 3
        self._packed = [data.reshape(-1, row_bytes) for data in self._maps]
        self._places = layout.start // row_bytes

    def _read(self, rows: np.ndarray) -> np.ndarray:
        places = self._places[rows]
        if len(self._packed) == 1:
            found: np.ndarray = self._packed[0].take(places, axis=0)
        else:
            found = np.empty((len(rows), self.size // max(1, len(self))), np.uint8)
            files = self.layout.file[rows]
            order = np.argsort(files, kind="stable")
            for part in np.split(order, np.flatnonzero(np.diff(files[order])) + 1):
                if len(part):
                    found[part] = self._packed[files[part[0]]].take(places[part], axis=0)
        return found.reshape(-1, *self.shape[1:])


class EncodedPixels(Pixels):
    """Pixels of images that lie there encoded and are decoded each time: large ones take less room so.

    ``names`` are what errors call the images; ``threads`` decode at once, 0 takes the cores.
    """

    def __init__(self, layout: Layout, decode: DecodeSpec, names: Sequence[str], threads: int = 0) -> None:
        super().__init__(layout, decode.image_size)
        self.decode = decode
        self.threads = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        self._names = names

    def encoded(self, row: int) -> bytes:
        """The bytes of one image as they came."""
        start = self.layout.start[row]
        data: bytes = self._maps[self.layout.file[row]][start : start + self.layout.length[row]].tobytes()
        return data

    def _read(self, rows: np.ndarray) -> np.ndarray:
        """Raises BadInput with the image's own code where it does not decode."""
        found = np.empty((len(rows), *self.shape[1:]), np.uint8)
        places = list(zip(rows.tolist(), found, strict=True))
        parts = [places[start : start + CHUNK_IMAGES] for start in range(0, len(places), CHUNK_IMAGES)]
        for _ in self._pool.map(self._fill, parts) if self.threads > 1 and len(parts) > 1 else map(self._fill, parts):
            pass
        return found

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, "decode")

    def _fill(self, places: list[tuple[int, np.ndarray]]) -> None:
        for row, pixels in places:
            try:
                pixels[:] = load_pixels(self.encoded(row), self.decode)
            except BadImage as error:
                raise BadInput(
                    error.code, f"{self._names[row]} was sound when it was validated: {error}", knob="dvc repro --force validate"
                ) from None
