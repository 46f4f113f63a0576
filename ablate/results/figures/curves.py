"""A metric over steps or tokens, one line an arm: as it is, as a gap to the baseline, or as an error that
falls with draws."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from ablate.experiment.schema import Metric, Published
from ablate.results.figures import tables
from ablate.results.figures.style import (
    Mark,
    Picture,
    best_of,
    better,
    canvas,
    finished,
    house,
    legend,
    log_axis,
    marks,
    stem,
)
from ablate.results.intervals import Interval


@house
def curves(records: pd.DataFrame, name: str | Metric) -> Picture | None:
    """A metric over steps, one line an arm, the band from the smallest to the largest seed. None where no
    value is finite."""
    metric = tables.named(name)
    found = tables.of(records, metric.name)
    if found.empty:
        return None
    shown, total = tables.arms(found, metric)
    lines = tables.thinned(tables.over_seeds(found[found["arm"].isin(shown)], ["arm"]), ["arm"])
    question = f"How does {metric.name} develop?"
    body = canvas(
        question,
        7.5,
        _height(shown),
        _band(lines, "from the smallest to the largest seed"),
        best_of(len(shown), total),
    )
    axes = body.subplots()
    draw_lines(axes, lines, "step", marks(shown))
    axes.set(xlabel="step", ylabel=metric.name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    name_lines(body, shown)
    return finished(stem("curves", metric.name), question, body, lines)


@house
def gap_curve(table: pd.DataFrame, metric: Metric) -> Picture | None:
    """Each arm minus its baseline at the same step and seed, against tokens, or steps where a workload has
    none: the mean over seeds and, from two on, its 95 % t interval, each step on its own. None where no arm
    has a pair. What comes before the first step is left out: it has no place on a log axis."""
    gaps = _gaps(tables.of(table, metric.name))
    if gaps.empty:
        return None
    shown, total = tables.arms(gaps, metric)
    gaps = gaps[gaps["arm"].isin(shown)]
    lines = tables.thinned(_with_interval(gaps), ["arm"])
    over = "tokens" if lines["tokens"].notna().all() else "step"
    question = f"How does each arm's gap to its baseline in {metric.name} develop?"
    said = _band(lines, "the 95 % t interval of the paired differences, at each step on its own")
    body = canvas(question, 7.5, _height(shown), said, best_of(len(shown), total))
    axes = body.subplots()
    axes.axhline(0, color="0.4", linewidth=1)
    if margin := _margin(table, gaps, metric):
        axes.axhspan(-margin, margin, color="0.93", zorder=0)
    draw_lines(axes, lines, over, marks(shown))
    axes.set(
        xscale="log",
        xlabel=over,
        ylabel=f"{metric.name}: arm minus baseline\n({better(metric.direction == 'minimize')})",
    )
    log_axis(axes.xaxis)
    name_lines(body, shown)
    return finished(stem("gap_curve", metric.name), question, body, lines.rename(columns={"mean": "gap"}))


def _gaps(found: pd.DataFrame) -> pd.DataFrame:
    """Rows of arms whose value is now their distance from the baseline's at the same seed and step."""
    key = ["sweep", "baseline", "seed", "step"]
    level = found[["sweep", "arm", "seed", "step", "value"]].rename(
        columns={"arm": "baseline", "value": "level"}
    )
    pairs = found[found["baseline"].notna() & (found["step"] > 0)].merge(level.drop_duplicates(key), on=key)
    return pairs.assign(value=pairs["value"] - pairs["level"])


def _margin(table: pd.DataFrame, gaps: pd.DataFrame, metric: Metric) -> float | None:
    """What does not matter, at the baseline's last value; None where there are several baselines."""
    found = tables.last(tables.of(table, metric.name))
    levels = found[found["arm"].isin(gaps["baseline"])].groupby("arm")["value"].mean()
    return metric.margin(levels.iloc[0]) if len(levels) == 1 else None


def _with_interval(gaps: pd.DataFrame) -> pd.DataFrame:
    deviation = gaps.groupby(["arm", "step"], sort=False)["value"].std()
    lines = tables.over_seeds(gaps, ["arm", "baseline"])
    width = [Interval().half_width(seeds) if seeds > 1 else np.nan for seeds in lines["seeds"]]
    half = deviation.loc[list(zip(lines["arm"], lines["step"], strict=True))].to_numpy() * width
    return lines.assign(low=lines["mean"] - half, high=lines["mean"] + half)


@house
def decay(records: pd.DataFrame, metric: str, published: Sequence[Published] = ()) -> Picture | None:
    """A metric over draws on log axes, one line an arm, with published figures where there are any: does it
    fall as 1 / draws? None where no value is above zero."""
    found = tables.of(records, metric)
    found = found[(found["value"] > 0) & (found["step"] > 0)]
    if found.empty:
        return None
    shown, total = tables.arms(found, tables.named(metric))
    lines = tables.thinned(tables.over_seeds(found[found["arm"].isin(shown)], ["arm"]), ["arm"])
    question = f"Does {metric} fall as 1 / draws?"
    stated = [
        line
        for line in published
        if line.metric == metric and line.step and line.against is None and line.arm in shown
    ]
    said = "Lines are measured, diamonds published." if stated else ""
    body = canvas(
        question,
        7.5,
        _height(shown),
        said,
        _band(lines, "from the smallest to the largest seed"),
        best_of(len(shown), total),
    )
    axes = body.subplots()
    drawn = marks(shown)
    draw_lines(axes, lines, "step", drawn)
    for line in stated:
        axes.plot(line.step, line.value, "D", markersize=11, fillstyle="none", color=drawn[line.arm].color)
    steps = np.array([lines["step"].min(), lines["step"].max()])
    slope = 1.7 * lines["mean"].max() * steps[0] / steps  # above the lines, which would hide it
    axes.plot(steps, slope, color="0.5", linewidth=0.8)
    axes.annotate(
        "falls as 1 / draws",
        (steps[0], slope[0]),
        (10, 0),
        textcoords="offset points",
        color="0.4",
        va="center",
        size="small",
    )
    axes.set(xscale="log", yscale="log", xlabel="independent draws in the mean", ylabel=metric)
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    axes.grid()
    name_lines(body, shown)
    points = pd.DataFrame(
        {"arm": line.arm, "step": float(line.step), "published": line.value} for line in stated
    )
    return finished(stem("decay", metric), question, body, pd.concat([lines, points], ignore_index=True))


def _height(shown: Sequence[str]) -> float:
    """Inches, with room for the legend."""
    return max(3.6, 0.3 * len(shown) + 0.4)


def _band(lines: pd.DataFrame, what: str) -> str:
    several = lines["seeds"].max() > 1
    return f"Lines are means over seeds; bands: {what}." if several else "One seed: no band."


def draw_lines(axes: Axes, lines: pd.DataFrame, over: str, drawn: dict[str, Mark]) -> None:
    """The mean of each arm, and a band where there is more than one seed."""
    for arm, mark in drawn.items():
        line = lines[lines["arm"] == arm]
        every = max(1, len(line) // 8)
        axes.plot(line[over], line["mean"], **mark._asdict(), markersize=4, markevery=every, linewidth=1.4)
        if (line["high"] > line["low"]).any():
            axes.fill_between(
                line[over], line["low"], line["high"], color=mark.color, alpha=0.18, linewidth=0
            )


def name_lines(body, shown: Sequence[str]) -> None:
    """The legend of `draw_lines`."""
    handles = [
        Line2D([], [], **mark._asdict(), markersize=4, linewidth=1.4) for mark in marks(shown).values()
    ]
    legend(body, handles, shown)
