"""A manifest of a million rows, checked without opening an image: seconds and peak memory. python -m bench.manifest [ROWS]"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.machine import write_result

CHECK = """
import json, sys, time
from pathlib import Path
from tasks.sources import open_source
start = time.monotonic()
open_source("table", sys.argv[1], Path())
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([time.monotonic() - start, int(peak) / 1024]))
"""
MAX_SECONDS, MAX_MIB = 120.0, 1536.0


def measure(path: Path) -> tuple[float, float]:
    """(seconds, peak MiB) of a process of its own that opens the manifest at ``path``."""
    done = subprocess.run([sys.executable, "-c", CHECK, str(path)], check=True, capture_output=True, text=True)
    seconds, mib = json.loads(done.stdout)
    return seconds, mib


def write(folder: Path, rows: int) -> list[Path]:
    """The same rows as CSV, JSON Lines and Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = [f"photographs/{index // 1000:04d}/{index:08d}.jpg" for index in range(rows)]
    labels = [f"class {index * 7919 % 100}" for index in range(rows)]
    (folder / "m.csv").write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in zip(paths, labels, strict=True)), encoding="utf-8")
    with (folder / "m.jsonl").open("w", encoding="utf-8") as handle:
        handle.writelines(json.dumps({"path": path, "label": label}) + "\n" for path, label in zip(paths, labels, strict=True))
    pq.write_table(pa.table({"path": paths, "label": labels}), folder / "m.parquet")
    return [folder / f"m.{form}" for form in ("csv", "jsonl", "parquet")]


def main() -> None:
    """Print and store the figures; exit 1 where a bound is broken."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        found = {path.suffix[1:]: measure(path) for path in write(Path(folder), rows)}
    lines = [f"| {form} | {seconds:.1f} | {mib:.0f} |" for form, (seconds, mib) in found.items()]
    table = "\n".join([f"A manifest of {rows:,} rows, checked; one run each.", "", "| format | s | peak MiB |", "|---|---|---|", *lines])
    write_result("manifest", table)
    if any(seconds > MAX_SECONDS or mib > MAX_MIB for seconds, mib in found.values()):
        sys.exit(f"over {MAX_SECONDS:g} s or {MAX_MIB:g} MiB")


if __name__ == "__main__":
    main()
