"""ingest -> validate -> prepare -> augment -> train -> evaluate -> gate -> register -> package -> deploy.

Run here: make run, or python -m flows.local. On a worker: prefect deployment run 'retrain/manual'.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import bindings
from flows.bindings import dvc_stage, effect
from flows.publish import publish
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

    ``overrides`` ({section: {key: value}}) are written into params.yaml first. A run of a deployment works in a git worktree of
    its own and publishes what it made (flows.publish); any other works in the project's folder. Ends as Completed "Unchanged" where there
    is nothing to do, as Completed "Rejected" where the gate said no, as Completed where a model went into service.
    """
    logger = get_run_logger()
    run_id = (runtime.flow_run.id if runtime.deployment.id else None) or ""
    with workspace(overrides, run_id=run_id, say=logger.info) as work:
        root = work.root
        ingest(root)
        reasons = bindings.find_changes(root)
        if not reasons:
            publish(work, bindings.outcome(root), f"retrain ({reason})")  # an attempt before this one may have ended just short of it
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
            publish(work, "rejected", f"retrain ({reason}): {'; '.join(reasons)}\n\nrejected: {decision.reason}")
            return Completed(name="Rejected", message=decision.reason, data=reasons)
        packaged = package.start(root)  # neither needs the other
        register(root)
        packaged()
        deploy(root)
        publish_summary(root, reasons)
        publish(work, "approved", f"retrain ({reason}): {'; '.join(reasons)}\n\napproved: {decision.reason}")
        return Completed(message="; ".join(reasons), data=reasons)
