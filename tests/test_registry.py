"""The registry's own manners; what it holds is tested where models are registered and promoted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.backends import model_registry


def test_two_projects_in_one_process_keep_their_stores_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow puts the store that it was told into the environment, where the next project would find it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("a", "b"):
        assert model_registry.alias_version(tmp_path / name, "classifier", "champion") is None
        assert (tmp_path / name / ".trainyard" / "mlflow" / "mlflow.db").is_file()
    assert "MLFLOW_TRACKING_URI" not in os.environ
