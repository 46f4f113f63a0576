"""Figures of effects: interactions of two knobs, and the gap over throughput."""

import itertools
import json
import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from ablate.experiment.schema import Metric
from ablate.reports.comparison_tables import foremost
from ablate.reports.figures import tables
from ablate.reports.figures.style import (
    MOST_ARMS,
    Drawing,
    Picture,
    best_of,
    better,
    heat,
    house,
    label,
    marks,
    plain,
)
from ablate.reports.figures.tables import FEWEST_POINTS
from ablate.results.attribution import Grid, front, interactions
from ablate.results.number_text import number
from ablate.results.summary import ArmSummary
from ablate.training.metric_names import each_layer

_MOST_PANELS = 9
_MOST_LEVELS = 8
"""Largest number of levels of a knob for which a heat map shows numbers. More would be too small to read."""
LAYERS_SQNR = (each_layer("sqnr_db"),)
"""Metrics from which `operand_errors` computes errors."""


@house
def interaction(grid: Grid | None, metric: Metric) -> Picture | None:
    """Draw the metric over every two knobs of a grid, as a mean over the other knobs and over seeds; None
    without a grid, or for a grid of one knob. If there are many pairs, those with the largest interactions
    are drawn.

    If rows are not parallel, the effect of one knob depends on the other.
    """
    if grid is None or len(grid.levels) < 2:
        return None
    depends = dict.fromkeys(itertools.combinations(grid.levels, 2), 0.0)
    for effect in interactions(grid):
        one, other = effect.knobs
        depends[one, other] = max(depends[one, other], abs(effect.effect.mean))
    most = set(sorted(depends, key=lambda pair: -depends[pair])[:_MOST_PANELS])
    pairs = [pair for pair in depends if pair in most]
    means = {pair: _means(grid, *pair) for pair in pairs}
    every = np.concatenate([values.ravel() for values in means.values()])
    seeds = len(next(iter(grid.values.values())))
    rest = " and the other knobs" if len(grid.levels) > 2 else ""
    note = f"Means over {seeds} seed{'s' * (seeds > 1)}{rest}; {better(metric)}."
    fewer = f"The {len(pairs)} of {len(depends)} pairs of knobs that depend on each other most."
    fewer = "" if len(pairs) == len(depends) else fewer
    columns = min(3, len(pairs))
    height = (0.42 * min(max(map(len, means.values())), 10) + 1.5) * -(-len(pairs) // columns)
    question = f"Does what one knob does to {metric.name} depend on another?"
    drawing = Drawing(question, 3.4 * columns + 1, height, note, fewer)
    drawn = drawing.panels(len(pairs), columns)
    for axes, (one, other) in zip(drawn, pairs, strict=True):
        values = means[one, other]
        texts = [[number(value) for value in line] for line in values]
        small = max(values.shape) <= _MOST_LEVELS
        image = heat(axes, values, every.min(), every.max(), texts if small else None)
        down, across = (
            [label(json.dumps(level), 16) for level in grid.levels[knob]] for knob in (one, other)
        )
        axes.set_yticks(range(len(down)), down)
        axes.set_xticks(range(len(across)), across)
        axes.set(xlabel=plain(other), ylabel=plain(one))
    drawing.body.colorbar(image, ax=drawn, label=metric.name, shrink=0.9).outline.set_visible(False)
    lines = [
        (one, json.dumps(first), other, json.dumps(second), means[one, other][a, b], seeds)
        for one, other in pairs
        for a, first in enumerate(grid.levels[one])
        for b, second in enumerate(grid.levels[other])
    ]
    data = pd.DataFrame(lines, columns=["knob", "level", "other_knob", "other_level", "mean", "seeds"])
    return drawing.picture(data, "interaction", metric.name)


def _means(grid: Grid, one: str, other: str) -> np.ndarray:
    """Return the mean at each pair of levels, [levels of one, levels of other]."""

    def mean(a: int, b: int) -> float:
        return float(np.mean(list(grid.mean(grid.cells(**{one: a, other: b})).values())))

    rows, columns = (range(len(grid.levels[knob])) for knob in (one, other))
    return np.array([[mean(a, b) for b in columns] for a in rows])


@house
def throughput_gap(arms: list[ArmSummary], metric: Metric) -> Picture | None:
    """Draw each arm's gap to its baseline over its throughput, and mark the arms that no other beats in both.
    None if the throughput of fewer than three arms was measured.

    If there are many arms, the best are drawn. The gap of a baseline is 0. The comparison holds for runs on
    equal hardware only.
    """
    best = foremost(arms, metric, MOST_ARMS)
    measured = [arm for arm in best if math.isfinite(arm.tokens_per_s) and arm.values]
    shown = [arm for arm in measured if arm.gap is None or arm.gap.pairs]
    if len(shown) < FEWEST_POINTS:
        return None
    gaps = {arm.name: 0.0 if arm.gap is None else arm.gap.mean for arm in shown}
    points = {arm.name: (arm.tokens_per_s, gaps[arm.name]) for arm in shown}
    unbeaten = front(points, (-1, 1 if metric.direction == "minimize" else -1))
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
    note = "Ringed and joined: the arms that no other beats in both. Bars are paired intervals."
    question, few = f"What does speed cost in {metric.name}?", best_of(len(best), len(arms))
    drawing, axes = _points(question, data, arms, metric, note, few)
    edge = data[data["front"]].sort_values("tokens_per_s")
    axes.plot(edge["tokens_per_s"], edge["gap"], "-", color="0.6", zorder=1)
    axes.plot(edge["tokens_per_s"], edge["gap"], "o", markersize=13, fillstyle="none", color="0.35", zorder=1)
    axes.set_xlabel("tokens a second (more is better)")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return drawing.picture(data, "throughput_gap", metric.name)


@house
def operand_errors(records: pd.DataFrame, arms: list[ArmSummary], metric: Metric) -> Picture | None:
    """Draw each arm's gap over the error of its operands in the first step in which all of them are recorded.
    If there are many arms, the best are drawn. None for fewer than three arms that have errors and a gap, or
    for several baselines.

    The error, from `quant/<slot>/<layer>/sqnr_db`, is that of `ablate rank`: squared error over power, summed
    over the operands, mean over the layers that any arm quantises and over seeds; 0 for a layer in bf16.
    Unlike there, arms have weights of their own in that step, and an operand that is cast from a copy is
    compared with the copy.
    """
    selected = tables.chosen(records, lambda name: name.like(LAYERS_SQNR), layer="layer")
    selected["error"] = 10 ** (-selected["value"] / 10)
    runs = selected.groupby(["arm", "seed", "step"], sort=False)["error"].agg(["sum", "size"]).reset_index()
    whole = runs[runs["size"] == runs.groupby(["arm", "seed"])["size"].transform("max")]
    step = whole.groupby(["arm", "seed"])["step"].min().max()  # gradients may be zero in earlier ones
    at_step = whole[whole["step"] == step].groupby("arm")["sum"].mean()
    errors: dict[str, float] = (at_step / max(1, selected["layer"].nunique())).to_dict()
    best = foremost(arms, metric, MOST_ARMS)
    shown = [(arm, arm.gap) for arm in best if arm.gap and arm.gap.pairs and arm.name in errors]
    if len(shown) < FEWEST_POINTS or len({arm.baseline for arm, _ in shown}) > 1:
        return None
    data = pd.DataFrame(
        {"arm": arm.name, "error": errors[arm.name], "gap": gap.mean, "low": gap.low, "high": gap.high}
        for arm, gap in shown
    )
    note = (
        f"Across: squared error of operands over their power, summed over operands, mean over layers, as"
        f" recorded in step {step:g}: the number that ablate rank orders recipes by. It does not order"
        " stochastic rounding against nearest; how often it is right: docs/use/rank.md. Up: gaps with paired"
        " intervals."
    )
    question, few = (
        f"Does the error of operands predict the gap in {metric.name}?",
        best_of(len(best), len(arms)),
    )
    drawing, axes = _points(question, data, arms, metric, note, few)
    axes.set_xlabel("error of operands")
    return drawing.picture(data, "operand_errors", metric.name)


def _points(
    question: str, data: pd.DataFrame, arms: list[ArmSummary], metric: Metric, *notes: str
) -> tuple[Drawing, Axes]:
    """Draw a point with its interval for each line of arm, a number, gap, low and high."""
    drawing = Drawing(question, 7.5, max(3.8, 0.3 * len(data) + 0.4), *notes)
    axes = drawing.body.subplots()
    looks = marks((arm.name for arm in arms), {arm.name for arm in arms if arm.is_baseline})
    axes.axhline(0, color="0.4", linewidth=1)
    for arm, x, gap, _, high in data.iloc[:, :5].itertuples(index=False):
        mark = looks[arm]
        half = high - gap if math.isfinite(high) else None
        axes.errorbar(x, gap, yerr=half, fmt=mark.marker, color=mark.color, capsize=3, markersize=6)
    axes.set_ylabel(f"{metric.name}: arm minus baseline\n({better(metric)})")
    axes.grid()
    drawing.key({arm: looks[arm] for arm in data["arm"]}, linestyle="")
    return drawing, axes
