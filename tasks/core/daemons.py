"""Programs that outlive the command that started them. No state but what the machine itself can tell.

Each carries environment variables that its children inherit, so it is found again whole even if its starter was killed
before it wrote a line, a recycled process id is never taken for ours, and two projects on one machine leave each other alone.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from tasks.core.errors import BadInput


def tagged(variable: str, root: Path, name: str) -> dict[str, list[psutil.Process]]:
    """Living processes whose environment variable ``variable`` is the folder ``root``, by the value of their variable ``name``.

    For a moment after exec the kernel shows no environment yet: wait for a program that was just started until it is seen.
    """
    found: dict[str, list[psutil.Process]] = {}
    mine = str(root.resolve())
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(variable) == mine and process.status() != psutil.STATUS_ZOMBIE:
                found.setdefault(environment.get(name, ""), []).append(process)
        except (psutil.Error, OSError):  # another user's, or it ended meanwhile
            continue
    return found


def send(processes: Iterable[psutil.Process], number: int) -> None:
    """Signal each process that still lives."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:  # it ended meanwhile
            continue


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all have ended; returns those that have not after ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if lives(process)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [process for process in left if lives(process)]
    return left


def lives(process: psutil.Process) -> bool:
    """Whether it runs. A zombie that nobody reaps has ended too."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def command_line(process: psutil.Process) -> str:
    """The words of its command, with spaces between; empty for one that has ended or does not show it."""
    try:
        return " ".join(process.cmdline())
    except (psutil.Error, OSError):
        return ""


def require_port(host: str, port: int, knob: str) -> None:
    """Raise BadInput ``port_taken`` where ``port`` cannot be bound, with the id of the program that has it, if it shows."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
            return
        except OSError as error:
            reason = error.strerror
    holder = _holder(port)
    value = f"{port}, held by process {holder}" if holder else f"{port} ({reason})"
    raise BadInput("port_taken", f"port {port} on {host} cannot be bound", value=value, constraint="a free port", knob=knob)


def _holder(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{connection.pid} ({psutil.Process(connection.pid).name()})"
    except (psutil.Error, OSError):  # another user's, or it ended meanwhile
        pass
    return ""


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(0, log.stat().st_size - 8192))
            lines = [line.strip() for line in handle.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        return "no log"
    return lines[-1][:300] if lines else "an empty log"
