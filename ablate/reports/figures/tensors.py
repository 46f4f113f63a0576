"""Figures of quantisation without a model: errors by operand, the effect of a rotation on values, and the
results of two roundings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from ablate.experiment.schema import Metric
from ablate.reports.figures import tables
from ablate.reports.figures.health import in_order
from ablate.reports.figures.style import (
    COLOURS,
    GREY,
    HATCHES,
    Drawing,
    Mark,
    Picture,
    best_of,
    house,
    log_axis,
    rows,
)

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of E2M1."""
_MEANING = {
    "rel_mse": "squared error over power",
    "zero_frac": "share rounded to zero",
    "saturated_frac": "share beyond the grid",
    "magnitude": "magnitude kept (1: unbiased)",
    "sqnr_db": "SQNR, dB",
    "cosine": "cosine with the source",
}
_MOST_CODES = 64
"""Largest number of distinct results of a rounding. More mean that they lie on no grid."""


@house
def errors_by_slot(
    table: pd.DataFrame, errors: Sequence[str] = ("rel_mse", "zero_frac", "magnitude")
) -> Picture | None:
    """Draw the errors (`quant/<slot>/<error>`) of quantising each operand by arm, in one panel for each
    error; None if no such error was recorded.

    Markers are means over seeds of the last value, bars go from the smallest to the largest. If the arms have
    several baselines, a grey stroke marks that of each.
    """
    selected = tables.errors_of_slots(table, errors)
    if selected.empty:
        return None
    first = selected[selected["error"] == selected["error"].iloc[0]]
    shown, total = tables.arms(first, Metric(name=errors[0]))
    data = _errors(selected[selected["arm"].isin(shown)])
    compared = data[data["baseline_mean"].notna()]
    several = compared["baseline"].nunique() > 1
    data = (compared if several else data.drop(columns="baseline_mean")).reset_index(drop=True)
    arms = [arm for arm in shown if arm in set(data["arm"])]
    looks = tables.looks(table, arms)
    kinds, slots = [error for error in errors if error in set(data["error"])], in_order(data["slot"])
    strokes = "Grey strokes: the arm's baseline." if several else ""
    height = max(len(slots) * max(0.35, 0.11 * len(arms) + 0.12) + 1, 0.3 * len(arms) + 0.4)
    question = "In which operands do the arms' quantisation errors differ?"
    drawing = Drawing(question, 2.3 * len(kinds) + 3.4, height, strokes, best_of(len(shown), total))
    for axes, kind in zip(drawing.panels(len(kinds), len(kinds), sharey=True), kinds, strict=True):
        _error_panel(axes, data[data["error"] == kind], slots, looks)
        axes.set_xlabel(_MEANING.get(kind, kind))
        axes.set_title(kind)
    drawing.key(looks, linestyle="", markersize=5)
    return drawing.picture(data, "errors_by_slot")


def _errors(selected: pd.DataFrame) -> pd.DataFrame:
    """Return mean, smallest and largest of each arm's last values over seeds, and its baseline's mean."""
    lasts = tables.last(selected).groupby(["error", "slot", "arm"], sort=False)
    data = lasts.agg(
        baseline=("baseline", "first"),
        mean=("value", "mean"),
        low=("value", "min"),
        high=("value", "max"),
        seeds=("value", "size"),
    ).reset_index()
    renamed = {"arm": "baseline", "mean": "baseline_mean"}
    level = data[["error", "slot", "arm", "mean"]].rename(columns=renamed)
    return data.astype({"baseline": object}).merge(level, on=["error", "slot", "baseline"], how="left")


def _error_panel(axes: Axes, data: pd.DataFrame, slots: list[str], looks: dict[str, Mark]) -> None:
    """Draw a band for each slot, with a row for each arm."""
    rows(axes, slots)
    for position, (arm, mark) in enumerate(looks.items()):
        line = data[data["arm"] == arm]
        heights = [slots.index(slot) + 0.8 * ((position + 0.5) / len(looks) - 0.5) for slot in line["slot"]]
        if "baseline_mean" in line:
            axes.plot(line["baseline_mean"], heights, "|", color=GREY, markersize=7, markeredgewidth=1.5)
        bars = np.maximum([line["mean"] - line["low"], line["high"] - line["mean"]], 0)
        look: dict[str, Any] = {"fmt": mark.marker, "color": mark.color, "markersize": 4.5, "linewidth": 1}
        axes.errorbar(line["mean"], heights, xerr=bars, **look)
    for edge in np.arange(len(slots) - 1) + 0.5:
        axes.axhline(edge, color="0.85", linewidth=0.8)
    values = data["mean"].abs()
    if values.min() > 0 and values.max() > 8 * values.min():
        axes.set_xscale("log")
        log_axis(axes.xaxis)


@house
def rotation_histogram(before: np.ndarray, after: np.ndarray, bins: int = 60) -> Picture | None:
    """Draw histograms of values before and after a Hadamard transform, with log counts; None if either has no
    finite value.

    Values have any shape and are in units of their block's scale: the grid of E2M1 is 0, 0.5, ... 6, and
    values below 0.25 round to zero. Values that are not finite are left out.
    """
    both = {"before": np.ravel(before), "after": np.ravel(after)}
    both = {when: values[np.isfinite(values)].astype(float) for when, values in both.items()}
    if not all(values.size for values in both.values()):
        return None
    reach = max(6.0, *(float(np.abs(values).max()) for values in both.values()))
    edges = np.linspace(-reach, reach, bins + 1)
    counts = {when: np.histogram(values, edges)[0] for when, values in both.items()}
    ends = {"from": edges[:-1], "to": edges[1:]}
    data = pd.DataFrame(ends | {f"count_{when}": count for when, count in counts.items()})
    zeros = " before, ".join(f"{np.mean(np.abs(values) < 0.25):.1%}" for values in both.values())
    note, grid = f"Rounded to zero, being below 0.25: {zeros} after.", "Grey lines: the grid of E2M1."
    question = "What does the rotation do to the values that are quantised?"
    drawing = Drawing(question, 7.2, 3.6, note, grid)
    axes = drawing.body.subplots()
    for point in sorted({sign * value for value in GRID for sign in (1, -1)}):
        axes.axvline(point, color="0.9", linewidth=0.8, zorder=0)
    axes.stairs(counts["before"], edges, baseline=0.7, fill=True, color=COLOURS[1], alpha=0.35)
    handles = [
        axes.stairs(counts["before"], edges, baseline=0.7, color=COLOURS[1], linewidth=1.4),
        axes.stairs(counts["after"], edges, baseline=0.7, color=COLOURS[0], linewidth=1.6, linestyle="--"),
    ]
    axes.set(yscale="log", xlabel="value, in units of its block's scale", ylabel="values", ylim=(0.7, None))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    drawing.legend(handles, ["before the rotation", "after it"], "outside lower center")
    return drawing.picture(data, "rotation_histogram")


@house
def rounding_histogram(values: np.ndarray, nearest: np.ndarray, stochastic: np.ndarray) -> Picture | None:
    """Draw the results of two roundings on the grid, and their mean errors over the values before rounding;
    None if no value is finite.

    Values have any shape and are in units of the block's scale. ValueError if the sizes differ, or the
    results lie on no grid (more than 64 distinct values).
    """
    source, *both = (np.ravel(each).astype(float) for each in (values, nearest, stochastic))
    results = dict(zip(("to nearest", "stochastic"), both, strict=True))
    if any(rounded.size != source.size for rounded in both):
        sizes = " and ".join(str(rounded.size) for rounded in both)
        raise ValueError(f"{source.size} values, and {sizes} roundings of them")
    finite = np.isfinite([source, *both]).all(axis=0)
    source, results = source[finite], {name: rounded[finite] for name, rounded in results.items()}
    if not source.size:
        return None
    codes = np.unique(np.concatenate([rounded + 0.0 for rounded in results.values()]))
    if codes.size > _MOST_CODES:
        raise ValueError(
            f"{codes.size} different results: divide by the block's scale first, so that they lie on the"
            " element's grid"
        )
    bias = {name: float(np.mean(rounded - source)) for name, rounded in results.items()}
    every = [_rounded(name, source, rounded, codes) for name, rounded in results.items()]
    data = pd.concat(every, ignore_index=True)
    errors = ", ".join(f"{name} {value:+.2g}" for name, value in bias.items())
    question = "Where do values go on the grid, and is their mean kept?"
    drawing = Drawing(question, 9, 3.6, f"Mean error of all: {errors}.")
    (count_axes, error_axes), handles, width = drawing.panels(2, 2), [], 0.4
    looks = ((-1, COLOURS[1], "o", "--"), (1, COLOURS[0], "s", "-"))
    for each, (side, colour, marker, dash) in zip(every, looks, strict=True):
        counts, near = (each[each["what"] == what] for what in ("goes to", "comes from"))
        middles, hatch = np.arange(len(codes)) + side * width / 2, HATCHES[side > 0]
        bar: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        handles.append(count_axes.bar(middles, counts["count"], width, **bar))
        line: dict[str, Any] = {
            "color": colour,
            "linestyle": dash,
            "marker": marker,
            "markersize": 2.5,
            "linewidth": 1.2,
        }
        error_axes.plot(near["value"], near["mean_error"], **line)
    count_axes.set_xticks(range(len(codes)), [f"{code:g}" for code in codes], size="small")
    count_axes.set(xlabel="value on the grid", ylabel="values that go there")
    count_axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    error_axes.axhline(0, color=GREY, linewidth=1)
    error_axes.set(xlabel="value before rounding", ylabel="mean error of the values there")
    drawing.legend(handles, list(results), "outside lower center")
    return drawing.picture(data, "rounding_histogram")


def _rounded(name: str, source: np.ndarray, rounded: np.ndarray, codes: np.ndarray) -> pd.DataFrame:
    """Return the number of values that become each code, and the mean error in each of 60 equal intervals."""
    edges = np.linspace(source.min(), source.max() if source.max() > source.min() else source.min() + 1, 61)
    interval = np.clip(np.searchsorted(edges, source, "right") - 1, 0, 59)
    counts = np.bincount(interval, minlength=60)
    sums = np.bincount(interval, rounded - source, minlength=60)
    errors = np.divide(sums, counts, out=np.full(60, np.nan), where=counts > 0)
    code_counts = np.bincount(np.searchsorted(codes, rounded + 0.0), minlength=len(codes))
    goes = {"what": "goes to", "value": codes, "count": code_counts, "mean_error": np.nan}
    middles = (edges[:-1] + edges[1:]) / 2
    comes = {"what": "comes from", "value": middles, "count": counts, "mean_error": errors}
    both = [pd.DataFrame({"rounding": name} | part) for part in (goes, comes)]
    return pd.concat([both[0], both[1][counts > 0]], ignore_index=True)
