"""One real Prefect server for the tests of doctor and sweep, started when the first of them asks."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path

from conftest import prefect_home

from tasks.core.process import QUIET, end_group, spare_port


def start(home: Path, port: int) -> subprocess.Popen[bytes]:
    """`prefect server start` on ``port`` with its database in ``home``, once it answers."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (home / "server.log").open("ab") as log:
        child = subprocess.Popen(
            command, env={**environment, **QUIET, "PREFECT_HOME": str(home)}, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    deadline = time.monotonic() + 90
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2).close()
            return child
        except OSError:
            assert time.monotonic() < deadline, (home / "server.log").read_text(encoding="utf-8")
            time.sleep(0.2)


@cache
def prefect_server() -> str:
    """The API address of a server that lives as long as this test run."""
    home = Path(tempfile.mkdtemp(prefix="trainyard-server-"))
    shutil.copytree(prefect_home(), home, dirs_exist_ok=True)
    port = spare_port()
    child = start(home, port)

    def end() -> None:
        end_group(child.pid, grace_s=5.0)
        child.wait()
        shutil.rmtree(home, ignore_errors=True)

    atexit.register(end)
    return f"http://127.0.0.1:{port}/api"
