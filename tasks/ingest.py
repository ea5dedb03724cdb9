"""Bring a source's images into data/ as a new batch of immutable shards, and move data.dvc to that version.

    python -m tasks.ingest      in a project's root; reads the source that params.yaml names

What is stored stays stored, byte for byte: a batch holds only images that are new, a label layer says what changed about old
ones. What people answered in a review (the source labelstudio) stands against what other sources say. The embedded digits
are a demonstration: any other source takes their place, and they are never mixed into other data.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.backends import dvc_repo
from tasks.core import errors
from tasks.core.artifacts import DatasetRef, SetAside, Shard
from tasks.core.config import IngestConfig, load_params
from tasks.core.errors import BadInput
from tasks.core.files import STATE, digest_of, file_lock, fsync_dir, home_of
from tasks.core.process import die_with_parent, quiet_environment
from tasks.images.claims import RANK, Claim, Claims, Outcome, settle
from tasks.images.shards import REVIEW, Standing, reviewed, standings, write_layer, write_shards
from tasks.sources import Item, Limits, Source, Unread, open_source
from tasks.sources.known import Known
from tasks.sources.layout import claims_image, is_storable, printable, refuse_collisions

DEMONSTRATION = "digits"
LOCK_TIMEOUT_S = 600.0
OWN_FILES = ("*.part", ".*.part", "*.parquet")


def ingest(config: IngestConfig, root: Path) -> DatasetRef:
    """Append what is new in the source to data/ below ``root`` and return the data version; dataset.json is written last.

    An image stated under two labels, twice, or in two splits is set aside (tasks.images.claims). A source in which nothing
    changed touches no file. An interrupted call leaves the former version whole, and calling again completes it.

    Raises BadInput of the source, ``too_few_classes``, ``empty_class``, ``class_name_collision``, or Transient ``lock_busy``.
    """
    limits = limits_of(config)
    with file_lock(root / STATE / "locks" / "ingest.lock", LOCK_TIMEOUT_S, "data/"):
        before = DatasetRef.load(root) if DatasetRef.exists(root) else None
        _sweep(root, before)
        if before and config.source == DEMONSTRATION and {shard.source for shard in before.shards} != {DEMONSTRATION}:
            raise BadInput(
                "data_foreign",
                "the embedded digits are no addition to other data",
                value=", ".join(before.classes[:5]),
                constraint="digits alone",
                knob="ingest.source, or start over: rm -r data data.dvc",
            )
        source = open_source(config.source, config.location, home_of(root), limits, config.options)
        stored = standings(before) if before else {}
        demonstration = before is not None and config.source != DEMONSTRATION and {shard.source for shard in before.shards} == {DEMONSTRATION}
        known = Known(home_of(root) / STATE / "known" / f"{digest_of([config.source, config.location, config.options])[:20]}.parquet")
        with Claims(root / STATE / "ingest", () if demonstration else stored) as claims:
            stated, set_aside = _gather(source, claims, limits, known)
            for notice in source.notices:
                print(f"ingest: {notice.code}: {notice.what}", flush=True)
            if demonstration:
                with _fresh(root) as work:
                    _publish(work, None, {}, claims, stated, set_aside, source.ignored, config)
                ref = DatasetRef.load(root)
            else:
                ref = _publish(root, before, stored, claims, stated, set_aside, source.ignored, config)
        known.save()
        return ref


def limits_of(config: IngestConfig) -> Limits:
    """What a source may bring."""
    return Limits(config.max_file_bytes, config.max_unpacked_bytes, config.max_unpacked_ratio)


def _gather(source: Source, claims: Claims, limits: Limits, known: Known) -> tuple[set[str], dict[str, str]]:
    """Read the source once, but for files that are known. Returns the classes that it states, files or not, and name -> code of
    what it cannot use."""
    stated = set(source.labels)
    set_aside: dict[str, str] = {}
    for entry in source.items if source.files is None else source.files:
        version = entry.version if isinstance(entry, Unread) else ""
        if isinstance(entry, Unread):
            sha256 = known.digest(entry.name, version)
            if claims.again(Claim(entry.name, entry.label, entry.split, None), sha256):
                stated.add(entry.label)
                known.note(entry.name, version, str(sha256))
                continue
        item = entry.read() if isinstance(entry, Unread) else entry
        if isinstance(item, SetAside):
            set_aside[item.name] = item.code
            continue
        if item.split not in RANK:
            raise BadInput("unknown_split", f"{item.name} stands in an unknown split", value=repr(item.split), constraint="train, val or test")
        stated.add(item.label)
        code = fits(item, limits)
        if code:
            set_aside[printable(item.name)] = code
        else:
            known.note(item.name, version, claims.add(Claim(item.name, item.label, item.split, item.group), item.data))
    return stated, set_aside


def fits(item: Item, limits: Limits) -> str:
    """The code of why a file is not stored, "" where it fits. Whether an image is sound is not asked here: validate counts those that are not."""
    if not is_storable(item.name) or not is_storable(item.label):
        return "bad_file_name"
    if len(item.data) > limits.max_file_bytes:
        return "image_too_large"
    if not claims_image(item.name, item.data):
        return "not_an_image"
    return "" if item.data else "empty_file"


def _publish(
    root: Path,
    before: DatasetRef | None,
    stored: dict[str, Standing],
    claims: Claims,
    stated: set[str],
    set_aside: dict[str, str],
    ignored: int,
    config: IngestConfig,
) -> DatasetRef:
    """Write the batch, its layer and dataset.json below ``root``, or nothing where nothing changed."""
    fixed = reviewed(before) if before is not None and config.source != REVIEW else set()
    settled = {}
    for sha256, found in claims.by_image.items():
        standing = stored.get(sha256)
        if sha256 in fixed and standing is not None and standing.label is not None:
            found = [claim._replace(label=standing.label) for claim in found]
        settled[sha256] = settle(found, standing)
    after = {**stored, **{sha256: outcome.standing for sha256, outcome in settled.items() if sha256 in stored or outcome.kept}}
    check_classes(stated, {standing.label for standing in after.values() if standing.label is not None}, stored)
    changed = {sha256: standing for sha256, standing in after.items() if sha256 in stored and stored[sha256] != standing}
    set_aside = set_aside | {item.name: item.code for outcome in settled.values() for item in outcome.set_aside}
    aside = _merge_set_aside(before, settled, set_aside)
    new = {sha256: outcome for sha256, outcome in settled.items() if outcome.kept and sha256 not in stored}
    if before is not None and not new and not changed and aside == before.set_aside:
        return before
    folder, batch = root / "data", _next_batch(before)
    shards = write_shards(folder, batch, claims.rows(new), int(config.shard_mb * 1_000_000), config.source) if new else []
    layers = [write_layer(folder, batch, changed, config.source)] if changed else []
    return _record(root, before, after, shards, layers, aside, ignored)


def _record(
    root: Path,
    before: DatasetRef | None,
    after: dict[str, Standing],
    shards: list[Shard],
    layers: list[Shard],
    aside: tuple[SetAside, ...],
    ignored: int,
) -> DatasetRef:
    """Write dataset.json: from here on the version exists."""
    all_shards = (*(before.shards if before else ()), *shards)
    all_layers = (*(before.layers if before else ()), *layers)
    present = [standing for standing in after.values() if standing.label is not None]
    counts = Counter(standing.label for standing in present if standing.label is not None)
    splits = Counter(standing.split for standing in present if standing.split is not None)
    return DatasetRef(
        classes=tuple(sorted(counts)),
        counts=dict(sorted(counts.items())),
        splits=dict(sorted(splits.items())),
        shards=all_shards,
        layers=all_layers,
        set_aside=aside,
        ignored=ignored,
        files={shard.file: shard.sha256 for shard in (*all_shards, *all_layers)},
    ).save(root)


def check_classes(stated: set[str], present: set[str], stored: dict[str, Standing]) -> None:
    """Refuse a source without classes, a class without images, and a data set of one class."""
    known = {standing.label for standing in stored.values() if standing.label is not None}
    refuse_collisions(stated | known)
    if not stated or len(stated | known) < 2:
        raise BadInput(
            "too_few_classes",
            "there is nothing to tell apart",
            value=f"{len(stated)} classes" + (f" ({next(iter(stated))!r})" if len(stated) == 1 else ""),
            constraint="at least 2, each a folder of images",
            knob="ingest.location",
        )
    empty = sorted(stated - present)
    if empty:
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise BadInput(
            "empty_class",
            f"class {empty[0]!r}{others} has no image that can be used",
            value=0,
            constraint="at least 1",
            knob="images for it, or no folder",
        )


def _merge_set_aside(before: DatasetRef | None, settled: dict[str, Outcome], set_aside: dict[str, str]) -> tuple[SetAside, ...]:
    """What is set aside now: the source's word on each name that it states, the former word on the others."""
    used = {outcome.kept.name for outcome in settled.values() if outcome.kept}
    former = {item.name: item.code for item in before.set_aside if item.name not in used} if before else {}
    return tuple(SetAside(name=name, code=code) for name, code in sorted({**former, **set_aside}.items()))


def _next_batch(before: DatasetRef | None) -> int:
    files = [*before.shards, *before.layers] if before else []
    return max((int(Path(shard.file).name[:6]) for shard in files), default=0) + 1


def _sweep(root: Path, before: DatasetRef | None) -> None:
    """Remove what an interrupted ingest left: files of ours that dataset.json does not know, and a half-made data set."""
    shutil.rmtree(root / STATE / "ingest", ignore_errors=True)
    known = set(before.files) if before else set()
    for name in ("shards", "labels"):
        for pattern in OWN_FILES:
            for path in (root / "data" / name).glob(pattern):
                if f"{name}/{path.name}" not in known:
                    path.unlink(missing_ok=True)
    for path in (root / "data").glob(".*.part"):
        path.unlink(missing_ok=True)


@contextmanager
def _fresh(root: Path) -> Iterator[Path]:
    """Yield a folder in which to make a whole data/ that then takes the old one's place.

    A crash between the two renames leaves no data/ at all, which is made again from data.dvc and the source.
    """
    work = root / STATE / "ingest" / "fresh"
    work.mkdir(parents=True)
    try:
        yield work
        (root / "data").replace(work / "old")
        (work / "data").replace(root / "data")
        fsync_dir(root)
    finally:
        shutil.rmtree(work)


def summary(ref: DatasetRef, before: DatasetRef | None, version: str, done: str) -> str:
    """One line on what an ingest did."""
    known = {shard.sha256 for shard in before.shards} if before else set()
    added = sum(shard.rows for shard in ref.shards if shard.sha256 not in known)
    aside = Counter(item.code for item in ref.set_aside)
    parts = [f"{sum(ref.counts.values()):,} images", f"{len(ref.classes)} classes", f"+{added:,} new"]
    if aside:
        parts.append(f"{aside.total():,} set aside ({', '.join(f'{count} {code}' for code, count in sorted(aside.items()))})")
    return f"ingest: {', '.join(parts)}, data.dvc {version[:8]} ({done})"


def main() -> None:
    """Restore the committed version where data/ is absent, ingest, move data.dvc."""
    die_with_parent()
    quiet_environment()
    params, root = load_params(), Path()
    with file_lock(root / STATE / "locks" / "data.lock", LOCK_TIMEOUT_S, "data/"):
        restored = dvc_repo.restore_data(root)
        if restored:
            print(f"ingest: {restored}", flush=True)
        before = DatasetRef.load(root) if DatasetRef.exists(root) else None
        ref = ingest(params.ingest, root)
        print(summary(ref, before, *dvc_repo.track_data(root, params.ingest.push)))


if __name__ == "__main__":
    sys.exit(errors.run(main))
