"""Two-level scaling written out tile by tile: plain loops over numpy fp32 scalars, from docs/reference/numerics.md alone.

Slow, and independent of the package: no tensor of torch, no broadcasting, and grids by enumeration. For the recipes of which no
public implementation is installed it is the only oracle; docs/project/status.md says which those are.
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


def powers_of_two(
    x: np.ndarray, tile: tuple[int, int], below: float | None, times: float
) -> tuple[np.ndarray, np.ndarray]:
    """Quantise to E2M1 with the power of two at or above each block's amax, times a factor: MXFP4-v4's rule, in float64.

    Args:
        x: fp32 [rows, columns], whole tiles.
        tile: rows and columns that share a scale.
        below: halve the scale where the amax is less than this part of it, compared in fp32; None: never.
        times: what the block's scale is mapped to.

    Returns:
        Codes times scales [rows, columns], and the scales [row tiles, column tiles], float64.
    """
    (height, width), (high, wide) = x.shape, tile
    values, scales = np.zeros(x.shape), np.zeros((height // high, width // wide))
    for top in range(0, height, high):
        for left in range(0, width, wide):
            place = slice(top, top + high), slice(left, left + wide)
            amax = float(np.abs(x[place]).max())
            mantissa, exponent = np.frexp(amax)
            scale = 2.0 ** max(int(exponent) - (mantissa == 0.5), -127) if amax else 2.0**-127
            if below is not None and FP32(amax / scale) < FP32(below):
                scale = max(scale / 2, 2.0**-127)
            scaled = (x[place].astype(np.float64) * times / scale).astype(FP32)
            values[place] = grids.nearest(scaled, grids.named("e2m1")) * scale
            scales[top // high, left // wide] = scale
    return values, scales


def selected(
    x: np.ndarray, pair: tuple[float, float], criterion: str, bound: float
) -> tuple[np.ndarray, np.ndarray]:
    """Quantise blocks of 1x16 in two ways, and keep the one that errs less: Four Over Six's rule for any pair of values.

    Args:
        x: fp32 [rows, 16 n].
        pair: values to which the candidates map a block's largest magnitude.
        criterion: `mse`, `mae` or `absmax`.
        bound: largest block scale that is used.

    Returns:
        Codes times scales [rows, 16 n] and scales [rows, n], fp32.
    """
    amax = FP32(np.abs(x).max())
    scale = FP32(1) if amax == 0 else min(FP32(6 * bound) / amax, FLT_MAX)
    values, scales = np.zeros_like(x), np.zeros((len(x), x.shape[1] // 16), FP32)
    for row in range(len(x)):
        for column in range(0, x.shape[1], 16):
            block = x[row, column : column + 16]
            base = FP32(np.abs(block).max()) / FP32(6) * scale
            best = None
            for value in pair:
                s = FP32(grids.nearest(np.array([base * FP32(6 / value)]), grids.named("e4m3"))[0])
                with np.errstate(divide="ignore", over="ignore"):
                    factor = min(FP32(1) / (s * (FP32(1) / scale)), FLT_MAX)
                    codes = grids.nearest(block * factor, grids.named("e2m1")).astype(FP32)
                difference = codes * s * amax / FP32(6 * bound) - block
                error = FP32(0)
                for one in np.abs(difference) if criterion != "mse" else difference * difference:
                    error = max(error, one) if criterion == "absmax" else FP32(error + one)
                if best is None or error < best[0]:
                    best = error, codes * s, s
            values[row, column : column + 16], scales[row, column // 16] = best[1:]
    return values, scales


def adaptive_grids(x: np.ndarray) -> np.ndarray:
    """Quantise blocks of 1x16 to E2M1 or to seven even steps up to 6 under one E4M3 scale, by squared error: IF4's rule.

    Args:
        x: fp32 [rows, 16 n].

    Returns:
        Values times scales, before the outer factor, fp32 [rows, 16 n]; E2M1 where both err alike.
    """
    amax = FP32(np.abs(x).max())
    scale = FP32(1) if amax == 0 else min(FP32(2688) / amax, FLT_MAX)
    values, step = np.zeros_like(x), FP32(6 / 7)
    for row in range(len(x)):
        for column in range(0, x.shape[1], 16):
            block = x[row, column : column + 16]
            base = FP32(np.abs(block).max()) / FP32(6) * scale
            s = FP32(grids.nearest(np.array([base]), grids.named("e4m3"))[0])
            with np.errstate(divide="ignore", over="ignore"):
                y = block * min(FP32(1) / (s * (FP32(1) / scale)), FLT_MAX)
                even = grids.nearest(y * FP32(7 / 6), grids.named("int4")).astype(FP32) * step
            best = None
            for codes in (grids.nearest(y, grids.named("e2m1")).astype(FP32), even):
                error = FP32(0)
                for one in codes * s * amax / FP32(2688) - block:
                    error = FP32(error + one * one)
                if best is None or error < best[0]:
                    best = error, codes * s
            values[row, column : column + 16] = best[1]
    return values


def logarithmic(x: np.ndarray, bits: np.ndarray, width: int) -> np.ndarray:
    """Quantise to 0 and seven powers of two below a tensor's amax at random, unbiased: LUQ's gradients, in float64.

    A magnitude below the smallest level becomes that level or zero, one between two levels either of them, so that the mean
    is the magnitude; up where floor(2^width f) exceeds the bits, f the position.

    Args:
        x: fp32 [rows, columns].
        bits: integers in [0, 2^width), like x.
        width: random bits of one draw.

    Returns:
        Levels, where the amax is 16, float64 like x.
    """
    levels = [0.0, *(2.0**power for power in range(-2, 5))]
    amax = FP32(np.abs(x).max())
    scaled = (x * (FP32(16) / amax)).astype(np.float64) if amax else np.zeros(x.shape)
    found = np.zeros(x.shape)
    for place, y in np.ndenumerate(np.minimum(np.abs(scaled), 16.0)):
        lower = max(level for level in levels if level <= y)
        upper = min((level for level in levels if level > y), default=lower)
        up = upper > lower and int((y - lower) / (upper - lower) * 2**width) > bits[place]
        found[place] = np.copysign(upper if up else lower, x[place])
    return found
