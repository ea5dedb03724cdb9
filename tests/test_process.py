"""Child processes under attack: a killed parent, a cancelled caller, a time limit, output that never ends its line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tasks.core.process import run_child, spare_port

ROOT = Path(__file__).parents[1]
GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
TWO_STREAMS = """
import sys
print("one", flush=True)
print("two", file=sys.stderr, flush=True)
sys.stdout.write("no newline")
sys.exit(7)
"""
STAGE = """
from tasks.core.process import die_with_parent
die_with_parent()
import os, time
print(os.getpid(), flush=True)
time.sleep(60)
"""


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether process ``pid`` ends (or is a zombie that waits for its parent) within some seconds."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_lines_arrive_in_order_and_the_exit_code_is_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    result = run_child([sys.executable, "-u", "-c", TWO_STREAMS], cwd=tmp_path, on_line=lines.append)
    assert result.returncode == 7
    assert lines == ["one", "two", "no newline"]
    assert result.tail == tuple(lines)


def test_an_interrupted_caller_ends_the_whole_group(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child([sys.executable, "-c", GRANDCHILD], cwd=tmp_path, on_line=interrupt)
    assert gone(pids[0])


def test_a_time_limit_ends_the_whole_group(tmp_path: Path) -> None:
    pids: list[int] = []
    with pytest.raises(subprocess.TimeoutExpired):
        run_child([sys.executable, "-c", GRANDCHILD], cwd=tmp_path, on_line=lambda line: pids.append(int(line)), timeout_s=1.0)
    assert gone(pids[0])


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_stage_dies_with_a_parent_that_was_killed() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STAGE!r}])"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_foreign_program_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """DVC under a flow that is killed with SIGKILL: nobody may go on repairing the pipeline behind a dead run."""
    (tmp_path / "foreign.py").write_text("import os, sys, time; print(os.getpid(), *sys.argv[1:], flush=True); time.sleep(60)")
    code = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'tasks.core.process', 'foreign', 'argument'])"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, argument = parent.stdout.readline().split()
    assert argument == "argument"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(int(pid))


def test_a_spare_port_is_none_that_the_kernel_gives_to_outgoing_connections() -> None:
    """One taken from the kernel's own range was gone again when a server bound it half a minute later."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {spare_port() for _ in range(50)}
    assert len(ports) > 40
    assert not [port for port in ports if low <= port <= high]
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
