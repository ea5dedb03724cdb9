"""Look at the source; where it moved, bring the new data in, prove it sound, publish it and say so.

Runs every few minutes as the deployment ``ingest/watch``. A source whose fingerprint did not move costs one listing: the run
ends as "Unchanged" in seconds. What was last seen is kept in .trainyard/watch/<registered model>.json of the project folder.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import bindings, events
from flows.bindings import dvc_stage, effect
from flows.publish import publish
from flows.workspace import workspace
from tasks.core.artifacts import DatasetRef, ValidationReport
from tasks.core.config import PARAMS, load_params
from tasks.core.errors import StageFailed
from tasks.core.files import STATE, canonical_json, write_atomic

BAD_INPUT_EXIT = 2
VERSION = re.compile(r"^- md5: (?P<md5>[0-9a-f]{32})(\.dir)?$", re.MULTILINE)

ingest_stage = effect("ingest", DatasetRef)
validate_stage = dvc_stage("validate", ValidationReport)


@dataclass(frozen=True)
class Seen:
    """What the last look found: the source's fingerprint, the data version last announced, the images stored in it, and the
    error line where the source's present state was refused."""

    fingerprint: str = ""
    version: str = ""
    stored: int = 0
    refused: str = ""

    @classmethod
    def load(cls, home: Path, model: str) -> Seen:
        """The last look, an empty one where there was none or its file cannot be read."""
        try:
            return cls(**json.loads(_path(home, model).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return cls()

    def save(self, home: Path, model: str) -> None:
        """Remember this look."""
        write_atomic(_path(home, model), canonical_json(asdict(self)))


@flow(name="ingest", retries=0)
def ingest(reason: str = "watching the source") -> State[Any]:
    """Bring new data in from the source that params.yaml names; ``reason`` is why the run was started.

    Ends as Completed "Unchanged" where the source did not move since the last look. A state of the source that ingest or
    validate refuses fails this run once, moves nothing, and is passed over until the source moves again.
    """
    logger = get_run_logger()
    home = Path.cwd()
    model = load_params(home / PARAMS).register_.model_name
    seen = Seen.load(home, model)
    fingerprint = bindings.source_fingerprint(home)
    if fingerprint and fingerprint == seen.fingerprint:
        return Completed(name="Unchanged", message=f"the source did not move ({reason}){': ' if seen.refused else ''}{seen.refused}")
    run_id = (runtime.flow_run.id if runtime.deployment.id else None) or ""
    with workspace(run_id=run_id, say=logger.info) as work:
        root = work.root
        committed = data_version(root)
        try:
            dataset = ingest_stage(root)
            validate_stage(root)
        except StageFailed as error:
            if error.exit_code == BAD_INPUT_EXIT:
                Seen(fingerprint, seen.version or committed, seen.stored, str(error)).save(home, model)
            raise
        publish(work, "ingested", f"ingest ({reason}): {sum(dataset.counts.values()):,} images")
        version = data_version(root)
    stored = sum(shard.rows for shard in dataset.shards)
    moved = version != (seen.version or committed)
    if moved:  # said before it is remembered: a run killed in between says it again, and the retrain that follows finds nothing to do
        events.data_changed(model, version, fingerprint, sum(dataset.counts.values()), max(stored - seen.stored, 0))
    Seen(fingerprint, version, stored).save(home, model)
    logger.info("data.dvc %s %s", version[:8], "moved" if moved else "did not move")
    return Completed(message=f"data.dvc {version[:8]} {'moved' if moved else 'did not move'} ({reason})")


def data_version(root: Path) -> str:
    """The md5 in data.dvc, "" where there is none."""
    try:
        found = VERSION.search((root / "data.dvc").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    return found["md5"] if found else ""


def _path(home: Path, model: str) -> Path:
    return home / STATE / "watch" / f"{model}.json"
