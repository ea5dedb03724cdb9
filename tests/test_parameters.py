"""Flow parameters are the config classes: Prefect shows and checks them, and what it takes is what params.yaml gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_server import Deployed

from flows.parameters import Overrides
from tasks.core.config import Params, apply_overrides, load_params
from tasks.core.errors import BadInput

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"train": {"epohcs": 3}}, "overrides: train; must be unknown key 'epohcs'"),
        ({"trian": {}}, "trian"),
        ({"prepare": {"decode": {"max_pixel": 1}}}, "max_pixels"),
        ({"train": {"epochs": 0}}, "overrides: train.epochs; got 0; must be greater than or equal to 1; set train.epochs"),
        ({"train": {"schedule": "linear"}}, "'cosine' or 'one_cycle'"),
    ],
)
def test_a_wrong_override_is_refused_with_the_right_name_or_bound(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(BadInput) as caught:
        Overrides.checked(tree)
    assert caught.value.code == "params_invalid"
    assert told in str(caught.value).replace("unknown key 'trian'; must be train", "trian")


def test_only_what_was_given_is_changed(tmp_path: Path) -> None:
    """A form sends null for what was left empty; JSON has no tuples."""
    given = {"train": {"epochs": 3, "lr": None}, "validate": {"min_classes": 3}, "prepare": {"decode": {"background": [1, 2, 3]}}, "gate": {}}
    changes = Overrides.checked(given).changes()
    assert changes == {"train": {"epochs": 3}, "validate": {"min_classes": 3}, "prepare": {"decode": {"background": [1, 2, 3]}}}
    path = tmp_path / "params.yaml"
    path.write_bytes((ROOT / "params.yaml").read_bytes())
    before = load_params(path)
    assert apply_overrides(changes, path)
    after = load_params(path)
    assert (after.train.epochs, after.validate_.min_classes, after.prepare.decode.background) == (3, 3, (1, 2, 3))
    assert after.train.lr == before.train.lr
    assert Overrides.checked({}).changes() == {}


def test_every_key_of_every_section_can_be_overridden() -> None:
    """All of params.yaml, given as an override, comes back as it was."""
    tree = load_params(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)
    assert Overrides.checked(tree).changes() == tree


@pytest.mark.slow
def test_prefects_form_has_types_bounds_and_words_and_a_bad_value_starts_nothing(deployed: Deployed) -> None:
    schema = deployed.deployment("retrain/manual")["parameter_openapi_schema"]
    epochs = schema["definitions"]["Train"]["properties"]["epochs"]
    assert {"type": "integer", "minimum": 1, "maximum": 10_000} in epochs["anyOf"]
    assert epochs["description"] == "passes over the training split"
    assert set(schema["definitions"]["Overrides"]["properties"]) == {field.alias or name for name, field in Params.model_fields.items()}
    before = len(deployed.runs("retrain/manual"))
    for value, told in (
        ('{"train": {"epochs": 0}}', "minimum of 1"),
        ('{"train": {"epohcs": 3}}', "epohcs"),
        ('{"train": {"model": 7}}', "overrides.train.model"),
    ):
        done = deployed.project.run("prefect", "deployment", "run", "retrain/manual", "--param", f"overrides={value}", env=deployed.env, check=False)
        assert done.returncode == 1
        assert told in done.stdout + done.stderr, done.stdout + done.stderr
    assert len(deployed.runs("retrain/manual")) == before
