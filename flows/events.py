"""What happened, said to the Prefect server, where deployments wait for it and automations pass it on.

The resource of every event is ``trainyard.pipeline.<registered model>``. Nothing is sent where no server outlives the run, and
an event that cannot be sent never fails a run: the nightly run finds what it would have started.
"""

from __future__ import annotations

from typing import Any

from prefect.events import emit_event
from prefect.logging import get_logger

from flows.bindings import has_server

DATA_CHANGED = "trainyard.data.changed"
DRIFT_DETECTED = "trainyard.drift.detected"
MODEL_PROMOTED = "trainyard.model.promoted"
MODEL_REJECTED = "trainyard.model.rejected"
MODEL_ROLLED_BACK = "trainyard.model.rolled-back"


def resource_id(model: str) -> str:
    """The resource id of the pipeline that makes the registered model ``model``."""
    return f"trainyard.pipeline.{model}"


def data_changed(model: str, version: str, fingerprint: str, images: int, new: int) -> None:
    """data.dvc moved to ``version`` (its md5): ``images`` in it, ``new`` of them stored since the version announced before."""
    _emit(DATA_CHANGED, model, {"version": version, "fingerprint": fingerprint, "images": images, "new": new})


def drift_detected(model: str, reason: str) -> None:
    """What the model is asked about no longer looks like what it learnt from; ``reason`` says how."""
    _emit(DRIFT_DETECTED, model, {"reason": reason})


def model_promoted(model: str, version: str, tag: str) -> None:
    """Registry version ``version`` went into service as Bento ``tag``."""
    _emit(MODEL_PROMOTED, model, {"model": model, "version": version, "tag": tag})


def model_rejected(model: str, reason: str) -> None:
    """The gate said no; ``reason`` is the verdict's."""
    _emit(MODEL_REJECTED, model, {"model": model, "reason": reason})


def model_rolled_back(model: str, version: str, tag: str, reason: str) -> None:
    """Registry version ``version`` is in service again, as Bento ``tag``, in place of a later one."""
    _emit(MODEL_ROLLED_BACK, model, {"model": model, "version": version, "tag": tag, "reason": reason})


def _emit(name: str, model: str, payload: dict[str, Any]) -> None:
    """Hand the event to Prefect's sender, which empties its queue before the process ends."""
    if not has_server():
        return
    try:
        emit_event(name, resource={"prefect.resource.id": resource_id(model), "prefect.resource.name": model}, payload=payload)
    except Exception as error:  # whatever it is, the run's own result stands
        get_logger(__name__).warning("the event %s could not be sent: %s", name, error)
