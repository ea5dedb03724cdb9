"""`make up` and `make down` on real servers: idempotent, mending, nothing left behind, no password in sight."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from stack_project import Stack, free_ports, stack_project
from tiny_project import make_project as make_tiny

from flows import servers
from flows import stack as local_stack
from flows.servers import Part
from tasks.backends import model_registry
from tasks.core import daemons
from tasks.core.errors import BadInput
from tasks.core.process import spare_port

PARTS = ("postgres", "prefect", "mlflow", "worker")


def states(table: dict[str, list[str]], *names: str) -> set[str]:
    return {" ".join(table[name][:2]) if table[name][:2] == ["started", "again"] else table[name][0] for name in names}


# One part alone, in milliseconds


def web(port: int, greeting: str = "") -> Part:
    """A real server for a part."""
    command = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port))
    return Part("mlflow", command, {"GREETING": greeting}, "here", lambda since: servers.request(f"http://127.0.0.1:{port}")[0] == 200, port=port)


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Part]:
    made = web(spare_port())
    yield made
    local_stack.end(tmp_path, made.name)
    assert not local_stack.members(tmp_path, made.name)


def test_a_part_that_runs_is_left_alone_and_one_that_was_killed_is_started(tmp_path: Path, part: Part, capsys: pytest.CaptureFixture[str]) -> None:
    local_stack.ensure(tmp_path, part)
    first = local_stack.leader(tmp_path, part)
    assert first is not None
    local_stack.ensure(tmp_path, part)
    assert local_stack.leader(tmp_path, part) == first
    first.kill()
    daemons.wait_gone([first], 5)
    local_stack.ensure(tmp_path, part)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["started", "running", "started"]


def test_a_part_whose_settings_changed_is_started_again(tmp_path: Path, part: Part) -> None:
    local_stack.ensure(tmp_path, part)
    before = local_stack.leader(tmp_path, part)
    assert part.port is not None
    other = web(part.port, "hello")
    local_stack.ensure(tmp_path, other)
    after = local_stack.leader(tmp_path, other)
    assert after is not None
    assert after != before
    assert after.environ()["GREETING"] == "hello"


def test_a_part_that_hangs_is_started_again(tmp_path: Path, part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    local_stack.ensure(tmp_path, part)
    hung = local_stack.leader(tmp_path, part)
    assert hung is not None
    hung.suspend()
    monkeypatch.setattr(local_stack, "READY_S", 1.0)
    monkeypatch.setattr(local_stack, "HUNG_S", 1.0)
    monkeypatch.setattr(local_stack, "SERVER_GRACE_S", 0.5)
    monkeypatch.setattr(servers.request, "__defaults__", (None, "", 0.5))
    monkeypatch.setattr(local_stack, "_require_answer", lambda *_: None)
    local_stack.ensure(tmp_path, part)
    assert local_stack.leader(tmp_path, part) not in (None, hung)
    assert not daemons.lives(hung)


def test_a_server_that_dies_says_its_last_line(tmp_path: Path) -> None:
    dying = Part("prefect", (sys.executable, "-c", "import time; time.sleep(.3); print('boom: no room'); exit(3)"), {}, "here", lambda since: False)
    with pytest.raises(BadInput, match=r"server_not_ready.*prefect ended; got boom: no room"):
        local_stack.ensure(tmp_path, dying)


def test_a_taken_port_is_named_with_its_holder(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            BadInput, match=rf"port_taken.*{port}, held by process {os.getpid()} .*TRAINYARD_STACK_MLFLOW_PORT in .trainyard/stack.env"
        ):
            local_stack.ensure(tmp_path, web(port))
    assert not local_stack.members(tmp_path, "mlflow")


def test_up_from_another_shell_is_no_change_of_settings_but_a_new_password_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, secret = servers.Settings(auth=True), servers.Credentials("a", "b", "c", "d")
    before = local_stack._digest(servers.parts(tmp_path, settings, secret, None)["worker"])
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setenv("no_proxy", "elsewhere")
    assert local_stack._digest(servers.parts(tmp_path, settings, secret, None)["worker"]) == before
    assert local_stack._digest(servers.parts(tmp_path, settings, servers.Credentials("a", "b", "x", "d"), None)["worker"]) != before


# Settings and credentials


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("TRAINYARD_STACK_PROT=1", "unknown setting of the stack; got TRAINYARD_STACK_PROT"),
        ("TRAINYARD_STACK_PREFECT_PORT=x", "TRAINYARD_STACK_PREFECT_PORT=x"),
        ("TRAINYARD_STACK_HOST=0.0.0.0", "set TRAINYARD_STACK_AUTH=true"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / ".trainyard").mkdir()
    (tmp_path / servers.SETTINGS_FILE).write_text(f"# mine\n\n{line}\n")
    with pytest.raises(BadInput) as caught:
        servers.load_settings(tmp_path)
    assert says in str(caught.value)


def test_the_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".trainyard").mkdir()
    (tmp_path / servers.SETTINGS_FILE).write_text("TRAINYARD_STACK_MLFLOW_PORT=1\nTRAINYARD_STACK_AUTH=true\n")
    monkeypatch.setenv("TRAINYARD_STACK_MLFLOW_PORT", "2")
    settings = servers.load_settings(tmp_path)
    assert (settings.mlflow_port, settings.auth) == (2, True)


def test_credentials_are_made_once_for_their_owner_alone_and_never_again_for_a_database_that_has_others(tmp_path: Path) -> None:
    made = servers.load_credentials(tmp_path)
    path = tmp_path / servers.FOLDER / "credentials.env"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert servers.load_credentials(tmp_path) == made
    assert made.postgres_password not in repr(made)
    path.unlink()
    (tmp_path / ".trainyard" / "postgres").mkdir()
    with pytest.raises(BadInput, match="credentials of the stack are not whole"):
        servers.load_credentials(tmp_path)


def test_a_history_in_sqlite_stays_there_and_one_in_postgresql_never_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.postgres, "find", lambda root: "PostgreSQL is not installed")
    automatic = servers.Settings()
    assert servers.database(tmp_path, automatic) == "PostgreSQL is not installed"
    with pytest.raises(BadInput, match="PostgreSQL is not installed"):
        servers.database(tmp_path, servers.Settings(database="postgresql"))
    (tmp_path / ".trainyard" / "stack" / "prefect").mkdir(parents=True)
    (tmp_path / ".trainyard" / "stack" / "prefect" / "prefect.db").touch()
    assert "begun with SQLite" in str(servers.database(tmp_path, automatic))
    (tmp_path / ".trainyard" / "postgres").mkdir()
    with pytest.raises(BadInput, match="PostgreSQL is not installed"):
        servers.database(tmp_path, automatic)


# The whole stack


@pytest.mark.slow
def test_without_postgresql_up_works_on_sqlite_and_down_reports_the_run_it_cuts_off_and_leaves_nothing() -> None:
    with stack_project({**free_ports(), "TRAINYARD_STACK_DATABASE": "sqlite"}) as made:
        table = made.make("up")
        assert states(table, "prefect", "mlflow", "worker") == {"started"}
        assert table["postgres"][:2] == ["not", "used"]
        assert "PREFECT_API_URL" in (made.root / servers.ENV_FILE).read_text()
        assert {entry["name"] for entry in made.api("/deployments/filter", {})} >= {"manual", "nightly"}
        run = made.start(made.add_probe("trainyard"), name="long", seconds=600)
        made.wait_for_run(run, "RUNNING")
        until = time.monotonic() + 30
        while not (held := [process for process in made.processes() if "time.sleep(600" in daemons.command_line(process)]):
            assert time.monotonic() < until
            time.sleep(0.2)
        made.make("down")
        assert not made.processes()
        assert not any(map(daemons.lives, held))
        with sqlite3.connect(made.root / ".trainyard" / "stack" / "prefect" / "prefect.db") as database:
            assert database.execute("SELECT state_type FROM flow_run WHERE id = ?", (run,)).fetchone() == ("CRASHED",)
        assert not (made.root / servers.ENV_FILE).exists()
        assert states(made.make("status"), "prefect", "mlflow", "worker", "service") == {"down"}


@pytest.mark.slow
def test_up_twice_changes_nothing(stack: Stack) -> None:
    before = {process.pid for process in stack.processes() if "python" in daemons.command_line(process)}
    assert states(stack.make("up"), *PARTS) == {"running"}
    assert before <= {process.pid for process in stack.processes()}


@pytest.mark.slow
def test_no_password_stands_in_a_process_list_a_log_or_a_readable_file(stack: Stack) -> None:
    credentials = servers.load_credentials(stack.root)
    secrets = [getattr(credentials, name) for name in credentials.__dataclass_fields__]
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if any(secret in command for secret in secrets)]
    for path in (stack.root / ".trainyard").rglob("*"):
        if path.is_file() and "postgres" not in path.relative_to(stack.root).parts[1]:
            told = any(secret.encode() in path.read_bytes() for secret in secrets)
            assert not told or stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.slow
def test_the_servers_let_nobody_in_without_the_password(stack: Stack) -> None:
    clients = stack.clients
    api, mlflow = clients["PREFECT_API_URL"], clients["MLFLOW_TRACKING_URI"]
    good = f"trainyard:{clients['MLFLOW_TRACKING_PASSWORD']}"
    for login, expected in (("", 401), ("trainyard:wrong", 401)):
        assert servers.request(f"{api}/flow_runs/filter", {}, login)[0] == expected
        assert servers.request(f"{mlflow}/api/2.0/mlflow/experiments/search", {"max_results": 1}, login)[0] == expected
    assert servers.request(f"{mlflow}/api/2.0/mlflow/experiments/search", {"max_results": 1}, good)[0] == 200


@pytest.mark.slow
def test_the_registry_logs_in_and_a_remote_champion_is_found_without_a_local_database(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in stack.clients.items():
        monkeypatch.setenv(key, value)
    tiny = make_tiny(tmp_path / "one")
    folder = {"trainyard": [tiny.model.path("model.onnx"), tiny.root / tiny.model.PATH, tiny.root / tiny.report.PATH]}
    record = model_registry.RunRecord({}, {"accuracy": 1.0}, [], {}, "tiny", "0" * 32, folder, {}, tiny.model.path("model.onnx"), ["onnx"])
    digest = tiny.model.digest
    assert model_registry.champion(tmp_path / "two", "tiny") is None
    version, made = model_registry.register(tiny.root, experiment="tiny", model_name="tiny", model_digest=digest, description="", record=record)
    assert (version, made) == ("1", True)
    model_registry.promote(tiny.root, "tiny", version, None)
    elsewhere = model_registry.champion(tmp_path / "two", "tiny")
    assert elsewhere is not None
    assert elsewhere.model_digest == digest
    assert (elsewhere.folder / "model.onnx").read_bytes() == tiny.model.path("model.onnx").read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong")
    with pytest.raises(BadInput, match="registry_denied"):
        model_registry.champion(tmp_path / "two", "tiny")


@pytest.mark.slow
def test_after_kill_9_of_everything_up_mends_it_and_the_run_is_not_left_running(stack: Stack) -> None:
    run = stack.start(stack.add_probe("trainyard"), name="killed", seconds=600)
    stack.wait_for_run(run, "RUNNING")
    victims = [
        stack.leader("worker", "worker start"),
        stack.leader("prefect", "server start"),
        stack.leader("mlflow", "mlflow server"),
        stack.leader("postgres", "postgres -D"),
    ]
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    daemons.wait_gone(victims, 10)
    table = stack.make("up")
    assert {name: table[name][0] for name in PARTS} == dict.fromkeys(PARTS, "started")
    assert stack.wait_for_run(run, "CRASHED", "SCHEDULED", seconds=5)
    quick = stack.start(str(stack.api("/deployments/name/probe/probe-trainyard")["id"]), name="quick")
    stack.wait_for_run(quick, "COMPLETED")
    assert (stack.root / "quick.seen").exists()
