"""The evaluation's pictures as PNG bytes: matplotlib's Agg, its bundled font and defaults only, so equal numbers give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.training.metrics import CalibrationBins, ClassScores

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT = "DejaVu Sans"
INK, ACCENT, MUTED, WARN = "#1f2933", "#2b6cb0", "#cbd2d9", "#c05621"
NAME_LENGTH = 28
MAX_ROWS = 100
"""Classes drawn by ``classes_png`` at most: the worst ones."""


def confusion_png(confusion: np.ndarray, classes: Sequence[str]) -> bytes:
    """A heat map of ``confusion`` int64 [C, C], rows true, coloured by the share of the row; counts are written in up to 25 classes."""
    count = len(classes)
    side = float(np.clip(0.17 * count, 4.6, 20.0)) if count > 25 else 2.6 + 0.46 * count
    small = 9 if count <= 25 else 6
    every = -(-count // 120)  # beyond 120 classes only every second, third, ... name has room
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    names = _names(classes)
    longest = max(map(len, names))
    room = longest * small * 0.6 / 72  # inches that the longest name takes
    upright = count > 25 or longest > 3
    with _figure(side + 1.8 + room, side + 0.9 + room * upright) as figure:
        from matplotlib.colors import PowerNorm

        axes = figure.add_subplot()
        # The square root lifts single mistakes, the ones to look for, out of the white.
        image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0.0, 1.0), interpolation="nearest")
        ticks = range(0, count, every)
        axes.set_xticks(ticks, [names[i] for i in ticks], rotation=90 * upright, fontsize=small)
        axes.set_yticks(ticks, [names[i] for i in ticks], fontsize=small)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        wrong = int(confusion.sum() - np.trace(confusion))
        axes.set_title(f"{wrong:,} of {int(confusion.sum()):,} test images wrong", fontsize=11, loc="left")
        if count <= 25:
            for row, column in np.argwhere(confusion > 0):
                colour = "white" if shares[row, column] > 0.35 else (INK if row == column else WARN)
                text = f"{confusion[row, column]}"
                axes.text(column, row, text, ha="center", va="center", fontsize=small, color=colour)
        bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03, aspect=25 if count <= 25 else 50, ticks=[0, 0.01, 0.1, 0.25, 0.5, 1])
        bar.set_label("share of the true class (square-root scale)", fontsize=small + 1)
        bar.ax.set_yticklabels(["0", "1 %", "10 %", "25 %", "50 %", "100 %"], fontsize=small + 1)
        return _png(figure)


def calibration_png(bins: CalibrationBins, error: float) -> bytes:
    """A reliability diagram: accuracy against confidence of each bin, above the images in each bin."""
    with _figure(5.6, 5.8) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
        width = bins.edges[1] - bins.edges[0]
        middles = bins.edges[:-1] + width / 2
        used = bins.counts > 0
        upper.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--", label="perfectly calibrated")
        upper.bar(middles[used], bins.accuracy[used], width * 0.92, color=ACCENT, label="accuracy")
        upper.plot(middles[used], bins.confidence[used], "D", color=WARN, markersize=5, clip_on=False, zorder=3, label="mean confidence")
        upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        upper.set_title(f"expected calibration error {error:.4f}", fontsize=11, loc="left")
        upper.legend(loc="upper left", frameon=False, fontsize=9)
        lower.bar(middles, bins.counts, width * 0.92, color=MUTED)
        lower.set(xlabel="confidence (probability of the predicted class)", ylabel="images")
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
        return _png(figure)


def classes_png(scores: ClassScores, classes: Sequence[str]) -> bytes:
    """Precision, recall and F1 of each class, the worst F1 first; of more than ``MAX_ROWS`` classes the worst."""
    order = np.argsort(scores.f1, kind="stable")[:MAX_ROWS]
    rows = np.arange(len(order))
    with _figure(7.2, 1.5 + 0.24 * len(order)) as figure:
        axes = figure.add_subplot()
        low = min(float(scores.recall[order].min()), float(scores.precision[order].min()))
        start = max(0.0, np.floor(low * 10 - 1) / 10)
        axes.barh(rows, scores.f1[order] - start, 0.62, left=start, color=MUTED, label="F1")
        axes.plot(scores.precision[order], rows, "D", color=WARN, markersize=4.5, label="precision", clip_on=False, zorder=3)
        axes.plot(scores.recall[order], rows, "o", color=ACCENT, markersize=5, label="recall", clip_on=False, zorder=4)
        names = _names(classes)
        axes.set_yticks(rows, [f"{names[i]}  (n={scores.support[i]})" for i in order], fontsize=8)
        axes.set(xlim=(start, 1.0), ylim=(len(order) - 0.4, -0.6))
        axes.xaxis.grid(True, color=MUTED, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        which = f"{len(order)} worst of {len(classes)} classes" if len(order) < len(classes) else f"{len(classes)} classes"
        figure.suptitle(f"Test scores, {which}, worst F1 first", fontsize=11, x=0.02, ha="left")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False, fontsize=9)
        return _png(figure)


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    """A figure of ``width`` x ``height`` inches under matplotlib's own defaults, whatever the user's matplotlibrc says."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        # Names of classes are text, never formulas: a "$" stays a "$".
        colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
        matplotlib.rcParams.update({"font.family": FONT, "text.parse_math": False, **colours})
        figure = Figure((width, height), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None}
    figure.savefig(buffer, format="png", metadata=metadata)
    return buffer.getvalue()


def _names(classes: Sequence[str]) -> list[str]:
    """``classes`` as they can be drawn: shortened, and what is no printable character of the font as its code."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs = get_font(findfont(FontProperties(family=FONT))).get_charmap()
    drawn = ("".join(c if c.isprintable() and ord(c) in glyphs else c.encode("unicode_escape").decode() for c in name) for name in classes)
    return [name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…" for name in drawn]
