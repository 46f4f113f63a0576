"""Numbers as text: metric values, counts of things, differences with their intervals."""

import math

from ablate.results.paired_stats import Difference


def number(value: float) -> str:
    """Return a number with four decimals (a loss), or with four significant digits if it is below 0.1."""
    return f"{value:z.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 seed`, `2 seeds`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def interval(difference: Difference) -> str:
    """Return a difference with half its interval: `+0.0123 ±0.0023`.

    Without an interval there is no ±; a confidence sequence with too few pairs has `±∞`. Small intervals get
    more decimals, and a value that rounds to zero has no minus sign.
    """
    if not difference.pairs:
        return "-"
    half = difference.high - difference.mean if difference.has_interval else 0.0
    decimals = _decimals(difference)
    bound = (
        f" ±{half:.{decimals}f}" if difference.has_interval else " ±∞" if math.isinf(difference.low) else ""
    )
    return f"{difference.mean:+z.{decimals}f}{bound}"


def signed(value: float, difference: Difference) -> str:
    """Return a number with its sign, and with as many decimals as the difference's interval needs."""
    return f"{value:+z.{_decimals(difference)}f}"


def around(mean: float, half: float) -> str:
    """Return a number with its sign and half its interval: `+0.0123 ±0.0023`."""
    places = _places(half or abs(mean))
    return f"{mean:+z.{places}f} ±{half:.{places}f}"


def _decimals(difference: Difference) -> int:
    half = difference.high - difference.mean if difference.has_interval else 0.0
    return _places(half or abs(difference.mean))


def _places(smallest: float) -> int:
    return max(4, 1 - math.floor(math.log10(smallest))) if smallest and math.isfinite(smallest) else 4


def percents(difference: Difference) -> str:
    """Return a difference of fractions in percent: `+1.23 ±0.45 %`."""
    half = f" ±{100 * (difference.high - difference.mean):.2g}" if difference.has_interval else ""
    return f"{100 * difference.mean:+z.2f}{half} %"
