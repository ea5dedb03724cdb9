"""ingest -> validate -> prepare -> augment -> train -> evaluate -> gate -> register -> package -> deploy.

Run here: make run, or python -m flows.local. On a worker: prefect deployment run 'retrain/manual'.
"""

from __future__ import annotations

from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import bindings, events
from flows.bindings import TRAINING_LIMIT, dvc_stage, effect
from flows.parameters import Overrides
from flows.publish import publish
from flows.summary import publish_summary
from flows.workspace import workspace
from flows.worktree import Work
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
from tasks.core.config import PARAMS, load_params
from tasks.core.files import STATE, file_lock

RELEASE_TIMEOUT_S = 3600.0
"""A release takes a minute or two; so long a run waits for those before it."""

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

    ``overrides`` are written into params.yaml first; ``reason`` is why the run was started. A run of a deployment works in a git
    worktree of its own and publishes what it made (flows.publish); any other works in the project's folder. Ends as Completed
    "Unchanged" where there is nothing to do, as Completed "Rejected" where the gate said no, as Completed where a model went
    into service. From the gate on one run at a time goes on, so that no champion changes between its verdict and its alias.
    """
    logger = get_run_logger()
    run_id = (runtime.flow_run.id if runtime.deployment.id else None) or ""
    with workspace(overrides.changes() if overrides else None, run_id=run_id, say=logger.info) as work:
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
        with file_lock(work.home / STATE / "serve" / "release.lock", RELEASE_TIMEOUT_S, "the release"):
            return release(work, reason, reasons)


def release(work: Work, reason: str, reasons: list[str]) -> State[Any]:
    """From the verdict to the main line; returns how the flow ends."""
    root = work.root
    why = f"retrain ({reason}): {'; '.join(reasons)}"
    decision = gate(root)
    if not decision.approved:
        record_rejected(root)
        publish_summary(root, reasons)
        publish(work, "rejected", f"{why}\n\nrejected: {decision.reason}")
        events.model_rejected(load_params(root / PARAMS).register_.model_name, decision.reason)
        return Completed(name="Rejected", message=decision.reason, data=reasons)
    registered = register.start(root)  # what a rehearsal needs, and needs not wait for
    package(root)
    rehearse(root)
    version = registered()
    endpoint = deploy(root)
    publish_summary(root, reasons)
    publish(work, "approved", f"{why}\n\napproved: {decision.reason}")
    events.model_promoted(version.name, version.version, endpoint.tag)
    return Completed(message="; ".join(reasons), data=reasons)
