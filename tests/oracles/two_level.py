"""Two-level scaling written out tile by tile: plain loops over numpy fp32 scalars, from docs/numerics.md alone.

Slow, and independent of the package: no tensor of torch, no broadcasting, and grids by enumeration. For the recipes of which no
public implementation is installed it is the only oracle; docs/status.md says which those are.
"""

from dataclasses import dataclass

import numpy as np

from oracles import grids

FP32 = np.float32
FLT_MAX = np.finfo(FP32).max


@dataclass
class Quantised:
    """Result for a matrix [rows, columns]."""

    values: np.ndarray
    """Code times block scale, [rows, columns padded to whole tiles]."""
    amax: np.ndarray
    """Outer statistic of each row, [rows]."""
    scales: np.ndarray
    """Block scales, [row tiles, column tiles]."""
    decoded: np.ndarray


def nvfp4(x: np.ndarray, tile: tuple[int, int] = (1, 16), rows: int | None = None) -> Quantised:
    """Quantise to E2M1 with E4M3 block scales, to nearest, and one fp32 outer scale for `rows` consecutive rows.

    Args:
        x: fp32 [rows, columns].
        tile: rows and columns that share a block scale.
        rows: consecutive rows that share an outer scale, counted from the first; None: all.
    """
    (height, width), (high, wide) = x.shape, tile
    x = np.pad(x, ((0, -height % high), (0, -width % wide)))
    result = Quantised(
        *(np.zeros(shape, FP32) for shape in (x.shape, len(x), (len(x) // high, x.shape[1] // wide), x.shape))
    )
    with np.errstate(over="ignore", divide="ignore"):
        for first in range(0, len(x), rows or len(x)):
            group = slice(first, first + (rows or len(x)))
            amax = FP32(np.abs(x[group]).max())
            scale = FP32(1) if amax == 0 else min(FP32(2688) / amax, FLT_MAX)
            scale = scale or FP32(1)
            result.amax[group] = amax
            for top in range(first, min(group.stop, len(x)), high):
                for left in range(0, x.shape[1], wide):
                    _tile(x, result, (top, left), tile, scale, amax)
    for name in ("values", "amax", "decoded"):
        setattr(result, name, getattr(result, name)[:height])
    return result


def _tile(
    x: np.ndarray, result: Quantised, corner: tuple[int, int], tile: tuple[int, int], scale: FP32, amax: FP32
) -> None:
    (top, left), (high, wide) = corner, tile
    place = slice(top, top + high), slice(left, left + wide)
    largest = FP32(np.abs(x[place]).max())
    block = FP32(grids.nearest(np.array([largest * (scale * (FP32(1) / FP32(6)))]), grids.named("e4m3"))[0])
    factor = min(FP32(1) / (block * (FP32(1) / scale)), FLT_MAX) if block else FLT_MAX
    codes = grids.nearest(x[place] * factor, grids.named("e2m1")).astype(FP32)
    result.scales[top // high, left // wide] = block
    result.values[place] = codes * block
    result.decoded[place] = codes * ((block * amax) * (FP32(1) / FP32(2688))) if block else 0
