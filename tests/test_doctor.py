"""The doctor on a sound project, on one where each thing is broken in turn, and before a real Prefect server."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import GIT_AUTHOR, Project
from own_server import prefect_server

from flows import checks, doctor, server_checks
from flows.place import CHILDREN, Answer, Finding, Place
from tasks.core.artifacts import Endpoint
from tasks.core.config import apply_overrides
from tasks.core.files import STATE
from tasks.core.process import spare_port


def green(_place: Place) -> Finding:
    return Finding("green", "well")


def test_a_check_that_crashes_or_hangs_is_a_red_line() -> None:
    def crash(_place: Place) -> Finding:
        raise ValueError("boom\nboom")

    def hang(_place: Place) -> Finding:
        time.sleep(30)
        return Finding("green", "too late")

    start = time.monotonic()
    found = doctor.examine(Place(Path(), limit_s=1.0), {"hangs": hang, "crashes": crash, "works": green})
    assert time.monotonic() - start < 3
    assert list(found) == ["hangs", "crashes", "works"]
    assert [finding.state for finding in found.values()] == ["red", "red", "green"]
    assert found["hangs"].said == "no answer within 1 s"
    assert found["crashes"].said == "the check itself failed: ValueError: boom boom"


def test_a_child_that_fails_is_asked_once_and_its_last_line_is_told() -> None:
    place = Place(Path(), {"dvc": ("sh", "-c", "echo asked >&2; echo 'error[dvc_failed]: DVC refused'; exit 2")})
    found = doctor.examine(
        place, {"dvc": checks.explained(lambda place: place.ask("dvc")), "again": checks.explained(lambda place: place.ask("dvc"))}
    )
    assert {finding.said for finding in found.values()} == {"error[dvc_failed]: DVC refused"}


def test_the_table_fits_a_hundred_columns_and_colours_only_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"a": Finding("green", "well " * 40), "a long name": Finding("red", "/a/path/" + "x" * 80, "do " * 50), "b": Finding("yellow", "hm")}
    plain = doctor.table(found, coloured=False)
    assert max(map(len, plain.splitlines())) <= 100
    assert plain.splitlines()[0].startswith("green   a            well")
    assert re.search(r"^ +-> do do", plain, re.MULTILINE)
    assert re.sub(r"\033\[\d*m", "", doctor.table(found, coloured=True)) == plain != doctor.table(found, coloured=True)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert doctor.may_colour(Terminal())
    assert not doctor.may_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not doctor.may_colour(Terminal())


@pytest.fixture(scope="module")
def sound(finished: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the project on which everything ran; tests put back what they break."""
    root = tmp_path_factory.mktemp("sound") / "project"
    return Project(shutil.copytree(finished.root, root, symlinks=True))


@pytest.mark.slow
def test_a_sound_project_has_no_red_line(sound: Project) -> None:
    done = sound.python("-m", "flows.doctor", "--json", "--limit-s", "120", check=False)
    said = json.loads(done.stdout)
    states = {line["name"]: line["state"] for line in said["checks"]}
    assert [line for line in said["checks"] if line["state"] == "red"] == []
    assert done.returncode == 0
    assert states.keys() == checks.CHECKS.keys()
    for name in ("git", "dvc", "mlflow", "bento store", "service", "ports", "environment", "params.yaml", ".trainyard", "telemetry", "time zones"):
        assert states[name] == "green", said
    assert said["green"] == list(states.values()).count("green")
    assert all(line["do"] for line in said["checks"] if line["state"] != "green")
    left = sound.run("git", "status", "--porcelain", "--untracked-files=all").stdout
    assert ".doctor-" not in left


def red(sound: Project, name: str) -> Finding:
    """What the check says now; it must be red and say what to do."""
    found = checks.CHECKS[name](Place(sound.root, limit_s=120))
    assert found.state == "red", found
    assert found.do
    return found


@contextmanager
def broken(path: Path, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """A file changed for the length of a block."""
    before = path.read_bytes()
    path.write_bytes(change(before))
    try:
        yield
    finally:
        path.write_bytes(before)


@pytest.mark.slow
def test_each_thing_that_is_broken_is_red_and_says_what_to_do(sound: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = sound.root
    for name, value in (sound.environment | GIT_AUTHOR).items():
        monkeypatch.setenv(name, value)
    with broken(root / "params.yaml", lambda data: data.replace(b"epochs:", b"epoch:")):
        assert "train.epochs" in red(sound, "params.yaml").said
        assert checks.CHECKS["git"](Place(root)) == Finding("yellow", "not known: params.yaml is wrong", "see params.yaml")
    with broken(root / "prefect.yaml", lambda data: data.replace(b"Europe/London", b"Europe/Londen")):
        assert "Europe/Londen" in red(sound, "time zones").said
    with broken(root / "requirements.lock", lambda data: data + b"no-such-package==1.0\nprefect==0.1\n"):
        assert "no-such-package missing, not 1.0" in red(sound, "environment").said
        assert "prefect" in red(sound, "environment").said
    monkeypatch.setenv("DVC_NO_ANALYTICS", "false")
    assert "DVC_NO_ANALYTICS=false" in red(sound, "telemetry").said
    assert red(sound, "telemetry").do == "unset DVC_NO_ANALYTICS"
    monkeypatch.setenv("DVC_NO_ANALYTICS", "true")
    assert checks.CHECKS["telemetry"](Place(root)).state == "green"  # another way to say the same
    monkeypatch.setattr(checks, "SPARE_GB", 1e9)
    assert "a run needs about 1000000000" in red(sound, "disk").said
    lock = root / ".git" / "index.lock"
    lock.touch()
    os.utime(lock, (1, 1))
    assert "index.lock" in red(sound, "git").said
    lock.unlink()
    sound.run("git", "remote", "add", "origin", str(tmp_path / "nowhere"))
    assert "origin refuses" in red(sound, "git").said
    sound.run("git", "remote", "remove", "origin")
    sound.run("git", "branch", "-m", "main", "other")
    assert "no branch main" in red(sound, "git").said
    sound.run("git", "branch", "-m", "other", "main")
    outside = Place(tmp_path)
    assert [checks.CHECKS[name](outside).state for name in ("git", "dvc", "params.yaml")] == ["red"] * 3
    assert "no params.yaml here" in checks.CHECKS["params.yaml"](outside).said.replace(f"{tmp_path}/", "")
    (tmp_path / STATE).touch()
    assert checks.CHECKS[".trainyard"](outside).state == "red"


@pytest.mark.slow
def test_a_remote_that_is_away_a_stale_lock_and_a_lost_bento(sound: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    root = sound.root
    for name, value in sound.environment.items():
        monkeypatch.setenv(name, value)
    local = root / ".dvc" / "config.local"
    local.write_text("[core]\n    remote = away\n['remote \"away\"']\n    url = http://127.0.0.1:9/dvc\n", encoding="utf-8")
    assert "the default remote away" in red(sound, "dvc").said
    local.unlink()
    lock = root / ".dvc" / "tmp" / "rwlock"
    lock.write_text(json.dumps({"/x": {"write": {"pid": 4194305, "cmd": "dvc repro"}}}), encoding="utf-8")
    found = checks.CHECKS["dvc"](Place(root, limit_s=120))
    assert (found.state, "dead process 4194305" in found.said) == ("yellow", True)
    lock.unlink()
    aside = shutil.move(root / STATE / "bentoml", root / STATE / "aside")
    assert "none of the champion" in red(sound, "bento store").said
    shutil.move(aside, root / STATE / "bentoml")


@pytest.mark.slow
def test_a_service_that_does_not_answer_or_is_somebody_elses(sound: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in sound.environment.items():
        monkeypatch.setenv(name, value)
    place = Place(sound.root, limit_s=120)
    place.ask("mlflow")
    with broken(sound.root / Endpoint.PATH, lambda data: data), broken(sound.root / "params.yaml", lambda data: data):
        port = spare_port()
        apply_overrides({"deploy": {"port": port}}, sound.root / "params.yaml")
        (sound.root / Endpoint.PATH).unlink()
        assert checks.CHECKS["ports"](place).state == "green"
        found = checks.CHECKS["service"](place)
        assert (found.state, found.do) == ("red", "make serve")
        with socket.create_server(("127.0.0.1", port)):
            assert "in use by another program" in checks.CHECKS["ports"](place).said
        with answering({"tag": "other:1", "artifacts": {"TrainedModel": "0" * 64}}, port=port):
            assert "serves other:1, the champion is version 1" in checks.CHECKS["service"](place).said
        (sound.root / Endpoint.PATH).touch()


@contextmanager
def answering(body: Any, status: int = 200, port: int = 0) -> Iterator[str]:
    """An HTTP server that answers everything with ``body`` as JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def seen(root: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> dict[str, Finding]:
    """The server's checks with ``url`` as the API."""
    monkeypatch.setenv("PREFECT_API_URL", url)
    place = Place(root, {"prefect": CHILDREN["prefect"]}, limit_s=120)
    return {name: checks.CHECKS[name](place) for name in ("prefect api", "deployments", "worker", "automations", "clock")}


def test_a_server_that_is_away_or_wants_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    away = seen(root, monkeypatch, "http://127.0.0.1:9/api")
    assert [finding.state for finding in away.values()] == ["red", *["yellow"] * 4]  # one trouble is one red line
    assert "does not answer" in away["prefect api"].said
    with answering({"detail": "Unauthorized"}, status=401) as url:
        assert "refuses the login" in seen(root, monkeypatch, f"{url}/api")["prefect api"].said


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("clock", {"ahead_s": -3600.2}, "3600 s behind the Prefect server's"),
        ("prefect api", {"server": "2.20.1"}, "is version 2.20.1, this is 3.9.1"),
        ("prefect api", {"analytics": True}, "analytics are on"),
        ("worker", {"pool": False}, "no work pool trainyard"),
        ("automations", {"wanted": ["a", "b"], "automations": ["b"]}, "1 of 2 automations are missing: a"),
        ("deployments", {"deployments": []}, "no deployment of this folder"),
    ],
)
def test_what_a_server_says_is_judged(tmp_path: Path, name: str, change: dict[str, Any], words: str) -> None:
    sound: dict[str, Any] = {"client": "3.9.1", "server": "3.9.1", "analytics": False, "error": "", "url": "http://x/api", "ahead_s": 0.2}
    sound |= {"deployments": ["manual"], "pool": True, "workers": ["w"], "wanted": ["b"], "automations": ["a", "b"]}
    for said, state in ((sound, "green"), (sound | change, "red")):
        found = checks.CHECKS[name](Place(tmp_path, {"prefect": ("echo", json.dumps(said))}))
        assert found.state == state
    assert words in found.said
    assert found.do


@pytest.mark.slow
def test_before_a_real_server(sound: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing there, then the pool and the deployments, then a worker."""
    for name, value in sound.environment.items():
        monkeypatch.setenv(name, value)
    api = {"PREFECT_API_URL": prefect_server()}
    first = seen(sound.root, monkeypatch, api["PREFECT_API_URL"])
    assert first["prefect api"].state == first["clock"].state == "green", first
    assert first["deployments"].state == first["worker"].state == "red"
    sound.run("prefect", "work-pool", "create", "trainyard", "--type", "process", env=api)
    sound.run("prefect", "--no-prompt", "deploy", "--all", env=api)
    second = seen(sound.root, monkeypatch, api["PREFECT_API_URL"])
    assert second["deployments"].state == "green"
    assert "manual" in second["deployments"].said
    assert second["worker"] == Finding(
        "red", "work pool trainyard: no worker is online, so nothing that is scheduled runs", server_checks.START_WORKER
    )
    worker = subprocess.Popen(
        ["prefect", "worker", "start", "--pool", "trainyard"],
        cwd=sound.root,
        env={**sound.environment, **api},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while (third := seen(sound.root, monkeypatch, api["PREFECT_API_URL"]))["worker"].state != "green":
            assert time.monotonic() < deadline, third
    finally:
        os.killpg(worker.pid, 9)
        worker.wait()
    assert "1 online" in third["worker"].said


def test_an_answer_is_the_last_line(tmp_path: Path) -> None:
    assert Answer(("sh", "-c", "echo a warning; echo '[1]'"), tmp_path, 20.0).get() == [1]


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    place = Place(tmp_path, {"torch": ("sleep", "47.11")}, limit_s=0.5)
    found = checks.CHECKS["processor"](place)
    assert (found.state, found.said[:20]) == ("red", "nothing within 0.45 ")
    assert subprocess.run(["pgrep", "-f", "^sleep 47.11"], capture_output=True).returncode == 1
