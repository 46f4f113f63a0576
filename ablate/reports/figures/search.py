"""Figures of a search: its progress, the knobs that its best arms share, the importance of knobs, and the
front of two objectives."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ablate.experiment.schema import Metric
from ablate.reports.figures.style import (
    COLOURS,
    GREY,
    MOST_ARMS,
    Drawing,
    Picture,
    better,
    house,
    label,
    name_column,
    rows,
)
from ablate.reports.figures.tables import FEWEST_POINTS
from ablate.results.attribution import front
from ablate.results.summary import ArmSummary

_MOST_NAMED = 12
"""Largest number of arms of a front that the legend names."""


@house
def history(arms: Sequence[ArmSummary], metric: Metric) -> Picture | None:
    """Draw the mean of each searched arm in the order of their proposals, and the best so far; None if fewer
    than three searched arms have a value on every seed."""
    searched = [arm for arm in arms if arm.role == "searched"]
    values = np.array([arm.mean if len(arm.values) == arm.seeds else math.nan for arm in searched])
    if np.isfinite(values).sum() < FEWEST_POINTS:
        return None
    less = metric.direction == "minimize"
    order, best = range(1, len(searched) + 1), (np.fmin if less else np.fmax).accumulate(values)
    names = [arm.name for arm in searched]
    data = pd.DataFrame({"order": order, "arm": names, "value": values, "best_so_far": best})
    missing = data[~np.isfinite(data["value"])]
    question = f"Does the search still find arms with {'less' if less else 'more'} {metric.name}?"
    without = f"{len(missing)} of {len(data):,} arms lack a seed: crosses below." if len(missing) else ""
    drawing = Drawing(question, 7.5, 3.4, without)
    axes = drawing.body.subplots()
    dot: dict[str, Any] = {"color": COLOURS[0], "markersize": 4, "alpha": 0.7}
    axes.plot(data["order"], data["value"], "o", label="arm, mean over its seeds", **dot)
    axes.step(data["order"], data["best_so_far"], where="post", color=COLOURS[3], label="best so far")
    edge, at_edge = [0.02] * len(missing), axes.get_xaxis_transform()
    axes.plot(missing["order"], edge, "x", color=GREY, markersize=5, transform=at_edge, label="no value")
    baselines = {arm.name: arm.mean for arm in arms if arm.role == "baseline" and arm.values}
    if len(baselines) == 1:
        ((name, mean),) = baselines.items()
        axes.axhline(mean, color="0.3", linestyle="--", linewidth=1, label=f"{label(name, 26)}, the baseline")
    elif baselines:  # each belongs to arms of its own, so that a line across all would compare unlike runs
        own = [baselines.get(arm.baseline or "", math.nan) for arm in searched]
        axes.plot(data["order"], own, "_", color="0.3", markersize=9, label="its own baseline")
    axes.set(xlabel="arms proposed so far", ylabel=f"{metric.name} ({better(metric)})")
    if isinstance(locator := axes.xaxis.get_major_locator(), MaxNLocator):
        locator.set_params(integer=True)
    entries = zip(*axes.get_legend_handles_labels(), strict=True)
    present = [entry for entry in entries if len(missing) or entry[1] != "no value"]
    drawing.body.legend(*zip(*present, strict=True), loc="outside lower center", ncols=len(present))
    return drawing.picture(data, "history", metric.name)


@house
def importance(importances: Mapping[str, float]) -> Picture | None:
    """Draw each knob's share, from 0 to 1, of the objective's variance over a search; None without a finite
    share. A share is not an effect size: a knob that was hardly varied has a small one."""
    shares = {knob: value for knob, value in importances.items() if math.isfinite(value)}
    if not shares:
        return None
    data = pd.DataFrame(shares.items(), columns=["knob", "importance"])
    data = data.sort_values("importance", ascending=False, kind="stable")
    fewer = "" if len(data) <= MOST_ARMS else f"The first {MOST_ARMS} of {len(data)} knobs."
    data = data.head(MOST_ARMS)
    question = "Which knobs move the search's objective most?"
    width, height = 5 + name_column(data["knob"]), 0.32 * len(data) + 0.8
    drawing = Drawing(question, width, height, "Over the ranges that were searched; no effect size.", fewer)
    axes = drawing.body.subplots()
    rows(axes, list(data["knob"]))
    drawn = axes.barh(range(len(data)), data["importance"], 0.65, color=COLOURS[0])
    axes.bar_label(drawn, fmt="{:.2f}", padding=3, size="small")
    axes.set_xlabel("importance, a share of 1")
    axes.margins(x=0.1)
    return drawing.picture(data, "importance")


@house
def objectives(arms_by_metric: Mapping[Metric, Sequence[ArmSummary]]) -> Picture | None:
    """Draw the first two objectives against each other, and number the arms that no other beats in both. None
    for one objective, or if fewer than three arms have values of both."""
    if len(arms_by_metric) < 2:
        return None
    (first, ones), (second, others) = list(arms_by_metric.items())[:2]
    means = {arm.name: arm.mean for arm in others if arm.values}
    points = {arm.name: (arm.mean, means[arm.name]) for arm in ones if arm.values and arm.name in means}
    if len(points) < FEWEST_POINTS:
        return None
    unbeaten = front(points, [1 if metric.direction == "minimize" else -1 for metric in (first, second)])
    data = pd.DataFrame(
        [(name, *point, name in unbeaten) for name, point in points.items()],
        columns=["arm", first.name, second.name, "front"],
    )
    question = f"Which arms does no other beat in both {first.name} and {second.name}?"
    note = f"{len(unbeaten)} of {len(points):,} arms: no other is as good in both and better in one."
    several = "" if len(arms_by_metric) == 2 else f"The first two of {len(arms_by_metric)} objectives."
    drawing = Drawing(question, 8.5, 4.2, note, several)
    axes = drawing.body.subplots()
    behind, edge = data[~data["front"]], data[data["front"]].sort_values(first.name)
    axes.plot(behind[first.name], behind[second.name], "o", color="0.6", markersize=4, alpha=0.7)
    axes.plot(edge[first.name], edge[second.name], "-s", color=COLOURS[3], markersize=6)
    for number, point in enumerate(zip(edge[first.name], edge[second.name], strict=True), start=1):
        axes.annotate(str(number), point, (6, 4), textcoords="offset points")
    axes.set(xlabel=f"{first.name} ({better(first)})", ylabel=f"{second.name} ({better(second)})")
    axes.grid()
    axes.margins(0.12)
    named = [f"{number} {name}" for number, name in enumerate(edge["arm"].head(_MOST_NAMED), start=1)]
    named += [f"and {len(edge) - _MOST_NAMED} more"] if len(edge) > _MOST_NAMED else []
    beaten = [Line2D([], [], color="0.6", marker="o", linestyle="")] if len(behind) else []
    handles = [Line2D([], [], color=COLOURS[3], marker="s", linestyle="")] * len(named) + beaten
    drawing.legend(handles, [*named, *["beaten"] * len(beaten)])
    return drawing.picture(data, "objectives", first.name, second.name)
