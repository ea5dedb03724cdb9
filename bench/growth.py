"""What a data version with one hundredth new images costs, against the first one: seconds of each step, and bytes on the DVC remote.

python -m bench.growth [IMAGES] [SIDE_PX]        5000 photographs of 512 px unless told, drawn here
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image

from bench.machine import write_result
from bench.projects import fresh_project, run
from tasks.core.config import PARAMS, apply_overrides

STEPS: dict[str, tuple[str, ...]] = {
    "ingest and dvc add": ("-m", "tasks.ingest"),
    "dvc push": ("-m", "dvc", "push", "-q", "data.dvc"),
    "prepare": ("-m", "tasks.prepare"),
}
SETTLE_S = 4.0
"""Files that changed within three seconds are read again (docs/decisions/0012)."""


def draw(folder: Path, first: int, count: int, side: int) -> int:
    """``count`` photographs of coloured blots in two classes below ``folder``; their bytes."""
    size = 0
    for number in range(first, first + count):
        coarse = np.random.default_rng(number).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        path = folder / ("cat", "dog")[number % 2] / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(path, quality=90)
        size += path.stat().st_size
    return size


def bytes_below(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def version(root: Path) -> dict[str, float]:
    """Seconds of each step of a new data version; validate runs between them, untimed here."""
    found = {}
    for name, command in STEPS.items():
        if name == "prepare":
            run(root, "-m", "tasks.validate")
        found[name] = run(root, *command)[0]
    return found


def main(images: int, side: int) -> None:
    """Measure both versions and write the result."""
    overrides: dict[str, dict[str, object]] = {
        "validate": {"suite": ""},
        "prepare": {"image_size": 128},
    }
    with fresh_project("flowers", **overrides) as root:
        source, remote = root.parent / "photographs", root.parent / "remote"
        for path in (root / "data.dvc", root / "dvc.lock"):
            path.unlink(missing_ok=True)
        apply_overrides({"ingest": {"source": "folder", "location": str(source), "push": False}}, root / PARAMS)
        subprocess.run([sys.executable, "-m", "dvc", "remote", "add", "-q", "-d", "-f", "here", str(remote)], cwd=root, check=True)
        size = draw(source, 0, images, side)
        time.sleep(SETTLE_S)
        first = version(root)
        pushed = bytes_below(remote)
        new = draw(source, images, images // 100, side)
        time.sleep(SETTLE_S)
        second = version(root)
        grown = bytes_below(remote) - pushed
    rows = [f"| {name} | {first[name]:.2f} | {second[name]:.2f} | {second[name] / first[name]:.1%} |" for name in STEPS]
    total = sum(second.values()) / sum(first.values())
    rows.append(f"| together | {sum(first.values()):.2f} | {sum(second.values()):.2f} | {total:.1%} |")
    head = f"{images:,} photographs of {side} px ({size / 1e6:.0f} MB), then {images // 100} more ({new / 1e6:.2f} MB); one run."
    store = f"The DVC remote grew by {grown / 1e6:.2f} MB, {grown / new:.2f} times the bytes of the new images."
    table = "| step | first, s | 1 % more, s | ratio |\n|---|---|---|---|\n" + "\n".join(rows)
    write_result("growth", f"# A data version with 1 % new images\n\n`python -m bench.growth {images} {side}`\n\n{head}\n\n{table}\n\n{store}")


if __name__ == "__main__":
    asked = [int(argument) for argument in sys.argv[1:]]
    main(asked[0] if asked else 5_000, asked[1] if len(asked) > 1 else 512)
