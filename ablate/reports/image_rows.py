"""Images that arms made of the same inputs: a row an image, arms side by side, above their magnified errors.

    original    visible    bf16         nvfp4
    [image]     [image]    [image]      [image]
                           [error x8]   [error x8]
                           21.4 dB      20.9 dB

The files are `reconstruction.npz` in the folders of trials, which own code saves, as experiments/mae.py does:
uint8 images [n, channels, height, width] before, masked and after, and the peak signal-to-noise ratio of each
in dB. Arms whose inputs or masks differ stand in tables of their own. One factor magnifies all errors of a
table.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from ablate.reports.page import Part, png
from ablate.reports.plain_text import inline, markdown_cell, pipe_table

FILE = "reconstruction.npz"
_FACTORS = (1, 2, 4, 8, 16, 32)
_QUANTILE = 0.95
"""Share of pixels whose error a magnified picture does not cut off."""


@dataclass(frozen=True)
class Reconstructed:
    """Images of one arm."""

    original: np.ndarray
    visible: np.ndarray
    reconstruction: np.ndarray
    decibels: np.ndarray

    @classmethod
    def read(cls, path: Path) -> "Reconstructed | None":
        """Return the images of a file; None if it has other content, or is damaged."""
        try:
            with path.open("rb") as file, np.load(file) as found:
                one = cls(*(found[name] for name in cls.__dataclass_fields__))
                return one if one._has_form() else None
        except Exception:  # of whatever class: zipfile, zlib and NumPy raise their own for damage
            return None

    def _has_form(self) -> bool:
        """Return True if the arrays have the types and shapes that own code is to save."""
        images, shape = (self.original, self.visible, self.reconstruction), self.original.shape
        if any(each.dtype != np.uint8 or each.shape != shape for each in images):
            return False
        if len(shape) != 4 or shape[1] not in (1, 3) or 0 in shape:
            return False
        return self.decibels.shape == shape[:1] and self.decibels.dtype.kind in "fiu"

    @property
    def errors(self) -> np.ndarray:
        """Largest absolute errors over channels, 0 to 255, [n, 1, height, width]."""
        return np.abs(self.reconstruction.astype(int) - self.original).max(1, keepdims=True)

    def alike(self, other: "Reconstructed") -> bool:
        """Return True if another arm was given the same images with the same masks."""
        return np.array_equal(self.original, other.original) and np.array_equal(self.visible, other.visible)


@dataclass(frozen=True)
class ImageRows(Part):
    """Table of images of arms with the same inputs, which stay in the trials' folders."""

    arms: Mapping[str, Reconstructed]

    @cached_property
    def factor(self) -> int:
        """Factor that magnifies errors."""
        largest = np.quantile([one.errors for one in self.arms.values()], _QUANTILE)
        return max(factor for factor in _FACTORS if factor == 1 or factor * largest <= 255)

    def html(self) -> str:
        """Return the table, with its images as data."""
        first = next(iter(self.arms.values()))
        head = "".join(f"<th>{inline(name)}</th>" for name in ("original", "visible", *self.arms))
        rows = "".join(
            f"<tr><td>{_image(first.original[n], f'image {n + 1}')}</td>"
            f"<td>{_image(first.visible[n], f'image {n + 1}, visible part')}</td>"
            f"{''.join(self._cell(name, one, n) for name, one in self.arms.items())}</tr>"
            for n in range(len(first.original))
        )
        times = f", magnified {self.factor} times" if self.factor > 1 else ""
        return (
            f'<div class="scroll"><table class="images"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>'
            '</table></div><p class="about">The first finished seed of each arm. Below each image its'
            f" error{times} (white: none), and the peak signal-to-noise ratio over masked pixels; more dB are"
            " better.</p>"
        )

    def _cell(self, name: str, one: Reconstructed, n: int) -> str:
        error = (255 - np.minimum(255, self.factor * one.errors[n])).astype(np.uint8)
        label = f"image {n + 1} by {name}"
        return (
            f"<td>{_image(one.reconstruction[n], label)}{_image(error, f'error of {label}')}"
            f"{one.decibels[n]:.1f} dB</td>"
        )

    def markdown(self) -> str:
        """Return a pipe table of the ratios."""
        names = ["image", *map(markdown_cell, self.arms)]
        rows = zip(*(one.decibels for one in self.arms.values()), strict=True)
        lines = [[str(n), *(f"{value:.1f} dB" for value in row)] for n, row in enumerate(rows, 1)]
        return pipe_table([names, ["---"] * len(names), *lines])


def _image(levels: np.ndarray, label: str) -> str:
    """Return uint8 levels [channels, height, width] as an element of a page."""
    colours, written = np.broadcast_to(levels, (3, *levels.shape[1:])), io.BytesIO()
    Image.fromarray(np.ascontiguousarray(colours.transpose(1, 2, 0))).save(written, "PNG", optimize=True)
    return png(written.getvalue(), label)


def image_rows(found: Mapping[str, Path]) -> list[ImageRows]:
    """Return a table for each set of arms, by the file of each, that were given the same images and masks."""
    groups: list[dict[str, Reconstructed]] = []
    for name, path in found.items():
        if one := Reconstructed.read(path):
            alike = (group for group in groups if one.alike(next(iter(group.values()))))
            if (group := next(alike, None)) is None:
                groups.append(group := {})
            group[name] = one
    return [ImageRows(group) for group in groups]
