"""Values of cells as a source writes them: numbers, steps and seeds, or a sentence on why they are not."""

import math

from ablate.files import Json
from ablate.training.log_readers import lines

MOST_STEP = 2**53
"""Largest step: below it each whole number is a float of its own."""
_SHOWN = 60


def is_empty(cell: Json) -> bool:
    """Return True for a cell that says nothing: no value, or only spaces."""
    return cell is None or (isinstance(cell, str) and not cell.strip())


def number(cell: Json) -> float:
    """Return the value of a metric's cell, perhaps NaN or infinite. ValueError if no float can hold it."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        raise ValueError(f"{shown(cell)} is not a number")
    if isinstance(cell, str):
        try:
            return lines.number(cell)
        except ValueError as error:
            raise ValueError(f"{error}{'; write a decimal point' * (',' in cell)}") from None
    try:
        return float(cell)
    except OverflowError:
        raise ValueError(f"{shown(cell)} does not fit a float") from None


def whole(cell: Json) -> int:
    """Return the whole number of a cell: `3`, or `3.0` as tables with gaps write it; else ValueError."""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return cell
    if isinstance(cell, str) and (text := cell.strip()).removeprefix("-").isascii():
        digits, _, zeros = text.removeprefix("-").partition(".")
        if digits.isdigit() and set(zeros) <= {"0"} and len(digits) < 20:
            return int(text.partition(".")[0])
    value = number(cell)
    if not value.is_integer() or abs(value) > MOST_STEP:
        raise ValueError(f"{shown(cell)} is not a whole number")
    return int(value)


def step_of(cell: Json) -> int:
    """Return the step of a cell. ValueError if it is not a whole number from 0."""
    value = whole(cell)
    if not 0 <= value <= MOST_STEP:
        raise ValueError(f"{shown(cell)} is not a step: a whole number from 0")
    return value


def setting(cell: Json) -> Json:
    """Return the value of a setting's cell: text that is a number becomes one, other text is kept."""
    if not isinstance(cell, str):
        return cell
    try:
        value = number(cell)
        return int(value) if cell.strip().removeprefix("-").isdigit() else value
    except ValueError:
        return cell.strip()


def shown(cell: object) -> str:
    """Return a cell for a sentence, cut if it is long."""
    text = ascii(cell) if isinstance(cell, str) else str(cell)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def same(one: float, other: float) -> bool:
    """Return True for equal values; NaN equals NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))
