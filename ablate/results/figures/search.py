"""Figures of a search: its progress, the knobs that its best arms share, the importance of knobs, and the
front of two objectives."""

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ablate.experiment.schema import Metric
from ablate.files import Json
from ablate.results.attribution import front
from ablate.results.figures.style import (
    COLOURS,
    GREY,
    MOST_ARMS,
    Picture,
    better,
    canvas,
    finished,
    house,
    label,
    legend,
    name_column,
    rows,
    stem,
)
from ablate.results.summary import ArmSummary

_FEW = 6
"""Largest number of distinct numbers of a knob that are all labelled on its axis."""
_MOST_NAMED = 12
"""Largest number of arms of a front that the legend names."""
_NOT_SET = -0.14
"""Height at which an arm's line crosses the axis of a knob that it does not have."""


@house
def history(arms: Sequence[ArmSummary], metric: Metric) -> Picture | None:
    """Draw the mean of each searched arm in the order of their proposals, and the best so far.

    Args:
        arms: Arms of the sweep. All searched ones are drawn.
        metric: Metric that the search optimises.

    Returns:
        The picture; None if no searched arm has a value.
    """
    searched = [arm for arm in arms if arm.role == "searched"]
    values = np.array([arm.mean for arm in searched])
    if not np.isfinite(values).any():
        return None
    best = (np.fmin if metric.direction == "minimize" else np.fmax).accumulate(values)
    data = pd.DataFrame(
        {
            "order": range(1, len(searched) + 1),
            "arm": [arm.name for arm in searched],
            "value": values,
            "best_so_far": best,
        }
    )
    missing = data[~np.isfinite(data["value"])]
    question = (
        f"Does the search still find arms with {'less' if metric.direction == 'minimize' else 'more'}"
        f" {metric.name}?"
    )
    body = canvas(
        question,
        7.5,
        3.4,
        f"{len(missing)} of {len(data):,} arms have no value: crosses below." if len(missing) else "",
    )
    axes = body.subplots()
    axes.plot(
        data["order"],
        data["value"],
        "o",
        color=COLOURS[0],
        markersize=4,
        alpha=0.7,
        label="arm, mean over its seeds",
    )
    axes.step(data["order"], data["best_so_far"], where="post", color=COLOURS[3], label="best so far")
    axes.plot(
        missing["order"],
        [0.02] * len(missing),
        "x",
        color=GREY,
        markersize=5,
        transform=axes.get_xaxis_transform(),
        label="no value",
    )
    for arm in (arm for arm in arms if arm.role == "baseline" and arm.values):
        axes.axhline(
            arm.mean, color="0.3", linestyle="--", linewidth=1, label=f"{label(arm.name, 26)}, the baseline"
        )
    axes.set(
        xlabel="arms proposed so far", ylabel=f"{metric.name} ({better(metric.direction == 'minimize')})"
    )
    if isinstance(locator := axes.xaxis.get_major_locator(), MaxNLocator):
        locator.set_params(integer=True)
    handles, labels = axes.get_legend_handles_labels()
    present = [
        (handle, text)
        for handle, text in zip(handles, labels, strict=True)
        if len(missing) or text != "no value"
    ]
    body.legend(*zip(*present, strict=True), loc="outside lower center", ncols=len(present))
    return finished(stem("history", metric.name), question, body, data)


@house
def parallel(arms: Sequence[ArmSummary], metric: Metric) -> Picture | None:
    """Draw searched arms as lines through the values of their knobs: the best in colour, the others pale.

    A line crosses the axis below its end for a knob that the arm does not have, or that is null.

    Args:
        arms: Arms of the sweep. If none was searched, all that set a knob are drawn.
        metric: Metric that orders the arms.

    Returns:
        The picture; None if no such arm has a value.
    """
    searched = [arm for arm in arms if arm.role == "searched"] or [arm for arm in arms if arm.knobs]
    shown = [arm for arm in searched if arm.values and arm.knobs]
    if not shown:
        return None
    minimize = metric.direction == "minimize"
    order = sorted(shown, key=lambda arm: arm.mean if minimize else -arm.mean)
    coloured = {arm.name for arm in order[:MOST_ARMS]}
    knobs = list(dict.fromkeys(knob for arm in shown for knob in arm.knobs))
    columns = {knob: [arm.knobs.get(knob) for arm in order] for knob in knobs} | {
        metric.name: [arm.mean for arm in order]
    }
    heights, ticks = zip(*(_axis(values) for values in columns.values()), strict=True)
    question = f"Which knobs do the arms with the {'least' if minimize else 'most'} {metric.name} share?"
    note = (
        ""
        if len(shown) <= MOST_ARMS
        else f"The best {MOST_ARMS} of {len(shown):,} arms in colour, the others pale."
    )
    body = canvas(question, min(1.5 * len(columns) + 2.2, 16), 4.2, "The thick line is the best arm.", note)
    axes = body.subplots()
    ends = order[0].mean, order[min(len(order), MOST_ARMS) - 1].mean
    scale = ScalarMappable(Normalize(min(ends), max(ends)), colormaps["viridis" if minimize else "viridis_r"])
    for rank in reversed(range(len(order))):
        pale = order[rank].name not in coloured
        look = (
            {"color": "0.88", "linewidth": 0.6}
            if pale
            else {"color": scale.to_rgba(order[rank].mean), "linewidth": 1.1}
        )
        axes.plot([height[rank] for height in heights], **(look | ({"linewidth": 3} if not rank else {})))
    _columns(axes, list(columns), ticks)
    bar = body.colorbar(scale, ax=axes, label=f"{metric.name} ({better(minimize)})", shrink=0.9)
    bar.outline.set_visible(False)
    texts = {
        knob: [None if value is None else json.dumps(value) for value in columns[knob]] for knob in knobs
    }
    data = pd.DataFrame({"arm": [arm.name for arm in order]} | texts | {metric.name: columns[metric.name]})
    return finished(stem("parallel", metric.name), question, body, data)


def _axis(values: Sequence[Json]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return each value's height in [0, 1], and the ticks: heights with their labels.

    Numbers lie on a linear scale, or on a log scale if they span a factor of 50. Other values, and few
    distinct numbers, lie at equal distances.
    """
    present = {json.dumps(value): value for value in values if value is not None}
    numbers = sorted(
        value for value in present.values() if isinstance(value, int | float) and not isinstance(value, bool)
    )
    numeric = len(numbers) == len(present)
    distinct: list[Json] = [*numbers] if numeric else [present[text] for text in sorted(present)]
    unset = [(_NOT_SET, "not set")] if None in values else []
    if not numeric or len(distinct) <= _FEW:
        height_of = {
            json.dumps(value): position / (len(distinct) - 1) if len(distinct) > 1 else 0.5
            for position, value in enumerate(distinct)
        }
        every = -(-len(distinct) // 12)
        ticks = [
            (height_of[json.dumps(value)], f"{value:.4g}" if numeric else str(value))
            for value in distinct[::every]
        ]
        return [
            _NOT_SET if value is None else height_of[json.dumps(value)] for value in values
        ], unset + ticks
    low, high = numbers[0], numbers[-1]
    bend, back = (math.log, math.exp) if low > 0 and high > 50 * low else (float, float)
    span = bend(high) - bend(low)
    heights = [
        (bend(value) - bend(low)) / span if isinstance(value, int | float) else _NOT_SET for value in values
    ]
    return heights, unset + [
        (part, f"{back(bend(low) + part * span):.4g}") for part in (0, 0.25, 0.5, 0.75, 1)
    ]


def _columns(axes: Axes, names: Sequence[str], ticks: Sequence[Sequence[tuple[float, str]]]) -> None:
    """Draw a vertical axis for each name, with its own ticks."""
    for column, named in enumerate(ticks):
        axes.axvline(column, color="0.3", linewidth=1)
        for height, text in named:
            axes.plot(column, height, "_", color="0.3", markersize=5)
            box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}
            axes.annotate(
                label(text, 24, 1),
                (column, height),
                (5, 0),
                textcoords="offset points",
                va="center",
                size="small",
                bbox=box,
                zorder=5,
            )
    axes.set_xticks(range(len(names)), [label(name, 18, 3) for name in names])
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(names) - 0.55)
    axes.spines[:].set_visible(False)


@house
def importance(importances: Mapping[str, float]) -> Picture | None:
    """Draw each knob's share of the objective's variance over a search.

    A share is no effect size: a knob that was hardly varied has a small one.

    Args:
        importances: Share by knob, from 0 to 1.

    Returns:
        The picture; None without a finite share.
    """
    shares = {knob: value for knob, value in importances.items() if math.isfinite(value)}
    if not shares:
        return None
    data = pd.DataFrame({"knob": list(shares), "importance": list(shares.values())})
    data = data.sort_values("importance", ascending=False, kind="stable")
    question = "Which knobs move the search's objective most?"
    fewer = "" if len(data) <= MOST_ARMS else f"The first {MOST_ARMS} of {len(data)} knobs."
    data = data.head(MOST_ARMS)
    body = canvas(
        question,
        5 + name_column(data["knob"]),
        0.32 * len(data) + 0.8,
        "Over the ranges that were searched; no effect size.",
        fewer,
    )
    axes = body.subplots()
    rows(axes, list(data["knob"]))
    drawn = axes.barh(range(len(data)), data["importance"], 0.65, color=COLOURS[0])
    axes.bar_label(drawn, fmt="{:.2f}", padding=3, size="small")
    axes.set_xlabel("importance, a share of 1")
    axes.margins(x=0.1)
    return finished("importance", question, body, data)


@house
def objectives(arms_by_metric: Mapping[Metric, Sequence[ArmSummary]]) -> Picture | None:
    """Draw the first two objectives against each other, and number the arms that no other beats in both.

    Args:
        arms_by_metric: Summaries of the arms by each objective. All arms are drawn.

    Returns:
        The picture; None for one objective, or if no arm has values of both.
    """
    if len(arms_by_metric) < 2:
        return None
    (first, ones), (second, others) = list(arms_by_metric.items())[:2]
    second_means = {arm.name: arm.mean for arm in others if arm.values}
    points = {
        arm.name: (arm.mean, second_means[arm.name])
        for arm in ones
        if arm.values and arm.name in second_means
    }
    if not points:
        return None
    unbeaten = front(points, [1 if metric.direction == "minimize" else -1 for metric in (first, second)])
    data = pd.DataFrame(
        [(name, *point, name in unbeaten) for name, point in points.items()],
        columns=["arm", first.name, second.name, "front"],
    )
    question = f"Which arms does no other beat in both {first.name} and {second.name}?"
    several = "" if len(arms_by_metric) == 2 else f"The first two of {len(arms_by_metric)} objectives."
    body = canvas(
        question,
        8.5,
        4.2,
        f"{len(unbeaten)} of {len(points):,} arms: no other is as good in both and better in one.",
        several,
    )
    axes = body.subplots()
    behind, edge = data[~data["front"]], data[data["front"]].sort_values(first.name)
    axes.plot(behind[first.name], behind[second.name], "o", color="0.6", markersize=4, alpha=0.7)
    axes.plot(edge[first.name], edge[second.name], "-s", color=COLOURS[3], markersize=6)
    for number, (x, y) in enumerate(zip(edge[first.name], edge[second.name], strict=True), start=1):
        axes.annotate(str(number), (x, y), (6, 4), textcoords="offset points")
    axes.set(
        xlabel=f"{first.name} ({better(first.direction == 'minimize')})",
        ylabel=f"{second.name} ({better(second.direction == 'minimize')})",
    )
    axes.grid()
    axes.margins(0.12)
    named = [f"{number} {name}" for number, name in enumerate(edge["arm"].head(_MOST_NAMED), start=1)]
    more = [f"and {len(edge) - _MOST_NAMED} more"] if len(edge) > _MOST_NAMED else []
    beaten = [Line2D([], [], color="0.6", marker="o", linestyle="")] if len(behind) else []
    handles = [Line2D([], [], color=COLOURS[3], marker="s", linestyle="")] * (len(named) + len(more)) + beaten
    legend(body, handles, [*named, *more, *["beaten"] * len(beaten)])
    return finished(stem("objectives", first.name, second.name), question, body, data)
