"""What of MLflow's store is dead and what of it is in use: for the sweep and the doctor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tasks.backends.model_registry import DIGEST_TAG
from tasks.backends.model_registry import _client as connect
from tasks.core.errors import Transient
from tasks.core.process import owner_is_dead

PAGE = 1000
DVC_FILES = ("data.dvc", "dvc.lock")


class DeadRun(NamedTuple):
    """An MLflow run that stands RUNNING though its process died on this host."""

    run_id: str
    name: str
    pid: str


class InUse(NamedTuple):
    """A model version that an alias names: its digest, and the text of the data.dvc and dvc.lock that it was made from."""

    name: str
    version: str
    model_digest: str
    dvc_files: str


def dead_runs(root: Path, experiment: str) -> tuple[list[DeadRun], int]:
    """The dead runs of ``experiment``, and how many run on. Raises Transient ``registry_unavailable``."""
    with connect(root) as client:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            return [], 0
        dead, alive, token = [], 0, None
        while True:
            page = client.search_runs([found.experiment_id], "attributes.status = 'RUNNING'", max_results=PAGE, page_token=token)
            for run in page:
                if owner_is_dead(run.data.tags):
                    dead.append(DeadRun(run.info.run_id, run.info.run_name or "", run.data.tags["owner.pid"]))
                else:
                    alive += 1
            token = page.token
            if not token:
                return dead, alive


def close_run(root: Path, run_id: str) -> None:
    """Mark a dead run KILLED; one that ended meanwhile keeps its end."""
    with connect(root) as client:
        if client.get_run(run_id).info.status == "RUNNING":
            client.set_terminated(run_id, "KILLED")


def in_use(root: Path, model_name: str) -> list[InUse]:
    """The versions of ``model_name`` that bear any alias. Raises Transient ``registry_unavailable`` where one cannot be read whole."""
    from mlflow.exceptions import MlflowException

    with connect(root) as client:
        try:
            aliases = client.get_registered_model(model_name).aliases
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return []
            raise
        found = []
        for number in sorted({str(version) for version in aliases.values()}):
            version = client.get_model_version(model_name, number)
            try:
                texts = [_text(client, version.run_id, f"project/{name}") for name in DVC_FILES]
            except (OSError, MlflowException) as error:
                raise Transient(
                    "registry_unavailable", f"the files of {model_name} version {number} cannot be read", value=type(error).__name__
                ) from error
            found.append(InUse(model_name, number, version.tags.get(DIGEST_TAG, ""), "\n".join(texts)))
        return found


def _text(client: object, run_id: str, path: str) -> str:
    """A text file among a run's artifacts, "" where the run has none of that name."""
    import mlflow

    folder = path.rpartition("/")[0]
    if path not in {entry.path for entry in client.list_artifacts(run_id, folder)}:  # type: ignore[attr-defined]
        return ""
    return str(mlflow.artifacts.load_text(f"runs:/{run_id}/{path}"))


def model_hash(dvc_lock: str) -> str:
    """The md5 of artifacts/model/model.json in a dvc.lock, "" where it names none: equal models have equal ones."""
    found = re.search(r"path: artifacts/model/model\.json\s+hash: md5\s+md5: ([0-9a-f]{32})", dvc_lock)
    return found[1] if found else ""
