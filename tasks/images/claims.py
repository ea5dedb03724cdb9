"""What a source says of its images, gathered in flat memory, and what follows from it for the data version. Pure but for a spool.

An image is its bytes: its sha256 is its identity. A source may state one image several times (copies, under two labels, in
two splits), and may state again, or otherwise, what is stored already.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tasks.core.artifacts import SetAside
from tasks.images.shards import ImageRow, Standing

RANK: dict[str | None, int] = {None: 0, "train": 1, "val": 2, "test": 3}
"""Of copies in several splits the highest is kept, so that nothing leaks into training."""


class Claim(NamedTuple):
    """One file of the source that holds an image."""

    name: str
    label: str
    split: str | None
    group: str | None


class Outcome(NamedTuple):
    """What the claims on one image come to: its standing from now on, the claim it rests on, the copies that are set aside."""

    standing: Standing
    kept: Claim | None
    set_aside: list[SetAside]


def settle(claims: list[Claim], stored: Standing | None) -> Outcome:
    """Decide on an image from all ``claims`` on it and from what is ``stored`` of it.

    Two labels: all are set aside, since nobody can say which is right, and a stored image is removed. Several splits, the
    stored one among them: the copy in test is kept before val before train. Otherwise the stored name is kept, or the first.
    """
    if len({claim.label for claim in claims}) > 1:
        aside = [SetAside(name=claim.name, code="conflicting_label") for claim in claims]
        first = min(claims)
        return Outcome(Standing(stored.path if stored else first.name, None, stored.split if stored else first.split), None, aside)
    known = stored.path if stored else None
    kept = min(claims, key=lambda claim: (-RANK[claim.split], claim.name != known, claim.name))
    split = kept.split
    if stored is not None and RANK[stored.split] > RANK[split]:
        split = stored.split
    aside = []
    for claim in claims:
        leaks = claim.split is not None and claim.split != split
        if claim is not kept or leaks:
            aside.append(SetAside(name=claim.name, code="leak_exact" if leaks else "duplicate"))
    return Outcome(Standing(known or kept.name, kept.label, split), kept, aside)


class Claims:
    """Gathers the claims of a source. The bytes of images that are not ``known`` go to an unnamed file below ``folder``.

    The file has no name, so a killed ingest leaves nothing behind.
    """

    def __init__(self, folder: Path, known: Iterable[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._places: dict[str, tuple[int, int]] = {}
        self._known = frozenset(known)
        self._end = 0
        self.by_image: dict[str, list[Claim]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._spool.close()

    def again(self, claim: Claim, sha256: str | None) -> bool:
        """Take a file that is known to hold the image ``sha256``, unread, if that image is known; whether it is."""
        if sha256 is None or sha256 not in self._known:
            return False
        self.by_image.setdefault(sha256, []).append(claim)
        return True

    def add(self, claim: Claim, data: bytes) -> str:
        """Take one file of the source; the hex sha256 of its bytes."""
        sha256 = hashlib.sha256(data).hexdigest()
        self.by_image.setdefault(sha256, []).append(claim)
        if sha256 not in self._known and sha256 not in self._places:
            self._spool.write(data)
            self._places[sha256] = (self._end, len(data))
            self._end += len(data)
        return sha256

    def rows(self, settled: dict[str, Outcome]) -> Iterator[ImageRow]:
        """The spooled images among ``settled`` that are kept, sorted by name, bytes one at a time."""
        kept = [(outcome.kept, sha256) for sha256, outcome in settled.items() if outcome.kept is not None and sha256 in self._places]
        for claim, sha256 in sorted(kept):
            offset, size = self._places[sha256]
            self._spool.seek(offset)
            data = self._spool.read(size)
            yield ImageRow(data, claim.name, claim.label, sha256, settled[sha256].standing.split, claim.group)
