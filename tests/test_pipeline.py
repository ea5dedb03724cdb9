"""The whole chain on the embedded data, as a newcomer runs it: what it says, leaves, serves, and does the second time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import Project

from tasks.core.artifacts import BentoRef, DatasetRef, Endpoint, EvaluationReport, GateDecision, ImageCache, ModelVersion, TrainedModel, TrainingSet

pytestmark = pytest.mark.slow


def get_json(url: str) -> object:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def lock_bytes(project: Project) -> bytes:
    return (project.root / "dvc.lock").read_bytes()


def test_it_ends_with_the_address_the_accuracy_and_the_verdict(finished: Project) -> None:
    report, endpoint = EvaluationReport.load(finished.root), Endpoint.load(finished.root)
    for told in (endpoint.url, f"{report.accuracy:.2%}", f"{report.accuracy_low:.2%}", "verdict    approved", "report.html", "make mlflow"):
        assert told in finished.output


def test_the_embedded_data_comes_out_at_the_committed_hash(finished: Project) -> None:
    assert "data.dvc" not in finished.run("git", "status", "--porcelain").stdout


def test_accuracy_is_at_least_97_percent(finished: Project) -> None:
    assert EvaluationReport.load(finished.root).accuracy >= 0.97


def test_every_artifact_is_whole_and_walks_back_to_the_data(finished: Project) -> None:
    root = finished.root
    data, cache, policy = DatasetRef.load(root), ImageCache.load(root).verify(), TrainingSet.load(root).verify()
    model, report, decision = TrainedModel.load(root).verify(), EvaluationReport.load(root).verify(), GateDecision.load(root)
    cache.require_made_from(data)
    policy.require_made_from(cache)
    model.require_made_from(policy, cache)
    report.require_made_from(model, cache)
    decision.require_made_from(model, report)
    bento, version = BentoRef.load(root).verify(), ModelVersion.load(root)
    assert bento.model_digest == version.model_digest == model.digest
    for path in (root / "artifacts").rglob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert str(root) not in text, path
    for split, count in cache.counts.items():
        assert count > 0, split


def test_what_is_served_is_what_was_judged(finished: Project) -> None:
    endpoint, model = Endpoint.load(finished.root), TrainedModel.load(finished.root)
    served = get_json(f"{endpoint.url}/provenance")
    assert isinstance(served, dict)
    assert served["tag"] == endpoint.tag
    assert model.digest in json.dumps(served)
    assert "endpoint" in finished.output


def test_the_registered_champion_answers_through_mlflow_as_evaluated(finished: Project) -> None:
    """Anybody with MLflow alone can load models:/classifier@champion and get the evaluation's probabilities."""
    code = (
        "import json, sys, numpy as np, mlflow\n"
        "from pathlib import Path\n"
        "from tasks.backends.model_registry import alias_version, champion, tracking_uri\n"
        "from tasks.core.artifacts import ImageCache\n"
        "from tasks.images.cache import open_split\n"
        "root = Path.cwd(); mlflow.set_tracking_uri(tracking_uri(root))\n"
        "pixels = np.ascontiguousarray(open_split(ImageCache.load(root), 'test').pixels[:32])\n"
        "answer = mlflow.pyfunc.load_model('models:/classifier@champion').predict(pixels)\n"
        "run = mlflow.search_runs(experiment_names=['trainyard']).iloc[0]\n"
        "keep = {k: str(v) for k, v in run.items() if k.startswith(('params.train.epochs', 'metrics.test_acc', 'tags.'))}\n"
        "print(json.dumps({'p': np.asarray(answer['probabilities']).tolist(), 'alias': alias_version(root, 'classifier', 'champion'),"
        " 'challenger': alias_version(root, 'classifier', 'challenger'), 'run': keep}))\n"
    )
    told = json.loads(finished.python("-W", "ignore", "-c", code).stdout.splitlines()[-1])
    expected = pq.read_table(EvaluationReport.load(finished.root).path("predictions.parquet"))["probabilities"].to_pylist()[:32]
    np.testing.assert_allclose(told["p"], expected, atol=1e-5)
    version = ModelVersion.load(finished.root).version
    assert told["alias"] == told["challenger"] == version
    assert told["run"]["tags.trainyard.verdict"] == "approved"
    assert re.fullmatch(r"[0-9a-f]{40}", told["run"]["tags.mlflow.source.git.commit"])


def test_registering_and_deploying_again_repeat_no_effect(finished: Project) -> None:
    """A retried flow calls the effects again: one version, one deployment, the same files."""
    before = [(finished.root / kind.PATH).read_bytes() for kind in (ModelVersion, Endpoint)]
    version = ModelVersion.load(finished.root).version
    assert f"version {version}," in finished.python("-m", "tasks.register").stdout
    finished.python("-m", "tasks.deploy")
    assert before == [(finished.root / kind.PATH).read_bytes() for kind in (ModelVersion, Endpoint)]


def test_prefect_holds_the_summary_tables_preview_and_link(finished: Project) -> None:
    listed = finished.run("prefect", "artifact", "ls", "--limit", "50").stdout
    for key in ("summary", "gate-checks", "per-class", "augmentation", "endpoint"):
        assert key in listed


def test_dvc_repro_has_nothing_to_do_after_the_flow(finished: Project) -> None:
    before = lock_bytes(finished)
    told = finished.run("dvc", "repro").stdout
    assert "Running stage" not in told
    assert told.count("didn't change, skipping") == 8
    assert lock_bytes(finished) == before


def test_a_second_flow_says_that_nothing_changed_and_changes_nothing(finished: Project) -> None:
    before = lock_bytes(finished), (finished.root / Endpoint.PATH).read_bytes(), (finished.root / ModelVersion.PATH).read_bytes()
    again = finished.retrain()
    assert "nothing changed" in again.output
    assert "Running stage" not in again.output
    assert before == (lock_bytes(finished), (finished.root / Endpoint.PATH).read_bytes(), (finished.root / ModelVersion.PATH).read_bytes())


def test_metrics_and_plots_can_be_compared(finished: Project, tmp_path: Path) -> None:
    shown = json.loads(finished.run("dvc", "metrics", "show", "--json").stdout)
    assert shown[""]["data"]["artifacts/evaluation/metrics.json"]["data"]["accuracy"] == EvaluationReport.load(finished.root).accuracy
    finished.run("dvc", "metrics", "diff")
    finished.run("dvc", "plots", "diff", "--out", str(tmp_path / "plots"))
    page = (tmp_path / "plots" / "index.html").read_text(encoding="utf-8")
    for title in ("Loss by epoch", "Accuracy by epoch", "Confusion on test"):
        assert title in page
    assert len(list((tmp_path / "plots" / "static").iterdir())) >= 3


def test_the_flow_leaves_no_process_of_its_own_but_the_service(finished: Project) -> None:
    code = "import psutil, sys; print([p.info['cmdline'] for p in psutil.process_iter(['cmdline', 'cwd']) if p.info['cwd'] == sys.argv[1]])"
    told = subprocess.run([sys.executable, "-c", code, str(finished.root)], cwd="/", capture_output=True, text=True, check=True).stdout
    for foreign in ("prefect.server", "tasks.train", "dvc repro"):
        assert foreign not in told
