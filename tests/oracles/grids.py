"""Number formats by enumeration, and rounding by search: slow, in float64, and independent of any bit trick."""

import numpy as np


def magnitudes(mantissa: int, emin: int, top: float) -> np.ndarray:
    """Every non-negative value of a small float, ascending: index parity is the parity of the code."""
    fractions = np.arange(2**mantissa) / 2**mantissa
    normals = [(1 + fractions) * 2.0**e for e in range(emin, int(np.log2(top)) + 1)]
    values = np.concatenate([fractions * 2.0**emin, *normals])
    return values[values <= top]


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Each value's nearest grid point (sign kept), ties to the even code, saturating."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), grid[-1])
    upper = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    below, above = magnitude - grid[upper - 1], grid[upper] - magnitude
    index = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, upper - 1)
    return np.copysign(grid[index], values)


def neighbours(value: float, grid: np.ndarray) -> tuple[float, float]:
    """The grid points at or around a magnitude; both are the largest beyond it."""
    magnitude = min(abs(float(value)), grid[-1])
    return grid[grid <= magnitude][-1], grid[grid >= magnitude][0]
