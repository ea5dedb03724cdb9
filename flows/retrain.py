"""ingest -> validate -> prepare -> augment -> train -> evaluate -> gate -> register -> package -> deploy.

Run here: make run, or python -m flows.local. On a worker: prefect deployment run 'retrain/manual'.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import bindings
from flows.bindings import TRAINING_LIMIT, dvc_stage, effect
from flows.parameters import Overrides
from flows.summary import publish_summary
from flows.workspace import workspace
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

ingest = effect("ingest", DatasetRef)
validate = dvc_stage("validate", ValidationReport)
prepare = dvc_stage("prepare", ImageCache)
augment = dvc_stage("augment", TrainingSet)
train = dvc_stage("train", TrainedModel, limit=TRAINING_LIMIT, tags=("training",))
evaluate = dvc_stage("evaluate", EvaluationReport)
gate = dvc_stage("gate", GateDecision, forced_when=bindings.verdict_is_stale)
record_rejected = effect("register", GateDecision, "--rejected")
register = effect("register", ModelVersion)
package = dvc_stage("package", BentoRef)
rehearse = effect("deploy", BentoRef, "--rehearse")
deploy = effect("deploy", Endpoint)


@flow(name="retrain", retries=0)
def retrain(overrides: Overrides | None = None, reason: str = "asked for") -> State[Any]:
    """Bring the served model up to date with the data, the params and the code.

    ``overrides`` are written into params.yaml first; ``reason`` is why the run was started. Ends as Completed "Unchanged" where
    there is nothing to do, as Completed "Rejected" where the gate said no, as Completed where a model went into service.
    """
    logger = get_run_logger()
    with workspace(overrides.changes() if overrides else None) as root:
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
        registered = register.start(root)  # what a rehearsal needs, and needs not wait for
        package(root)
        rehearse(root)
        registered()
        deploy(root)
        publish_summary(root, reasons)
        return Completed(message="; ".join(reasons), data=reasons)
