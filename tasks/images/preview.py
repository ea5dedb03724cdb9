"""preview.png: training samples as they are and after several draws of the augmentation, for people to look at."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

TILE = 112
GAP, MARGIN = 8, 24
INK, FAINT, PAPER, LINE = (24, 28, 36), (104, 112, 124), (255, 255, 255), (214, 219, 226)
NAME_WIDTH = 132
ROWS = 16
"""Rows in one block; more images go into blocks side by side."""

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def preview_png(before: np.ndarray, after: Sequence[np.ndarray], names: Sequence[str], notes: Sequence[str]) -> bytes:
    """The picture as PNG bytes.

    Args:
        before: uint8 [N, S, S, 3], the cached samples.
        after: for each draw, uint8 [N, S, S, 3]; may be empty.
        names: class name of each sample.
        notes: one line for each op of the policy.
    """
    title, body, small = (ImageFont.load_default(size) for size in (20, 14, 13))
    tile = _tile_side(before.shape[1])
    columns = 1 + len(after)
    rows = min(len(before), ROWS)
    blocks = -(-len(before) // rows)
    block_width = NAME_WIDTH + columns * (tile + GAP) + GAP
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    width = max(2 * MARGIN + blocks * block_width + (blocks - 1) * MARGIN, 560)
    lines = _wrap("Policy: " + ("; ".join(notes) if notes else "none, samples are used as they are"), width - 2 * MARGIN, small, measure)
    top = MARGIN + 32 + 20 * len(lines) + 16
    sheet = Image.new("RGB", (width, top + 24 + rows * (tile + GAP) + MARGIN), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), "Training samples before and after augmentation", INK, title)
    for number, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + 32 + 20 * number), line, FAINT, small)
    for block in range(blocks):
        left = MARGIN + block * (block_width + MARGIN)
        start = left + NAME_WIDTH
        pen.text((start, top), "sample", INK, body)
        after_left = start + tile + 3 * GAP
        if after:
            pen.text((after_left, top), "random draws", INK, body)
        for row, index in enumerate(range(block * rows, min((block + 1) * rows, len(before)))):
            y = top + 24 + row * (tile + GAP)
            pen.text((left, y + tile // 2), _fit(names[index], NAME_WIDTH - GAP, body, pen), INK, body, anchor="lm")
            _put(sheet, pen, before[index], (start, y), tile)
            for number, images in enumerate(after):
                _put(sheet, pen, images[index], (after_left + number * (tile + GAP), y), tile)
        if after:
            x = start + tile + GAP + GAP // 2
            pen.line((x, top + 24, x, top + 24 + min(rows, len(before) - block * rows) * (tile + GAP) - GAP), LINE)
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG", optimize=False, compress_level=6)
    return buffer.getvalue()


def _tile_side(size: int) -> int:
    """The side of a tile on the sheet: a whole multiple of small images, so that each pixel stays a square; at most TILE of large ones."""
    return size * max(1, round(TILE / size)) if size <= 2 * TILE else TILE


def _put(sheet: Image.Image, pen: ImageDraw.ImageDraw, pixels: np.ndarray, at: tuple[int, int], tile: int) -> None:
    way = Image.Resampling.NEAREST if tile >= len(pixels) else Image.Resampling.BILINEAR
    sheet.paste(Image.fromarray(np.ascontiguousarray(pixels)).resize((tile, tile), way), at)
    pen.rectangle((at[0] - 1, at[1] - 1, at[0] + tile, at[1] + tile), outline=LINE)


def _fit(text: str, width: int, font: Font, pen: ImageDraw.ImageDraw) -> str:
    """``text`` on one line, cut with an ellipsis where it is wider than ``width`` pixels."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(f"{text}...", font) > width:
        text = text[:-1]
    return f"{text}..."


def _wrap(text: str, width: int, font: Font, pen: ImageDraw.ImageDraw) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, font) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
