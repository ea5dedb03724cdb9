"""Puts an approved, registered, packaged model in service, or leaves everything as it was.

    python -m tasks.deploy            deploy what the project's artifacts name
    python -m tasks.deploy --serve    start again what was deployed last (after a reboot); no new verdict
    python -m tasks.deploy --stop     end the service

The new server first answers held-out images on a spare port, as the evaluation did. Then it joins the former one on the
public port, the alias `champion` moves, and the former ends: at no moment does nothing answer. Whatever fails before
that leaves the former serving and the alias where it was; a crash at any point is put right by the next deploy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tasks.backends import serving
from tasks.backends.serving import Server
from tasks.core.artifacts import BentoRef, DatasetRef, Endpoint, EvaluationReport, GateDecision, ModelVersion, require_approval
from tasks.core.config import DeployConfig, load_params
from tasks.core.errors import BadInput, Rejected, run
from tasks.core.files import STATE, file_lock
from tasks.core.process import QUIET, die_with_parent, quiet_environment
from tasks.images.shards import find_rows

LOCK_TIMEOUT_S = 300.0
KEPT_BENTOS = 5
"""Bentos that stay in the local store for a quick way back."""


class Expected(NamedTuple):
    """One held-out image and what evaluation saw the model answer: label -> probability."""

    name: str
    data: bytes
    probabilities: dict[str, float]


def deploy(
    bento: BentoRef,
    version: ModelVersion,
    report: EvaluationReport,
    dataset: DatasetRef,
    decision: GateDecision,
    config: DeployConfig,
    *,
    promote: Callable[[], None],
    root: Path,
) -> Endpoint:
    """Serve ``bento`` on the public port and call ``promote`` (moves the alias `champion`; may raise to call it off).

    Idempotent: where this Bento is in service already, only the alias and endpoint.json are made sure of.
    Raises Rejected ``rejected``; BadInput ``artifact_foreign``, ``artifact_edited``, ``port_taken``, ``smoke_test_failed``,
    ``service_not_ready`` (it died) or what ``promote`` raises; Transient ``service_not_ready`` (too slow) or ``lock_busy``.
    """
    _require_chain(bento, version, report, decision)
    with _locked(root):
        former = serving.current(root)
        serving.sweep(root, keep=former)
        public = serving.url_of(config.host, config.port)
        if former and (former.host, former.port) == (config.host, config.port) and serving.served_tag(public) == bento.tag:
            promote()
            return _endpoint(public, bento, version, config).save(root)
        _require_address(former, config)
        expected = held_out(report, dataset, config.smoke_images)
        folder = _stored(root, bento.tag) if former and former.tag == bento.tag else install(bento, root)
        try:
            _rehearse(root, folder, bento, expected, config)
            new = _join(root, folder, bento, expected[0], config)
            promote()
        except BaseException:
            serving.sweep(root, keep=former)
            raise
        serving.commit(root, new)
        endpoint = _endpoint(new.url, bento, version, config).save(root)
        serving.sweep(root, keep=new)
        _prune(root, keep=bento.tag)
        return endpoint


def _require_chain(bento: BentoRef, version: ModelVersion, report: EvaluationReport, decision: GateDecision) -> None:
    """Fail closed unless the verdict approves this Bento's model, and Bento, version and evaluation are of that model."""
    if not (decision.approved and decision.checks and all(check.passed for check in decision.checks)):
        raise Rejected("rejected", "the gate did not approve this model", value=decision.reason, knob="see artifacts/gate/decision.json")
    decision.require_made_from(report)
    bento.require_made_from(report, decision)
    for artifact in (bento, version):
        if artifact.model_digest != decision.model_digest:
            raise BadInput(
                "artifact_foreign",
                f"{type(artifact).__name__} is of another model than the verdict",
                value=artifact.model_digest[:12],
                constraint=decision.model_digest[:12],
                knob=f"python -m tasks.{artifact.STAGE}",
            )
    bento.verify()
    report.verify()


def _require_address(former: Server | None, config: DeployConfig) -> None:
    """Raise BadInput ``port_taken`` unless the new server can listen there, beside ``former`` or alone."""
    if former is None or former.port != config.port:
        serving.require_port(config.host, config.port)
    elif former.host != config.host:  # of two addresses of one port the narrower gets the connections: no seamless change
        raise BadInput(
            "port_taken", "the service listens on another address of that port", value=former.host, constraint=config.host, knob="make stop"
        )


def held_out(report: EvaluationReport, dataset: DatasetRef, count: int) -> list[Expected]:
    """``count`` test images (or all, if fewer) as raw files with evaluation's answers, taking turns among the classes.

    Raises BadInput ``artifact_foreign`` where the data does not hold the images that were evaluated.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(report.path("predictions.parquet")) as reader:  # read_table would also import pandas
        rows = reader.read(columns=["sha256", "label", "probabilities"]).to_pylist()
    turns: dict[str, int] = {}
    ordered: list[tuple[int, str, dict[str, Any]]] = []
    for row in sorted(rows, key=lambda row: row["sha256"]):
        turns[row["label"]] = turns.get(row["label"], 0) + 1
        ordered.append((turns[row["label"]], row["label"], row))
    chosen = [row for _, _, row in sorted(ordered, key=lambda entry: entry[:2])[:count]]
    files = find_rows(dataset, [row["sha256"] for row in chosen])
    missing = [row["sha256"] for row in chosen if row["sha256"] not in files]
    if missing or not chosen:
        raise BadInput("artifact_foreign", "the data does not hold the images that were evaluated", value=f"{len(missing)} missing", knob="dvc repro")
    return [
        Expected(files[row["sha256"]].path, files[row["sha256"]].data, dict(zip(report.classes, row["probabilities"], strict=True))) for row in chosen
    ]


def install(bento: BentoRef, root: Path) -> Path:
    """Import the archive into the project's Bento store with ``bentoml import``; returns the Bento's folder there.

    A Bento of that tag that is there already gives way: a crash may have left half of one.
    """
    target = _stored(root, bento.tag)
    shutil.rmtree(target, ignore_errors=True)
    home = (root / STATE / "bentoml").resolve()
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bentoml", "import", str(bento.path("service.bento").resolve())]
    done = subprocess.run(
        command,
        cwd=home,
        env=os.environ | QUIET | {"BENTOML_HOME": str(home), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0 or not (target / "bento.yaml").is_file():
        raise RuntimeError(f"bentoml import failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return target


def _stored(root: Path, tag: str) -> Path:
    name, _, version = tag.partition(":")
    return root / STATE / "bentoml" / "bentos" / name / version


def _prune(root: Path, keep: str) -> None:
    """Remove all but the KEPT_BENTOS newest Bentos of the store, and their logs: nobody watches the disk."""
    kept = _stored(root, keep)
    others = sorted((path for path in kept.parent.iterdir() if path.is_dir() and path != kept), key=lambda path: path.stat().st_mtime)
    for path in others[: -(KEPT_BENTOS - 1)]:
        shutil.rmtree(path, ignore_errors=True)
        (root / STATE / "serve" / f"{path.parent.name}-{path.name}.log").unlink(missing_ok=True)


def _rehearse(root: Path, folder: Path, bento: BentoRef, expected: list[Expected], config: DeployConfig) -> None:
    """Start the new server on a spare loopback port and compare its answers with evaluation's; end it either way."""
    spare = serving.launch(root, folder, bento.tag, "127.0.0.1", serving.spare_port())
    try:
        serving.wait_ready(root, spare, config.ready_timeout_s, lambda: serving.served_tag(spare.url) == bento.tag)
        for image in expected:
            compare(spare.url, image, bento.tag, config)
    finally:
        serving.retire(root, spare.id)


def _join(root: Path, folder: Path, bento: BentoRef, image: Expected, config: DeployConfig) -> Server:
    """Start the new server on the public port, beside the former one, and wait until it answers there."""
    new = serving.launch(root, folder, bento.tag, config.host, config.port)
    serving.wait_ready(root, new, config.ready_timeout_s, lambda: serving.served_tag(new.url) == bento.tag)
    return new


def compare(url: str, image: Expected, tag: str, config: DeployConfig) -> None:
    """Send one raw image file; raise BadInput ``smoke_test_failed`` unless every probability is evaluation's."""
    try:
        status, answer = serving.classify(url, image.data, config.ready_timeout_s)
    except OSError as error:
        status, answer = 0, {"error": {"code": type(error).__name__}}
    if status != 200:
        code = answer["error"]["code"] if isinstance(answer, dict) and "error" in answer else "no answer"
        raise BadInput(
            "smoke_test_failed",
            f"{tag} refused the test image {image.name}",
            value=f"{status} {code}",
            constraint="200",
            knob="package.max_request_bytes, or see the log in .trainyard/serve",
        )
    served = {entry["label"]: entry["probability"] for entry in answer["probabilities"]}
    if served.keys() != image.probabilities.keys():
        raise BadInput(
            "smoke_test_failed", f"{tag} knows other classes than the evaluation", value=sorted(served), constraint=str(sorted(image.probabilities))
        )
    difference, label = max((abs(served[label] - probability), label) for label, probability in image.probabilities.items())
    if not difference <= config.max_probability_difference:
        raise BadInput(
            "smoke_test_failed",
            f"{tag} answers {image.name} with another probability of {label} than the evaluation",
            value=f"a difference of {difference:.2g}",
            constraint=f"at most {config.max_probability_difference:g}",
            knob="deploy.max_probability_difference, if the difference is rounding",
        )


def _endpoint(url: str, bento: BentoRef, version: ModelVersion, config: DeployConfig) -> Endpoint:
    return Endpoint(
        url=url,
        tag=bento.tag,
        model_digest=bento.model_digest,
        model_version=version.version,
        smoke_images=config.smoke_images,
        max_probability_difference=config.max_probability_difference,
        made_from={type(parent).__name__: parent.digest for parent in (bento, version)},
    )


def _locked(root: Path) -> Any:
    return file_lock(root / STATE / "serve" / "deploy.lock", LOCK_TIMEOUT_S, "the deployment")


def deploy_project(root: Path) -> Endpoint:
    """Deploy what the artifacts below ``root`` name, checking the verdict again, and move the alias in MLflow."""
    from tasks.backends import model_registry

    decision = require_approval(root)
    version = ModelVersion.load(root)
    model_registry.preload()  # two seconds, while the new server starts
    expected = decision.champion.version if decision.champion else None

    def promote() -> None:
        model_registry.promote(root, version.name, version.version, expected)

    report, dataset, config = EvaluationReport.load(root), DatasetRef.load(root), load_params(root / "params.yaml").deploy
    return deploy(BentoRef.load(root), version, report, dataset, decision, config, promote=promote, root=root)


def serve(root: Path) -> Endpoint:
    """Start again what endpoint.json names, from the local store; nothing to do where it runs.

    Raises BadInput ``artifact_missing`` where nothing was deployed or its Bento is gone, else as ``deploy``.
    """
    endpoint, config = Endpoint.load(root), load_params(root / "params.yaml").deploy
    with _locked(root):
        server = serving.current(root)
        serving.sweep(root, keep=server)
        public = serving.url_of(config.host, config.port)
        if server and (server.host, server.port) == (config.host, config.port) and serving.served_tag(public) == endpoint.tag:
            return endpoint
        serving.sweep(root, keep=None)
        serving.require_port(config.host, config.port)
        folder = _stored(root, endpoint.tag)
        if not (folder / "bento.yaml").is_file():
            bento = BentoRef.load(root).verify()
            if bento.tag != endpoint.tag:
                raise BadInput(
                    "artifact_missing", f"the Bento {endpoint.tag} is not in the store", value=folder, constraint="imported", knob="make run"
                )
            folder = install(bento, root)
        server = serving.launch(root, folder, endpoint.tag, config.host, config.port)
        try:
            serving.wait_ready(root, server, config.ready_timeout_s, lambda: serving.served_tag(public) == endpoint.tag)
        except BaseException:
            serving.sweep(root, keep=None)
            raise
        serving.commit(root, server)
        return endpoint.model_copy(update={"url": public}).save(root)


def stop(root: Path) -> str:
    """End the project's service and whatever a crash left of it; says what it did."""
    with _locked(root):
        server = serving.current(root)
        stray = serving.sweep(root, keep=None)
        serving.commit(root, None)
    return f"stopped {server.tag} on {server.url}" if server else f"stopped {len(stray)} stray servers" if stray else "nothing runs"


def main() -> None:
    """Deploy, or do what the option says."""
    die_with_parent()
    quiet_environment()
    actions: dict[str, Callable[[Path], Endpoint | str]] = {"": deploy_project, "--serve": serve, "--stop": stop}
    option = " ".join(sys.argv[1:])
    if option not in actions:
        raise BadInput("unknown_option", "tasks.deploy takes one option", value=option, constraint="--serve, --stop or nothing")
    done = actions[option](Path())
    print(done if isinstance(done, str) else f"serving {done.tag} at {done.url}")


if __name__ == "__main__":
    sys.exit(run(main))
