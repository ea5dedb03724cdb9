"""Progress for people: a live line on a terminal, one plain line for each epoch elsewhere. Speeds stay out of history.csv."""

from __future__ import annotations

import sys
import time

from tasks.training.plugins import Plugin, TrainState

REDRAW_S = 0.2


class Printer:
    """Prints whole lines, and on a terminal a last line that is drawn over. Only rank 0 prints; of many ranks it names itself."""

    def __init__(self, rank: int, world: int) -> None:
        self.quiet = rank != 0
        self.prefix = f"[rank{rank}] " if world > 1 else ""
        self.live = not self.quiet and sys.stdout.isatty()
        self._drawn = False

    def say(self, line: str) -> None:
        """Print ``line`` for good."""
        if not self.quiet:
            print(f"{self._clear()}{self.prefix}{line}", flush=True)

    def draw(self, line: str) -> None:
        """Show ``line`` until the next one; nothing where the output is no terminal."""
        if self.live:
            print(f"{self._clear()}{self.prefix}{line}", end="", flush=True)
            self._drawn = True

    def _clear(self) -> str:
        drawn, self._drawn = self._drawn, False
        return "\r\033[K" if drawn else ""


class Progress(Plugin):
    """Images per second of all ranks together, training alone, and the time left, validation included."""

    priority = 90

    def __init__(self, printer: Printer) -> None:
        self.printer = printer
        self._redrawn = 0.0

    def on_start(self, state: TrainState) -> None:
        self._start, self._from = time.monotonic(), state.epoch

    def on_epoch_start(self, state: TrainState) -> None:
        self._epoch_start = time.monotonic()
        self._train_s = 0.0

    def on_step_end(self, state: TrainState) -> None:
        now = time.monotonic()
        self._train_s = now - self._epoch_start
        if self.printer.live and now - self._redrawn > REDRAW_S:
            self._redrawn = now
            share = state.step / state.steps_per_epoch
            bar = "#" * round(20 * share)
            self.printer.draw(f"epoch {state.epoch + 1}/{state.config.epochs} |{bar:<20}| {self._speed(state, share)} {self._eta(state, share)}")

    def on_epoch_end(self, state: TrainState) -> None:
        row = state.history[-1]
        self.printer.say(
            f"epoch {row.epoch}/{state.config.epochs} loss {row.train_loss:.3f} val {100 * row.val_accuracy:.1f} % "
            f"{self._speed(state, 1.0)} {self._eta(state, 0.0)}"
        )

    def _speed(self, state: TrainState, share: float) -> str:
        return f"{share * state.images_per_epoch / max(self._train_s, 1e-9):,.0f} images/s"

    def _eta(self, state: TrainState, share: float) -> str:
        done = state.epoch + share - self._from
        left = (state.config.epochs - state.epoch - share) * (time.monotonic() - self._start) / max(done, 1e-9)
        return f"eta {left:.0f} s"
