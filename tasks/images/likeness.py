"""Images that are one picture: equal pixels in other bytes, and near copies (another size, quality, tint or format).

A near copy is found by a 64-bit gradient hash (N. Krawetz, "Kind of Like That", 2013: one bit for each neighbour in a row of a
9 x 8 grey image, set where it grows brighter) and confirmed by the correlation of two 16 x 16 grey images: the hash alone, at a
distance of 6, takes mostly strangers for copies (docs/decisions/0010-copies.md). Flat images and those of fewer than MIN_SIDE_PX
pixels a side have no hash: there is too little in them to tell a copy by.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from tasks.core.artifacts import Split

MIN_SIDE_PX = 16
MIN_RANGE = 8
"""Grey levels between the darkest and the brightest of the 9 x 8 pixels of an image that is not flat."""
MIN_CORRELATION = 0.95
SKETCH_PX = 16
BANDS = 4
BAND_BITS = 16
ONE = float(1 << 22)
STEP_PIXELS = 1 << 20
"""Pixels that are held at once as 64-bit floats."""
MOST_BITS = 2 * BANDS - 1
"""The largest distance for which a pair must have a band of 16 bits that differs in one bit at most."""
RANK: dict[Split, int] = {"test": 0, "val": 1, "train": 2}
"""Of two copies the one of the lower rank stays: what judges a model is not moved for what teaches it."""


class Likeness(NamedTuple):
    """What tells copies: a digest of the pixels (16 bytes), the gradient hash (None where there is none), the grey sketch uint8 [256]."""

    pixels: bytes
    hash: int | None
    sketch: bytes


class Copy(NamedTuple):
    """Why the image at ``place`` is set aside: the catalogue's code, and the place of the image that it is a copy of."""

    place: int
    code: str
    of: int


def luma_of(pixels: np.ndarray) -> np.ndarray:
    """The luma (ITU-R BT.601, Pillow's integer weights) of decoded ``pixels`` (uint8 [N, H, W, 3]): uint8 [N, H, W]."""
    images, height, width, _ = pixels.shape
    luma: np.ndarray = np.asarray(Image.fromarray(pixels.reshape(images * height, width, 3)).convert("L")).reshape(images, height, width)
    return luma


def likeness(pixels: np.ndarray) -> Likeness:
    """The likeness of one decoded image (uint8 [H, W, 3])."""
    return likenesses(pixels[None], luma_of(pixels[None]))[0]


def likenesses(pixels: np.ndarray, lumas: np.ndarray) -> list[Likeness]:
    """The likeness of each of N images of one shape: decoded ``pixels`` (uint8 [N, H, W, 3]) and their ``lumas`` (uint8 [N, H, W])."""
    images, height, width = lumas.shape
    head = hashlib.blake2b(f"{height} {width} ".encode(), digest_size=16)
    digests = [_digest(head, image) for image in np.ascontiguousarray(pixels)]
    if min(height, width) < MIN_SIDE_PX:
        return [Likeness(digest, None, b"") for digest in digests]
    small, sketches = shrunk(lumas, 8, 9), shrunk(lumas, SKETCH_PX, SKETCH_PX)
    textured = np.ptp(small, axis=(1, 2)) >= MIN_RANGE
    hashes = np.packbits((small[:, :, 1:] > small[:, :, :-1]).reshape(images, 64), axis=1).view(">u8").ravel()
    return [
        Likeness(digest, value, sketch.tobytes()) if enough else Likeness(digest, None, b"")
        for digest, enough, value, sketch in zip(digests, textured.tolist(), hashes.tolist(), sketches, strict=True)
    ]


def _digest(head: hashlib.blake2b, image: np.ndarray) -> bytes:
    digest = head.copy()
    digest.update(image.data)
    return digest.digest()


def shrunk(lumas: np.ndarray, height: int, width: int) -> np.ndarray:
    """Each of ``lumas`` (uint8 [N, H, W]) resized to uint8 [N, height, width] by a triangle filter that widens with the reduction.

    Weights are whole numbers of 22 bits an axis, so every sum is below 2^53 and exact as a 64-bit float, whatever order a matrix
    product takes: one rounding at the end, and the same bytes on every machine.
    """
    images, high, wide = lumas.shape
    rows = np.empty((images * high, width))
    step = max(1, STEP_PIXELS // wide)
    for start in range(0, len(rows), step):
        rows[start : start + step] = lumas.reshape(-1, wide)[start : start + step].astype(np.float64) @ triangle(wide, width)
    columns = rows.reshape(images, high, width).transpose(0, 2, 1).reshape(-1, high) @ triangle(high, height)
    sums = columns.reshape(images, width, height).transpose(0, 2, 1)
    resized: np.ndarray = np.floor(sums / ONE**2 + 0.5).astype(np.uint8)
    return resized


@functools.lru_cache(256)
def triangle(taken: int, size: int) -> np.ndarray:
    """Weights of ``taken`` samples for each of ``size``: float64 [taken, size] of whole numbers, ONE standing for 1.

    Each sample of the result weighs the samples around its centre by a triangle of half the width ``taken`` / ``size``, at least 1,
    cut at the ends (the "bilinear" resampling with antialias of Pillow and others).
    """
    centres, samples = (2 * np.arange(size) + 1) * taken, (2 * np.arange(taken)[:, None] + 1) * size
    ramps = np.maximum(0, 2 * max(taken, size) - np.abs(samples - centres))  # in whole numbers: 2 max(taken, size) stands for 1
    weights: np.ndarray = np.rint(ramps * ONE / ramps.sum(axis=0))
    return weights


def near_pairs(hashes: np.ndarray, bits: int) -> np.ndarray:
    """Every pair (i, j), i < j, of ``hashes`` (uint64 [N]) that differ in at most ``bits`` bits: int64 [P, 2], sorted.

    Two hashes within 7 bits agree but for one bit in one of four bands of 16, so candidates are found by sorting each band once
    and looking up its 17 neighbours (M. Norouzi et al., "Fast Search in Hamming Space with Multi-Index Hashing", CVPR 2012).
    Raises ValueError for more than MOST_BITS bits.
    """
    if not 0 <= bits <= MOST_BITS:
        raise ValueError(f"{bits} bits; must be 0 to {MOST_BITS}")
    found: list[np.ndarray] = []
    for band in range(BANDS):
        keys = (hashes >> np.uint64(band * BAND_BITS)).astype(np.uint16)
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        for mask in (0, *(1 << bit for bit in range(BAND_BITS))):
            wanted = keys ^ np.uint16(mask)
            low, high = np.searchsorted(ordered, wanted, "left"), np.searchsorted(ordered, wanted, "right")
            found += _within(hashes, order, low, high, bits)
    pairs = np.concatenate(found) if found else np.empty((0, 2), np.int64)
    unique: np.ndarray = np.unique(pairs, axis=0)
    return unique


def _within(hashes: np.ndarray, order: np.ndarray, low: np.ndarray, high: np.ndarray, bits: int, step: int = 1 << 22) -> list[np.ndarray]:
    """Of each i against ``order[low[i] : high[i]]`` the pairs i < j within ``bits``, about ``step`` comparisons at a time."""
    counts = high - low
    ends = np.cumsum(counts)
    found, start = [], 0
    while start < len(counts):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + step, "right")))
        some = counts[start:stop]
        first = np.repeat(np.arange(start, stop), some)
        within = np.arange(some.sum()) - np.repeat(np.cumsum(some) - some, some)
        second = order[np.repeat(low[start:stop], some) + within]
        near = (first < second) & (np.bitwise_count(hashes[first] ^ hashes[second]) <= bits)
        if near.any():
            found.append(np.stack([first[near], second[near]], axis=1))
        start = stop
    return found


def confirmed(pairs: np.ndarray, sketches: np.ndarray) -> np.ndarray:
    """Those of ``pairs`` (int64 [P, 2]) whose ``sketches`` (uint8 [N, 256]) correlate by MIN_CORRELATION or more: int64 [Q, 2]."""
    kept = np.zeros(len(pairs), bool)
    for start in range(0, len(pairs), 1 << 16):
        some = slice(start, start + (1 << 16))
        one, other = (_normalised(sketches[pairs[some, side]]) for side in (0, 1))
        kept[some] = (one * other).sum(axis=1) >= MIN_CORRELATION
    return pairs[kept]


def _normalised(sketches: np.ndarray) -> np.ndarray:
    """Each row with mean 0 and length 1 (0 where it is constant)."""
    centred: np.ndarray = sketches - sketches.mean(axis=1, keepdims=True, dtype=np.float32)
    centred /= np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-6)
    return centred


def exact_copies(likenesses: Sequence[Likeness], names: Sequence[str], labels: Sequence[str], splits: Sequence[Split]) -> list[Copy]:
    """Images whose pixels another one has.

    Where they bear several labels nobody can say which is right: all are set aside as ``conflicting_label``. Else the one
    that judges (test before val before train, then by name) stays; the others are ``duplicate`` in its split, ``leak_exact`` elsewhere.
    """
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, found in enumerate(likenesses):
        groups[found.pixels].append(index)
    copies = []
    for members in groups.values():
        if len(members) == 1:
            continue
        members.sort(key=lambda index: (RANK[splits[index]], names[index]))
        first = members[0]
        if len({labels[index] for index in members}) > 1:
            strangers = {index: next(other for other in members if labels[other] != labels[index]) for index in members}
            copies += [Copy(index, "conflicting_label", other) for index, other in strangers.items()]
        else:
            copies += [Copy(index, "duplicate" if splits[index] == splits[first] else "leak_exact", first) for index in members[1:]]
    return sorted(copies)


def near_copies(likenesses: Sequence[Likeness], bits: int) -> np.ndarray:
    """Pairs (i, j), i < j, of near copies among ``likenesses``: int64 [P, 2], sorted."""
    textured = np.array([index for index, found in enumerate(likenesses) if found.hash is not None], np.int64)
    if not len(textured):
        return np.empty((0, 2), np.int64)
    hashes = np.array([likenesses[index].hash for index in textured], np.uint64)
    sketches = np.frombuffer(b"".join(likenesses[index].sketch for index in textured), np.uint8).reshape(len(textured), -1)
    pairs: np.ndarray = textured[confirmed(near_pairs(hashes, bits), sketches)]
    return pairs


def leaks(pairs: np.ndarray, splits: Sequence[Split]) -> list[Copy]:
    """Of near copies in two splits the one that does not judge (train before val): ``leak_near``, once for each image."""
    found: dict[int, Copy] = {}
    for one, other in pairs.tolist():
        if splits[one] != splits[other]:
            kept, lost = sorted((one, other), key=lambda index: RANK[splits[index]])
            found.setdefault(lost, Copy(lost, "leak_near", kept))
    return sorted(found.values())
