"""First table of a report: every comparison with its interval drawn in its line, grouped by what is turned.

    sr: true instead of false                 -.02 ... 0 ... +.02        effect, 95 % interval   verdict
      with rht true      [the question]     ----------o--------          +0.0040 (...)           undecided

One scale for all lines, one sign for all numbers: arm minus baseline, or the value named first minus the
other. A dot is a seed, the grey band is what does not matter. Colours and words are those of the verdict,
which is corrected by Holm; without an answer no line is coloured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ablate.recipes import KNOBS
from ablate.reports.comparison_tables import WORD
from ablate.reports.drawn import Axis
from ablate.reports.plain_text import inline
from ablate.reports.table import Cell, Column, Html, Table, only
from ablate.results.attribution import shown_value
from ablate.results.comparisons import Comparisons
from ablate.results.forked import difference_word
from ablate.results.number_text import bounds, minus, shortened
from ablate.results.paired_stats import MOST_SEEDS, Difference, Verdict
from ablate.results.unpaired import pairing
from ablate.results.verdict_text import needed_text, verdict_notes
from ablate.training.metric_names import DAMAGE


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
    a group."""
    found: list[Line] = []
    knobs = sweep.grid.levels if sweep.grid and sweep.turned_knobs else {}
    stated = set()
    for effect, verdict in sweep.asked_effects:
        group = f"{effect.knobs[0]}: {effect.change}" if effect.knobs else "the question"
        others = [knob for knob in knobs if knob not in effect.knobs and knob not in effect.given]
        held = ", ".join(f"{knob} {shown_value(value)}" for knob, value in effect.given.items())
        label = " ".join(filter(None, (f"with {held}" if held else "", "on average" if others else "")))
        if not label:
            group, label = (effect.knobs or ("the question",))[0], effect.change
        stated.add((group, label))
        found.append(Line(group, label, effect.effect, verdict, effect.margin, True))
    averaged = len(knobs) > 1
    for effect, verdict in sweep.main_effects if knobs else ():
        whole = f"{effect.knobs[0]}: {effect.change}", "on average"
        group, label = whole if averaged else (effect.knobs[0], effect.change)
        if (group, label) not in stated:
            found.append(Line(group, label, effect.effect, verdict, effect.margin, sweep.asked is None))
    asked = {sweep.asked_contrast(effect) for effect, _ in sweep.asked_effects if effect.knobs}
    for contrast in sweep.contrasts if averaged else ():
        group = f"{contrast.knob}: {contrast.change}"
        label = f"with {contrast.held.replace('=', ' ')}"
        if (contrast.knob, contrast.change, contrast.held) not in asked:
            found.append(Line(group, label, contrast.effect, contrast.verdict, contrast.margin))
    to = "gap to" if difference_word(sweep.arms) != DAMAGE else "damage against"
    for arm in sweep.arms:
        if arm.gap is not None and arm.role not in ("searched", "null", "bad"):  # controls are checks
            found.append(Line(f"{to} {arm.baseline}", arm.name, arm.gap, arm.verdict, arm.margin))
    presets = "recipe" in (sweep.grid.levels if sweep.grid else ()) and not knobs
    for effect, verdict in sweep.main_effects if presets else ():
        if effect.knobs[0] == "recipe" and ("recipe", effect.change) not in stated:
            found.append(Line("recipe", effect.change, effect.effect, verdict, effect.margin))
    order = {group: number for number, group in enumerate(dict.fromkeys(line.group for line in found))}
    return sorted(found, key=lambda line: (order[line.group], not line.asked, line.difference.mean))


def effect_table(name: str, those: Sequence[Line], sweep: Comparisons, coloured: bool = True) -> Table[Line]:
    """Return comparisons as a table, on a page with drawn intervals. `name`: stem of its CSV file's name;
    `coloured`: False if a check failed, so that no line may be coloured."""
    axis, metric = Axis.of((line.difference, line.margin) for line in those), sweep.metric
    unit = f", {sweep.unit}" if sweep.unit else ""
    ends = ("← better", "worse →") if metric.direction == "minimize" else ("← worse", "better →")
    seeded, shown = any(line.verdict.needed for line in those), shortened([arm.name for arm in sweep.arms])

    def drawing(line: Line) -> Html:
        label, kind = shown(f"{line.group}, {line.label}: {bounds(line.difference)}"), line.verdict.shown
        return Html(axis.draw(line.difference, label, kind if coloured else "open", line.margin))

    def numbers(line: Line) -> Cell:
        text = bounds(line.difference)
        return (minus(text) if line.difference.pairs else text, line.difference.mean)

    def seeds(line: Line) -> Cell:
        if (needed := line.verdict.needed) is None:
            return None
        about = "≈ " if needed.count else ""
        return (f"{about}{needed_text(needed, ranged=False)} seeds", needed.count or MOST_SEEDS + 1)

    columns = [
        *only(
            "html",
            Column(f"{metric.name}{unit}", lambda line: labelled(shown(line.label), line.asked)),
            Column(Html(axis.head(*ends)), drawing),
            Column("effect, 95 % interval", numbers),
        ),
        *only(
            "markdown",
            Column("comparison", lambda line: f"{line.group}, {line.label}{' (the question)' * line.asked}"),
            Column(f"effect on {metric.name}{unit}, 95 % interval", lambda line: bounds(line.difference)),
        ),
        *only(
            "csv",
            Column("group", lambda line: line.group),
            Column("comparison", lambda line: line.label),
            Column("question", lambda line: "yes" * line.asked),
            Column("effect", lambda line: _plain(line.difference.mean)),
            Column("low", lambda line: _plain(line.difference.low)),
            Column("high", lambda line: _plain(line.difference.high)),
            Column("pairs", lambda line: line.difference.runs),
        ),
        WORD,
        Column("for a verdict", seeds, only=("html", "markdown")),
        *only(
            "csv",
            Column("p (Holm)", lambda line: _plain(line.verdict.p)),
            Column("seeds for a verdict", lambda line: needed_text(line.verdict.needed, ranged=False)),
            Column("differences by seed", lambda line: by_seed(line.difference)),
        ),
    ]
    caption = (
        f"Intervals are of differences {pairing(line.difference for line in those)}, each by itself; verdicts"
        " are corrected by Holm for the number of comparisons of their kind."
        f"{' For a verdict: seeds in all for an 80 % chance.' if seeded else ''} All numbers:"
        f' <a href="figures/{name}.csv">CSV</a>.'
    )
    kinds = [line.verdict.kind if coloured and not line.verdict.exploratory else "" for line in those]
    classes = [f"{kind}{' question' * line.asked}" for kind, line in zip(kinds, those, strict=True)]
    notes = [verdict_notes(line.verdict) + _perhaps_little(line) for line in those]
    knobs = [KNOBS.get(line.group.partition(":")[0]) for line in those]
    groups = [
        headed(shown(line.group), knob.help if knob else "") for line, knob in zip(those, knobs, strict=True)
    ]
    margin, *others = {line.margin for line in those} or {None}
    band = f"; grey band: below {margin:.2g}, too small to matter" if margin and not others else ""
    key = f"Bar: 95 % interval; large dot: mean; small dots: seeds{band}."
    return Table(name, those, columns, Html(caption), classes, notes, groups, key)


def labelled(label: str, asked: bool) -> Html:
    """Return the name of a comparison, with a mark if the question is about it."""
    return Html(inline(label) + ' <span class="asked">the question</span>' * asked)


def headed(group: str, means: str) -> Html:
    """Return the head of a group, with what its name means."""
    return Html(inline(group) + f' <span class="means">{inline(means)}</span>' * bool(means))


def _perhaps_little(line: Line) -> list[str]:
    """Return the note that a resolved effect may be smaller than what matters."""
    one, margin = line.difference, line.margin
    if not line.verdict.resolved or margin is None or not one.has_interval:
        return []
    little = min(abs(one.low), abs(one.high)) < margin
    return ["differs from zero, but perhaps by too little to matter"] * little


def by_seed(difference: Difference) -> str:
    """Return the differences by seed as text."""
    return " ".join(f"{value:.6g}" for value in difference.values)


def _plain(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else ""
