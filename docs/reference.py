"""Write docs/errors.md and docs/params.md from the code. Run: python docs/reference.py (a test holds them in step)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tasks.core.config import Params, Section  # noqa: E402
from tasks.core.errors import CODES  # noqa: E402

ERRORS = """# Error codes

Every error that a user can cause ends with one last line on stderr:

    error[code]: what; got VALUE; must be CONSTRAINT; set KNOB

The codes are stable. Exit codes: 2 bad input (do not retry), 3 rejected by the gate (a normal end), 75 something outside
is away for now (retry), 130 interrupted, 1 a bug. `--debug` or `TRAINYARD_DEBUG=1` adds the traceback.

| code | meaning |
|---|---|
"""
PARAMS = """# Params

`params.yaml` holds every number that changes a result, one section per stage; a preset is a whole params file that is
used by copying it over `params.yaml`. It is YAML 1.2 (`1e-3` is a number). Unknown and repeated keys are refused.

"""


def errors_page() -> str:
    """docs/errors.md as text."""
    return ERRORS + "".join(f"| `{code}` | {meaning} |\n" for code, meaning in CODES.items())


def params_page() -> str:
    """docs/params.md as text."""
    page = PARAMS
    for name, field in Params.model_fields.items():
        section: Any = field.annotation
        page += f"## {field.alias or name}\n\n{section.__doc__}\n\n| key | default | what |\n|---|---|---|\n"
        page += "".join(_rows(section, "")) + "\n"
    return page.rstrip("\n") + "\n"


def _rows(section: Any, prefix: str) -> list[str]:
    rows: list[str] = []
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            rows += _rows(type(field.default), f"{prefix}{name}.")
        else:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            rows.append(f"| `{prefix}{name}` | `{default!r}` | {field.description} |\n")
    return rows


if __name__ == "__main__":
    (ROOT / "docs" / "errors.md").write_text(errors_page(), encoding="utf-8")
    (ROOT / "docs" / "params.md").write_text(params_page(), encoding="utf-8")
