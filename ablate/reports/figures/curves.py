"""Curves of a metric over steps or tokens, one line for each arm: its values, its gap to the baseline, or an
error that falls with the number of draws."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from ablate.experiment.roles import ELSEWHERE
from ablate.experiment.schema import Metric, Published
from ablate.reports.figures import tables
from ablate.reports.figures.style import (
    Drawing,
    Mark,
    Picture,
    best_of,
    better,
    house,
    label,
    log_axis,
)
from ablate.results.intervals import Interval

_COLUMNS = 4
"""Panels in a row."""


@house
def curves(records: pd.DataFrame, name: str | Metric) -> Picture | None:
    """Draw a metric over steps: one line for each arm, with a band from the smallest to the largest seed.
    None if no arm has finite values at three steps. If only the metric's name is given, less is taken to be
    better."""
    metric = tables.named(name)
    selected = tables.long_enough(tables.of(records, metric.name), ["arm"])
    if selected.empty:
        return None
    drawing, axes, lines, _ = _mean_lines(records, selected, metric, f"How does {metric.name} develop?")
    axes.set(xlabel="step", ylabel=metric.name)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return drawing.picture(lines, "curves", metric.name)


def _mean_lines(
    records: pd.DataFrame, selected: pd.DataFrame, metric: Metric, question: str, note: str = ""
) -> tuple[Drawing, Axes, pd.DataFrame, dict[str, Mark]]:
    """Draw each arm's mean over seeds at each step, with a band from the smallest to the largest seed; return
    the figure, its axes, the drawn numbers, and the mark of each arm."""
    shown, total = tables.arms(selected, metric)
    lines = tables.thinned(tables.over_seeds(selected[selected["arm"].isin(shown)], ["arm"]), ["arm"])
    band = _band(lines, "from the smallest to the largest seed")
    height = max(3.6, 0.3 * len(shown) + 0.4)
    drawing = Drawing(question, 7.5, height, note, band, best_of(len(shown), total))
    axes, looks = drawing.body.subplots(), tables.looks(records, shown)
    draw_lines(axes, lines, "step", looks)
    name_lines(drawing, looks)
    return drawing, axes, lines, looks


@house
def gap_curve(table: pd.DataFrame, metric: Metric) -> Picture | None:
    """Draw each arm minus its baseline at the same step and seed, over tokens: one panel an arm, with the
    others thin behind it. None if no arm has pairs at three steps.

    Lines are means over seeds; bands are 95 % t intervals at each step on its own, for two seeds or more.
    Steps replace tokens if the workload counts none. Records before the first step are left out: a log axis
    has no 0.
    """
    gaps = tables.long_enough(_gaps(tables.of(table, metric.name)), ["arm"])
    if gaps.empty:
        return None
    shown, total = tables.arms(gaps, metric)
    gaps = gaps[gaps["arm"].isin(shown)]
    lines = tables.thinned(_with_interval(gaps), ["arm"])
    over = "tokens" if lines["tokens"].notna().all() else "step"
    question = f"How does each arm's gap to its baseline in {metric.name} develop?"
    note = _band(lines, "the 95 % t interval of the paired differences, at each step on its own")
    margin = _margin(table, gaps, metric)
    matters = f"Grey: smaller than {margin:g}, the smallest gap that matters." if margin else ""
    rows = -(-len(shown) // _COLUMNS)
    drawing = Drawing(question, 10.0, 0.5 + 1.6 * rows, note, matters, best_of(len(shown), total))
    looks = tables.looks(table, shown)
    every = drawing.panels(len(shown), _COLUMNS, sharex=True, sharey=True)
    for number, (axes, name) in enumerate(zip(every, shown, strict=True)):
        axes.axhline(0, color="0.4", linewidth=1)
        if margin:
            axes.axhspan(-margin, margin, facecolor="0.93", edgecolor="0.55", linewidth=0.6, zorder=0)
        for other, line in lines.groupby("arm", sort=False):
            if other != name:
                axes.plot(line[over], line["mean"], color="0.75", linewidth=0.7, zorder=1)
        draw_lines(axes, lines[lines["arm"] == name], over, {name: looks[name]})
        axes.set_xscale("log")
        axes.set_title(label(name, 30), loc="left", size="small", weight="bold")
        log_axis(axes.xaxis)
        if number % _COLUMNS == 0:
            axes.set_ylabel(f"arm minus baseline\n({better(metric)})", size="small")
        if number + _COLUMNS >= len(shown):
            axes.set_xlabel(over)
            axes.tick_params(labelbottom=True)
    return drawing.picture(lines.rename(columns={"mean": "gap"}), "gap_curve", metric.name)


def _gaps(selected: pd.DataFrame) -> pd.DataFrame:
    """Return rows of arms with their value minus the baseline's at the same seed and step. Arms that are
    compared unpaired are left out: their seeds are not the baseline's."""
    seeds = selected.groupby(["sweep", "arm"], observed=True)["seed"].agg(set).to_dict()
    compared = selected[["sweep", "arm", "baseline"]].drop_duplicates().dropna()
    unpaired = {
        (sweep, arm)
        for sweep, arm, base in compared.itertuples(index=False)
        for own, other in [(seeds[sweep, arm], seeds.get((sweep, base), set()))]
        if arm.startswith(ELSEWHERE) or not (own <= other or other <= own)
    }
    if unpaired:
        keys = zip(selected["sweep"], selected["arm"], strict=True)
        selected = selected[[key not in unpaired for key in keys]]
    key = ["sweep", "baseline", "seed", "step"]
    level = selected[["sweep", "arm", "seed", "step", "value"]].rename(
        columns={"arm": "baseline", "value": "level"}
    )
    pairs = selected[selected["baseline"].notna() & (selected["step"] > 0)].merge(
        level.drop_duplicates(key), on=key
    )
    return pairs.assign(value=pairs["value"] - pairs["level"])


def _margin(table: pd.DataFrame, gaps: pd.DataFrame, metric: Metric) -> float | None:
    """Return the smallest gap that matters at the baseline's last value; None for several baselines."""
    selected = tables.last(tables.of(table, metric.name))
    levels = selected[selected["arm"].isin(gaps["baseline"])].groupby("arm")["value"].mean()
    return metric.margin(levels.iloc[0]) if len(levels) == 1 else None


def _with_interval(gaps: pd.DataFrame) -> pd.DataFrame:
    """Return mean gaps over seeds at each step, with their 95 % t intervals."""
    deviation = gaps.groupby(["arm", "step"], sort=False)["value"].std()
    lines = tables.over_seeds(gaps, ["arm", "baseline"])
    width = [Interval().half_width(seeds) if seeds > 1 else np.nan for seeds in lines["seeds"]]
    half = deviation.loc[list(zip(lines["arm"], lines["step"], strict=True))].to_numpy() * width
    return lines.assign(low=lines["mean"] - half, high=lines["mean"] + half)


@house
def decay(records: pd.DataFrame, metric: str, published: Sequence[Published] = ()) -> Picture | None:
    """Draw a metric over the number of draws, which is the step of `records`, on log axes, beside the slope 1
    / draws and published figures on this metric. None if no value is above zero."""
    selected = tables.of(records, metric)
    selected = selected[(selected["value"] > 0) & (selected["step"] > 0)]
    if selected.empty:
        return None
    main = tables.named(metric)
    shown, _ = tables.arms(selected, main)
    stated = [
        (float(line.step), line)
        for line in published
        if line.metric == metric and line.step and line.against is None and line.arm in shown
    ]
    note = "Lines are measured, diamonds published." if stated else ""
    question = f"Does {metric} fall as 1 / draws?"
    drawing, axes, lines, drawn = _mean_lines(records, selected, main, question, note)
    for step, line in stated:
        axes.plot(step, line.value, "D", markersize=11, fillstyle="none", color=drawn[line.arm].color)
    steps = np.array([lines["step"].min(), lines["step"].max()])
    slope = 1.7 * lines["mean"].max() * steps[0] / steps  # above the lines, which would cover it
    axes.plot(steps, slope, color="0.5", linewidth=0.8)
    beside: dict[str, Any] = {"textcoords": "offset points", "color": "0.4", "va": "center", "size": "small"}
    axes.annotate("falls as 1 / draws", (steps[0], slope[0]), (10, 0), **beside)
    axes.set(xscale="log", yscale="log", xlabel="independent draws in the mean", ylabel=metric)
    log_axis(axes.xaxis)
    log_axis(axes.yaxis)
    axes.grid()
    points = pd.DataFrame({"arm": line.arm, "step": step, "published": line.value} for step, line in stated)
    return drawing.picture(pd.concat([lines, points], ignore_index=True), "decay", metric)


def _band(lines: pd.DataFrame, what: str) -> str:
    several = lines["seeds"].max() > 1
    return f"Lines are means over seeds; bands: {what}." if several else "One seed: no band."


def draw_lines(axes: Axes, lines: pd.DataFrame, over: str, drawn: dict[str, Mark]) -> None:
    """Draw the mean of each arm, and a band if it has more than one seed. They are groups `arm-<number>-...`
    of the SVG, which a click on `key-<number>` in the legend hides."""
    figure = axes.get_figure(root=True)
    place = figure.axes.index(axes) if figure else 0
    for number, (arm, mark) in enumerate(drawn.items()):
        line = lines[lines["arm"] == arm]
        look = mark._asdict() | {"markersize": 4, "markevery": max(1, len(line) // 8), "linewidth": 1.4}
        axes.plot(line[over], line["mean"], **look, gid=f"arm-{number}-line-{place}")
        if (line["high"] > line["low"]).any():
            pale: dict[str, Any] = {"color": mark.color, "alpha": 0.18, "linewidth": 0}
            band = axes.fill_between(line[over], line["low"], line["high"], **pale)
            band.set_gid(f"arm-{number}-band-{place}")


def name_lines(drawing: Drawing, drawn: Mapping[str, Mark]) -> None:
    """Add the legend of `draw_lines`."""
    legend = drawing.key(drawn, markersize=4, linewidth=1.4)
    entries = zip(legend.legend_handles, legend.get_texts(), strict=True)
    for number, (handle, text) in enumerate(entries):
        text.set_gid(f"key-{number}-text")
        if handle:
            handle.set_gid(f"key-{number}-line")
