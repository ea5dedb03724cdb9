"""Write the test images that the last model was least sure of as tasks for Label Studio, their bytes and the model's answers in them.

    python -m tasks.sources.review [--count N] [--out review.json]        in a project's root, after `evaluate`

Beside OUT lies its labelling configuration (.xml). What people answer comes back by the source `labelstudio` (docs/sources.md).
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from tasks.core import errors
from tasks.core.artifacts import DatasetRef, EvaluationReport
from tasks.core.errors import BadInput
from tasks.core.files import write_atomic
from tasks.core.process import die_with_parent

CONTROL, SHOWN = "class", "image"
TYPES = ((b"\xff\xd8\xff", "image/jpeg"), (b"\x89PNG", "image/png"), (b"GIF8", "image/gif"), (b"BM", "image/bmp"), (b"RIFF", "image/webp"))


def review(ref: DatasetRef, report: EvaluationReport, count: int) -> list[dict[str, Any]]:
    """The ``count`` tasks whose highest probability is least, the least first; raises BadInput ``artifact_missing`` or ``artifact_edited``."""
    import pyarrow.parquet as pq

    from tasks.images.shards import find_rows

    report.verify()
    answers = pq.read_table(report.path("predictions.parquet"), columns=["sha256", "predicted", "probabilities"]).to_pylist()
    unsure = sorted(answers, key=lambda answer: (max(answer["probabilities"]), answer["sha256"]))[:count]
    rows = find_rows(ref, [answer["sha256"] for answer in unsure])
    tasks = []
    for answer in unsure:
        row = rows.get(answer["sha256"])
        if row is None:  # removed since the model was evaluated
            continue
        kind = next((kind for start, kind in TYPES if row.data.startswith(start)), "image/tiff")
        said = {"from_name": CONTROL, "to_name": SHOWN, "type": "choices", "value": {"choices": [answer["predicted"]]}}
        prediction = {"model_version": report.digest[:12], "score": round(max(answer["probabilities"]), 6), "result": [said]}
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
    parser.add_argument("--count", type=int, default=100, help="how many images")
    parser.add_argument("--out", type=Path, default=Path("review.json"), help="file of tasks; the configuration lies beside it")
    chosen = parser.parse_args()
    if chosen.count < 1:
        raise BadInput("unknown_option", "--count", value=chosen.count, constraint="at least 1")
    ref = DatasetRef.load(Path())
    tasks = review(ref, EvaluationReport.load(Path()), chosen.count)
    write_atomic(chosen.out.with_suffix(".xml"), configuration(ref.classes).encode())
    write_atomic(chosen.out, json.dumps(tasks, ensure_ascii=False).encode())
    print(f"review: {len(tasks)} images of the test split, least sure first, in {chosen.out}; configuration in {chosen.out.with_suffix('.xml')}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
