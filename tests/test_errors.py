"""Errors as users meet them: one last line, stable codes, exit codes, no traceback unless asked for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.errors import CODES, BadInput, Rejected, Transient

ROOT = Path(__file__).parents[1]


def child(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = f"import sys\nfrom tasks.core import errors\nfrom tasks.core.errors import *\ndef main():\n  {code}\nsys.exit(errors.run(main))"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin", **environment}
    )


def test_the_line_says_value_constraint_and_knob() -> None:
    error = BadInput("class_too_small", "class 'bird' is too small", value="1 image", constraint="at least 3", knob="prepare.val_share")
    assert str(error) == "error[class_too_small]: class 'bird' is too small; got 1 image; must be at least 3; set prepare.val_share"


def test_a_hostile_name_cannot_forge_a_second_line() -> None:
    assert str(BadInput("image_corrupt", "bad image", value="a\nerror[x]: \x1b[31m\u202egnp.png")).count("\n") == 0
    assert "\\n" in str(BadInput("image_corrupt", "bad image", value="a\nb"))


@pytest.mark.parametrize(("kind", "code"), [("BadInput", 2), ("Rejected", 3), ("Transient", 75)])
def test_exit_codes(kind: str, code: int) -> None:
    done = child(f"print('work'); raise {kind}('rejected', 'no')")
    assert done.returncode == code
    assert done.stderr == "error[rejected]: no\n"
    assert (BadInput.exit_code, Rejected.exit_code, Transient.exit_code) == (2, 3, 75)


def test_a_traceback_comes_only_when_asked_for() -> None:
    code = "raise BadInput('rejected', 'no')"
    assert "Traceback" in child(code, "--debug").stderr
    assert "Traceback" in child(code, TRAINYARD_DEBUG="1").stderr
    assert child(code, "--debug").stderr.splitlines()[-1] == "error[rejected]: no"


def test_a_bug_keeps_its_traceback() -> None:
    done = child("raise KeyError('bug')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_full_disk_is_said_as_such() -> None:
    done = child("import errno; raise OSError(errno.ENOSPC, 'No space left', '/x/y')")
    assert done.returncode == 75
    assert done.stderr.startswith("error[disk_full]: ")


def test_docs_list_exactly_the_codes() -> None:
    listed = re.findall(r"^\| `([a-z_]+)` \| (.+) \|$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(listed) == CODES


def test_every_code_raised_in_the_tree_is_listed() -> None:
    raised = set()
    for folder in ("flows", "tasks", "service"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("BadInput", "Transient", "Rejected"):
                    first = node.args[0] if node.args else None
                    if isinstance(first, ast.Constant):
                        raised.add(first.value)
    assert raised <= set(CODES)
