"""From encoded images to pixels that a training can read: the plain way against tasks.prepare, side by side; and validate's look at each.

Run: python -m bench.prepare [IMAGES]   (looks for cifar10.zip in $TRAINYARD_DATA or ../shared/data)
"""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image
from threadpoolctl import threadpool_limits

from bench.machine import shared_data, write_result
from tasks.core.artifacts import DatasetRef, ValidationReport
from tasks.core.config import IngestConfig, PrepareConfig, ValidateConfig
from tasks.images.decode import policy_of
from tasks.images.shards import iter_rows
from tasks.images.table import Bounds, inspect_all
from tasks.ingest import ingest
from tasks.prepare import prepare
from tasks.validate import validate

ROUNDS = 5
SIZE = 32
CONFIG = PrepareConfig(image_size=SIZE, reuse_mb=0.0)
REUSING = PrepareConfig(image_size=SIZE)


def plain(files: list[tuple[Path, int]], out: Path) -> None:
    """Open, convert, resize one by one, pickle: what tutorials do."""
    pixels, labels = [], []
    for path, label in files:
        with Image.open(path) as image:
            pixels.append(np.array(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)))
        labels.append(label)
    with out.open("wb") as file:
        pickle.dump((pixels, labels), file)


def look(ref: DatasetRef) -> None:
    """What validate does with each image, without the suite and the page."""
    bounds = Bounds(policy_of(CONFIG.decode), 8, 10_000)
    with threadpool_limits(1, "blas"):
        for _ in inspect_all(iter_rows(ref), bounds, 6):
            pass


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def unpack(root: Path, ref: DatasetRef) -> list[tuple[Path, int]]:
    """The images as files in class folders."""
    files = []
    for number, row in enumerate(iter_rows(ref)):
        path = root / "files" / row.label / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(row.data)
        files.append((path, ref.classes.index(row.label)))
    return files


def subset(source: Path, target: Path, images: int) -> Path:
    """The first ``images`` files of each split and class of a zip, spread evenly, as a zip."""
    import zipfile

    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as chosen:
        infos = sorted((info for info in archive.infolist() if not info.is_dir()), key=lambda info: info.filename)
        for info in infos[:: max(1, len(infos) // images)]:
            chosen.writestr(info, archive.read(info))
    return target


def main(images: int) -> None:
    """Interleaved rounds of both ways, then a prepare with 1 % of the images new."""
    archive = shared_data("cifar10.zip")
    if archive is None:
        sys.exit("bench.prepare: no cifar10.zip in $TRAINYARD_DATA or ../shared/data; nothing was measured")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = subset(archive, root / "images.zip", images) if images < 60_000 else archive
        ref = ingest(IngestConfig(source="archive", location=str(source)), root)
        report = validate(ref, ValidateConfig(), CONFIG, root)
        files = unpack(root, ref)
        plain_s, ours_s, again_s, looks_s = [], [], [], []
        for _ in range(ROUNDS):
            plain_s.append(seconds(lambda: plain(files, root / "plain.pkl")))
            ours_s.append(seconds(lambda: prepare(ref, report, CONFIG, root)))
            looks_s.append(seconds(lambda: look(ref)))
        less = without_each_hundredth(ref, report, root / "less")
        for _ in range(ROUNDS):
            prepare(*less, REUSING, root / "less")
            again_s.append(seconds(lambda: prepare(ref, report, REUSING, root / "less")))
    count = len(files)
    rows = [
        f"| {name} | {median(times):.2f} | {count / median(times):,.0f} | {median(plain_s) / median(times):.1f} |"
        for name, times in (
            ("plain: open, convert, resize one by one, pickle", plain_s),
            ("prepare", ours_s),
            ("prepare, 1 % new, amid the others", again_s),
            ("validate's part for each image: decode, statistics, hash, sketch, digest", looks_s),
        )
    ]
    head = f"# Prepare\n\n`python -m bench.prepare {images}`: {count:,} JPEGs of 32 x 32, medians of {ROUNDS} interleaved rounds.\n"
    write_result("prepare", f"{head}\n| way | s | images/s | times as fast as plain |\n|---|---|---|---|\n" + "\n".join(rows))


def without_each_hundredth(ref: DatasetRef, report: ValidationReport, root: Path) -> tuple[DatasetRef, ValidationReport]:
    """The same data and a report in a project of its own in which every hundredth image is quarantined."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tasks.core.artifacts import file_digests

    target = root / "artifacts" / "validation"
    target.mkdir(parents=True)
    table = pq.read_table(report.path("images.parquet"))
    reasons = ["left out" if index % 100 == 0 else reason for index, reason in enumerate(table["reason"].to_pylist())]
    pq.write_table(table.set_column(table.schema.get_field_index("reason"), "reason", pa.array(reasons, pa.string())), target / "images.parquet")
    return ref, report.model_copy(update={"files": file_digests(target, "images.parquet")}).save(root)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60_000)
