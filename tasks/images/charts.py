"""Small charts as inline SVG, equal for equal values; colours come from the page's style (.mark, .range, .median)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

BINS = 24
WIDTH, HEIGHT, STRIP_PX = 240, 90, 14


class Histogram(NamedTuple):
    """A histogram and what stands below it: least, median and largest value."""

    svg: Markup
    low: float
    median: float
    high: float


def histogram(values: Sequence[float], log: bool = False) -> Histogram:
    """Counts of ``values`` (at least one, 0 or more) in equal bins, of log(1 + value) with ``log``; hovering tells a bin's range and count."""
    array = np.asarray(values, np.float64)
    low, high = float(array.min()), float(array.max())
    scaled = np.log1p(array) if log else array
    counts, edges = np.histogram(
        scaled, BINS, (float(scaled.min()), float(scaled.max()) or 1.0) if low < high else (scaled[0] - 0.5, scaled[0] + 0.5)
    )
    ends = np.expm1(edges) if log else edges
    step = WIDTH / BINS
    bars = []
    for place, count in enumerate(counts.tolist()):
        if count:
            tall = max(1.5, HEIGHT * count / int(counts.max()))
            title = f"{number(float(ends[place]))} to {number(float(ends[place + 1]))}: {count:,}"
            where = f'x="{place * step + 0.75:.2f}" y="{HEIGHT - tall:.2f}" width="{step - 1.5:.2f}" height="{tall:.2f}"'
            bars.append(f'<rect class="mark" {where}><title>{title}</title></rect>')
    return Histogram(_svg(WIDTH, HEIGHT, bars), low, float(np.sort(array)[len(array) // 2]), high)


def strip(values: Sequence[float], low: float, high: float, log: bool = False) -> Markup:
    """The middle nine tenths of ``values`` as a bar on the scale from ``low`` to ``high``, with a mark at their median."""
    ordered = np.sort(np.asarray(values, np.float64))
    few, middle, most = (float(ordered[int(share * (len(ordered) - 1))]) for share in (0.05, 0.5, 0.95))
    start, end = (float(np.log1p(value)) if log else value for value in (low, high))
    at = [WIDTH * ((float(np.log1p(value)) if log else value) - start) / ((end - start) or 1.0) for value in (few, middle, most)]
    title = f"<title>median {number(middle)}; nine tenths from {number(few)} to {number(most)}</title>"
    bar = f'<rect class="range" x="{at[0]:.2f}" y="4" width="{max(2.0, at[2] - at[0]):.2f}" height="6">{title}</rect>'
    tick = f'<rect class="median" x="{min(max(0.0, at[1] - 1.5), WIDTH - 3):.2f}" y="0" width="3" height="{STRIP_PX}">{title}</rect>'
    return _svg(WIDTH, STRIP_PX, [bar, tick])


def number(value: float) -> str:
    """``value`` to about three places that matter."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _svg(width: int, height: int, marks: Sequence[str]) -> Markup:
    return Markup(f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" height="{height}" role="img">{"".join(marks)}</svg>')
