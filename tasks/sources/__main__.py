"""Print the fingerprint of the source that params.yaml names: python -m tasks.sources, in a project's root.

One line, "" where the source has none. The section `ingest` is part of it: another location is another source.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tasks.core import errors
from tasks.core.config import load_params
from tasks.core.files import digest_of
from tasks.core.process import die_with_parent
from tasks.sources import fingerprint_of


def main() -> None:
    """Ask the source and print."""
    die_with_parent()
    config = load_params().ingest
    found = fingerprint_of(config.source, config.location, Path(), config.options)
    print(f"fingerprint {digest_of([config.model_dump(mode='json'), found]) if found else ''}")


if __name__ == "__main__":
    sys.exit(errors.run(main))
