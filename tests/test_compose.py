"""compose.yaml runs what flows/servers.py runs. No engine here: the file is read, not started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from flows import servers
from flows.postgres import Cluster
from flows.servers import Credentials, Part, Settings
from tasks.core.config import load_params
from tasks.core.process import QUIET

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "compose.yaml").read_text(encoding="utf-8")
TREE: dict[str, Any] = YAML(typ="safe", pure=True).load(TEXT)
SERVICES: dict[str, Any] = TREE["services"]
OF_THE_HOST = {"PATH", "PYTHONUNBUFFERED", "no_proxy", "NO_PROXY"}
"""Variables that a container has no use for."""


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, Part]:
    """The local stack with the settings that compose.yaml has: PostgreSQL, passwords, all addresses."""
    secret = Credentials(*(f"{{{name}}}" for name in ("POSTGRES_PASSWORD", "PREFECT_PASSWORD", "MLFLOW_PASSWORD", "MLFLOW_SECRET")))
    return servers.parts(tmp_path, Settings(host="0.0.0.0", auth=True), secret, Cluster(tmp_path, tmp_path, None))


@pytest.mark.parametrize("name", ["prefect", "mlflow", "worker"])
def test_commands_are_those_of_the_local_stack(name: str, parts: dict[str, Part]) -> None:
    local = [word if not word.startswith("trainyard-") else "trainyard-compose" for word in parts[name].command[1:]]
    assert SERVICES[name]["command"] == ["python", *local, *(["--with-healthcheck"] if name == "worker" else [])]


def plain(text: str) -> str:
    """``text`` with its secrets as {NAME}, and addresses and folders as a container or this machine would both have them."""
    text = re.sub(r"\$\{(\w+)[^}]*\}", r"{\1}", text)
    text = re.sub(r"(?<=[/@])(127\.0\.0\.1|prefect|mlflow|postgres):(\d+)", lambda found: f"host:{found[2].replace('54329', '5432')}", text)
    return "a folder" if text.startswith("/") else text


@pytest.mark.parametrize("name", ["prefect", "mlflow", "worker"])
def test_variables_are_those_of_the_local_stack(name: str, parts: dict[str, Part]) -> None:
    skipped = OF_THE_HOST | ({"PREFECT_HOME"} if name == "prefect" else set())
    local = {key: plain(value) for key, value in parts[name].environment.items() if key not in skipped}
    composed = {key: plain(value) for key, value in SERVICES[name]["environment"].items() if key != "MLFLOW_SERVER_ALLOWED_HOSTS"}
    assert composed == local


def test_mlflows_login_file_is_that_of_the_local_stack(parts: dict[str, Part]) -> None:
    (local,) = parts["mlflow"].files.values()
    assert plain(TREE["configs"]["mlflow_auth"]["content"]) == plain(local)


def test_every_service_is_watched_pinned_and_open_to_this_machine_alone() -> None:
    assert set(SERVICES) == {"postgres", "prefect", "mlflow", "worker", "service"}
    for name, service in SERVICES.items():
        assert "healthcheck" in service or name == "service"
        assert re.search(r":(local|\d[\w.]*-\w+)$", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    mounted = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert {name for name in mounted if not name.startswith(".")} == set(TREE["volumes"])


def test_there_is_no_default_password_and_the_example_names_every_variable() -> None:
    asked = set(re.findall(r"\$\{(\w+)", TEXT))
    assert all(used.startswith(":?") for used in re.findall(r"\$\{\w+([^}]*)\}", TEXT))
    example = dict(line.split("=") for line in (ROOT / "docker" / "example.env").read_text().splitlines() if "=" in line and not line.startswith("#"))
    assert set(example) == asked
    assert not [name for name, value in example.items() if ("PASSWORD" in name or "SECRET" in name) and value]


def test_the_image_is_quiet_and_the_ports_are_those_of_the_project() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert dict(pair.split("=") for pair in re.findall(r"\b[A-Z_]+=\S+", dockerfile) if pair.split("=")[0] in QUIET) == QUIET
    assert re.search(r"FROM python:\d+\.\d+\.\d+-", dockerfile)
    port = load_params(ROOT / "params.yaml").deploy.port
    assert f"127.0.0.1:{port}:{port}" in SERVICES["worker"]["ports"]
    assert f"127.0.0.1:{port}/" in SERVICES["service"]["command"][-1]


def test_both_databases_are_made() -> None:
    made = re.findall(r"CREATE DATABASE (\w+);", (ROOT / "docker" / "databases.sql").read_text())
    assert made == [servers.PREFECT_DATABASE, servers.MLFLOW_DATABASE]


def test_the_page_names_every_setting_and_its_default() -> None:
    page = (ROOT / "docs" / "servers.md").read_text(encoding="utf-8")
    for name, field in Settings.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        assert f"| `{servers.PREFIX}{name.upper()}` | `{default}` | {field.description} |" in page
