"""First table of a report: every comparison with its interval drawn in its line, grouped by what is turned.

    sr: true instead of false                 -.02 ... 0 ... +.02        effect, 95 % interval   verdict
      with rht true      [the question]     ----------o--------          +0.0040 (...)           undecided

One scale for all lines, one sign for all numbers: arm minus baseline, or the value named first minus the
other. A dot is a seed, the grey band is what does not matter. Colours and words are those of the verdict,
which is corrected by Holm; without an answer no line is coloured.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ablate.recipes import KNOBS
from ablate.reports.page import inline
from ablate.reports.plain_text import csv_cell, footnotes, html_text, markdown_cell
from ablate.results.comparisons import Comparisons
from ablate.results.forked import difference_word
from ablate.results.number_text import signed
from ablate.results.paired_stats import Difference, Verdict
from ablate.results.verdict_text import needed_text, verdict_notes, verdict_text
from ablate.training.metric_names import DAMAGE

_WIDTH, _HEIGHT = 300, 26
"""Size of a drawn interval in CSS pixels."""
_COLUMNS = (
    "group",
    "comparison",
    "question",
    "effect",
    "low",
    "high",
    "pairs",
    "verdict",
    "p (Holm)",
    "seeds for a verdict",
    "differences by seed",
)
_WIDEST = 3.0
"""Half-widths beyond this multiple of the median are cut off with an arrow, so that they do not flatten the
others."""


@dataclass(frozen=True)
class Line:
    """One comparison."""

    group: str
    label: str
    difference: Difference
    verdict: Verdict
    margin: float | None
    asked: bool = False
    """True if the question is about it."""


def lines(sweep: Comparisons) -> list[Line]:
    """Return the comparisons of a sweep by group: those that the question is about first, then the other
    contrasts of knobs, then every arm against its baseline, then presets against each other; by effect within
    a group.

    Args:
        sweep: the sweep's comparisons.
    """
    found: list[Line] = []
    knobs = sweep.grid.levels if sweep.grid and sweep.turned_knobs else {}
    stated = set()
    for effect, verdict in sweep.asked_effects:
        group = f"{effect.knobs[0]}: {effect.change}" if effect.knobs else "the question"
        others = [knob for knob in knobs if knob not in effect.knobs and knob not in effect.given]
        held = ", ".join(f"{knob} {_json(value)}" for knob, value in effect.given.items())
        label = " ".join(filter(None, (f"with {held}" if held else "", "on average" if others else "")))
        if not label:
            group, label = (effect.knobs or ("the question",))[0], effect.change
        stated.add((group, label))
        found.append(Line(group, label, effect.effect, verdict, effect.margin, True))
    averaged = len(knobs) > 1
    for effect, verdict in sweep.main_effects if knobs else ():
        group, label = (
            (f"{effect.knobs[0]}: {effect.change}", "on average")
            if averaged
            else (effect.knobs[0], effect.change)
        )
        if (group, label) not in stated:
            found.append(Line(group, label, effect.effect, verdict, effect.margin, sweep.asked is None))
    for contrast in sweep.contrasts if averaged else ():
        group = f"{contrast.knob}: {contrast.change}"
        label = f"with {contrast.held.replace('=', ' ')}"
        if (group, label) not in stated:
            found.append(Line(group, label, contrast.effect, contrast.verdict, contrast.margin))
    to = "gap to" if difference_word(sweep.arms) != DAMAGE else "damage against"
    for arm in sweep.arms:
        if arm.gap is not None and arm.role != "searched":
            found.append(Line(f"{to} {arm.baseline}", arm.name, arm.gap, arm.verdict, arm.margin))
    presets = "recipe" in (sweep.grid.levels if sweep.grid else ()) and not knobs
    for effect, verdict in sweep.main_effects if presets else ():
        if effect.knobs[0] == "recipe" and ("recipe", effect.change) not in stated:
            found.append(Line("recipe", effect.change, effect.effect, verdict, effect.margin))
    order = {group: number for number, group in enumerate(dict.fromkeys(line.group for line in found))}
    return sorted(found, key=lambda line: (order[line.group], not line.asked, line.difference.mean))


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class EffectTable:
    """The comparisons as a table with drawn intervals."""

    name: str
    """Stem of its CSV file's name."""
    lines: Sequence[Line]
    metric: str
    unit: str
    minimize: bool
    coloured: bool = True
    """False if a check failed, so that no line may be coloured."""

    @property
    def empty(self) -> bool:
        """True if nothing is compared."""
        return not self.lines

    def html(self) -> str:
        """Return the table."""
        scale = _Scale.of(self.lines)
        marks, notes = footnotes([verdict_notes(line.verdict) for line in self.lines])
        body, group = [], ""
        for line, mark in zip(self.lines, marks or [""] * len(self.lines), strict=True):
            if line.group != group:
                group = line.group
                knob = KNOBS.get(group.partition(":")[0])
                means = f' <span class="means">{inline(knob.help)}</span>' if knob else ""
                head = f'<th colspan="5" scope="colgroup">{inline(group)}{means}</th>'
                body.append(f'<tr class="group">{head}</tr>')
            body.append(self._row(line, mark, scale))
        unit = f", {self.unit}" if self.unit else ""
        head = (
            f"<th>{inline(self.metric)}{inline(unit)} ({self._better})</th>"
            f'<th class="drawn">{scale.axis()}</th>'
            '<th class="number">effect, 95 % interval</th><th>verdict</th>'
        ) + ('<th class="number">for a verdict</th>' if self._open else "")
        seeds = " For a verdict: seeds in all for an 80 % chance." if self._open else ""
        what = (
            "Intervals are of the paired differences, each by itself; verdicts are corrected by Holm for the"
            f" number of comparisons of their kind.{seeds} All numbers:"
            f' <a href="figures/{self.name}.csv">CSV</a>.'
        )
        caption = "<br>".join([*map(inline, notes), what])
        inside = "\n".join(body)
        return (
            f'<p class="about">{self._key}</p>'
            f'<div class="scroll"><table class="effects" id="table-{self.name}"><caption>{caption}</caption>'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{inside}\n</tbody></table></div>"
        )

    @property
    def _key(self) -> str:
        """The key to the drawing: one line above the table."""
        margins = {line.margin for line in self.lines}
        margin = margins.pop() if len(margins) == 1 else None
        band = f"; grey band: below {margin:.3g}, too small to matter" if margin else ""
        return f"Bar: 95 % interval; large dot: mean; small dots: seeds{band}."

    @cached_property
    def _open(self) -> bool:
        """True if any comparison needs more seeds, which have a column then."""
        return any(_seeds(line.verdict) for line in self.lines)

    @property
    def _better(self) -> str:
        return "less is better" if self.minimize else "more is better"

    def _row(self, line: Line, mark: str, scale: "_Scale") -> str:
        kind = line.verdict.kind if self.coloured and not line.verdict.exploratory else ""
        asked = ' <span class="asked">the question</span>' if line.asked else ""
        classes = " ".join(filter(None, (kind, "question" if line.asked else "")))
        seeds = f'<td class="number">{inline(_seeds(line.verdict))}</td>' if self._open else ""
        return (
            f'<tr class="{classes}" data-arm="{html_text(line.label)}"><td>{inline(line.label)}{asked}</td>'
            f'<td class="drawn">{scale.draw(line)}</td><td class="number">{_bounds(line.difference)}</td>'
            f'<td class="verdict">{inline(verdict_text(line.verdict, short=True) + mark)}</td>'
            f"{seeds}</tr>"
        )

    def markdown(self) -> str:
        """Return a pipe table with a line for each comparison."""
        marks, notes = footnotes([verdict_notes(line.verdict) for line in self.lines])
        unit = f", {self.unit}" if self.unit else ""
        rows = [
            ["comparison", f"effect on {self.metric}{unit}, 95 % interval", "verdict", "for a verdict"],
            ["---"] * 4,
        ]
        for line, mark in zip(self.lines, marks or [""] * len(self.lines), strict=True):
            asked = " (the question)" if line.asked else ""
            word = verdict_text(line.verdict, short=True)
            rows.append(
                [
                    f"{line.group}, {line.label}{asked}",
                    _bounds(line.difference),
                    word + mark,
                    _seeds(line.verdict),
                ]
            )
        table = "\n".join(f"| {' | '.join(map(markdown_cell, row))} |" for row in rows)
        return "\n\n".join(filter(None, [table, "  \n".join(map(markdown_cell, notes))]))

    def save(self, folder: Path) -> None:
        """Write the numbers as a CSV file, one comparison a row, with every seed's difference."""
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{self.name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            for line in self.lines:
                one = line.difference
                numbers = [_plain(value) for value in (one.mean, one.low, one.high)]
                writer.writerow(
                    [
                        csv_cell(line.group),
                        csv_cell(line.label),
                        "yes" if line.asked else "",
                        *numbers,
                        one.pairs,
                        verdict_text(line.verdict, short=True),
                        _plain(line.verdict.p),
                        _seeds(line.verdict).lstrip("≈ ").removesuffix(" seeds"),
                        " ".join(f"{value:.6g}" for value in one.values),
                    ]
                )


def _plain(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""


def _bounds(difference: Difference) -> str:
    """Return `+0.0040 (-0.0190 to +0.0280)`."""
    if not difference.pairs:
        return "-"
    mean = signed(difference.mean, difference)
    if not difference.has_interval:
        return mean
    return f"{mean} ({signed(difference.low, difference)} to {signed(difference.high, difference)})"


def _seeds(verdict: Verdict) -> str:
    text = needed_text(verdict.needed, ranged=False)
    return f"{'' if text.startswith('over') else '≈ '}{text} seeds" if text else ""


@dataclass(frozen=True)
class _Scale:
    """Common scale of the drawn intervals: from -limit to limit, or the part of it that is needed."""

    low: float
    high: float

    @classmethod
    def of(cls, those: Iterable[Line]) -> "_Scale":
        known = [line for line in those if line.difference.pairs]
        halves = sorted(
            line.difference.high - line.difference.mean for line in known if line.difference.has_interval
        )
        most = _WIDEST * halves[len(halves) // 2] if halves else math.inf
        ends = [0.0]
        for line in known:
            one = line.difference
            half = min(one.high - one.mean, most) if one.has_interval else 0.0
            ends += [one.mean - half, one.mean + half]
            ends += [-line.margin, line.margin] if line.margin and line.margin < 2 * most else []
        low, high = min(ends), max(ends)
        pad = 0.06 * (high - low) or 1.0
        return cls(low - pad, high + pad)

    def x(self, value: float) -> float:
        """Return the place of a value in pixels, at the edge if it lies beyond."""
        share = (value - self.low) / (self.high - self.low)
        return round(_WIDTH * min(1.0, max(0.0, share)), 1)

    def axis(self) -> str:
        """Return the scale's numbers as a drawing."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / 2))
        step = next(s for s in (step, 2 * step, 5 * step, 10 * step) if (self.high - self.low) / s <= 6)
        decimals = max(0, -math.floor(math.log10(step)))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        ticks = "".join(
            f'<text x="{self.x(number * step)}" y="12" text-anchor="middle">'
            f"{'0' if number == 0 else f'{number * step:+.{decimals}f}'}</text>"
            for number in range(first, last + 1)
            if 12 < self.x(number * step) < _WIDTH - 12
        )
        return f'<svg viewBox="0 0 {_WIDTH} 16" width="{_WIDTH}" height="16" aria-hidden="true">{ticks}</svg>'

    def draw(self, line: Line) -> str:
        """Return the interval, its mean and its seeds as a drawing with a text for screen readers."""
        one, middle = line.difference, _HEIGHT / 2 - 3
        parts = []
        if line.margin:
            left, right = self.x(-line.margin), self.x(line.margin)
            parts.append(
                f'<rect class="margin" x="{left}" y="2" width="{right - left:.1f}" height="{_HEIGHT - 8}"/>'
            )
        parts.append(f'<line class="zero" x1="{self.x(0)}" x2="{self.x(0)}" y1="0" y2="{_HEIGHT - 4}"/>')
        if one.has_interval and math.isfinite(one.high):
            left, right = self.x(one.low), self.x(one.high)
            parts.append(f'<line class="bar" x1="{left}" x2="{right}" y1="{middle}" y2="{middle}"/>')
            parts += [
                f'<path class="beyond" d="M{end} {middle - 4}l{sign * 5} 4l{-sign * 5} 4z"/>'
                for end, sign, out in (
                    (left + 5, -1, one.low < self.low),
                    (right - 5, 1, one.high > self.high),
                )
                if out
            ]
        parts += [
            f'<circle class="seed" cx="{self.x(value)}" cy="{_HEIGHT - 4}" r="1.8"/>'
            for value in one.values
            if self.low <= value <= self.high
        ]
        if one.pairs:
            parts.append(f'<circle class="mean" cx="{self.x(one.mean)}" cy="{middle}" r="4"/>')
        label = html_text(f"{line.group}, {line.label}: {_bounds(one)}")
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img"'
            f' aria-label="{label}"><title>{label}</title>{"".join(parts)}</svg>'
        )
