"""Where the doctor looks, what a check returns, and the children that it asks: each once, whoever wants to know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tasks.core.config import PARAMS, Params, load_params
from tasks.core.process import run_child

PYTHON = sys.executable
LIMIT_S = 15.0
"""For each check; a child gets a little less, so that one that hangs is ended and named."""
TORCH = "import json, torch; print(json.dumps([torch.__version__, torch.get_num_threads(), torch.version.cuda, torch.cuda.is_available()]))"
CHILDREN = {
    "prefect": (PYTHON, "-m", "flows.facts"),
    "mlflow": (PYTHON, "-m", "tasks.backends.health", "mlflow"),
    "dvc": (PYTHON, "-m", "tasks.backends.health", "dvc"),
    "torch": (PYTHON, "-c", TORCH),
}


class Finding(NamedTuple):
    """What a check saw, and what to do about it where it is not green."""

    state: Literal["green", "yellow", "red"]
    said: str
    do: str = ""


class Unanswered(Exception):
    """A child ended without an answer; the message is its last line."""


class Place:
    """The project at ``home``, and the answers of the children, each asked at most once."""

    def __init__(self, home: Path, children: Mapping[str, tuple[str, ...]] = CHILDREN, limit_s: float = LIMIT_S) -> None:
        self.home = home
        self.limit_s = limit_s
        self._asked = {name: Answer(command, home, 0.9 * limit_s) for name, command in children.items()}

    @property
    def params(self) -> Params:
        """params.yaml; raises BadInput where it is wrong."""
        return load_params(self.home / PARAMS)

    def ask(self, name: str) -> Any:
        """What the child ``name`` answers; waits for it. Raises Unanswered."""
        return self._asked[name].get()


class Answer:
    """The answer of one child, which starts when somebody first asks."""

    def __init__(self, command: tuple[str, ...], home: Path, limit_s: float) -> None:
        self.command = command
        self.home = home
        self.limit_s = limit_s
        self.lock = threading.Lock()
        self.result: Callable[[], Any] | None = None

    def get(self) -> Any:
        """The child's last line as JSON."""
        with self.lock:
            if self.result is None:
                lines: list[str] = []
                path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ.get('PATH', '')}"
                try:
                    code = run_child(self.command, cwd=self.home, on_line=lines.append, env={"PATH": path}, timeout_s=self.limit_s).returncode
                    last = next((line for line in reversed(lines) if line.strip()), "no output")
                except subprocess.TimeoutExpired:
                    code, last = 1, f"nothing within {self.limit_s:.3g} s: the machine is busy, or what it asks is away"
                value = json.loads(last) if code == 0 else None
                self.result = (lambda: value) if code == 0 else _raiser(last)
        return self.result()


def _raiser(line: str) -> Callable[[], Any]:
    def fail() -> Any:
        raise Unanswered(line)

    return fail
