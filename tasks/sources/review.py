"""Write images that people should look at as tasks for Label Studio, their bytes and the model's answers in them.

    python -m tasks.sources.review [--of predictions] [--count N] [--out review.json]        in a project's root, after `evaluate`
    python -m tasks.sources.review --of label_issues                         after `python -m tasks.training.label_issues`

The first takes the test images that the last model was least sure of, the second those of any split whose labels are likely wrong.
Beside OUT lies its labelling configuration (.xml). What people answer comes back by the source `labelstudio` (docs/sources.md).
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

from tasks.core import errors
from tasks.core.artifacts import DatasetRef, EvaluationReport, LabelIssues
from tasks.core.errors import BadInput
from tasks.core.files import write_atomic
from tasks.core.process import die_with_parent

CONTROL, SHOWN = "class", "image"
TYPES = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG", "image/png"), (b"GIF8", "image/gif"), (b"BM", "image/bmp"), (b"RIFF", "image/webp"))


class Doubt(NamedTuple):
    """An image, the class that a model takes it for, and with what probability."""

    sha256: str
    answer: str
    probability: float


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


def review(ref: DatasetRef, doubts: Sequence[Doubt], version: str) -> list[dict[str, Any]]:
    """A task for each of ``doubts``, answered by the model of ``version``; those removed from the data since are left out."""
    from tasks.images.shards import find_rows

    rows = find_rows(ref, [doubt.sha256 for doubt in doubts])
    tasks = []
    for doubt in doubts:
        row = rows.get(doubt.sha256)
        if row is None:
            continue
        kind = next((kind for start, kind in TYPES if row.data.startswith(start)), "image/tiff")
        said = {"from_name": CONTROL, "to_name": SHOWN, "type": "choices", "value": {"choices": [doubt.answer]}}
        prediction = {"model_version": version, "score": round(doubt.probability, 6), "result": [said]}
        data = {"image": f"data:{kind};base64,{base64.b64encode(row.data).decode()}", "name": row.path, "label": row.label, "sha256": row.sha256}
        tasks.append({"data": data, "predictions": [prediction]})
    return tasks


def configuration(classes: tuple[str, ...]) -> str:
    """Label Studio's labelling configuration for these classes."""
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in classes)
    image, control = f'<Image name="{SHOWN}" value="$image"/>', f'<Choices name="{CONTROL}" toName="{SHOWN}" choice="single">'
    return f"<View>\n  {image}\n  {control}\n{choices}  </Choices>\n</View>\n"


def main() -> None:
    """Write both files."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m tasks.sources.review")
    parser.add_argument("--of", choices=("predictions", "label_issues"), default="predictions", help="least sure, or likely wrong labels")
    parser.add_argument("--count", type=int, default=100, help="how many images")
    parser.add_argument("--out", type=Path, default=Path("review.json"), help="file of tasks; the configuration lies beside it")
    chosen = parser.parse_args()
    if chosen.count < 1:
        raise BadInput("unknown_option", "--count", value=chosen.count, constraint="at least 1")
    ref = DatasetRef.load(Path())
    if chosen.of == "predictions":
        report = EvaluationReport.load(Path())
        doubts, version, what = least_sure(report, chosen.count), report.digest[:12], "images of the test split, least sure first"
    else:
        issues = LabelIssues.load(Path())
        doubts, version, what = likely_wrong(issues, chosen.count), issues.digest[:12], "images, the likeliest wrong label first"
    tasks = review(ref, doubts, version)
    write_atomic(chosen.out.with_suffix(".xml"), configuration(ref.classes).encode())
    write_atomic(chosen.out, json.dumps(tasks, ensure_ascii=False).encode())
    print(f"review: {len(tasks)} {what}, in {chosen.out}; configuration in {chosen.out.with_suffix('.xml')}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
