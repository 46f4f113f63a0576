"""How far arms are from each other and how sure that is: paired gaps, what a knob does, what two do together,
what is the seed's."""

import itertools
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from ablate.experiment.schema import Metric, Published
from ablate.results.attribution import Grid, front, interactions
from ablate.results.contrasts import Contrast
from ablate.results.figures.style import (
    COLOURS,
    GREY,
    MOST_ARMS,
    Picture,
    best_of,
    better,
    canvas,
    finished,
    heat,
    house,
    label,
    legend,
    log_axis,
    marks,
    name_column,
    panels,
    plain,
    rows,
    stem,
)
from ablate.results.number_text import interval, number
from ablate.results.paired_stats import Difference, Verdict
from ablate.results.summary import ArmSummary, foremost
from ablate.results.verdict_text import verdict_text

_MOST_PANELS = 9
_MOST_WORDS = 8
"""Levels of a knob beyond which a heat map holds no numbers: they would not be read."""
_STANDINGS = {
    "better": (COLOURS[0], "o", "full"),
    "worse": (COLOURS[3], "s", "full"),
    "equivalent": ("0.35", "D", "full"),
    "not decided": ("0.35", "o", "none"),
}
"""Colour, marker and filling of what a comparison came to, after correction for all of its table."""


class _Line(NamedTuple):
    """One row of a forest."""

    name: str
    difference: Difference
    margin: float | None
    verdict: Verdict


@house
def forest(arms: list[ArmSummary], metric: Metric) -> Picture | None:
    """Each arm's gap to its baseline with its paired interval; the band is what does not matter. None where
    nothing has a pair."""
    best = foremost(arms, metric, MOST_ARMS)
    compared = [arm for arm in best if arm.gap is not None and arm.gap.pairs]
    if not compared:
        return None
    question = f"How far is each arm from its baseline in {metric.name}?"
    axis = (
        f"{metric.name}: arm minus baseline, paired,"
        f" {compared[0].interval}\n({better(metric.direction == 'minimize')})"
    )
    lines = [_Line(arm.name, arm.gap, arm.margin, arm.verdict) for arm in compared]
    data = pd.DataFrame(
        {
            "arm": arm.name,
            "baseline": arm.baseline,
            **_numbers(arm.gap, arm.margin),
            "verdict": verdict_text(arm.verdict),
        }
        for arm in compared
    )
    return _forest(
        stem("forest", metric.name), question, axis, lines, data, metric, best_of(len(best), len(arms))
    )


@house
def contrast_forest(contrasts: list[Contrast], metric: Metric) -> Picture | None:
    """What turning one knob did, everything else held, in the style of `forest`; of many the largest. None
    where nothing has a pair."""
    measured = [contrast for contrast in contrasts if contrast.effect.pairs]
    if not measured:
        return None
    largest = {
        id(contrast)
        for contrast in sorted(measured, key=lambda contrast: -abs(contrast.effect.mean))[:MOST_ARMS]
    }
    shown = [contrast for contrast in measured if id(contrast) in largest]
    question = f"What does turning one knob do to {metric.name}?"
    axis = (
        f"{metric.name}: first value minus the other, paired,"
        f" {shown[0].effect.interval}\n({better(metric.direction == 'minimize')})"
    )
    lines = [
        _Line(
            f"{c.knob}: {c.change}" + (f" (with {c.held})" if c.held else ""), c.effect, c.margin, c.verdict
        )
        for c in shown
    ]
    data = pd.DataFrame(
        {
            "knob": c.knob,
            "change": c.change,
            "held": c.held,
            **_numbers(c.effect, c.margin, "effect"),
            "verdict": verdict_text(c.verdict),
        }
        for c in shown
    )
    said = "" if len(shown) == len(measured) else f"The {len(shown)} largest of {len(measured):,} effects."
    return _forest(stem("contrast_forest", metric.name), question, axis, lines, data, metric, said)


def _numbers(difference: Difference, margin: float | None, name: str = "gap") -> dict[str, float]:
    margin = math.nan if margin is None else margin
    return {
        name: difference.mean,
        "low": difference.low,
        "high": difference.high,
        "pairs": difference.pairs,
        "margin": margin,
    }


def _forest(
    name: str, question: str, axis: str, lines: list[_Line], data: pd.DataFrame, metric: Metric, said: str
) -> Picture:
    margin = "The grey band is what does not matter." if any(line.margin for line in lines) else ""
    width = 6 + name_column(line.name for line in lines)
    body = canvas(question, width, 0.4 * len(lines) + 1.2, margin, said)
    axes = body.subplots()
    rows(axes, [line.name for line in lines])
    axes.axvline(0, color="0.4", linewidth=1)
    seen = []
    for row, line in enumerate(lines):
        if line.margin:
            axes.barh(row, 2 * line.margin, 1, -line.margin, color="0.93", zorder=0.5)
        seen.append(_standing(line.verdict))
        colour, marker, filled = _STANDINGS[seen[-1]]
        half = line.difference.high - line.difference.mean if line.difference.has_interval else None
        axes.errorbar(
            line.difference.mean,
            row,
            xerr=half,
            fmt=marker,
            color=colour,
            fillstyle=filled,
            capsize=4,
            markersize=6,
        )
        axes.text(
            1.02,
            row,
            plain(interval(line.difference)),
            transform=axes.get_yaxis_transform(),
            va="center",
            size="small",
        )
    axes.set_xlabel(axis)
    present = [standing for standing in _STANDINGS if standing in seen]
    handles = [
        Line2D(
            [], [], color=_STANDINGS[s][0], marker=_STANDINGS[s][1], fillstyle=_STANDINGS[s][2], linestyle=""
        )
        for s in present
    ]
    legend(body, handles, present, "lower center")
    return finished(name, question, body, data)


def _standing(verdict: Verdict) -> str:
    """Return the standing that a forest draws. An arm that a search chose by these numbers has no result,
    hence none."""
    if not verdict.decided or verdict.exploratory:
        return "not decided"
    return "equivalent" if verdict.kind == "same" else verdict.kind


@house
def dots(arms: list[ArmSummary], metric: Metric, published: Sequence[Published] = ()) -> Picture | None:
    """Every arm's metric, a dot a seed; its baseline and what was published of it beside. A log axis where
    they span a factor of 8. Of many arms the best, which is said. None where no arm was measured."""
    best = foremost(arms, metric, MOST_ARMS)
    measured = {arm.name: arm for arm in best if arm.values}
    if not measured:
        return None
    compared = [arm for arm in measured.values() if arm.baseline in measured]
    several = len({arm.baseline for arm in compared}) > 1
    shown = compared if several else list(measured.values())  # each baseline beside its arm, or one for all
    data = _dots(shown, measured if several else {}, metric, published)
    question = f"What did each arm come to in {metric.name}, seed by seed?"
    body = canvas(question, 5.6 + name_column(arm.name for arm in shown), 0.36 * len(shown) + 1.2)
    axes = body.subplots()
    rows(axes, [arm.name for arm in shown])
    places = {arm.name: row for row, arm in enumerate(shown)}
    looks = {
        "its baseline, by seed": {"marker": "|", "markersize": 14, "color": GREY},
        "arm, by seed": {"marker": "o", "color": COLOURS[0], "alpha": 0.7},
        "published": {"marker": "D", "markersize": 11, "fillstyle": "none", "color": COLOURS[3]},
    }
    handles = {}
    for what, look in looks.items():
        drawn = data[data["what"] == what]
        for arm, values in drawn.groupby("arm", sort=False)["value"]:
            (handles[what],) = axes.plot(values, [places[arm]] * len(values), linestyle="", **look)
    values = data["value"].abs()
    if values.min() > 0 and values.max() > 8 * values.min():
        axes.set_xscale("log")
        log_axis(axes.xaxis)
    said = (
        metric.name
        if len(best) == len(arms)
        else f"{metric.name}: the best {len(best)} of {len(arms):,} arms"
    )
    axes.set_xlabel(said)
    legend(body, list(handles.values()), list(handles), "lower center")
    return finished(stem("dots", metric.name), question, body, data)


def _dots(
    shown: list[ArmSummary], bases: dict[str, ArmSummary], metric: Metric, published: Sequence[Published]
) -> pd.DataFrame:
    lines = []
    for arm in shown:
        lines += [(arm.name, "arm, by seed", seed, value) for seed, value in arm.values.items()]
        base = bases[arm.baseline].values if bases else {}
        lines += [(arm.name, "its baseline, by seed", seed, value) for seed, value in base.items()]
    names = {arm.name for arm in shown}
    alone = [
        line
        for line in published
        if line.metric == metric.name and line.step is None and line.against is None
    ]
    lines += [(line.arm, "published", None, line.value) for line in alone if line.arm in names]
    return pd.DataFrame(lines, columns=["arm", "what", "seed", "value"]).astype({"seed": "Int64"})


@house
def interaction(grid: Grid | None, metric: Metric) -> Picture | None:
    """The metric over every two knobs of a grid, mean over the others and over seeds: where rows are not
    parallel, the knobs work upon each other. Of many pairs those that do so most. None where there is no
    grid, or it has one knob."""
    if grid is None or len(grid.levels) < 2:
        return None
    depends = dict.fromkeys(itertools.combinations(grid.levels, 2), 0.0)
    for effect in interactions(grid):
        depends[effect.knobs] = max(depends[effect.knobs], abs(effect.effect.mean))
    most = set(sorted(depends, key=lambda pair: -depends[pair])[:_MOST_PANELS])
    pairs = [pair for pair in depends if pair in most]
    means = {pair: _means(grid, *pair) for pair in pairs}
    low, high = _range(means.values())
    question = f"Does what one knob does to {metric.name} depend on another?"
    seeds = len(next(iter(grid.values.values())))
    rest = " and the other knobs" if len(grid.levels) > 2 else ""
    said = f"Means over {seeds} seed{'s' * (seeds > 1)}{rest}; {better(metric.direction == 'minimize')}."
    fewer = (
        ""
        if len(pairs) == len(depends)
        else f"The {len(pairs)} of {len(depends)} pairs of knobs that depend on each other most."
    )
    columns = min(3, len(pairs))
    tall = max(len(values) for values in means.values())
    body = canvas(
        question, 3.4 * columns + 1, (0.42 * min(tall, 10) + 1.5) * -(-len(pairs) // columns), said, fewer
    )
    drawn = panels(body, len(pairs), columns)
    for axes, (one, other) in zip(drawn, pairs, strict=True):
        values = means[one, other]
        words = (
            [[number(value) for value in line] for line in values]
            if max(values.shape) <= _MOST_WORDS
            else None
        )
        image = heat(axes, values, low, high, words)
        axes.set_yticks(range(values.shape[0]), [label(json.dumps(level), 16) for level in grid.levels[one]])
        axes.set_xticks(
            range(values.shape[1]), [label(json.dumps(level), 16) for level in grid.levels[other]]
        )
        axes.set(xlabel=plain(other), ylabel=plain(one))
    body.colorbar(image, ax=drawn, label=metric.name, shrink=0.9).outline.set_visible(False)
    lines = [
        {
            "knob": one,
            "level": json.dumps(first),
            "other_knob": other,
            "other_level": json.dumps(second),
            "mean": means[one, other][a, b],
            "seeds": seeds,
        }
        for one, other in pairs
        for a, first in enumerate(grid.levels[one])
        for b, second in enumerate(grid.levels[other])
    ]
    return finished(stem("interaction", metric.name), question, body, pd.DataFrame(lines))


def _range(matrices) -> tuple[float, float]:
    every = np.concatenate([matrix.ravel() for matrix in matrices])
    return float(every.min()), float(every.max())


def _means(grid: Grid, one: str, other: str) -> np.ndarray:
    """[levels of one, levels of the other]"""
    return np.array(
        [
            [
                np.mean(list(grid.mean(grid.cells(**{one: a, other: b})).values()))
                for b in range(len(grid.levels[other]))
            ]
            for a in range(len(grid.levels[one]))
        ]
    )


@house
def seed_spread(arms: list[ArmSummary], metric: Metric) -> Picture | None:
    """Each seed's value as a line across arms: what the lines have in common is the seed's, and goes when
    arms are paired. None where no arm was measured."""
    best = foremost(arms, metric, MOST_ARMS)
    shown = [arm for arm in best if arm.values]
    if not shown:
        return None
    data = pd.DataFrame(
        [(arm.name, seed, value) for arm in shown for seed, value in sorted(arm.values.items())],
        columns=["arm", "seed", "value"],
    )
    seeds = sorted(set(data["seed"]))
    question = f"How much of {metric.name} is the seed's?"
    body = canvas(
        question,
        6 + name_column(arm.name for arm in shown),
        max(0.36 * len(shown) + 1, 2.2),
        _spread(shown),
        best_of(len(best), len(arms)),
    )
    axes = body.subplots()
    rows(axes, [arm.name for arm in shown])
    for seed, mark in marks(map(str, seeds)).items():
        axes.plot(
            [arm.values.get(int(seed), math.nan) for arm in shown],
            range(len(shown)),
            **mark._asdict(),
            markersize=5,
            linewidth=1,
        )
    axes.set_xlabel(f"{metric.name} ({better(metric.direction == 'minimize')})")
    if len(seeds) <= 12:
        legend(body, axes.lines, [f"seed {seed}" for seed in seeds])
    return finished(stem("seed_spread", metric.name), question, body, data)


def _spread(arms: list[ArmSummary]) -> str:
    """The two deviations whose ratio is what pairing is worth; nothing of one seed."""
    of_values = [np.std(list(arm.values.values()), ddof=1) for arm in arms if len(arm.values) > 1]
    of_gaps = [arm.gap.deviation for arm in arms if arm.gap is not None and arm.gap.pairs > 1]
    if not of_gaps:
        return "One seed: no spread." if not of_values else ""
    values, gaps = (math.sqrt(np.mean(np.square(found))) for found in (of_values, of_gaps))
    return (
        f"Standard deviation over seeds: {values:.2g} of an arm's values, {gaps:.2g} of its differences from"
        " its baseline."
    )


@house
def throughput_gap(arms: list[ArmSummary], metric: Metric) -> Picture | None:
    """Each arm's gap to its baseline over its throughput, and the arms that no other beats in both; a
    baseline's gap is 0. None where no throughput was measured. It compares runs of equal hardware only."""
    best = foremost(arms, metric, MOST_ARMS)
    shown = [
        arm
        for arm in best
        if math.isfinite(arm.tokens_per_s) and arm.values and (arm.gap is None or arm.gap.pairs)
    ]
    if not shown:
        return None
    gaps = {arm.name: 0.0 if arm.gap is None else arm.gap.mean for arm in shown}
    minimize = metric.direction == "minimize"
    unbeaten = front(
        {arm.name: (arm.tokens_per_s, gaps[arm.name]) for arm in shown}, (-1, 1 if minimize else -1)
    )
    data = pd.DataFrame(
        {
            "arm": arm.name,
            "tokens_per_s": arm.tokens_per_s,
            "gap": gaps[arm.name],
            "low": math.nan if arm.gap is None else arm.gap.low,
            "high": math.nan if arm.gap is None else arm.gap.high,
            "front": arm.name in unbeaten,
        }
        for arm in shown
    )
    question = f"What does speed cost in {metric.name}?"
    said = "Ringed and joined: the arms that no other beats in both. Bars are paired intervals."
    body = canvas(question, 7.5, max(3.8, 0.3 * len(shown) + 0.4), said, best_of(len(best), len(arms)))
    axes = body.subplots()
    axes.axhline(0, color="0.4", linewidth=1)
    edge = data[data["front"]].sort_values("tokens_per_s")
    axes.plot(edge["tokens_per_s"], edge["gap"], "-", color="0.6", zorder=1)
    axes.plot(edge["tokens_per_s"], edge["gap"], "o", markersize=13, fillstyle="none", color="0.35", zorder=1)
    handles = []
    for arm, mark in zip(shown, marks(gaps).values(), strict=True):
        half = arm.gap.high - arm.gap.mean if arm.gap is not None and arm.gap.has_interval else None
        axes.errorbar(
            arm.tokens_per_s,
            gaps[arm.name],
            yerr=half,
            fmt=mark.marker,
            color=mark.color,
            capsize=3,
            markersize=6,
        )
        handles.append(Line2D([], [], color=mark.color, marker=mark.marker, linestyle=""))
    axes.set(
        xlabel="tokens a second (more is better)",
        ylabel=f"{metric.name}: arm minus baseline\n({better(minimize)})",
    )
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid()
    legend(body, handles, list(gaps))
    return finished(stem("throughput_gap", metric.name), question, body, data)
