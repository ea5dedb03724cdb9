"""Errors that tell a user the value, the constraint and the knob, and the one place that prints them.

Every entry point ends with ``sys.exit(errors.run(main))``: a TrainyardError becomes one last line on stderr,
``error[code]: what; got VALUE; must be CONSTRAINT; set KNOB``, without a traceback unless ``--debug`` is given
or TRAINYARD_DEBUG=1 is set. Codes are stable and listed in docs/errors.md.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

CODES: dict[str, str] = {
    "params_missing": "params.yaml is not where the command was started",
    "params_invalid": "params.yaml has an unknown or repeated key, or a value outside its range",
    "unsafe_yaml": "a YAML file holds a tag, which could name code",
    "lock_conflict": "dvc.lock, data.dvc or dvc.yaml holds the marks of an unfinished merge",
    "unsafe_model_file": "a file of weights is a pickle, which could run code as it is loaded",
    "not_a_repository": "the folder is not a git and DVC repository",
    "branch_missing": "the branch that runs start from and publish to does not exist",
    "git_failed": "git refused a command",
    "source_unavailable": "the data source does not exist or cannot be read",
    "source_empty": "the data source holds no image",
    "unknown_source": "no source is registered under that name",
    "too_few_classes": "fewer than two classes",
    "empty_class": "a class folder holds no image",
    "class_too_small": "a class has fewer images than there are splits",
    "class_not_in_train": "a class has no image in the training split",
    "class_name_collision": "two class names are equal after Unicode normalisation, strip and case folding",
    "duplicate": "the same image stands twice under one label; the first by name is kept",
    "leak_exact": "the same image stands in two splits; the copy in test (or val) is kept",
    "leak_near": "a near copy of the image (another size, quality or tint) stands in another split; the one in test (or val) is kept",
    "conflicting_label": "the same image stands under two labels",
    "group_straddles": "images of one group stand in two splits",
    "unknown_split": "a split is not named train, val or test",
    "missing_column": "the table has no column for images or for labels",
    "duplicate_column": "a column that is used stands twice, or two could be meant",
    "empty_manifest": "the table has no rows",
    "manifest_encoding": "the table is not UTF-8",
    "manifest_corrupt": "the table cannot be read",
    "bad_row": "a row does not fit the table's columns, or a cell is no text or too long",
    "missing_label": "a row has no label",
    "unknown_class": "a label is none of the declared classes",
    "missing_file": "a row names a file that is not there",
    "path_outside_root": "a row names a path outside the table's folder",
    "url_not_allowed": "a URL, or one that it redirects to, is not allowed by the policy",
    "download_truncated": "a body from the web ends early, at every try",
    "download_timeout": "a file from the web does not come in time, at every try",
    "download_too_large": "a file from the web, or what it unpacks to, has more bytes than the limit",
    "download_failed": "the web server does not give the file, or gives another one",
    "archive_corrupt": "the archive cannot be read to its end",
    "archive_encrypted": "the archive is encrypted",
    "archive_ratio": "the archive unpacks to far more than its size",
    "archive_unsafe_path": "the archive names a path outside itself",
    "archive_link": "the archive holds a link",
    "archive_special": "the archive holds a device, FIFO or other special file",
    "archive_duplicate_entry": "the archive holds two entries of one name",
    "too_large": "the source, or a YAML file with aliases, unpacks to more than the limit",
    "image_missing": "no image was sent in the request",
    "image_corrupt": "the image cannot be decoded",
    "image_truncated": "the image ends before its data does",
    "image_too_large": "the image has more pixels or bytes than the limit",
    "image_too_small": "the image has fewer pixels on a side than the limit",
    "not_an_image": "the bytes are not an image",
    "unsupported_format": "the image's format is not on the list of allowed formats",
    "empty_file": "the file has no bytes",
    "symlink": "a symbolic link, never followed",
    "not_a_regular_file": "a FIFO, device or socket",
    "unreadable": "the file cannot be opened",
    "bad_file_name": "the file's name cannot be stored as text",
    "validation_failed": "the data failed its validation suite",
    "suite_invalid": "the file of validate.suite is not there, or has an unknown key, column or expectation",
    "artifact_missing": "a file that an earlier stage writes is not there",
    "artifact_edited": "an artifact's content does not match its own digest",
    "artifact_foreign": "an artifact was made from other inputs than the ones at hand",
    "artifact_format": "an artifact was written in a format that this version does not read",
    "no_verdict": "there is no gate decision for this model",
    "rejected": "the gate rejected this model",
    "stale_verdict": "the champion changed after the gate compared with it",
    "unknown_model": "no model of that name",
    "training_failed": "a rank died and its restarts are used up",
    "loss_not_finite": "the loss became NaN or infinite",
    "export_mismatch": "the exported ONNX model answers differently from the trained one",
    "checkpoint_corrupt": "a checkpoint cannot be read or fails its digest",
    "remote_unavailable": "the DVC remote cannot be reached",
    "data_foreign": "data/ holds files that ingest did not write",
    "data_behind": "data.dvc names another version than data/ holds",
    "dvc_failed": "DVC refused a command",
    "registry_unavailable": "the MLflow tracking store cannot be reached",
    "registry_denied": "the MLflow server refused the login, or the login may not do this",
    "server_unavailable": "the Prefect server cannot be reached",
    "no_server": "the command needs a Prefect server, and PREFECT_API_URL names none",
    "login_refused": "the Prefect server refused the login",
    "unknown_block": "the Prefect server has no block of that name, or none that can notify",
    "deploy_failed": "prefect deploy refused a deployment of prefect.yaml",
    "stack_invalid": "a setting of the local servers (.trainyard/stack.env) is unknown or out of range, or their credentials are gone",
    "server_not_ready": "a server of the local stack ended or did not become ready in time",
    "port_taken": "the port is in use by another program",
    "service_not_ready": "the new service did not become ready in time",
    "smoke_test_failed": "the new service answers differently from the evaluation",
    "lock_busy": "another run holds the pipeline's lock",
    "disk_full": "no space is left on the device, or a quota or file size limit is reached",
    "out_of_memory": "the process could not get the memory that it asked for",
    "stage_killed": "a signal ended a stage's process, most often the kernel's for want of memory",
    "time_limit": "a stage ran past its time limit and was ended",
    "stage_failed": "a stage ended with an error that is not listed here: a bug",
    "unknown_option": "the command does not take that option",
}


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FULL_WORDS = ("No space left on device", "database or disk is full", "Disk quota exceeded")
FREE_SPACE = "on a disk with free space"
SWEEP_KNOB = "python -m flows.sweep, which frees some, and run again"
MEMORY_KNOBS = "train.batch_size, train.width, prepare.image_size or package.workers lower, or get more memory"


class TrainyardError(Exception):
    """Base of every error meant for a user.

    ``code`` is a key of CODES; ``what`` a short clause; ``value`` what was found; ``constraint`` what it must be;
    ``knob`` what the user can change. The rendered message is always one line.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, code: str, what: str, *, value: object = None, constraint: str = "", knob: str = "") -> None:
        assert code in CODES, f"unlisted error code {code!r}"
        self.code = code
        self.what = what
        self.value = value
        self.constraint = constraint
        self.knob = knob
        parts = [what]
        if value is not None:
            parts.append(f"got {value}")
        if constraint:
            parts.append(f"must be {constraint}")
        if knob:
            parts.append(f"set {knob}")
        super().__init__(_one_line("; ".join(parts)))

    def __str__(self) -> str:
        return f"error[{self.code}]: {super().__str__()}"


class BadInput(TrainyardError):
    """The data, params or command are wrong: retrying cannot help."""


class Transient(TrainyardError):
    """Something outside is away for now: retrying can help. Exit code 75 (EX_TEMPFAIL)."""

    exit_code = 75


class Rejected(TrainyardError):
    """The gate's normal "no". Exit code 3."""

    exit_code = 3


class StageFailed(Exception):
    """A stage that ran as a child process ended with an error. The message is its own error line, the exit code its own."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


def _one_line(text: str) -> str:
    """``text`` with control characters escaped, so that no name from a data set can forge a log line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def run(main: Callable[[], None]) -> int:
    """Call ``main`` and return the process's exit code, printing errors as documented above.

    0 success, 2 bad input, 3 rejected, 75 transient, 130 interrupted; a bug keeps its traceback and returns 1.
    """
    debug = os.environ.get("TRAINYARD_DEBUG", "") not in ("", "0")
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        debug = True
        os.environ["TRAINYARD_DEBUG"] = "1"
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        told = of_machine(error) or error
        if not isinstance(told, TrainyardError | StageFailed):
            raise
        return _report(told, debug)
    return 0


def of_machine(error: BaseException) -> TrainyardError | None:
    """The error to tell where a full disk or a lack of memory is behind ``error``, however a library wrapped it; else None.

    A full disk is Transient: the sweep, or a person, frees some, and a run goes on from where it was. Memory refused (a limit of
    this process or its container, or the GPU's) is BadInput: the same params ask for as much again.
    """
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, TrainyardError) and cause.code in ("disk_full", "out_of_memory"):
            return cause
        if getattr(cause, "errno", None) in FULL or any(words in str(cause) for words in FULL_WORDS):
            told = [line.strip() for line in str(cause).splitlines() if any(words in line for words in FULL_WORDS)]
            value = getattr(cause, "filename", None) or f"{(told or [str(cause)])[0][:200]} in {Path.cwd()}"
            return Transient("disk_full", "writing failed", value=value, constraint=FREE_SPACE, knob=SWEEP_KNOB)
        if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(cause):
            value = _one_line(str(cause))[:200] or "no memory"
            return BadInput("out_of_memory", "memory ran out", value=value, constraint="less, or more memory", knob=MEMORY_KNOBS)
        cause = cause.__cause__ or cause.__context__
    return None


def _report(error: TrainyardError | StageFailed, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    sys.stdout.flush()
    print(error, file=sys.stderr, flush=True)
    return error.exit_code
