"""The doctor's checks of this machine and folder. Each is a function of a Place that returns a Finding.

Nothing here imports a heavy library: what only MLflow, DVC, torch or Prefect can say is asked of a child (flows/place.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from zoneinfo import ZoneInfo

from ruamel.yaml import YAML

from flows import server_checks
from flows.place import Finding, Place, Unanswered
from tasks.core.errors import TrainyardError
from tasks.core.files import STATE
from tasks.core.process import QUIET

GB = 1e9
SPARE_GB = 1.0
"""Free space that a run wants beside twice what data/ and artifacts/ hold now."""
TELEMETRY = [name for name in QUIET if not name.startswith(("MLFLOW_SERVER", "PREFECT_SERVER_EPHEMERAL"))]
NO, YES = {"0", "false", "no", "off", ""}, {"1", "true", "yes", "on"}


def git(place: Place) -> Finding:
    """Repository, main line, who commits, remote, a lock that a crash left."""
    if _git(place, "rev-parse", "--git-dir") is None:
        return Finding("red", "this is no git repository", "git init && git add -A && git commit -m start")
    lock = place.home / (_git(place, "rev-parse", "--git-path", "index.lock") or ".git/index.lock")
    if lock.exists() and time.time() - lock.stat().st_mtime > 60:
        return Finding("red", f"{lock} is held for more than a minute: a git command died", f"rm {lock}, once no git command runs")
    run = place.params.run
    if _git(place, "rev-parse", "--verify", "--quiet", f"refs/heads/{run.branch}") is None:
        return Finding("red", f"there is no branch {run.branch}, which runs start from", f"git branch {run.branch}, or set run.branch")
    edits = len((_git(place, "status", "--porcelain", "--untracked-files=no") or "").splitlines())
    said = f"on {_git(place, 'branch', '--show-current') or 'no branch'}, main line {run.branch}" + (f", {edits} files edited" if edits else "")
    if _git(place, "config", "user.email") is None:
        return Finding("yellow", f"{said}; git does not know who you are", "git config user.name NAME; git config user.email ADDRESS")
    remote = _git(place, "remote", "get-url", run.git_remote)
    if remote is None:
        return Finding("green", f"{said}, no remote {run.git_remote}: what runs leave stays here")
    try:
        if _git(place, "ls-remote", "--quiet", run.git_remote, "HEAD", timeout_s=8) is None:
            return Finding("red", f"{said}; the remote {run.git_remote} refuses", f"git ls-remote {run.git_remote} says why")
    except subprocess.TimeoutExpired:
        return Finding("red", f"{said}; the remote {run.git_remote} does not answer", f"git ls-remote {run.git_remote}")
    return Finding("green", f"{said}, remote {run.git_remote} answers")


def dvc(place: Place) -> Finding:
    """Repository, remotes, cache, and locks."""
    if not (place.home / ".dvc").is_dir():
        return Finding("red", "this is no DVC repository", "dvc init")
    said = place.ask("dvc")
    words = f"DVC {said['version']}, cache {_short(said['cache'], place.home)}"
    broken = {name: wrong for name, wrong in said["remotes"].items() if wrong}
    if said["default"] in broken:
        return Finding("red", f"the default remote {said['default']}: {broken[said['default']]}", f"dvc push -r {said['default']} says more")
    if broken:
        return Finding("yellow", f"{words}; remote {'; '.join(': '.join(pair) for pair in broken.items())}", "dvc remote list, dvc push -r NAME")
    if said["stale"]:
        return Finding("yellow", f"{words}; a lock of the dead process {said['stale'][0]}", "nothing: the next dvc command clears it")
    remotes = f"remotes that answer: {', '.join(said['remotes'])}" if said["remotes"] else "no remote: data/ is only here"
    busy = f", at work: {said['busy'][0]}" if said["busy"] else ""
    return Finding("green" if said["remotes"] else "yellow", f"{words}, {remotes}{busy}", "" if said["remotes"] else "dvc remote add -d NAME URL")


def links(place: Place) -> Finding:
    """Whether data and artifacts can be linked from DVC's cache, or must be copied."""
    found = place.ask("dvc")["links"]
    if isinstance(found, str):
        return Finding("red", f"DVC's cache cannot be written: {found}", "let this user own both folders")
    works = [name for name, can in found.items() if can]
    said = f"from DVC's cache into the project: {', '.join(works) or 'copies only'}"
    if "hardlink" not in works and "reflink" not in works:
        return Finding("yellow", f"{said}; each run's worktree holds copies or symlinks", "put DVC's cache on the project's disk")
    return Finding("green", said)


def disk(place: Place) -> Finding:
    """Free space against what a run needs."""
    need = 2 * sum(_size(place.home / name) for name in ("data", "artifacts")) / GB + SPARE_GB
    places = {"project": place.home, "cache": _existing(_cache(place)), "tmp": Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(path).free / GB for name, path in places.items()}
    said = ", ".join(f"{name} {size:.1f} GB" for name, size in free.items()) + f" free; a run needs about {need:.1f} GB"
    inodes = min(os.statvfs(path).f_favail or 10**9 for path in places.values())
    if inodes < 10_000:
        return Finding("red", f"{said}; {inodes} files can still be made", "python -m flows.sweep, or remove files")
    if min(free["project"], free["cache"]) < need or free["tmp"] < 0.5:
        return Finding("red", said, "python -m flows.sweep, or a larger disk; TMPDIR for another tmp")
    if min(free["project"], free["cache"]) < 5 * need:
        return Finding("yellow", said, "python -m flows.sweep --dry-run says what could go")
    return Finding("green", said)


def shared_memory(_place: Place) -> Finding:
    """/dev/shm, through which the ranks of a training talk."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("yellow", "no /dev/shm here", "on Linux: mount -t tmpfs tmpfs /dev/shm")
    usage = shutil.disk_usage(shm)
    said = f"/dev/shm {usage.free / GB:.1f} of {usage.total / GB:.1f} GB free"
    if usage.free < 64e6:
        return Finding("yellow", f"{said}: little for training on several processes", "docker run --shm-size=1g")
    return Finding("green", said)


def processor(place: Place) -> Finding:
    """Cores, torch, and whether a GPU can be used."""
    version, threads, cuda, usable = place.ask("torch")
    cores, train = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, place.params.train
    gpu = f"CUDA {cuda} usable" if usable else "no GPU"
    said = f"{cores} cores, torch {version}, {threads} threads, {gpu}"
    if not usable and Path("/dev/nvidiactl").exists():
        return Finding("red", f"{said}, though this machine has one", "nvidia-smi; a driver as new as torch's CUDA")
    if train.processes * max(1, train.threads) > cores and not usable:
        return Finding(
            "yellow", f"{said}; train asks for {train.processes} processes of {train.threads or 'all'} threads", "train.processes, train.threads"
        )
    return Finding("green", said)


def nginx(_place: Place) -> Finding:
    """The proxy in front of the service, where one is wanted."""
    path = shutil.which("nginx")
    return Finding("green", path) if path else Finding("yellow", "not installed", "only needed as a proxy with a login before the service")


def time_zones(place: Place) -> Finding:
    """The zones of prefect.yaml's schedules."""
    text = (place.home / "prefect.yaml").read_text(encoding="utf-8")
    deployments = YAML(typ="safe", pure=True).load(text)["deployments"]
    zones = sorted({str(schedule["timezone"]) for one in deployments for schedule in one.get("schedules") or [] if schedule.get("timezone")})
    for zone in zones:
        try:
            ZoneInfo(zone)
        except (OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
            return Finding("red", f"the schedules' time zone {zone} is not known here", "install tzdata, or mend prefect.yaml")
    return Finding("green", f"local {time.strftime('%Z %z')}; the schedules' {', '.join(zones) or 'UTC'} known")


def telemetry(_place: Place) -> Finding:
    """Each variable of QUIET as it would be in effect: what the user set wins over us."""
    others = {name: os.environ[name] for name in TELEMETRY if not _same(os.environ.get(name, QUIET[name]), QUIET[name])}
    if others:
        said = ", ".join(f"{name}={value}" for name, value in others.items())
        return Finding("red", f"your environment sets {said}: telemetry is on", f"unset {' '.join(others)}")
    return Finding("green", f"off: {len(TELEMETRY)} of {len(TELEMETRY)} variables in effect")


def environment(place: Place) -> Finding:
    """requirements.lock against what is installed."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    lines = (place.home / "requirements.lock").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if re.match(r"[A-Za-z0-9]", line)]
    wrong = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            have = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            have = "missing"
        if have == "missing" or not requirement.specifier.contains(Version(have), prereleases=True):
            wrong.append(f"{requirement.name} {have}, not {str(requirement.specifier).lstrip('=')}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return Finding("red", f"differs from requirements.lock: {', '.join(wrong[:3])}{more}", "rm .venv/requirements.lock && make setup")
    return Finding("green", f"as requirements.lock says: {len(wanted)} packages")


def params(place: Place) -> Finding:
    """params.yaml."""
    found = place.params
    return Finding("green", f"valid: source {found.ingest.source}, model {found.train.model}, {found.train.epochs} epochs")


def state_folder(place: Place) -> Finding:
    """.trainyard, where locks, stores and checkpoints lie."""
    folder = place.home / STATE
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as probe:
            probe.write(b"1")
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return Finding("red", f".trainyard cannot be written: {error.strerror}", f"chown -R $USER {folder}, or free space")
    return Finding("green", f"writable: {STATE}")


def _git(place: Place, *arguments: str, timeout_s: float = 10) -> str | None:
    """A git command's output, None where it fails. Raises TimeoutExpired."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": os.environ.get("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")}
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=place.home, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    return done.stdout.strip() if done.returncode == 0 else None


def _same(value: str, wanted: str) -> bool:
    return any(value.lower() in words and wanted.lower() in words for words in (NO, YES))


def _cache(place: Place) -> Path:
    try:
        return Path(place.ask("dvc")["cache"])
    except Unanswered:
        return place.home / ".dvc"


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _short(path: str, home: Path) -> str:
    return str(Path(path).relative_to(home.resolve())) if Path(path).is_relative_to(home.resolve()) else path


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def explained(check: Callable[[Place], Finding]) -> Callable[[Place], Finding]:
    """``check``, whose known errors are findings in their own words. What only waits for a sound params.yaml is yellow."""

    def checked(place: Place) -> Finding:
        try:
            return check(place)
        except (TrainyardError, Unanswered) as error:
            if check is not params and "error[params_" in str(error):
                return Finding("yellow", "not known: params.yaml is wrong", "see params.yaml")
            return Finding("red", str(error), "what it names" if "; set " in str(error) else "make doctor again; what it asks says more")

    return checked


CHECKS = {
    name: explained(check)
    for name, check in {
        "git": git,
        "dvc": dvc,
        "dvc links": links,
        "disk": disk,
        "shared memory": shared_memory,
        "processor": processor,
        **server_checks.CHECKS,
        "nginx": nginx,
        "time zones": time_zones,
        "telemetry": telemetry,
        "environment": environment,
        "params.yaml": params,
        ".trainyard": state_folder,
    }.items()
}
