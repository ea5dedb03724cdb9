"""No request leaves the machine: the whole chain in a network namespace that has nothing but loopback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Project

from tasks.core.artifacts import GateDecision

AUDIT = """
import os, sys
LOG = os.environ.get("TRAINYARD_TEST_AUDIT")
def watch(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect":
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host and host not in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::", ""):
        with open(LOG, "a") as log:
            log.write(f"{event} {host} {sys.argv[:3]}\\n")
if LOG:
    sys.addaudithook(watch)
"""


def can_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="making a network namespace needs root, unshare and ip (Debian: util-linux, iproute2)")
def test_the_chain_runs_on_loopback_alone_and_asks_for_nothing_else(project: Project, tmp_path: Path) -> None:
    """The namespace proves that nothing is needed; the audit hook, that no process which inherits it even tries.

    The build of the Bento and the service start with a clean Python path, so for them the namespace alone speaks.
    """
    hook, log = tmp_path / "hook", tmp_path / "requests.log"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(AUDIT, encoding="utf-8")
    script = f"""
set -e
ip link set lo up
{sys.executable} -m flows.local
{sys.executable} -c "import json, urllib.request as u; from pathlib import Path; from tasks.core.artifacts import Endpoint as E
print(json.load(u.urlopen(E.load(Path()).url + '/provenance'))['tag'])"
{sys.executable} -m tasks.deploy --stop
"""
    done = project.run("unshare", "-n", "bash", "-c", script, env={"PYTHONPATH": str(hook), "TRAINYARD_TEST_AUDIT": str(log)})
    assert "retrain: completed" in done.stdout
    assert GateDecision.load(project.root).approved
    assert not log.exists(), log.read_text(encoding="utf-8")


def test_the_audit_hook_sees_a_request(tmp_path: Path) -> None:
    """The hook of the test above would notice: a check that cannot fail is no check."""
    (tmp_path / "sitecustomize.py").write_text(AUDIT, encoding="utf-8")
    log = tmp_path / "log"
    code = "import socket\ntry: socket.getaddrinfo('telemetry.invalid', 443)\nexcept OSError: pass"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path), "TRAINYARD_TEST_AUDIT": str(log)}, check=True)
    assert "telemetry.invalid" in log.read_text(encoding="utf-8")
