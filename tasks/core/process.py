"""Child processes that cannot outlive their parent, with their lines streamed to whoever watches.

``python -m tasks.core.process MODULE ARGUMENTS`` is ``python -m MODULE ARGUMENTS`` that dies with its parent, for programs
that are not ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "BENTOML_DO_NOT_TRACK": "True",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}
"""Telemetry off, and the two server settings a small machine needs. The Makefile exports the same block."""

_PR_SET_PDEATHSIG = 1


def quiet_environment() -> None:
    """Put QUIET into this process's environment where the user has not set something else."""
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)


def die_with_parent() -> None:
    """Ask Linux to SIGTERM this process when its parent dies, so that a killed DVC leaves no orphan trainer.

    Elsewhere than on Linux it does nothing. The signal is tied to the parent's thread that started us.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def process_mark(pid: int) -> str:
    """What tells the process ``pid`` from a later one of the same number: the boot and its start in ticks.

    "" where no such process lives; "?" elsewhere than on Linux, where only the number is known.
    """
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return "?"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{boot[:8]}:{fields[19]}"  # proc(5): state is field 3, starttime field 22


def owner_tags() -> dict[str, str]:
    """Who this process is, for a record that outlives it: host, process id, and ``process_mark``."""
    return {"owner.host": socket.gethostname(), "owner.pid": str(os.getpid()), "owner.started": process_mark(os.getpid())}


def owner_is_dead(tags: Mapping[str, str]) -> bool:
    """Whether the process of ``owner_tags`` ran on this host and lives no more; False where that cannot be known."""
    pid = tags.get("owner.pid", "")
    if tags.get("owner.host") != socket.gethostname() or not pid.isdigit():
        return False
    return process_mark(int(pid)) != tags.get("owner.started", "")


@dataclass(frozen=True)
class ChildResult:
    """How a child ended: exit code (negative: signal number), its last lines, seconds."""

    returncode: int
    tail: tuple[str, ...]
    seconds: float


def run_child(
    command: Sequence[str],
    *,
    cwd: Path,
    on_line: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> ChildResult:
    """Run ``command`` in its own process group, passing each output line (stdout and stderr together) to ``on_line``.

    If the caller is interrupted, cancelled or times out, the whole group gets SIGTERM and, 10 s later, SIGKILL.
    Raises subprocess.TimeoutExpired after ``timeout_s`` seconds.
    """
    start = time.monotonic()
    child = subprocess.Popen(
        list(command),
        cwd=cwd,
        env={**os.environ, **QUIET, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="backslashreplace",
        bufsize=1,
        start_new_session=True,
    )
    tail: deque[str] = deque(maxlen=80)
    timed_out = threading.Event()
    timer: threading.Timer | None = None
    if timeout_s is not None:

        def time_out() -> None:
            timed_out.set()
            end_group(child.pid)

        timer = threading.Timer(timeout_s, time_out)
        timer.daemon = True
        timer.start()
    try:
        assert child.stdout is not None
        for raw in child.stdout:
            line = raw.rstrip()
            tail.append(line)
            on_line(line)
        child.wait()
    finally:
        if timer is not None:
            timer.cancel()
        if child.poll() is None:
            end_group(child.pid)
            child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if timed_out.is_set():
        raise subprocess.TimeoutExpired(list(command), timeout_s or 0.0)
    return ChildResult(child.returncode, tuple(tail), time.monotonic() - start)


def end_group(pid: int, grace_s: float = 10.0) -> None:
    """SIGTERM the process group led by ``pid``; SIGKILL what is left of it after ``grace_s`` seconds."""
    for sig, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 2.0)):
        try:
            os.killpg(pid, sig)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # a zombie leader would keep the group alive
            try:
                os.killpg(pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


def spare_port() -> int:
    """A loopback port that is free, and stays so until its server binds it seconds from now.

    Not one that the kernel picks: those it also gives to outgoing connections, and such a port may be gone by then.
    Raises OSError where a hundred tries found none.
    """
    try:
        below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        below = 32768
    low, high = (10_000, below) if below > 20_000 else (1024 + below, 65_535)
    for _ in range(100):
        port = random.randrange(low, high)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise OSError(f"no free port from {low} to {high}")


if __name__ == "__main__":
    die_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
