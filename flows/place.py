"""Where the doctor looks, what a check returns, and the children that it asks: each once, whoever wants to know."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tasks.core.config import PARAMS, Params, load_params
from tasks.core.process import run_child

PYTHON = sys.executable
ASK_S = 14.0
"""Less than the doctor's own limit, so that a child that hangs is ended."""
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

    def __init__(self, home: Path, children: dict[str, tuple[str, ...]] = CHILDREN) -> None:
        self.home = home
        self._asked = {name: Answer(command, home) for name, command in children.items()}

    @property
    def params(self) -> Params:
        """params.yaml; raises BadInput where it is wrong."""
        return load_params(self.home / PARAMS)

    def ask(self, name: str) -> Any:
        """What the child ``name`` answers; waits for it. Raises Unanswered."""
        return self._asked[name].get()


class Answer:
    """The answer of one child, which starts when somebody first asks."""

    def __init__(self, command: tuple[str, ...], home: Path) -> None:
        self.command = command
        self.home = home
        self.lock = threading.Lock()
        self.result: Callable[[], Any] | None = None

    def get(self) -> Any:
        """The child's last line as JSON."""
        with self.lock:
            if self.result is None:
                lines: list[str] = []
                path = f"{Path(PYTHON).parent}{os.pathsep}{os.environ.get('PATH', '')}"
                done = run_child(self.command, cwd=self.home, on_line=lines.append, env={"PATH": path}, timeout_s=ASK_S)
                last = next((line for line in reversed(lines) if line.strip()), "no output")
                value: Any = None
                if done.returncode == 0:
                    value = json.loads(last)
                self.result = (lambda: value) if done.returncode == 0 else _raiser(last)
        return self.result()


def _raiser(line: str) -> Callable[[], Any]:
    def fail() -> Any:
        raise Unanswered(line)

    return fail
