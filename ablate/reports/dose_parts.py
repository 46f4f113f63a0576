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
from ablate.reports.answer_measurements import Measurements
from ablate.reports.drawn import SQUARE, mark, reach, round_numbers
from ablate.reports.page import Part, Text
from ablate.reports.plain_text import html_text, inline
from ablate.reports.table import VERDICT, Cell, DrawnTable, Table
from ablate.results.doses import Dose, Doses, doses, sentence
from ablate.results.number_text import bounds, interval, minus
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
class _Plot:
    """Drawing of one dose-response, on the scale from `low` to `high`."""

    doses: Doses
    metric: Metric
    coloured: bool
    low: float
    high: float

    def svg(self) -> str:
        numbers = "".join(
            f'<text x="{_LEFT - 1.5}%" y="{self._y(value) + 4:.1f}" text-anchor="end">{text}</text>'
            for value, text in round_numbers(self.low, self.high)
        )
        places, zero = positions([dose.value for dose in self.doses.values]), f"{self._y(0):.1f}"
        wordy = min(b - a for a, b in itertools.pairwise(places)) > _WORDY
        drawn = zip(self.doses.values, places, strict=True)
        marks = "".join(self._mark(dose, x, wordy) for dose, x in drawn)
        said = "; ".join(_said(dose) for dose in self.doses.values if dose.change)
        label = html_text(f"{self.metric.name}, change from {_reference(self.doses)}: {said}")
        return (
            f'<svg width="100%" height="{_HEIGHT}" role="img" aria-label="{label}">'
            f"{self._band()}{numbers}{_names(self.doses.values, places)}"
            f'<line class="zero" x1="{_LEFT}%" x2="{_RIGHT}%" y1="{zero}" y2="{zero}"/>{self._ends()}{marks}'
            f'<text x="{(_LEFT + _RIGHT) / 2}%" y="{_HEIGHT - 6}" text-anchor="middle">'
            f"{html_text(self.doses.knob)}</text></svg>"
        )

    def _y(self, value: float) -> float:
        """Return the position of a value in pixels, at the edge if it lies beyond."""
        share = min(1.0, max(0.0, (self.high - value) / (self.high - self.low)))
        return _TOP + share * (_HEIGHT - _TOP - _BOTTOM - 10)

    def _band(self) -> str:
        margin = self.doses.margin
        if not margin:
            return ""
        top, bottom = self._y(margin), self._y(-margin)
        text = top + 14 if bottom - top > _THICK else top - 5
        outline = "" if margin < max(self.high, -self.low) else ' style="stroke: none"'
        return (
            f'<rect class="margin" x="{_LEFT}%" y="{top:.1f}" width="{_RIGHT - _LEFT}%"'
            f' height="{bottom - top:.1f}"{outline}/><text class="end" x="{_LEFT + 1}%" y="{text:.1f}">'
            f"below {margin:.2g}: too small to matter</text>"
        )

    def _ends(self) -> str:
        """Return the words above and below the axes."""
        above, below = ("worse", "better") if self.metric.direction == "minimize" else ("better", "worse")
        named = html_text(_reference(self.doses))
        return "".join(
            f'<text class="end" x="{_RIGHT}%" y="{y}" text-anchor="end">{word} than {named} {arrow}</text>'
            for y, word, arrow in ((12, above, "↑"), (_HEIGHT - _BOTTOM + 2, below, "↓"))
        )

    def _mark(self, dose: Dose, x: float, wordy: bool) -> str:
        if dose.change is None:
            return f'<g class="equivalent">{mark(x, self._y(0), "", SQUARE)}</g>'
        one, verdict = dose.change
        kind, parts = verdict.shown if self.coloured else "open", [f"<title>{_said(dose)}</title>"]
        if one.has_interval:
            top, bottom = self._y(one.high), self._y(one.low)
            parts.append(f'<line class="bar" x1="{x:.2f}%" x2="{x:.2f}%" y1="{top:.1f}" y2="{bottom:.1f}"/>')
            up, down = (top, "M-5 8L0 0 5 8z"), (bottom, "M-5-8L0 0 5-8z")
            parts += [
                f'<svg x="{x:.2f}%" y="{y:.1f}" overflow="visible"><path class="beyond" d="{path}"/></svg>'
                for y, path in [up] * (one.high > self.high) + [down] * (one.low < self.low)
            ]
        if one.pairs:
            parts.append(mark(x, self._y(one.mean), kind))
        if wordy and kind != "open":
            y = self._y(one.mean) - 8
            parts.append(f'<text class="word" x="{x + 1.4:.2f}%" y="{y:.1f}">{kind}</text>')
        return f'<g class="{kind}">{"".join(parts)}</g>'


def _said(dose: Dose) -> str:
    if dose.change is None:
        return ""
    change, verdict = dose.change
    return f"{dose}: {minus(bounds(change))}, {verdict_text(verdict, short=True)}"


def _reference(doses: Doses) -> str:
    return f"{doses.knob} {doses.reference}"


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


def dose_parts(sweep: Measurements) -> list[Part]:
    """Return a picture and a sentence for each ordered knob, without colours if a check failed."""
    shown: list[Part] = []
    for one in doses(sweep):
        shown.append(_picture(one, sweep.metric, sweep.unit, sweep.answer.valid))
        shown += [Text(text)] if (text := sentence(one)) else []
    return shown


def _picture(doses: Doses, metric: Metric, unit: str, coloured: bool) -> DrawnTable:
    """Return a heading, the drawing, how to read it, and the numbers."""
    rows: list[dict[str, Cell]] = [
        {
            doses.knob: str(dose),
            f"change from {doses.reference}": interval(dose.change[0]) if dose.change else "",
            VERDICT: verdict_text(dose.change[1], short=True) if dose.change else "",
            "gap to baseline": interval(dose.gap) if dose.gap else "",
            "of the gap closed": str(dose.closed or ""),
        }
        for dose in doses.values
    ]
    table, knob = Table.of(f"doses-{doses.knob.replace('.', '-')}", rows), KNOBS.get(doses.knob)
    given = "".join(f", with {knob} {value}" for knob, value in doses.given.items())
    means = f' <span class="means">{inline(knob.help)}</span>' if knob else ""
    of = f"{metric.name}{f', {unit}' if unit else ''}"
    title = inline(f"{of}: change from {_reference(doses)}{given}")
    kind = doses.reference.gap.interval if doses.reference.gap else "95 % interval"
    changes = ((dose.change[0], doses.margin) for dose in doses.values if dose.change)
    plot = _Plot(doses, metric, coloured, *reach(changes, _FARTHEST))
    html = (
        f'<div class="dose drawn"><p><b>{title}</b>{means}</p>{plot.svg()}'
        f'<p class="about">Bars: {kind} of the paired difference, each by itself. Filled: decided after'
        f' Holm\'s correction; open: undecided. <a href="figures/{table.name}.csv">CSV</a></p></div>'
    )
    return DrawnTable(html, table)
