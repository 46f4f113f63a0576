"""Scaling with micro-exponents, as in HiF4, written out group by group: plain loops over Python floats.

From the definition in docs/reference/numerics.md (section 3) alone. Products are formed in float64, where those of two fp32 numbers are
exact, and rounded to fp32 one by one.
"""

import math

import numpy as np

from oracles import grids


def rounded(value: float, bits: int) -> float:
    """A number rounded to so many significant bits, ties to even; for numbers in the range of bf16's normals."""
    if value == 0 or not math.isfinite(value):
        return value
    _, exponent = math.frexp(value)
    step = 2.0 ** (exponent - bits)
    return round(value / step) * step


def three_level(
    x: np.ndarray, lengths: tuple[int, ...] = (8, 4), group: int = 64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise groups of a row to E1M2 with an E6M2 scale and one-bit exponents of sub-blocks.

    Args:
        x: fp32 [rows, columns], whole groups.
        lengths: elements that share a one-bit exponent, level by level.
        group: elements that share a scale.

    Returns:
        Values [rows, columns], scales [rows, groups], and sums of exponents of each element [rows, columns]; float64.
    """
    values, exponents = np.zeros(x.shape), np.zeros(x.shape)
    scales = np.zeros((len(x), x.shape[1] // group))
    constant = rounded(1 / (1.75 * 2 ** len(lengths)), 8)
    for row in range(len(x)):
        for first in range(0, x.shape[1], group):
            members = [float(value) for value in x[row, first : first + group]]
            largest = max(abs(value) for value in members)
            wanted = rounded(float(np.float32(largest * constant)), 8)
            scale = float(grids.nearest(np.array([wanted]), grids.E6M2)[0])
            reciprocal = rounded(1 / scale, 8)
            scaled = [float(np.float32(abs(value) * reciprocal)) for value in members]
            sums = [0] * group
            for level, length in enumerate(lengths):
                for start in range(0, group, length):
                    largest = max(scaled[start : start + length])
                    if largest / 2 ** sums[start] >= 2 ** (len(lengths) - level):
                        for place in range(start, start + length):
                            sums[place] += 1
            for place, value in enumerate(members):
                quarters = min(math.floor(scaled[place] / 2 ** sums[place] * 4 + 0.5), 7)
                values[row, first + place] = math.copysign(quarters / 4 * 2 ** sums[place] * scale, value)
                exponents[row, first + place] = sums[place]
            scales[row, first // group] = scale
    return values, scales, exponents
