"""The MLflow tracking store and model registry: runs, versions, and the aliases `challenger` and `champion`.

The store is SQLite at .trainyard/mlflow/mlflow.db below the project's root, or what MLFLOW_TRACKING_URI names.
A version is found by the tag ``trainyard.model_digest``, so registering the same model twice makes one version.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.backends import mlflow_database
from tasks.core.errors import BadInput, Transient
from tasks.core.files import STATE, file_lock, publish_dir
from tasks.core.process import owner_tags, quiet_environment

CHAMPION = "champion"
CHALLENGER = "challenger"
DIGEST_TAG = "trainyard.model_digest"
FOLDER = "trainyard"
"""Artifact folder of a run that holds model.json, model.onnx, report.json, predictions.parquet ..."""
CHAMPION_KEPT_S = 86_400.0


class Champion(NamedTuple):
    """The version that the alias `champion` names, with its files on this disk (never write there)."""

    version: str
    model_digest: str
    folder: Path


@dataclass(frozen=True)
class RunRecord:
    """What one pipeline run leaves in MLflow."""

    params: Mapping[str, str]
    metrics: Mapping[str, float]
    history: Sequence[Mapping[str, float]]
    tags: Mapping[str, str]
    dataset_name: str
    dataset_digest: str
    files: Mapping[str, Sequence[Path]]
    """artifact folder of the run -> files to log there"""
    texts: Mapping[str, str]
    """path among the run's artifacts -> content"""
    onnx: Path
    """the model to register: uint8 [N, S, S, 3] -> probabilities float32 [N, C]"""
    requirements: Sequence[str]
    """what MLflow installs to load it"""
    system: Sequence[Mapping[str, float]] = ()
    """samples of the training's machine: `time` (Unix seconds) and the metrics of that moment"""


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI, or the project's SQLite store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{_database(root)}"


def _database(root: Path) -> Path:
    return (root / STATE / "mlflow" / "mlflow.db").resolve()


def _locked(root: Path) -> AbstractContextManager[None]:
    """Beside the database, which the worktrees of one project share."""
    return file_lock(root / STATE / "mlflow" / "registry.lock", 120.0, "the model registry")


def preload() -> None:
    """Import mlflow in the background, for callers that wait for something else before they need it."""
    threading.Thread(target=importlib.import_module, args=("mlflow",), name="preload mlflow", daemon=True).start()


def champion(root: Path, model_name: str) -> Champion | None:
    """The model in service, or None where no version bears the alias.

    Raises Transient ``registry_unavailable`` where the store cannot be reached: "no champion" is never guessed.
    """
    if tracking_uri(root) == f"sqlite:///{_database(root)}" and not _database(root).exists():
        return None
    with _client(root) as client:
        version = _by_alias(client, model_name, CHAMPION)
        if version is None:
            return None
        digest = version.tags[DIGEST_TAG]
        return Champion(str(version.version), digest, _files_of(root, version.run_id, digest))


def _files_of(root: Path, run_id: str, model_digest: str) -> Path:
    """The files of a registered model, downloaded once to .trainyard/champion/<digest>.

    Those of former champions give way a day after their last use: another run may be comparing with them.
    """
    import mlflow

    kept = root / STATE / "champion" / model_digest
    with file_lock(kept.parent / "champion.lock", 120.0, "the champion's files"):
        if not kept.is_dir():
            with publish_dir(kept) as work:
                mlflow.artifacts.download_artifacts(run_id=run_id, artifact_path=FOLDER, dst_path=str(work))
        os.utime(kept)
        for other in kept.parent.iterdir():
            if other.is_dir() and other.stat().st_mtime < time.time() - CHAMPION_KEPT_S:
                shutil.rmtree(other, ignore_errors=True)
    return kept / FOLDER


def alias_version(root: Path, model_name: str, alias: str) -> str | None:
    """The version number that ``alias`` names, or None."""
    with _client(root) as client:
        version = _by_alias(client, model_name, alias)
        return None if version is None else str(version.version)


def register(root: Path, *, experiment: str, model_name: str, model_digest: str, description: str, record: RunRecord) -> tuple[str, bool]:
    """Record the run and make a model version with the alias `challenger`; returns (version, whether it was made now).

    Idempotent by ``model_digest``: a version that holds it already is returned, its run untouched. A run that a crash
    left half written bears no version and is marked KILLED on the next call.
    """
    with _locked(root), _client(root) as client:
        found = _by_digest(client, model_name, model_digest)
        if found is not None:
            client.set_registered_model_alias(model_name, CHALLENGER, found)
            return found, False
        run_id, model_id = _record(client, root, experiment, model_digest, record)
        from mlflow.exceptions import MlflowException

        try:
            client.create_registered_model(model_name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tags = {**record.tags, DIGEST_TAG: model_digest}
        # A server takes the source of a logged model only together with the model's id.
        source = {"source": f"models:/{model_id}", "model_id": model_id}
        made = client.create_model_version(model_name, **source, run_id=run_id, tags=tags, description=description)
        client.set_registered_model_alias(model_name, CHALLENGER, made.version)
        return str(made.version), True


def record_run(root: Path, *, experiment: str, model_digest: str, record: RunRecord) -> bool:
    """Record a run that made no version (a rejected model); False where this digest was recorded before."""
    with _locked(root), _client(root) as client:
        query = f"attributes.status = 'FINISHED' and tags.`{DIGEST_TAG}` = '{model_digest}'"
        if client.search_runs([_experiment(client, root, experiment)], query, max_results=1):
            return False
        _record(client, root, experiment, model_digest, record)
        return True


def promote(root: Path, model_name: str, version: str, expected: str | None) -> None:
    """Move the alias `champion` to ``version`` if it still stands at ``expected`` (None: nowhere).

    Does nothing where it stands at ``version`` already. Raises BadInput ``stale_verdict`` otherwise.
    """
    with _locked(root), _client(root) as client:
        current = _by_alias(client, model_name, CHAMPION)
        standing = None if current is None else str(current.version)
        if standing == version:
            return
        if standing != expected:
            raise BadInput(
                "stale_verdict",
                "the champion is not the one that the gate compared with",
                value=f"version {standing or 'none'}",
                constraint=f"version {expected or 'none'}",
                knob="dvc repro --force gate, to judge against it",
            )
        client.set_registered_model_alias(model_name, CHAMPION, version)


@contextmanager
def _client(root: Path) -> Iterator[Any]:
    """An MlflowClient on the project's store; connection failures become Transient ``registry_unavailable``, a refused login
    or a missing permission BadInput ``registry_denied``."""
    quiet_environment()
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    import logging

    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    import mlflow

    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import OperationalError

    uri, before = tracking_uri(root), os.environ.get("MLFLOW_TRACKING_URI")
    try:
        if uri.startswith("sqlite:///"):
            mlflow_database.prepare(Path(uri.removeprefix("sqlite:///")))
        mlflow.set_tracking_uri(uri)
        mlflow.set_registry_uri(uri)
        yield mlflow.MlflowClient(uri)
    except (RequestException, OperationalError, sqlite3.OperationalError) as error:
        raise _unavailable(uri, error) from error
    except MlflowException as error:
        if error.error_code in {"UNAUTHENTICATED", "PERMISSION_DENIED"}:
            user = os.environ.get("MLFLOW_TRACKING_USERNAME", "nobody")
            knob = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or ask its owner (docs/teams.md)"
            raise BadInput("registry_denied", f"the MLflow server refuses {user}", value=error.error_code, knob=knob) from error
        if error.error_code in {"TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED"} or "API request" in str(error):
            raise _unavailable(uri, error) from error
        raise
    finally:  # set_tracking_uri also sets the variable, by which the next project's store would be this one's
        if before is None:
            os.environ.pop("MLFLOW_TRACKING_URI", None)
        else:
            os.environ["MLFLOW_TRACKING_URI"] = before


def _unavailable(uri: str, error: Exception) -> Transient:
    shown = uri.split("@")[-1]
    said = "database is locked" if "database is locked" in str(error) else type(error).__name__
    return Transient("registry_unavailable", f"the MLflow store {shown} does not answer", value=said, knob="MLFLOW_TRACKING_URI")


def _by_alias(client: Any, model_name: str, alias: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(model_name, alias)
    except MlflowException as error:
        if error.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
            return None
        raise


def _by_digest(client: Any, model_name: str, model_digest: str) -> str | None:
    found = client.search_model_versions(f"name = '{model_name}' and tags.`{DIGEST_TAG}` = '{model_digest}'")
    return str(max(found, key=lambda version: int(version.version)).version) if found else None


def _experiment(client: Any, root: Path, name: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    local = client.tracking_uri.startswith("sqlite:")
    location = (root / STATE / "mlflow" / "artifacts").resolve().as_uri() if local else None
    return str(client.create_experiment(name, artifact_location=location))


def _close_dead_runs(client: Any, experiment_id: str, model_digest: str) -> None:
    """Mark runs of this digest that a crash left RUNNING as KILLED (the caller holds the registry's lock)."""
    query = f"attributes.status = 'RUNNING' and tags.`{DIGEST_TAG}` = '{model_digest}'"
    for run in client.search_runs([experiment_id], query):
        client.set_terminated(run.info.run_id, "KILLED")


def _record(client: Any, root: Path, experiment: str, model_digest: str, record: RunRecord) -> tuple[str, str]:
    """Write one whole run; returns (run id, id of its logged ONNX model)."""
    import mlflow
    import mlflow.onnx
    import onnx

    experiment_id = _experiment(client, root, experiment)
    _close_dead_runs(client, experiment_id, model_digest)
    # With its tags from the first moment: a run that a crash leaves behind can always be told from a living one.
    tags = {**record.tags, **owner_tags(), DIGEST_TAG: model_digest}
    with mlflow.start_run(experiment_id=experiment_id, run_name=model_digest[:12], tags=tags) as run:
        _log_numbers(client, run.info.run_id, record)
        for folder, paths in record.files.items():
            for path in paths:
                client.log_artifact(run.info.run_id, str(path), folder or None)
        for name, text in record.texts.items():
            client.log_text(run.info.run_id, text, name)
        logged = mlflow.onnx.log_model(
            onnx.load(str(record.onnx)),
            name="model",
            pip_requirements=list(record.requirements),
            onnx_execution_providers=["CPUExecutionProvider"],
            save_as_external_data=False,
        )
        return run.info.run_id, logged.model_id


def _log_numbers(client: Any, run_id: str, record: RunRecord) -> None:
    import mlflow
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.data.sources import LocalArtifactDatasetSource
    from mlflow.entities import Metric, Param

    now = int(time.time() * 1000)
    metrics = [Metric(key, float(value), now, step) for step, row in enumerate(record.history, 1) for key, value in row.items()]
    metrics += [Metric(key, float(value), now, 0) for key, value in record.metrics.items()]
    for step, sample in enumerate(record.system):
        at = int(sample["time"] * 1000)
        metrics += [Metric(f"system/{key}", float(value), at, step) for key, value in sample.items() if key != "time"]
    params = [Param(key, value[:6000]) for key, value in record.params.items()]
    for start in range(0, len(metrics), 1000):
        client.log_batch(run_id, metrics=metrics[start : start + 1000])
    for start in range(0, len(params), 100):
        client.log_batch(run_id, params=params[start : start + 100])
    dataset = MetaDataset(LocalArtifactDatasetSource("data.dvc"), name=record.dataset_name, digest=record.dataset_digest[:36])
    mlflow.log_input(dataset, context="training")
