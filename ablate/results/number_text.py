"""Numbers as text: metric values, counts of things, differences with their intervals."""

import math
import re
from collections.abc import Callable, Collection

from ablate.experiment.roles import CONFIRM, WINNER
from ablate.results.paired_stats import Difference

_VAST = 1e6
"""Numbers from here on have an exponent in sentences."""
_FRACTION = re.compile(r"(?<![\w.])\d+\.\d+(?:e[-+]?\d+)?(?!\w|\.\d)")
_TYPED = 6
"""Significant digits of a number up to which it is shown as it is: somebody may have typed it."""


def number(value: float, half: float = math.nan) -> str:
    """Return a number with four decimals (a loss), or with four significant digits if it is below 0.1. A
    small `half`, half an interval, of which two digits are to be seen, gives it more decimals."""
    if (places := _places(half)) > 4 and places > 3 - _exponent(value):
        return f"{value:z.{places}f}"
    return f"{value:z.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def shortened(names: Collection[str]) -> Callable[[str], str]:
    """Return a function that makes arms' names in any text readable: it says which arm reruns a winner, and
    shortens long numbers, such as drawn rates, to the fewest significant digits, at least 3, by which all
    names stay distinct. Files for programs keep names as they are."""
    numbers = {each for name in names for each in _FRACTION.findall(name)}
    long = [each for each in numbers if len(each.partition("e")[0].replace(".", "").lstrip("0")) > _TYPED]

    def rounded(text: str, digits: int) -> str:
        short = {each: f"{float(each):.{digits}g}" for each in long}
        return _FRACTION.sub(lambda match: short.get(match[0], match[0]), text)

    apart = len({*names})
    digits = next((n for n in range(3, 17) if len({rounded(name, n) for name in names}) == apart), 0)
    return lambda text: (rounded(text, digits) if long and digits else text).replace(CONFIRM, WINNER)


def _exponent(value: float) -> int:
    """Return the power of ten of a number's first digit; 0 for zero, NaN and infinities."""
    return math.floor(math.log10(abs(value))) if value and math.isfinite(value) else 0


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 seed`, `2 seeds`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def interval(difference: Difference) -> str:
    """Return a difference with half its interval: `+0.0123 ±0.0023`. Without an interval there is no ±; a
    confidence sequence with too few pairs has `±∞`. Small intervals get more decimals, and a value that
    rounds to zero has no minus sign."""
    if not difference.pairs:
        return "-"
    decimals, bound = _decimals(difference), " ±∞" if math.isinf(difference.low) else ""
    if difference.has_interval:
        bound = f" ±{difference.half:.{decimals}f}"
    return f"{difference.mean:+z.{decimals}f}{bound}"


def signed(value: float, difference: Difference) -> str:
    """Return a number with its sign, and with as many decimals as the difference's interval needs."""
    if abs(value) >= _VAST:
        return f"{value:+.3g}"
    return f"{value:+z.{_decimals(difference)}f}"


def bounds(difference: Difference) -> str:
    """Return a difference with its interval's bounds: `+0.0040 (-0.0190 to +0.0280)`."""
    if not difference.pairs:
        return "-"
    mean = signed(difference.mean, difference)
    if not difference.has_interval:
        return mean
    return f"{mean} ({signed(difference.low, difference)} to {signed(difference.high, difference)})"


def minus(text: str) -> str:
    """Return numbers as text with real minus signs in place of hyphens."""
    return text.replace("-", "\N{MINUS SIGN}")


def percent(value: float, difference: Difference) -> str:
    """Return a share in percent with its sign, to the second digit of the difference's interval, with one
    decimal at most."""
    half = difference.half
    places = max(0, min(1, 1 - _exponent(100 * half))) if half > 0 else 1
    return minus(f"{100 * value:+z.{places}f}")


def around(mean: float, half: float) -> str:
    """Return a number with its sign and half its interval: `+0.0123 ±0.0023`."""
    places = _places(half or abs(mean))
    return f"{mean:+z.{places}f} ±{half:.{places}f}"


def _decimals(difference: Difference) -> int:
    """Return the decimals of a difference: to the second digit of half its interval, and up to two more if an
    end that excludes zero would be printed as zero, against the verdict beside it."""
    places = _places(difference.half if difference.half > 0 else abs(difference.mean))
    end = min(abs(difference.low), abs(difference.high)) if difference.low * difference.high > 0 else math.inf
    return places if round(end, places) else max(places, min(places + 2, -_exponent(end)))


def _places(smallest: float) -> int:
    return max(4, 1 - _exponent(smallest)) if smallest and math.isfinite(smallest) else 4


def percents(difference: Difference) -> str:
    """Return a difference of fractions in percent: `+1.23 ±0.45 %`, `+35 ±12 %`."""
    text, bound = percent_texts(difference.mean, difference.half)
    return f"{text} ±{bound} %" if bound else f"{text} %"


def percent_texts(value: float, half: float) -> tuple[str, str]:
    """Return a fraction with its sign and half its interval in percent, as texts: `+1.23`, `0.45`. Both end
    at the second digit of half the interval; without one (NaN, infinite) there are two decimals and an empty
    text."""
    places = max(0, 1 - _exponent(100 * half)) if half and math.isfinite(half) else 2
    return f"{100 * value:+z.{places}f}", f"{100 * half:.{places}f}" if math.isfinite(half) else ""
