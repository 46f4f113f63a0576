"""Bar charts of the measurements of `ablate bench`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ablate.reports.figures.style import (
    COLOURS,
    HATCHES,
    Picture,
    canvas,
    finished,
    house,
    legend,
    name_column,
    panels,
    rows,
    stem,
)

Line = Mapping[str, Any]
"""One measurement: values of any kind by column name."""
_ENGINES = {
    "transformer_engine": " (TE)",
    "emulated": " (emulated)",
    "scaled_mm": " (scaled_mm)",
    "scaled_mm:cudnn": " (cudnn)",
    "scaled_mm:cutlass": " (cutlass)",
}


def _look(position: int) -> dict[str, Any]:
    return {
        "color": COLOURS[position % len(COLOURS)],
        "hatch": HATCHES[position % len(HATCHES)],
        "edgecolor": "white",
    }


@house
def bars(lines: Sequence[Line], value: str, label: str, hue: str) -> Picture | None:
    """Draw measured values, lines by column name, as bars, in one panel for each shape and dtype; None
    without lines.

    `value`: column of the value; `label`: column that groups the bars; `hue`: column that the colours of a
    group's bars show.
    """
    if not lines:
        return None
    data = pd.DataFrame(lines)
    varying = [
        name for name in ("shape", "dtype") if name in data and name != label and data[name].nunique() > 1
    ]
    data["panel"] = data[varying].astype(str).agg(", ".join, axis=1) if varying else ""
    parts, labels, hues = (list(dict.fromkeys(data[name])) for name in ("panel", label, hue))
    question = f"What does each {hue} reach in {value}, by {label}?"
    columns = min(2, len(parts))
    height = (len(labels) * (0.16 * len(hues) + 0.14) + 0.9) * -(-len(parts) // columns) + 0.3
    body = canvas(question, 4.4 * columns + name_column(map(str, labels)), height)
    thick = 0.8 / len(hues)
    for axes, part in zip(panels(body, len(parts), columns, sharex=True, sharey=True), parts, strict=True):
        rows(axes, [str(name) for name in labels])
        for position, name in enumerate(hues):
            means = (
                data[(data["panel"] == part) & (data[hue] == name)].groupby(label, sort=False)[value].mean()
            )
            middles = [labels.index(each) + (position - (len(hues) - 1) / 2) * thick for each in means.index]
            axes.barh(middles, means, thick, linewidth=0, label=str(name), **_look(position))
        axes.set_title(part)
        axes.tick_params(labelbottom=True)
    for axes in body.axes[-columns:]:
        axes.set_xlabel(value)
    drawn = {
        name: handle
        for axes in body.axes
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    legend(body, list(drawn.values()), list(drawn), "outside lower center")
    return finished(stem("bars", value), question, body, data.drop(columns="panel"))


@house
def shares(lines: Sequence[Line], value: str, label: str, parts: Sequence[str]) -> Picture | None:
    """Draw each line's value, such as milliseconds, as a bar that is divided into the shares of its parts;
    None without lines.

    `value`: column of the value; `label`: column of the bar's name; `parts`: columns of the shares, from 0 to
    1.
    """
    if not lines:
        return None
    data = pd.DataFrame(
        [
            {label: line[label], "part": part, "share": line[part], value: line[value] * line[part]}
            for line in lines
            for part in parts
        ]
    )
    names = [str(line[label]) for line in lines]
    question = "Where does a step spend its time?"
    body = canvas(question, 6 + name_column(names), 0.5 * len(lines) + 1.1)
    axes = body.subplots()
    rows(axes, names)
    begins = np.zeros(len(lines))
    handles = []
    for position, part in enumerate(parts):
        widths = data.loc[data["part"] == part, value].to_numpy(float)
        handles.append(axes.barh(range(len(lines)), widths, 0.7, begins, linewidth=0, **_look(position)))
        begins += widths
    axes.set_xlabel(value)
    legend(body, handles, parts, "outside lower center")
    return finished(stem("shares", value), question, body, data)


@house
def speeds(lines: Sequence[Line], unit: str, *notes: str) -> Picture | None:
    """Draw the speed of each layer, forward and backward, as bars over pale ones that end at the hardware's
    peak; None without lines. `unit`: the speed's, which its columns' names end with; `notes`: sentences below
    the figure."""
    if not lines:
        return None
    data = pd.DataFrame(
        {
            "shape": line["shape"] if line["shape"] == line["size"] else f"{line['shape']}\n{line['size']}",
            "preset": line["preset"] + _ENGINES.get(line["engine"], ""),
            "pass": way,
            unit: line[f"{way} {unit}"],
            "peak": line[f"{way} peak"],
            "share": line[f"{way} of peak"],
        }
        for way in ("forward", "backward")
        for line in lines
    ).astype({"peak": float, "share": float})
    shapes, presets = (list(dict.fromkeys(data[name])) for name in ("shape", "preset"))
    question = "How much of the hardware does a linear layer use?"
    body = canvas(
        question, 7.6 + name_column(shapes), len(shapes) * (0.2 * len(presets) + 0.22) + 0.9, *notes
    )
    thick = 0.84 / len(presets)
    looks = {name: _look(position) for position, name in enumerate(presets)}
    for axes, way in zip(panels(body, 2, 2, sharex=True, sharey=True), ("forward", "backward"), strict=True):
        rows(axes, shapes)
        for position, name in enumerate(presets):
            part = data[(data["pass"] == way) & (data["preset"] == name)]
            middles = [
                shapes.index(shape) + (position - (len(presets) - 1) / 2) * thick for shape in part["shape"]
            ]
            _tracks(axes, middles, part, unit, thick, looks[name]["color"])
            axes.barh(middles, part[unit], thick, linewidth=0, label=name, **looks[name])
        axes.set(title=way, xlabel=f"{unit} (more is better)")
        axes.set_xlim(0, 1.14 * data[[unit, "peak"]].max(axis=None))
    handles, names = body.axes[0].get_legend_handles_labels()
    legend(
        body,
        [*handles, Line2D([], [], color="0.2", linewidth=1.4)],
        [*names, "peak, and the share of it"],
        "outside lower center",
    )
    return finished(stem("speeds", unit), question, body, data)


def _tracks(
    axes: Axes, middles: Sequence[float], part: pd.DataFrame, unit: str, thick: float, colour: str
) -> None:
    """Draw a pale bar up to each known peak, with a line at the peak and the share of it behind the bars."""
    for middle, speed, peak, share in zip(middles, part[unit], part["peak"], part["share"], strict=True):
        if np.isfinite(peak):
            axes.barh(middle, peak, thick, linewidth=0, color=colour, alpha=0.13)
            axes.vlines(peak, middle - thick / 2, middle + thick / 2, color="0.2", linewidth=1.4)
            at = max(speed, peak)
            text = axes.annotate(
                f"{share:.0%}",
                (at, middle),
                (4, 0),
                textcoords="offset points",
                va="center",
                size=7,
                color="0.3",
            )
            text.set_in_layout(False)
