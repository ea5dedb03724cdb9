"""The rejected path: a worse model is recorded and goes no further, and the former one serves on."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest
from conftest import Project, make_project

from tasks.backends import model_registry
from tasks.core.artifacts import Endpoint, GateDecision, ModelVersion, TrainedModel
from tasks.core.files import canonical_json, digest_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with a champion in service; these tests change it in the order in which they stand."""
    made = make_project(tmp_path_factory.mktemp("rejected") / "project")
    made.retrain()
    yield made
    made.python("-m", "tasks.deploy", "--stop", check=False)


def serving(project: Project) -> str:
    with urllib.request.urlopen(f"{Endpoint.load(project.root).url}/provenance", timeout=10) as answer:
        return str(json.load(answer)["tag"])


def test_a_worse_model_ends_the_flow_as_rejected_and_changes_nothing_outside(served: Project) -> None:
    before = (served.root / Endpoint.PATH).read_bytes(), serving(served), (served.root / ModelVersion.PATH).read_bytes()
    champion = model_registry.champion(served.root, "classifier")
    assert champion is not None
    archive = (served.root / "artifacts" / "bento" / "bento.json").read_bytes()
    run = served.retrain("train.epochs=1", "train.lr=1e-6")
    assert "retrain: rejected" in run.output
    assert "changed params train.epochs, train.lr" in run.output
    decision = GateDecision.load(served.root)
    assert not decision.approved
    assert decision.champion is not None
    assert decision.champion.version == champion.version
    assert not decision.champion.rescored
    assert before == ((served.root / Endpoint.PATH).read_bytes(), serving(served), (served.root / ModelVersion.PATH).read_bytes())
    assert archive == (served.root / "artifacts" / "bento" / "bento.json").read_bytes()
    assert model_registry.champion(served.root, "classifier") == champion
    assert model_registry.alias_version(served.root, "classifier", "challenger") == champion.version


def test_the_rejected_run_is_recorded_without_a_version(served: Project) -> None:
    code = (
        "import json, mlflow; from pathlib import Path; from tasks.backends.model_registry import tracking_uri\n"
        "mlflow.set_tracking_uri(tracking_uri(Path.cwd())); client = mlflow.MlflowClient()\n"
        "runs = mlflow.search_runs(experiment_names=['trainyard'])\n"
        "print(json.dumps([list(runs['tags.trainyard.verdict']), len(client.search_model_versions(\"name = 'classifier'\"))]))"
    )
    verdicts, versions = json.loads(served.python("-W", "ignore", "-c", code).stdout.splitlines()[-1])
    assert sorted(verdicts) == ["approved", "rejected"]
    assert versions == 1


def test_asking_again_after_a_rejection_ends_as_unchanged(served: Project) -> None:
    assert "retrain: nothing changed" in served.retrain().output


@pytest.mark.parametrize("stage", ["register", "package", "deploy"])
def test_no_later_stage_runs_on_a_rejection(served: Project, stage: str) -> None:
    done = served.python("-m", f"tasks.{stage}", check=False)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("error[rejected]: ")


@pytest.mark.parametrize("stage", ["register", "package", "deploy"])
@pytest.mark.parametrize(
    ("attack", "code"), [("missing", "no_verdict"), ("edited", "artifact_edited"), ("forged", "artifact_edited"), ("foreign", "artifact_foreign")]
)
def test_a_missing_edited_forged_or_foreign_verdict_stops_each_later_stage(served: Project, stage: str, attack: str, code: str) -> None:
    path = served.root / GateDecision.PATH
    whole = path.read_bytes()
    tree = json.loads(whole)
    try:
        if attack == "missing":
            path.unlink()
        elif attack == "edited":
            path.write_bytes(canonical_json({**tree, "approved": True}))
        else:
            changed = {**tree, "approved": True} if attack == "forged" else {**tree, "made_from": {**tree["made_from"], "TrainedModel": "0" * 64}}
            changed.pop("digest")
            path.write_bytes(canonical_json({**changed, "digest": digest_of(changed)}))
        done = served.python("-m", f"tasks.{stage}", check=False)
    finally:
        path.write_bytes(whole)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error[{code}]: ")
    assert "Traceback" not in done.stderr


def test_a_champion_of_another_test_split_is_scored_again_and_a_better_model_takes_over(served: Project) -> None:
    """Other test images and another image size: the champion's model.onnx must be run on them, decoded its own way."""
    old = Endpoint.load(served.root)
    run = served.retrain(
        "train.epochs=10", "train.lr=0.1", "prepare.seed=1", "prepare.image_size=12", "gate.margin=0.05", "gate.min_class_recall=0.8"
    )
    decision = GateDecision.load(served.root)
    assert decision.champion is not None
    assert decision.champion.rescored
    assert decision.champion.model_digest == old.model_digest
    assert decision.champion.correct / decision.champion.images > 0.9
    assert "retrain: completed" in run.output
    now = Endpoint.load(served.root)
    assert now.model_digest == TrainedModel.load(served.root).digest != old.model_digest
    assert (now.url, serving(served)) == (old.url, now.tag)
    champion = model_registry.champion(served.root, "classifier")
    assert champion is not None
    assert (champion.model_digest, champion.version) == (now.model_digest, now.model_version)


def test_a_verdict_that_compared_with_another_champion_cannot_be_deployed(served: Project) -> None:
    """Somebody promotes another version by hand: deploy must refuse, and the flow must judge again."""
    code = (
        "from pathlib import Path; import mlflow; from tasks.backends.model_registry import DIGEST_TAG, tracking_uri\n"
        "mlflow.set_tracking_uri(tracking_uri(Path.cwd())); client = mlflow.MlflowClient(); old = client.get_model_version('classifier', '1')\n"
        "new = client.create_model_version('classifier', old.source, run_id=old.run_id, tags={DIGEST_TAG: old.tags[DIGEST_TAG]})\n"
        "client.set_registered_model_alias('classifier', 'champion', new.version)\n"
    )
    assert served.python("-m", "tasks.gate", "--stale").stdout.strip() == "fresh"
    served.python("-W", "ignore", "-c", code)
    assert served.python("-m", "tasks.gate", "--stale").stdout.strip() == "stale"
    before = serving(served)
    done = served.python("-m", "tasks.deploy", check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error[stale_verdict]: ")
    assert serving(served) == before
