"""Write images that people should look at as tasks for Label Studio, their bytes and the model's answers in them.

    python -m tasks.sources.review [--of predictions] [--count N] [--out review.json]        in a project's root, after `evaluate`
    python -m tasks.sources.review --of label_issues                         after `python -m tasks.training.label_issues`
    python -m tasks.sources.review --pool FOLDER                             after `train`

The first takes the test images that the last model was least sure of, the second those of any split whose labels are likely wrong, the
third, of the images below FOLDER that nobody labelled, those that the model is least sure of. Beside OUT lies the labelling configuration
(.xml). What people answer comes back by the source `labelstudio` (docs/sources.md).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import heapq
import json
import os
import sys
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

from tasks.core import errors
from tasks.core.artifacts import DatasetRef, EvaluationReport, LabelIssues, TrainedModel
from tasks.core.config import load_params
from tasks.core.errors import BadInput
from tasks.core.files import write_atomic
from tasks.core.process import die_with_parent
from tasks.sources.folder import read_file
from tasks.sources.layout import located, printable

CONTROL, SHOWN = "class", "image"
TYPES = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG", "image/png"), (b"GIF8", "image/gif"), (b"BM", "image/bmp"), (b"RIFF", "image/webp"))


BATCH = 256
"""Images of a pool that the model looks at together."""


class Doubt(NamedTuple):
    """An image, the class that a model takes it for, and with what probability."""

    sha256: str
    answer: str
    probability: float


class Unlabelled(NamedTuple):
    """An image of a pool, by its name below the folder."""

    name: str
    sha256: str
    data: bytes


def least_sure(report: EvaluationReport, count: int) -> list[Doubt]:
    """The ``count`` test images whose highest probability is least, the least first; raises BadInput ``artifact_missing`` or ``artifact_edited``."""
    import pyarrow.parquet as pq

    answers = pq.read_table(report.verify().path("predictions.parquet"), columns=["sha256", "predicted", "probabilities"]).to_pylist()
    doubts = [Doubt(answer["sha256"], answer["predicted"], max(answer["probabilities"])) for answer in answers]
    return sorted(doubts, key=lambda doubt: (doubt.probability, doubt.sha256))[:count]


def likely_wrong(issues: LabelIssues, count: int) -> list[Doubt]:
    """The ``count`` images whose labels are likeliest wrong, the likeliest first; raises BadInput ``artifact_missing`` or ``artifact_edited``."""
    import pyarrow.parquet as pq

    rows = pq.read_table(issues.verify().path("issues.parquet"), columns=["sha256", "suggested", "probability_suggested"]).slice(0, count)
    return [Doubt(*row.values()) for row in rows.to_pylist()]


def least_sure_of(
    model: TrainedModel, folder: Path, known: Container[str], max_bytes: int, count: int
) -> tuple[list[tuple[Doubt, Unlabelled]], Counter[str]]:
    """The ``count`` images below ``folder`` whose highest probability is least, the least first; and how many were passed over, by code.

    Those whose sha256 is in ``known``, hidden files and links are no part of the pool. A batch and the chosen ones are in memory. Raises BadInput
    ``artifact_missing`` or ``artifact_edited``.
    """
    import numpy as np

    from tasks.images.decode import BadImage, load_pixels
    from tasks.training.predict import predict

    onnx = model.verify().path("model.onnx")
    passed: Counter[str] = Counter()
    chosen: list[tuple[float, str, Doubt, Unlabelled]] = []
    images = _pool(folder, known, max_bytes, passed)
    while batch := list(islice(images, BATCH)):
        sound, pixels = [], []
        for image in batch:
            try:
                pixels.append(load_pixels(image.data, model.decode))
                sound.append(image)
            except BadImage as error:
                passed[error.code] += 1
        for image, answer in zip(sound, predict(onnx, np.stack(pixels), BATCH) if sound else (), strict=True):
            doubt = Doubt(image.sha256, model.classes[answer.argmax()], float(answer.max()))
            entry = (-doubt.probability, doubt.sha256, doubt, image)
            (heapq.heappush if len(chosen) < count else heapq.heappushpop)(chosen, entry)
    return [(doubt, image) for _, _, doubt, image in sorted(chosen, key=lambda entry: (-entry[0], entry[1]))], passed


def _pool(folder: Path, known: Container[str], max_bytes: int, passed: Counter[str]) -> Iterator[Unlabelled]:
    """The files below ``folder`` that are not in ``known``, each content once; what cannot be read is counted in ``passed``."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            path = Path(parent, name)
            if path.is_symlink():
                continue
            data = read_file(path, max_bytes)
            if isinstance(data, str):
                passed[data] += 1
                continue
            sha256 = hashlib.sha256(data).hexdigest()
            if sha256 not in seen and sha256 not in known:
                seen.add(sha256)
                yield Unlabelled(printable(path.relative_to(folder).as_posix()), sha256, data)


def review(ref: DatasetRef, doubts: Sequence[Doubt], version: str) -> list[dict[str, Any]]:
    """A task for each of ``doubts``, answered by the model of ``version``; those removed from the data since are left out."""
    from tasks.images.shards import find_rows

    rows = find_rows(ref, [doubt.sha256 for doubt in doubts])
    tasks = []
    for doubt in doubts:
        row = rows.get(doubt.sha256)
        if row is not None:
            tasks.append(_task(doubt, row.data, version, name=row.path, label=row.label))
    return tasks


def _task(doubt: Doubt, data: bytes, version: str, **said: str) -> dict[str, Any]:
    """A task with the image in it and the model's answer."""
    kind = next((kind for start, kind in TYPES if data.startswith(start)), "image/tiff")
    answer = {"from_name": CONTROL, "to_name": SHOWN, "type": "choices", "value": {"choices": [doubt.answer]}}
    prediction = {"model_version": version, "score": round(doubt.probability, 6), "result": [answer]}
    image = {"image": f"data:{kind};base64,{base64.b64encode(data).decode()}", **said, "sha256": doubt.sha256}
    return {"data": image, "predictions": [prediction]}


def configuration(classes: tuple[str, ...]) -> str:
    """Label Studio's labelling configuration for these classes."""
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in classes)
    image, control = f'<Image name="{SHOWN}" value="$image"/>', f'<Choices name="{CONTROL}" toName="{SHOWN}" choice="single">'
    return f"<View>\n  {image}\n  {control}\n{choices}  </Choices>\n</View>\n"


def _of_pool(ref: DatasetRef, location: str, count: int) -> tuple[list[dict[str, Any]], str]:
    """Tasks of the pool at ``location``, and what they are."""
    from tasks.images.shards import standings

    folder, model = located(location, Path(), "a folder of images"), TrainedModel.load(Path())
    if not folder.is_dir():
        raise BadInput("source_unavailable", "the pool is no folder", value=location, constraint="a folder of images", knob="--pool")
    found, passed = least_sure_of(model, folder, standings(ref), load_params().ingest.max_file_bytes, count)
    tasks = [_task(doubt, image.data, model.digest[:12], name=image.name) for doubt, image in found]
    bad = f"; {passed.total()} passed over ({', '.join(f'{code} {times}' for code, times in sorted(passed.items()))})" if passed else ""
    return tasks, f"images of {location}, least sure first{bad}"


def main() -> None:
    """Write both files."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m tasks.sources.review")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--of", choices=("predictions", "label_issues"), default="predictions", help="least sure, or likely wrong labels")
    which.add_argument("--pool", metavar="FOLDER", help="images that nobody labelled: a folder, or the URL of one in a store")
    parser.add_argument("--count", type=int, default=100, help="how many images")
    parser.add_argument("--out", type=Path, default=Path("review.json"), help="file of tasks; the configuration lies beside it")
    chosen = parser.parse_args()
    if chosen.count < 1:
        raise BadInput("unknown_option", "--count", value=chosen.count, constraint="at least 1")
    ref = DatasetRef.load(Path())
    if chosen.pool:
        tasks, what = _of_pool(ref, chosen.pool, chosen.count)
    elif chosen.of == "predictions":
        report = EvaluationReport.load(Path())
        tasks, what = review(ref, least_sure(report, chosen.count), report.digest[:12]), "images of the test split, least sure first"
    else:
        issues = LabelIssues.load(Path())
        tasks, what = review(ref, likely_wrong(issues, chosen.count), issues.digest[:12]), "images, the likeliest wrong label first"
    write_atomic(chosen.out.with_suffix(".xml"), configuration(ref.classes).encode())
    write_atomic(chosen.out, json.dumps(tasks, ensure_ascii=False).encode())
    print(f"review: {len(tasks)} {what}, in {chosen.out}; configuration in {chosen.out.with_suffix('.xml')}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
