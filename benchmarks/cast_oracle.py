"""NVFP4's cast in integer arithmetic, from its specification (docs/reference/numerics.md, sections 2 to 4).

It shares no code with the reference or the kernels. A number is an integer times a power of two and rounds by
shifts; factors that a whole tensor shares are fractions. Doubles, which hold every fp32 number exactly, only
compare sizes and count bits.

    >>> cast = Cast.of(scale=1.0, amax=2688.0)  # both factors are 1
    >>> bits = 0x4026  # 2.59375 in bf16: between 2 and 3, at 152/256
    >>> [hex(z[bits]) for z in (cast.low, cast.high, cast.near)], int(cast.position[bits])
    (['0x4000', '0x4040', '0x4040'], 152)
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Doubles = NDArray[np.float64]

FLT_MAX = Fraction((2**24 - 1) * 2**104)
LARGEST = 0x7F7F
"""Bits of the largest finite bf16."""
ELEMENTS = {
    "e2m1": (1, 0, 6.0),
    "e1m2": (2, 0, 1.75),
    "int4": (2, 2, 7.0),
    "e2m3": (3, 0, 7.5),
    "e3m2": (2, -2, 28.0),
    "e4m3": (3, -6, 448.0),
    "e5m2": (2, -14, 57344.0),
}
"""Mantissa bits, exponent of the smallest normal, largest magnitude of formats with a mantissa."""
SCALES = {
    "e4m3": tuple(
        m / 512 if e == -7 else (1 + m / 8) * 2.0**e
        for e in range(-7, 9)
        for m in range(8)
        if (e, m) != (8, 7)
    ),
    "ue5m3": tuple(
        m / 2**17 if e == -15 else (1 + m / 8) * 2.0**e
        for e in range(-15, 16)
        for m in range(8)
        if (e, m) != (15, 7)
    ),
    "e8m0": tuple(2.0**e for e in range(-100, 101)),
}
"""All values of the formats of block scales, but E8M0's beyond 2^100 and below 2^-100, by which results need
not be bf16 numbers. E4M3 has zero and 126 positive ones."""
_MOST_SHIFT = 62
_BOUNDS = {0.25: False, 0.75: True, 1.25: False, 1.75: True, 2.5: False, 3.5: True, 5.0: False}
"""Halfway points of E2M1; True if the even code is the upper one."""


# --- numbers that a tensor shares -----------------------------------------------------------------


def fp32(value: Fraction) -> Fraction:
    """Return the nearest fp32 number of a value that is not negative, ties to even, at most FLT_MAX."""
    if value == 0:
        return value
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return min(round(value / unit) * unit, FLT_MAX)


def outer_scale(amax: float) -> Fraction:
    """Return S of a tensor with this fp32 outer statistic."""
    return fp32(6 * 448 / Fraction(amax)) or Fraction(1) if amax else Fraction(1)


def multiplier(amax: float) -> Fraction:
    """Return the factor from a block's amax to its scale: S / 6, an fp32 number."""
    return fp32(outer_scale(amax) * fp32(Fraction(1, 6)))


def element_factor(scale: float, amax: float) -> Fraction:
    """Return the factor of the elements of a block with this scale."""
    divisor = fp32(Fraction(scale) * fp32(1 / outer_scale(amax)))
    return fp32(1 / divisor) if divisor else FLT_MAX


# --- arrays ---------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """Array of `significand` * 2^`exponent`, not negative."""

    significand: Integers
    exponent: Integers


def bf16_magnitudes() -> Numbers:
    """Return all finite bf16 magnitudes, by their bits, 0 to LARGEST."""
    bits = np.arange(LARGEST + 1, dtype=np.int64)
    field = bits >> 7
    return Numbers((bits & 127) | ((field > 0) << 7), np.maximum(field, 1) - 134)


def _length(value: Integers) -> Integers:
    """Return the number of bits of integers below 2^53."""
    return np.frexp(value.astype(np.float64))[1].astype(np.int64)


def product(numbers: Numbers, factor: Fraction) -> Numbers:
    """Return fp32(number * factor) of numbers of up to 24 bits; the factor is an fp32 number.

    What exceeds FLT_MAX stays as it is: it saturates anyway.
    """
    power = factor.denominator.bit_length() - 1
    exact = numbers.significand * 1
    top = factor.numerator
    while top >= 2**24:  # a power of two times an integer of at most 24 bits
        top, power = top >> 1, power - 1
    exact *= top
    exponent = numbers.exponent - power
    shift = np.clip(np.maximum(exponent + _length(exact) - 24, -149) - exponent, 0, _MOST_SHIFT)
    kept, lost = exact >> shift, exact & ((1 << shift) - 1)
    half = (1 << shift) >> 1
    up = (lost > half) | ((lost == half) & (shift > 0) & (kept & 1 == 1))
    return Numbers(kept + up, exponent + shift)


class Neighbours(NamedTuple):
    """Places of numbers on a grid of magnitudes."""

    low: Doubles
    """The magnitude at or below, at most the largest."""
    high: Doubles
    """The next one; nothing is rounded to it at position 0."""
    position: Integers
    """floor(256 f), f the position between the two."""
    up: NDArray[np.bool_]
    """True if the nearest is `high`; of two equally near ones, the even code."""


def neighbours(numbers: Numbers, mantissa: int, least: int, largest: float) -> Neighbours:
    """Return the neighbours of fp32 numbers on a grid with at least one mantissa bit."""
    significand, exponent = numbers
    unit = np.maximum(_length(significand) + exponent - 1, least) - mantissa
    right = np.clip(unit - exponent, 0, _MOST_SHIFT - 8)
    left = np.clip(exponent - unit, 0, mantissa + 1)
    whole = (significand >> right) << left
    rest = (significand & ((1 << right) - 1)) << 8
    position = rest >> right
    beyond = rest & ((1 << right) - 1) > 0
    up = (position > 128) | ((position == 128) & (beyond | (whole & 1 == 1)))
    saturated = np.ldexp(significand.astype(np.float64), exponent) >= largest
    low, high = (np.ldexp(z.astype(np.float64), unit) for z in (whole, whole + 1))
    return Neighbours(
        np.where(saturated, largest, low),
        np.where(saturated, largest, high),
        np.where(saturated, 0, position),
        up & ~saturated,
    )


def block_scales(largest: Numbers, amax: float) -> Doubles:
    """Return the block scales of blocks with these amaxes in a tensor with this outer statistic."""
    found = neighbours(product(largest, multiplier(amax)), *ELEMENTS["e4m3"])
    return np.where(found.up, found.high, found.low)


@dataclass(frozen=True)
class Cast:
    """Results of the cast at one block scale and outer statistic, by the bits of x in bf16 (65,536 each).

    Results are code times block scale, as bits of bf16. NaN and infinities have zeros.
    """

    low: NDArray[np.int16]
    high: NDArray[np.int16]
    """Stochastic rounding gives `high` if the random byte is below `position`, else `low`."""
    position: NDArray[np.uint8]
    near: NDArray[np.int16]
    """Rounded to nearest, ties to the even code."""
    away: NDArray[np.int16]
    """Rounded to nearest, ties away from zero."""

    @classmethod
    def of(cls, scale: float, amax: float, element: str = "e2m1") -> "Cast":
        """Return the results at a block scale, and an outer statistic, an fp32 number.

        An element other than E2M1 is scaled alike: S is 2688 over the outer statistic.
        """
        found = neighbours(product(bf16_magnitudes(), element_factor(scale, amax)), *ELEMENTS[element])
        low, high = (_bf16(z * scale) for z in (found.low, found.high))
        position = np.zeros((2, 2**15), dtype=np.uint8)
        position[:, : LARGEST + 1] = found.position
        near = np.where(found.up, high, low)
        away = np.where(found.position >= 128, high, low)
        return cls(_signed(low), _signed(high), position.reshape(-1), _signed(near), _signed(away))


def _bf16(values: Doubles) -> Integers:
    """Return the bits of values that bf16 holds exactly; ValueError if it does not."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    if np.any(bits & 0xFFFF) or np.any(values.astype(np.float32) != values):
        raise ValueError("code times block scale is not exact in bf16")
    return bits >> 16


def _signed(magnitudes: Integers) -> NDArray[np.int16]:
    """Return the results of all bf16 numbers from those of finite magnitudes, by their bits."""
    both = np.zeros((2, 2**15), dtype=np.uint16)
    both[:, : LARGEST + 1] = magnitudes
    both[1, : LARGEST + 1] |= 0x8000
    return both.reshape(-1).view(np.int16)


def nearest_e2m1(patterns: range) -> NDArray[np.int16]:
    """Return the nearest E2M1 numbers, as bits of bf16, of consecutive fp32 bits of one sign."""
    first, sign = patterns.start & 0x7FFFFFFF, patterns.start >> 31
    bounds = [int(np.float32(bound).view(np.uint32)) + (not up) for bound, up in _BOUNDS.items()]
    places = np.clip(np.array([0, *bounds, 2**31]) - first, 0, len(patterns))
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32).view(np.uint32) >> 16
    return np.repeat((codes | sign << 15).astype(np.uint16), np.diff(places)).view(np.int16)
