"""Number formats by enumeration, and rounding by search: slow, in float64, and independent of any bit trick."""

from typing import Any

import numpy as np

POWERS = 2.0 ** np.arange(-127, 128)
"""E8M0: code k is 2^(k - 127), the last code is NaN, and there is no zero."""
E6M2 = np.array([(1 + code % 4 / 4) * 2.0 ** (code // 4 - 48) for code in range(255)])
"""E6M2: six bits of exponent with bias 48 and two of mantissa, without zero and subnormals; code 255 is NaN."""
TABLES = {
    "e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "e1m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75],
    "int4": [0, 1, 2, 3, 4, 5, 6, 7],
    "e3m0": [0, 0.25, 0.5, 1, 2, 4, 8, 16],
}
"""The eight magnitudes of each four-bit format, by their codes, written out."""
FIELDS = {
    "e2m3": (2, 3, 1, 31),
    "e3m2": (3, 2, 3, 31),
    "e4m3": (4, 3, 7, 126),
    "e5m2": (5, 2, 15, 123),
    "ue5m3": (5, 3, 15, 247),
}
"""Exponent bits, mantissa bits, bias, and the last finite code: OCP's formats, and UE5M3 with its top exponent reserved."""


def magnitudes(mantissa: int, emin: int, top: float) -> np.ndarray:
    """Every non-negative value of a small float, ascending: index parity is the parity of the code."""
    fractions = np.arange(2**mantissa) / 2**mantissa
    normals = [(1 + fractions) * 2.0**e for e in range(emin, int(np.log2(top)) + 1)]
    values = np.concatenate([fractions * 2.0**emin, *normals])
    return values[values <= top]


def decoded(exponent_bits: int, mantissa_bits: int, bias: int, last: int) -> np.ndarray:
    """The magnitudes of codes 0 to `last`, from their bit fields."""
    values = []
    for code in range(last + 1):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        assert exponent < 2**exponent_bits
        fraction = mantissa / 2**mantissa_bits
        values.append((fraction if exponent == 0 else 1 + fraction) * 2.0 ** (max(exponent, 1) - bias))
    return np.array(values)


def named(name: str) -> np.ndarray:
    """The magnitudes of a format by its name, ascending: index parity is the parity of the code."""
    if name == "e8m0":
        return POWERS
    if name == "e6m2":
        return E6M2
    return np.array(TABLES[name], dtype=float) if name in TABLES else decoded(*FIELDS[name])


def nearest(values: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Each value's nearest grid point (sign kept), ties to the even code, saturating."""
    magnitude = np.clip(np.abs(values.astype(np.float64)), grid[0], grid[-1])
    upper = np.clip(np.searchsorted(grid, magnitude), 1, len(grid) - 1)
    below, above = magnitude - grid[upper - 1], grid[upper] - magnitude
    index = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, upper - 1)
    return np.copysign(grid[index], values)


def neighbours(values: Any, grid: np.ndarray) -> tuple[Any, Any]:
    """The grid points at or around magnitudes; both are the smallest or the largest beyond them."""
    magnitudes = np.clip(np.abs(np.asarray(values, dtype=np.float64)), grid[0], grid[-1])
    return grid[np.searchsorted(grid, magnitudes, side="right") - 1], grid[np.searchsorted(grid, magnitudes)]
