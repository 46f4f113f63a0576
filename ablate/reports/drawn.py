"""Small drawings of intervals, inside a page's tables: SVG as wide as its cell.

Positions along the axis are percentages of the width and all else is in pixels, so a drawing fits a phone and
a printed page without scaled text. Colours come from the page's style sheet, by the kind of verdict; shapes
say the same without colours.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ablate.reports.plain_text import html_text
from ablate.results.number_text import minus
from ablate.results.paired_stats import Difference

_HEIGHT = 26
"""Height of a drawn interval in CSS pixels."""
_TICKS = 6
"""Largest number of round numbers on an axis."""
_WIDEST = 3.0
"""Half-widths beyond this multiple of the median are cut off with an arrow, so that they do not flatten the
others."""
_FARTHEST = math.log(4)
"""Log-ratios beyond this are arrows, unless they are the rule, ..."""
_NEARLY = 1.4
"""... or lie within this multiple of it."""
_APART = 15.0
"""Smallest distance of two ticks in percent, in percent of the axis."""
_CLOSE = 28.0
"""Distance of two ticks, in percent of the axis, below which a narrow column leaves one out."""
_RISES = (1, 2, 5, 10, 20, 30, 50, 100, 200, 300, 500, 900, 1900, 4900, 9900, 99900, 999900)
_FALLS = (-1, -2, -5, -10, -20, -40, -60, -70, -80, -90, -95, -98, -99, -99.9, -99.99)
CIRCLE, DIAMOND, SQUARE = "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z", "M0-6L6 0 0 6-6 0z", "M-4-4H4V4H-4z"
"""Shapes of marks."""


def mark(x: float, y: float, kind: str, path: str = "") -> str:
    """Return the mark of a mean at x percent and y pixels: a diamond for worse, a circle otherwise."""
    path = path or (DIAMOND if kind == "worse" else CIRCLE)
    return f'<svg x="{x:.2f}%" y="{y:g}" overflow="visible"><path class="mean" d="{path}"/></svg>'


def round_numbers(low: float, high: float) -> list[tuple[float, str]]:
    """Return round numbers within bounds, at most about `_TICKS`, each with its text."""
    step = 10 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if (high - low) / s <= _TICKS)
    decimals = max(0, -math.floor(math.log10(step)))
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [(n * step, minus(f"{n * step:+.{decimals}f}") if n else "0") for n in numbers]


def reach(those: Iterable[tuple[Difference, float | None]], farthest: float = 2.0) -> tuple[float, float]:
    """Return the bounds of an axis for differences: zero, means, intervals and margins. The widest intervals
    are not shown to their ends, and a margin is left out if it is `farthest` times as wide as those."""
    known = [(one, margin) for one, margin in those if one.pairs]
    halves = sorted(one.half for one, _ in known if one.has_interval)
    most = _WIDEST * halves[len(halves) // 2] if halves else math.inf
    ends = [0.0]
    for one, margin in known:
        half = min(one.half, most) if one.has_interval else 0.0
        ends += [one.mean - half, one.mean + half]
        ends += [-margin, margin] if margin and margin < farthest * most else []
    pad = 0.06 * (max(ends) - min(ends)) or 1.0
    return min(ends) - pad, max(ends) + pad


@dataclass(frozen=True)
class Axis:
    """Common horizontal axis of drawn intervals."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    @classmethod
    def of(cls, those: Iterable[tuple[Difference, float | None]]) -> "Axis":
        """Return the axis of differences with their margins."""
        low, high = reach(those)
        return cls(low, high, round_numbers(low, high))

    @classmethod
    def of_ratios(cls, those: Iterable[Difference]) -> "Axis":
        """Return the axis of log-ratios, with ticks in percent."""
        those = [one for one in those if one.pairs]
        if not those:
            return cls(-1.0, 1.0, [])
        far = sorted(abs(one.mean) for one in those)
        limit = max(_FARTHEST, 2 * far[len(far) // 2])
        low, high = reach((one, None) for one in those)
        axis = cls(
            max(low, -limit) if low < -_NEARLY * limit else low,
            min(high, limit) if high > _NEARLY * limit else high,
            [],
        )
        ticks = [(0.0, "0")]
        for side in (_RISES, _FALLS):
            last = axis.at(0)
            for percent in side:
                value = math.log1p(percent / 100)
                if axis.low < value < axis.high and abs(axis.at(value) - last) >= _APART:
                    ticks.append((value, minus(f"{percent:+g}%")))
                    last = axis.at(value)
        return cls(axis.low, axis.high, ticks)

    def at(self, value: float) -> float:
        """Return the position of a value in percent of the width, at the edge if it lies beyond."""
        return 100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def head(self, less: str = "", more: str = "") -> str:
        """Return the numbers of the axis, below words at its two ends."""
        top = 14 if less else 0
        words = (
            f'<text class="end" x="0" y="10">{html_text(less)}</text>'
            f'<text class="end" x="100%" y="10" text-anchor="end">{html_text(more)}</text>'
        )
        numbers, last = [], {True: self.at(0), False: self.at(0)}
        for value, text in sorted(self.ticks, key=lambda tick: abs(tick[0])):
            x, side = self.at(value), value > 0
            close = value and abs(x - last[side]) < _CLOSE
            last[side] = last[side] if close else x
            if 3 < x < 97:
                kind = ' class="close"' * bool(close)
                numbers.append(f'<text{kind} x="{x:.2f}%" y="{top + 11}" text-anchor="middle">{text}</text>')
        inside = words * bool(less) + "".join(numbers)
        return f'<svg width="100%" height="{top + 15}" aria-hidden="true">{inside}</svg>'

    def draw(
        self, one: Difference, label: str, kind: str, margin: float | None = None, seeds: bool = True
    ) -> str:
        """Return an interval, its mean and, if wanted, a dot for each seed as a drawing with a text for
        screen readers. `kind`: class of its verdict, as `look` returns it; `margin`: smallest difference that
        matters, drawn as a band."""
        middle, parts = _HEIGHT / 2 - 3 * seeds, []
        if margin:
            left, right = self.at(-margin), self.at(margin)
            parts.append(
                f'<rect class="margin" x="{left:.2f}%" y="2" width="{right - left:.2f}%"'
                f' height="{_HEIGHT - 8}"/>'
            )
        zero = f"{self.at(0):.2f}%"
        parts.append(f'<line class="zero" x1="{zero}" x2="{zero}" y1="0" y2="{_HEIGHT - 4 * seeds}"/>')
        beyond = [one.mean < self.low, one.mean > self.high]
        if one.has_interval and math.isfinite(one.high) and not any(beyond):
            left, right = self.at(one.low), self.at(one.high)
            parts.append(
                f'<line class="bar" x1="{left:.2f}%" x2="{right:.2f}%" y1="{middle:g}" y2="{middle:g}"/>'
            )
            beyond = [one.low < self.low, one.high > self.high]
        parts += [
            f'<circle class="seed" cx="{self.at(value):.2f}%" cy="{_HEIGHT - 4}" r="1.8"/>'
            for value in one.values * seeds
            if self.low <= value <= self.high
        ]
        if one.pairs and self.low <= one.mean <= self.high:
            parts.append(mark(self.at(one.mean), middle, kind))
        parts += [
            f'<svg x="{end}" y="{middle:g}" overflow="visible"><path class="beyond" d="{path}"/></svg>'
            for end, path, out in zip(("0", "100%"), ("M8-5L0 0 8 5z", "M-8-5L0 0-8 5z"), beyond, strict=True)
            if out
        ]
        return (
            f'<svg class="{kind}" width="100%" height="{_HEIGHT}" role="img" aria-label="{html_text(label)}">'
            f"<title>{html_text(label)}</title>{''.join(parts)}</svg>"
        )
