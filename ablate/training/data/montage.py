"""Small images as PNG: one by itself, or several in rows, enlarged and labelled."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_TILE, _GAP, _TEXT = 128, 6, 14
"""Pixels: approximate size of an image, gap between two, and height of a letter."""
_INK, _PAPER = (26, 29, 33), (255, 255, 255)


def montage(path: Path, columns: Sequence[str], rows: Sequence[Sequence[np.ndarray]], foot: str = "") -> None:
    """Write images in a labelled grid as a PNG; the same arguments give the same bytes.

    Args:
        path: the file.
        columns: labels of the columns.
        rows: rows of images, fp32 [channels, height, width] in [0, 1], all of one shape. Their pixels are
            enlarged to squares.
        foot: a line of text below.
    """
    height, width = rows[0][0].shape[1:]
    scale = max(1, round(_TILE / max(height, width)))
    font, line = ImageFont.load_default(_TEXT), _TEXT + 2 * _GAP
    tall = line + len(rows) * (height * scale + _GAP) + (line if foot else _GAP)
    sheet = Image.new("RGB", (_GAP + len(columns) * (width * scale + _GAP), tall), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for column, name in enumerate(columns):
        left = _GAP + column * (width * scale + _GAP)
        pen.text((left, _GAP), name, fill=_INK, font=font)
        for row, images in enumerate(rows):
            enlarged = levels(images[column]).repeat(scale, 1).repeat(scale, 2)
            sheet.paste(_picture(enlarged), (left, line + row * (height * scale + _GAP)))
    pen.text((_GAP, tall - line + _GAP), foot, fill=_INK, font=font)
    sheet.save(path, optimize=True)


def levels(image: np.ndarray) -> np.ndarray:
    """Return an image in [0, 1] as uint8 levels."""
    return np.rint(image * 255).astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """Return a file of uint8 levels [channels, height, width]."""
    written = io.BytesIO()
    _picture(image).save(written, "PNG", optimize=True)
    return written.getvalue()


def _picture(image: np.ndarray) -> Image.Image:
    colours = np.broadcast_to(image, (3, *image.shape[1:]))
    return Image.fromarray(np.ascontiguousarray(colours.transpose(1, 2, 0)))
