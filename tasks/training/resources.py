"""What training costs the machine: samples of processor, memory and GPU, which `register` hands to MLflow.

They depend on the clock, so they are kept out of the artifacts, in a CSV beside the checkpoints.
"""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path

import psutil
import torch

from tasks.core.files import write_atomic
from tasks.training.plugins import Plugin, TrainState

FIELDS = ("time", "cpu_utilization_percentage", "system_memory_usage_megabytes", "process_memory_megabytes", "gpu_memory_megabytes", "images_per_s")
EVERY_S = 1.0
FILE = "system.csv"


class ResourceMonitor(Plugin):
    """Takes a sample on rank 0 at most once a second, between steps, and writes them all at each epoch's end.

    Percent of all cores, megabytes (10^6 bytes) of the whole machine and of this rank, images per second of all ranks.
    """

    priority = 95

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.rows: list[tuple[float, ...]] = []

    def on_start(self, state: TrainState) -> None:
        self._process = psutil.Process()
        psutil.cpu_percent()  # the first call only sets the zero of the next one
        self._last, self._images = time.monotonic(), 0

    def on_step_end(self, state: TrainState) -> None:
        self._images += min(state.config.batch_size, state.images_per_epoch - (state.step - 1) * state.config.batch_size)
        elapsed = time.monotonic() - self._last
        if not state.ranks.first or elapsed < EVERY_S:
            return
        gpu = torch.cuda.memory_allocated(state.ranks.device) if state.ranks.device.type == "cuda" else 0
        memory = psutil.virtual_memory()
        used = (memory.total - memory.available, self._process.memory_info().rss, gpu)
        self.rows.append((time.time(), psutil.cpu_percent(), *(value / 1e6 for value in used), self._images / elapsed))
        self._last, self._images = time.monotonic(), 0

    def on_epoch_end(self, state: TrainState) -> None:
        if state.ranks.first and self.rows:
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(FIELDS)
            writer.writerows([f"{value:.3f}" for value in row] for row in self.rows)
            write_atomic(self.path, text.getvalue().encode())


def keep(job: Path, folder: Path, model_digest: str) -> None:
    """Copy the samples of the training in ``job`` to ``folder``/<model digest>.csv, if it was long enough for one."""
    if (job / FILE).is_file():
        write_atomic(folder / f"{model_digest}.csv", (job / FILE).read_bytes())
