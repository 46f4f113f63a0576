"""Picture of a dose-response: the change of the metric over the values of an ordered knob.

The same intervals and verdicts as in the table of comparisons, upright: decided values are filled, others
open, and the region that is too small to matter is a band. The drawing fits its column as those of `drawn`
do. Notes and CSV have the numbers as a table.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ablate.experiment.schema import Metric
from ablate.recipes import KNOBS
from ablate.reports.drawn import SQUARE, mark, reach, round_numbers
from ablate.reports.page import Part, Text
from ablate.reports.plain_text import html_text, inline
from ablate.reports.table import VERDICT, Cell, Table, TablePicture
from ablate.results.doses import Dose, Doses, sentence
from ablate.results.number_text import bounds, interval, minus
from ablate.results.paired_stats import Difference, Verdict
from ablate.results.verdict_text import verdict_text

_HEIGHT, _TOP, _BOTTOM = 330, 20, 44
"""Height of the drawing and of the space above and below its axes, in CSS pixels."""
_LEFT, _RIGHT = 15.0, 97.0
"""Edges of the axes in percent of the width."""
_FARTHEST = 6.0
"""A margin this many times as wide as the widest interval that is shown lies outside of the axes."""
_WORDY = 12.0
"""Smallest distance of two values, in percent of the width, that leaves room for words beside the marks."""
_THICK = 60
"""Least height in pixels of a band that has room for words above its middle."""
_APART = 16.0
"""Space between a knob that is off and its smallest number, in percent of the width."""
_CROWDED = 0.12
"""Share of the axis below which neighbours and their numbers are too close to read."""


@dataclass(frozen=True)
class DosePicture(TablePicture):
    """Drawing of a dose-response on a page; a table elsewhere."""

    doses: Doses
    metric: Metric
    unit: str
    coloured: bool

    def html(self) -> str:
        """Return a heading, the drawing, and how to read it."""
        given = "".join(f", with {knob} {value}" for knob, value in self.doses.given.items())
        knob = KNOBS.get(self.doses.knob)
        means = f' <span class="means">{inline(knob.help)}</span>' if knob else ""
        unit = f", {self.unit}" if self.unit else ""
        kind = self.doses.reference.gap.interval if self.doses.reference.gap else "95 % interval"
        title = inline(f"{self.metric.name}{unit}: change from {self._named}{given}")
        return (
            f'<div class="dose drawn"><p><b>{title}</b>{means}</p>{self._drawing()}'
            f'<p class="about">Bars: {kind} of the paired difference, each by itself. Filled: decided after'
            " Holm's correction; open: undecided."
            f' <a href="figures/{self.table.name}.csv">CSV</a></p></div>'
        )

    @property
    def _named(self) -> str:
        return f"{self.doses.knob} {self.doses.reference}"

    @property
    def table(self) -> Table:
        """Numbers of the drawing."""
        change = f"change from {self.doses.reference}"
        rows: list[dict[str, Cell]] = [
            {
                self.doses.knob: str(dose),
                change: interval(dose.change[0]) if dose.change else "",
                VERDICT: verdict_text(dose.change[1], short=True) if dose.change else "",
                "gap to baseline": interval(dose.gap) if dose.gap else "",
                "of the gap closed": str(dose.closed or ""),
            }
            for dose in self.doses.values
        ]
        return Table.of(f"doses-{self.doses.knob.replace('.', '-')}", rows)

    def _drawing(self) -> str:
        changes = [(str(dose), *dose.change) for dose in self.doses.values if dose.change]
        low, high = reach(((change, self.doses.margin) for _, change, _ in changes), _FARTHEST)
        scale = _Scale(low, high)
        numbers = "".join(
            f'<text x="{_LEFT - 1.5}%" y="{scale.y(value) + 4:.1f}" text-anchor="end">{text}</text>'
            for value, text in round_numbers(low, high)
        )
        places = positions([dose.value for dose in self.doses.values])
        wordy = min(b - a for a, b in itertools.pairwise(places)) > _WORDY
        marks = "".join(
            self._mark(dose, x, scale, wordy) for dose, x in zip(self.doses.values, places, strict=True)
        )
        numbers_said = "; ".join(_said(*change) for change in changes)
        label = html_text(f"{self.metric.name}, change from {self._named}: {numbers_said}")
        return (
            f'<svg width="100%" height="{_HEIGHT}" role="img" aria-label="{label}">'
            f"{self._band(scale)}{numbers}{_names(self.doses.values, places)}"
            f'<line class="zero" x1="{_LEFT}%" x2="{_RIGHT}%" y1="{scale.y(0):.1f}" y2="{scale.y(0):.1f}"/>'
            f"{self._ends()}{marks}"
            f'<text x="{(_LEFT + _RIGHT) / 2}%" y="{_HEIGHT - 6}" text-anchor="middle">'
            f"{html_text(self.doses.knob)}</text></svg>"
        )

    def _band(self, scale: "_Scale") -> str:
        margin = self.doses.margin
        if not margin:
            return ""
        top, bottom = scale.y(margin), scale.y(-margin)
        text = top + 14 if bottom - top > _THICK else top - 5
        outline = "" if margin < max(scale.high, -scale.low) else ' style="stroke: none"'
        return (
            f'<rect class="margin" x="{_LEFT}%" y="{top:.1f}" width="{_RIGHT - _LEFT}%"'
            f' height="{bottom - top:.1f}"{outline}/><text class="end" x="{_LEFT + 1}%" y="{text:.1f}">'
            f"below {margin:.2g}: too small to matter</text>"
        )

    def _ends(self) -> str:
        """Return the words above and below the axes."""
        above, below = ("worse", "better") if self.metric.direction == "minimize" else ("better", "worse")
        named = html_text(self._named)
        return (
            f'<text class="end" x="{_RIGHT}%" y="12" text-anchor="end">{above} than {named} ↑</text>'
            f'<text class="end" x="{_RIGHT}%" y="{_HEIGHT - _BOTTOM + 2}" text-anchor="end">'
            f"{below} than {named} ↓</text>"
        )

    def _mark(self, dose: Dose, x: float, scale: "_Scale", wordy: bool) -> str:
        if dose.change is None:
            return f'<g class="equivalent">{mark(x, scale.y(0), "", SQUARE)}</g>'
        one, verdict = dose.change
        kind, parts = (
            verdict.shown if self.coloured else "open",
            [f"<title>{_said(str(dose), *dose.change)}</title>"],
        )
        if one.has_interval:
            top, bottom = scale.y(one.high), scale.y(one.low)
            parts.append(f'<line class="bar" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top:.1f}" y2="{bottom:.1f}"/>')
            parts += [
                f'<svg x="{x:.2f}%" y="{y:.1f}" overflow="visible"><path class="beyond" d="{path}"/></svg>'
                for y, path, out in (
                    (top, "M-5 8L0 0 5 8z", one.high > scale.high),
                    (bottom, "M-5-8L0 0 5-8z", one.low < scale.low),
                )
                if out
            ]
        if one.pairs:
            parts.append(mark(x, scale.y(one.mean), kind))
        if wordy and kind != "open":
            y = scale.y(one.mean) - 8
            parts.append(f'<text class="word" x="{x + 1.4:.2f}%" y="{y:.1f}">{kind}</text>')
        return f'<g class="{kind}">{"".join(parts)}</g>'


def _said(value: str, change: Difference, verdict: Verdict) -> str:
    return f"{value}: {minus(bounds(change))}, {verdict_text(verdict, short=True)}"


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float

    def y(self, value: float) -> float:
        """Return the position of a value in pixels, at the edge if it lies beyond."""
        share = min(1.0, max(0.0, (self.high - value) / (self.high - self.low)))
        return _TOP + share * (_HEIGHT - _TOP - _BOTTOM - 10)


def positions(values: Sequence[float | None]) -> list[float]:
    """Return the places of ascending values on the axis, in percent of the width; None stands on the left,
    apart from the numbers. The axis is linear, or logarithmic if that keeps neighbours further apart; values
    that neither separates are evenly spaced."""
    numbers = [value for value in values if value is not None]
    inset = 3.0 + _APART * (len(values) - len(numbers))
    scales = [numbers, [math.log(value) for value in numbers] if numbers[0] > 0 else numbers]
    nearest = [min(b - a for a, b in itertools.pairwise(scale)) / (scale[-1] - scale[0]) for scale in scales]
    best = scales[1] if nearest[1] > 1.5 * nearest[0] else scales[0]
    if max(nearest) < _CROWDED:
        best = [float(number) for number in range(len(numbers))]
    first, last = best[0], best[-1]
    width = _RIGHT - _LEFT - inset - _WORDY
    off = [_LEFT + 3.0] * (len(values) - len(numbers))
    return [*off, *(_LEFT + inset + width * (value - first) / (last - first) for value in best)]


def _names(values: Sequence[Dose], places: Sequence[float]) -> str:
    """Return the values below the axis, but none that would touch another."""
    shown, last = [], -math.inf
    for dose, x in zip(values, places, strict=True):
        if x - last >= 7:
            shown.append(
                f'<text x="{x:.2f}%" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{dose}</text>'
            )
            last = x
    return "".join(shown)


def dose_parts(found: Sequence[Doses], metric: Metric, unit: str, coloured: bool) -> list[Part]:
    """Return a picture and a sentence for each ordered knob. `unit`: the metric's, empty if it has no name;
    `coloured`: False if a check failed, so that nothing may be coloured."""
    shown: list[Part] = []
    for doses in found:
        shown.append(DosePicture(doses, metric, unit, coloured))
        shown += [Text(text)] if (text := sentence(doses)) else []
    return shown
