"""Run every bench, one after the other: python -m bench"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "__main__", "machine", "projects", "yard"))

if __name__ == "__main__":
    failed = [name for name in NAMES if subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
