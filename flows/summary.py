"""What a run tells people: Prefect artifacts, and the lines that `make run` ends with."""

from __future__ import annotations

import base64
import os
from pathlib import Path

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from tasks.core.artifacts import Endpoint, EvaluationReport, GateDecision, TrainingSet, ValidationReport


def publish_summary(root: Path, reasons: list[str]) -> None:
    """Leave the verdict, the checks, the per-class scores, the preview and the link at the flow run."""
    decision, report = GateDecision.load(root), EvaluationReport.load(root)
    checks = [
        {"check": check.name, "value": str(check.value), "bound": check.bound, "passed": "yes" if check.passed else "NO", "detail": check.detail}
        for check in decision.checks
    ]
    classes = [
        {"class": name, "precision": f"{score.precision:.4f}", "recall": f"{score.recall:.4f}", "F1": f"{score.f1:.4f}", "images": score.support}
        for name, score in report.per_class.items()
    ]
    create_markdown_artifact("\n".join(f"- {line}" for line in summary_lines(root, reasons)), key="summary", description="The run in a few lines")
    create_table_artifact(checks, key="gate-checks", description="Every check of the gate: value, bound, result")
    create_table_artifact(classes, key="per-class", description="Scores of each class on the test split")
    preview = base64.b64encode(TrainingSet.load(root).path("preview.png").read_bytes()).decode()
    create_markdown_artifact(f"![augmented samples](data:image/png;base64,{preview})", key="augmentation-preview")
    if decision.approved and Endpoint.exists(root):
        create_link_artifact(Endpoint.load(root).url, key="endpoint", link_text="the served classifier")


def summary_lines(root: Path, reasons: list[str]) -> list[str]:
    """The run in a few plain lines."""
    lines = [f"why        {'; '.join(reasons) or 'nothing changed'}"]
    if EvaluationReport.exists(root):
        report = EvaluationReport.load(root)
        interval = f"{report.confidence:.0%} interval {report.accuracy_low:.2%} to {report.accuracy_high:.2%}"
        lines.append(f"accuracy   {report.accuracy:.2%} on {report.images:,} test images ({interval})")
    if GateDecision.exists(root):
        decision = GateDecision.load(root)
        lines.append(f"verdict    {'approved' if decision.approved else 'rejected'}: {decision.reason}")
    if Endpoint.exists(root):
        endpoint = Endpoint.load(root)
        lines += [
            f"endpoint   {endpoint.url}   (page, POST /classify, /provenance, /metrics)",
            f"model      {endpoint.tag}, registry version {endpoint.model_version}",
        ]
    folder = root.resolve()
    lines.append(f"report     {folder / ValidationReport.PATH.replace('.json', '.html')}, {folder / 'artifacts' / 'evaluation'}")
    server = os.environ.get("MLFLOW_TRACKING_URI", "")
    lines.append(f"registry   {server if server.startswith('http') else 'make mlflow, then http://127.0.0.1:5000'}")
    return lines
