"""Secrets for the stage that reads the source: from the environment, or from the Prefect server's Secret blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from prefect.blocks.system import Secret

from tasks.core.config import PARAMS, load_params
from tasks.core.errors import BadInput

KNOB = "ingest.secrets"
SHORTEST = 4
"""Characters of the shortest secret that is masked: shorter ones would blot out innocent words."""


def secrets_of(root: Path) -> dict[str, str]:
    """Environment variable -> its secret, of all that ``ingest.secrets`` names. What the environment already holds counts.

    Raises BadInput ``unknown_block`` where the server has no such block, or it holds no text.
    """
    found: dict[str, str] = {}
    for variable, block in load_params(root / PARAMS).ingest.secrets.items():
        found[variable] = os.environ.get(variable) or _secret(block)
    return found


def _secret(block: str) -> str:
    if not os.environ.get("PREFECT_API_URL"):
        raise BadInput("unknown_block", "a secret is in no Prefect server", value=block, constraint="a server, or the variable set", knob=KNOB)
    try:
        value = cast("Secret[Any]", Secret.load(block)).get()
    except ValueError:  # Prefect's own error names the block's id and type, and a command to list blocks
        raise BadInput(
            "unknown_block", "no such Secret block on the Prefect server", value=block, constraint="one that is there", knob=KNOB
        ) from None
    if not isinstance(value, str) or not value:
        raise BadInput("unknown_block", f"the Secret block {block} holds no text", value=type(value).__name__, constraint="text", knob=KNOB)
    return value


def masked(line: str, secrets: Iterable[str]) -> str:
    """``line`` with *** in place of every secret."""
    for secret in secrets:
        if len(secret) >= SHORTEST:
            line = line.replace(secret, "***")
    return line
