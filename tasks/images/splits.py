"""The sticky split: which of train, val and test an image belongs to, for ever.

An image's split is a pure function of its key (its group, or its sha256 where it has none), of the seed and shares in
params.yaml, and of the split that its source gave it. It depends on no other image and on no order, so growing the data
never moves an image, and two models a year apart meet on a common test set.

The key hashes to a uniform number u in [0, 1): u below ``test_share`` is the test band, the next ``val_share`` the val band,
the rest train. Then

- an image whose source put it in test or val stays there;
- an image without a split goes to its band, whether or not other images have one;
- an image whose source put it in train stays there, except where the data names no val (or no test): then the val (or
  test) band is carved out of train. "Names" is judged at the batch that brought the key: shards are append-only, so a
  later batch that is the first to name a test split changes nothing for the images that were there before.

The price of purity is balance: a small class may get no image in some split. That is an error that names the class (see
``check_classes``), never a quiet move of an image from test to train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tasks.core.artifacts import SPLITS, DatasetRef, Split
from tasks.core.config import PrepareConfig
from tasks.core.errors import BadInput

NOTHING: frozenset[str] = frozenset()


class Member(NamedTuple):
    """What decides an image's split; ``split`` is its source's own, or None."""

    sha256: str
    group: str | None
    split: str | None

    @property
    def key(self) -> str:
        """The group, or the sha256 of an image without one; prefixed, so that no group can pose as a digest."""
        return f"group:{self.group}" if self.group is not None else f"image:{self.sha256}"


def uniform(key: str, seed: int) -> float:
    """A number in [0, 1) that looks random: the first 53 bits of sha256 over seed and key."""
    digest = hashlib.sha256(f"{seed}:{key}".encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def choose(member: Member, named: frozenset[str], config: PrepareConfig) -> Split:
    """The split of ``member``; ``named`` are the splits that the data named when its key first came.

    Raises BadInput ``unknown_split``.
    """
    given = member.split
    if given is not None and given not in SPLITS:
        raise BadInput("unknown_split", f"image {member.sha256[:12]} has an unknown split", value=given, constraint="train, val or test")
    if given == "test" or given == "val":
        return "test" if given == "test" else "val"
    place = uniform(member.key, config.seed)
    band: Split = "test" if place < config.test_share else "val" if place < config.test_share + config.val_share else "train"
    return "train" if given == "train" and band in named else band


class Splitter:
    """Assigns splits image by image and holds every group to one of them."""

    def __init__(self, config: PrepareConfig, named: frozenset[str] = NOTHING, before: Mapping[str, frozenset[str]] | None = None) -> None:
        self.config = config
        self.named = named
        self.before = before or {}
        self._groups: dict[str, Split] = {}

    def split_of(self, member: Member) -> Split:
        """The split of ``member``; raises BadInput ``unknown_split`` or ``group_straddles``."""
        split = choose(member, self.before.get(member.key, self.named), self.config)
        if member.group is not None:
            first = self._groups.setdefault(member.group, split)
            if first != split:
                raise BadInput(
                    "group_straddles",
                    f"group {member.group!r} stands in two splits",
                    value=f"{first} and {split}",
                    constraint="all images of a group in one split",
                    knob="the source's split or group of these images",
                )
        return split


def splitter(ref: DatasetRef, config: PrepareConfig) -> Splitter:
    """The Splitter of a data version. Reads small columns of the shards, and only where the source names splits.

    Raises BadInput ``artifact_missing`` or ``artifact_edited`` for a lost or damaged shard.
    """
    if not ref.splits:
        return Splitter(config)
    batches: dict[str, list[str]] = {}
    for shard in (*ref.shards, *ref.layers):
        batches.setdefault(Path(shard.file).stem[:6], []).append(shard.file)  # shards/000002-00000 and labels/000002 are batch 2
    named: dict[str, frozenset[str]] = {}
    seen = NOTHING
    for batch in sorted(batches):
        seen |= {split for file in batches[batch] for split in set(_column(ref, file, "split")) if split}
        named[batch] = seen
    before: dict[str, frozenset[str]] = {}
    for batch in sorted(batches):
        if named[batch] == seen:
            break  # from here on every batch knows what the last one knows
        for file in batches[batch]:
            if file.startswith("shards/"):
                for sha256, group in zip(_column(ref, file, "sha256"), _column(ref, file, "group"), strict=True):
                    before.setdefault(Member(str(sha256), group, None).key, named[batch])
    return Splitter(config, seen, before)


def _column(ref: DatasetRef, file: str, name: str) -> list[str | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = ref.folder / file
    try:
        with pq.ParquetFile(path) as table:
            values: list[str | None] = table.read(columns=[name])[name].to_pylist()
    except FileNotFoundError:
        raise BadInput("artifact_missing", "a file of data/ is gone", value=path, knob="dvc checkout data.dvc") from None
    except (pa.ArrowException, KeyError, OSError):
        raise BadInput("artifact_edited", "a file of data/ cannot be read", value=path, knob="dvc checkout --force data.dvc") from None
    return values


def check_classes(classes: Sequence[str], counts: Mapping[str, Mapping[str, int]], named: frozenset[str]) -> None:
    """Refuse a split in which a class could not be learnt or judged.

    ``counts`` is split -> class -> images. Every class must have an image in every split; a val split that the source itself
    named may lack classes, since it only chooses the epoch, but may not be empty.

    Raises BadInput ``class_too_small`` or ``class_not_in_train``, naming the first such class and how many more there are.
    """
    lacking = [(name, split) for name in classes for split in SPLITS if not counts[split].get(name) and not (split == "val" and "val" in named)]
    if not lacking:
        if not sum(counts["val"].values()):
            raise BadInput("class_too_small", "the val split holds no image", value=0, constraint="1 or more", knob="the source's val")
        return
    name, split = lacking[0]
    total = sum(counts[each].get(name, 0) for each in SPLITS)
    others = len({other for other, _ in lacking} - {name})
    raise BadInput(
        "class_not_in_train" if split == "train" and total else "class_too_small",
        f"class {name!r} has no image in {split}" + (f", and {others} more classes are short" if others else ""),
        value=f"{total} sound images ({', '.join(f'{counts[each].get(name, 0)} {each}' for each in SPLITS)})",
        constraint="at least one in each of train, val and test",
        knob="more images of the class, another prepare.seed, or larger prepare.val_share and test_share",
    )
