"""The PostgreSQL of the local stack: found on this machine, made in .trainyard/postgres, reached on loopback with a password.

PostgreSQL refuses to run as root. There it runs as the user `postgres`, which Debian's package makes, if that user can reach
the project's folder.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import BadInput, Transient
from tasks.core.files import STATE

OWNER = "trainyard"
"""The role that owns the databases."""
DEBIAN = Path("/usr/lib/postgresql")
UNPRIVILEGED = "postgres"
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


@dataclass(frozen=True)
class Cluster:
    """A PostgreSQL cluster in ``folder``, run with the programs of ``programs`` as ``user`` (None: as ourselves)."""

    folder: Path
    programs: Path
    user: str | None

    def command(self, port: int) -> tuple[str, ...]:
        """The server in the foreground, on loopback TCP alone."""
        options = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "timezone": "UTC", "log_timezone": "UTC"}
        return (
            str(self.programs / "postgres"),
            "-D",
            str(self.folder),
            *(part for key, value in options.items() for part in ("-c", f"{key}={value}")),
        )

    def made(self) -> bool:
        """Whether the cluster is there whole: it is renamed into place."""
        return self.folder.exists()

    def make(self, password: str) -> None:
        """``initdb`` with a password for OWNER and nobody else; does nothing where it is made already.

        Raises BadInput ``server_not_ready`` with initdb's last line.
        """
        if self.made():
            return
        part = self.folder.with_name(f"{self.folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700, parents=True)
        # A file, since the process list shows arguments; beside the cluster, since its user need not see our other folders.
        descriptor, name = tempfile.mkstemp(prefix="postgres.", suffix=".part", dir=part.parent)
        try:
            with os.fdopen(descriptor, "w") as handle:
                handle.write(password + "\n")
            if self.user:
                for path in (part, Path(name)):
                    shutil.chown(path, self.user, pwd.getpwnam(self.user).pw_gid)
            options = ("--auth=scram-sha-256", f"--username={OWNER}", f"--pwfile={name}", "--encoding=UTF8", "--no-locale")
            done = self._run(str(self.programs / "initdb"), "-D", str(part), *options)
        finally:
            Path(name).unlink(missing_ok=True)
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            raise BadInput(
                "server_not_ready", "initdb could not make the PostgreSQL cluster", value=lines[-1], knob="TRAINYARD_STACK_DATABASE=sqlite"
            )
        part.replace(self.folder)

    def unlock(self) -> None:
        """Remove the lock file of a server that is dead. Call it only when no process works in ``folder``.

        PostgreSQL does so itself unless the process id in it exists: as a zombie, where process 1 reaps none (in many a
        container), or as another program's after a reboot.
        """
        (self.folder / "postmaster.pid").unlink(missing_ok=True)

    def reaches(self, folder: Path) -> bool:
        """Whether the user it runs as may enter ``folder``."""
        return self.user is None or self._run("test", "-x", str(folder)).returncode == 0

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=ENVIRONMENT, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, **identity(self.user))


def identity(user: str | None) -> dict[str, Any]:
    """Popen's arguments that run a program as ``user`` and in no other group of ours."""
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}


def find(root: Path) -> Cluster | str:
    """The cluster of this project, made or not, or why PostgreSQL cannot run here, in words."""
    folder = (root / STATE / "postgres").resolve()
    programs = _programs(folder)
    if programs is None:
        return "PostgreSQL is not installed"
    user = None
    if os.geteuid() == 0:
        user = UNPRIVILEGED
        if user not in {entry.pw_name for entry in pwd.getpwall()}:
            return f"PostgreSQL does not run as root, and there is no user {user}"
    cluster = Cluster(folder, programs, user)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not cluster.reaches(folder.parent):
        return f"PostgreSQL does not run as root, and the user {user} cannot enter {folder.parent}"
    return cluster


def _programs(folder: Path) -> Path | None:
    """The folder with `initdb` and `postgres`: of the release that made the cluster in ``folder``, on PATH, or the newest of Debian's."""
    marker = folder / "PG_VERSION"
    same = [DEBIAN / marker.read_text(encoding="ascii").strip() / "bin"] if marker.is_file() else []
    on_path = [Path(entry) for entry in os.environ.get("PATH", "").split(os.pathsep) if entry]
    newest = sorted(DEBIAN.glob("*/bin"), key=lambda path: (len(path.parent.name), path.parent.name), reverse=True)
    found = next((place for place in (*same, *on_path, *newest) if all(os.access(place / name, os.X_OK) for name in ("initdb", "postgres"))), None)
    return (found / "postgres").resolve().parent if found else None


def answers(port: int, password: str) -> bool:
    """Whether OWNER can log in."""
    try:
        _execute(port, password, "postgres", ())
    except Transient:
        return False
    return True


def make_databases(port: int, password: str, names: Iterable[str]) -> None:
    """Create the databases that are not there yet. Raises Transient ``server_not_ready`` where the server does not answer."""
    there = {row[0] for row in _execute(port, password, "postgres", ("SELECT datname FROM pg_database",))}
    _execute(port, password, "postgres", [f'CREATE DATABASE "{name}"' for name in names if name not in there])


def _execute(port: int, password: str, database: str, statements: Iterable[str]) -> list[tuple[str, ...]]:
    import asyncio

    import asyncpg

    async def go() -> list[tuple[str, ...]]:
        connection = await asyncpg.connect(host="127.0.0.1", port=port, user=OWNER, password=password, database=database, timeout=5)
        try:
            return [tuple(row) for statement in statements for row in await connection.fetch(statement)]
        finally:
            await connection.close()

    try:
        return asyncio.run(go())
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
        raise Transient("server_not_ready", "PostgreSQL does not answer", value=f"{type(error).__name__}: {error}", constraint="up") from error
