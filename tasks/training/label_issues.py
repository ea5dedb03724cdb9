"""Find labels that are likely wrong: train on all but a part of the images, ask about that part, and so for each part.

    python -m tasks.training.label_issues [--folds N]        in a project's root, after `train`; as long as N trainings

Reads artifacts/validation, artifacts/cache and artifacts/training_set, writes artifacts/label_issues. ``python -m
tasks.sources.review --of label_issues`` takes what was found to people (docs/validation.md).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core import errors
from tasks.core.artifacts import ImageCache, LabelIssues, TrainingSet, ValidationReport, file_digests, lineage
from tasks.core.config import TrainConfig, load_params
from tasks.core.errors import BadInput
from tasks.core.files import STATE, home_of, write_atomic
from tasks.core.process import die_with_parent, quiet_environment

if TYPE_CHECKING:
    import numpy as np

    from tasks.images.label_issues import Found
    from tasks.training.folds import Answers

FILES = ("issues.parquet", "report.html")
TEMPLATE = Path(__file__).with_suffix(".html")
WORK = STATE / "label_issues"
MOST_SHOWN, MOST_PAIRS, PICTURE_PX = 200, 20, 64


def label_issues(report: ValidationReport, cache: ImageCache, training_set: TrainingSet, config: TrainConfig, folds: int, out: Path) -> LabelIssues:
    """Write artifacts/label_issues below ``out``, report.json last.

    Raises BadInput ``unknown_option`` for fewer than 2 folds, ``artifact_foreign`` or ``artifact_edited``, and what tasks.training.folds
    raises.
    """
    import numpy as np

    from tasks.images import label_issues as confident
    from tasks.training.folds import out_of_fold
    from tasks.training.models import starting_weights

    if folds < 2:
        raise BadInput("unknown_option", "--folds", value=folds, constraint="at least 2")
    cache.require_made_from(report)
    report.verify()
    training_set.require_made_from(cache).verify()
    weights = starting_weights(config, out)
    answers = out_of_fold(training_set, cache, config, weights, _groups(report), folds, home_of(out) / WORK)
    found = confident.find(answers.labels, answers.probabilities)
    rows = _rows(cache, answers, found)
    pairs = Counter((row["label"], row["suggested"]) for row in rows)
    folder = (out / LabelIssues.PATH).parent
    (out / LabelIssues.PATH).unlink(missing_ok=True)
    result = LabelIssues(
        made_from=lineage(report, cache, training_set),
        folds=folds,
        images=len(answers.labels),
        issues=len(rows),
        accuracy=float(np.mean(answers.probabilities.argmax(axis=1) == answers.labels)),
        noise=found.noise,
        pairs=tuple((*pair, count) for pair, count in sorted(pairs.items(), key=lambda one: (-one[1], one[0]))),
    )
    write_atomic(folder / FILES[0], _table(rows))
    write_atomic(folder / FILES[1], _page(result, rows, _pictures(cache, answers, found.places[:MOST_SHOWN])).encode())
    return result.model_copy(update={"files": file_digests(folder, *FILES)}).save(out)


def _groups(report: ValidationReport) -> dict[str, str]:
    """sha256 -> group of the images that have one."""
    import pyarrow.parquet as pq

    columns = pq.read_table(report.path("images.parquet"), columns=["sha256", "group"]).to_pydict()
    return {sha256: group for sha256, group in zip(columns["sha256"], columns["group"], strict=True) if group is not None}


def _rows(cache: ImageCache, answers: Answers, found: Found) -> list[dict[str, Any]]:
    return [
        {
            "sha256": answers.sha256[place],
            "path": answers.paths[place],
            "split": answers.splits[place],
            "label": cache.classes[answers.labels[place]],
            "suggested": cache.classes[other],
            "probability_label": float(answers.probabilities[place, answers.labels[place]]),
            "probability_suggested": float(answers.probabilities[place, other]),
            "margin": margin,
        }
        for place, other, margin in zip(found.places.tolist(), found.suggested.tolist(), found.margin.tolist(), strict=True)
    ]


def _table(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts, numbers = ("sha256", "path", "split", "label", "suggested"), ("probability_label", "probability_suggested", "margin")
    schema = pa.schema([*((name, pa.string()) for name in texts), *((name, pa.float64()) for name in numbers)])
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer, compression="none")
    return buffer.getvalue()


def _pictures(cache: ImageCache, answers: Answers, places: np.ndarray) -> list[np.ndarray]:
    """The cached pixels of ``places``, those larger than PICTURE_PX made smaller: uint8 [H, W, 3] each."""
    from tasks.core.artifacts import SPLITS
    from tasks.images.cache import open_split
    from tasks.images.decode import to_square

    views = {split: open_split(cache, split) for split in SPLITS}
    starts = {split: answers.splits.index(split) for split in SPLITS}
    pixels = [views[answers.splits[place]].pixels[place - starts[answers.splits[place]]] for place in places.tolist()]
    return [image if image.shape[0] <= PICTURE_PX else to_square(image, PICTURE_PX, "stretch") for image in pixels]


def _page(result: LabelIssues, rows: list[dict[str, Any]], pictures: list[np.ndarray]) -> str:
    """report.html: one self-contained page; every name from the data is escaped."""
    from jinja2 import Environment, StrictUndefined

    from tasks.images.validation_page import data_uri, visible

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    environment.filters["count"] = lambda number: f"{number:,}"
    page: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        result=result,
        shown=[(row, data_uri(picture)) for row, picture in zip(rows, pictures, strict=False)],
        pairs=result.pairs[:MOST_PAIRS],
        more_pairs=max(0, len(result.pairs) - MOST_PAIRS),
        top=max((count for _, _, count in result.pairs), default=1),
    )
    return page


def main() -> None:
    die_with_parent()
    quiet_environment()
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as tasks/train.py does
    parser = argparse.ArgumentParser(prog="python -m tasks.training.label_issues")
    parser.add_argument("--folds", type=int, default=5, help="parts of the images, each a training")
    folds = parser.parse_args().folds
    root = Path()
    found = label_issues(ValidationReport.load(root), ImageCache.load(root), TrainingSet.load(root), load_params().train, folds, root)
    print(
        f"label issues: {found.issues} of {found.images} labels are likely wrong, estimated noise {100 * found.noise:.2f} %, "
        f"out-of-fold accuracy {100 * found.accuracy:.2f} %; see {found.path('report.html')}"
    )


if __name__ == "__main__":
    sys.exit(errors.run(main))
