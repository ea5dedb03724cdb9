"""ingest -> validate -> prepare -> augment -> train -> evaluate -> gate -> register -> package -> deploy.

Run here: make run, or python -m flows.retrain. On a worker: prefect deployment run 'retrain/manual'.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import bindings
from flows.bindings import StageFailed, dvc_stage, effect
from flows.summary import publish_summary, summary_lines
from flows.workspace import workspace
from tasks.core import errors
from tasks.core.artifacts import (
    BentoRef,
    DatasetRef,
    Endpoint,
    EvaluationReport,
    GateDecision,
    ImageCache,
    ModelVersion,
    TrainedModel,
    TrainingSet,
    ValidationReport,
)
from tasks.core.config import load_params
from tasks.core.errors import BadInput, TrainyardError
from tasks.core.process import quiet_environment

ingest = effect("ingest", DatasetRef)
validate = dvc_stage("validate", ValidationReport)
prepare = dvc_stage("prepare", ImageCache)
augment = dvc_stage("augment", TrainingSet)
train = dvc_stage("train", TrainedModel)
evaluate = dvc_stage("evaluate", EvaluationReport)
gate = dvc_stage("gate", GateDecision, forced_when=bindings.verdict_is_stale)
record_rejected = effect("register", GateDecision, "--rejected")
register = effect("register", ModelVersion)
package = dvc_stage("package", BentoRef)
deploy = effect("deploy", Endpoint)


@flow(name="retrain", retries=0)
def retrain(overrides: dict[str, dict[str, Any]] | None = None, reason: str = "asked for") -> State[Any]:
    """Bring the served model up to date with the data, the params and the code.

    ``overrides`` ({section: {key: value}}) are written into params.yaml first. Ends as Completed "Unchanged" where there
    is nothing to do, as Completed "Rejected" where the gate said no, as Completed where a model went into service.
    """
    logger = get_run_logger()
    with workspace(overrides) as root:
        ingest(root)
        reasons = bindings.find_changes(root)
        if not reasons:
            return Completed(name="Unchanged", message=f"nothing changed ({reason})", data=[])
        logger.info("retraining (%s): %s", reason, "; ".join(reasons))
        validate(root)
        prepare(root)
        augment(root)
        train(root)
        evaluate(root)
        decision = gate(root)
        if not decision.approved:
            record_rejected(root)
            publish_summary(root, reasons)
            return Completed(name="Rejected", message=decision.reason, data=reasons)
        register(root)
        package(root)
        deploy(root)
        publish_summary(root, reasons)
        return Completed(message="; ".join(reasons), data=reasons)


class _NoTraceback(logging.Filter):
    """Drops the traceback of errors that a user can cause: their one line says it all."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], StageFailed | TrainyardError):
            record.exc_info = None
        return True


def _overrides(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """``train.epochs=3 gate.margin=0.01`` as {"train": {"epochs": 3}, "gate": {"margin": 0.01}}."""
    from ruamel.yaml import YAML

    tree: dict[str, dict[str, Any]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        section, dot, name = key.partition(".")
        if not (equals and dot and section and name):
            raise BadInput("unknown_option", "flows.retrain", value=argument, constraint="section.key=value")
        tree.setdefault(section, {})[name] = YAML(typ="safe", pure=True).load(value)
    return tree


def main() -> None:
    """Run the flow here, without a worker, and end with the summary or one error line."""
    quiet_environment()
    load_params()  # a typo is said at once, before a server starts
    last_words: list[str] = []
    atexit.register(lambda: print(*last_words, sep="\n", end="", file=sys.stderr, flush=True))  # after Prefect's own farewell
    if os.environ.get("TRAINYARD_DEBUG", "") in ("", "0"):
        for name in ("prefect", "prefect.flow_runs", "prefect.task_runs"):
            logging.getLogger(name).addFilter(_NoTraceback())
    state = retrain(_overrides(sys.argv[1:]), return_state=True)
    result = state.result(raise_on_failure=False)
    if isinstance(result, StageFailed | TrainyardError):
        last_words.append(f"{result}\n")
        sys.exit(result.exit_code)
    if not state.is_completed():
        state.result()
    reasons: list[str] = result if isinstance(result, list) else []
    said = "nothing changed" if state.name == "Unchanged" else str(state.name).lower()
    print("\n".join(["", f"retrain: {said}", *(f"  {line}" for line in summary_lines(Path.cwd(), reasons))]))


if __name__ == "__main__":
    sys.exit(errors.run(main))
