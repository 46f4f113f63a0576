"""Bar charts of the measurements of `ablate bench`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ablate.reports.figures.style import COLOURS, HATCHES, Drawing, Picture, house, name_column, rows

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
    colour, hatch = COLOURS[position % len(COLOURS)], HATCHES[position % len(HATCHES)]
    return {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}


def _middles(names: Sequence[str], labels: Sequence[str], place: float, thick: float) -> list[float]:
    """Return the heights of bars in the rows of their names. `place`: of the bar in its row, 0 the middle."""
    return [labels.index(name) + place * thick for name in names]


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
    several = [name for name in ("shape", "dtype") if name in data and data[name].nunique() > 1]
    varying = [name for name in several if name != label]
    data["panel"] = data[varying].astype(str).agg(", ".join, axis=1) if varying else ""
    parts, labels, hues = (list(dict.fromkeys(data[name])) for name in ("panel", label, hue))
    columns, names = min(2, len(parts)), [str(name) for name in labels]
    height = (len(labels) * (0.16 * len(hues) + 0.14) + 0.9) * -(-len(parts) // columns) + 0.3
    question = f"What does each {hue} reach in {value}, by {label}?"
    drawing = Drawing(question, 4.4 * columns + name_column(names), height)
    thick, drawn = 0.8 / len(hues), dict[str, Any]()
    every = drawing.panels(len(parts), columns, sharex=True, sharey=True)
    for axes, part in zip(every, parts, strict=True):
        rows(axes, names)
        for position, name in enumerate(hues):
            selected = data[(data["panel"] == part) & (data[hue] == name)]
            means = selected.groupby(label, sort=False)[value].mean()
            middles = _middles([*means.index], labels, position - (len(hues) - 1) / 2, thick)
            axes.barh(middles, means, thick, label=str(name), **_look(position))
        axes.set_title(part)
        axes.tick_params(labelbottom=True)
        handles, texts = axes.get_legend_handles_labels()
        drawn |= dict(zip(texts, handles, strict=True))
    for axes in every[-columns:]:
        axes.set_xlabel(value)
    drawing.legend(list(drawn.values()), list(drawn), "outside lower center")
    return drawing.picture(data.drop(columns="panel"), "bars", value)


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
        {label: line[label], "part": part, "share": line[part], value: line[value] * line[part]}
        for line in lines
        for part in parts
    )
    names = [str(line[label]) for line in lines]
    height = 0.5 * len(lines) + 1.1
    drawing = Drawing("Where does a step spend its time?", 6 + name_column(names), height)
    axes = drawing.body.subplots()
    rows(axes, names)
    begins, handles = np.zeros(len(lines)), []
    for position, part in enumerate(parts):
        widths = data.loc[data["part"] == part, value].to_numpy(float)
        handles.append(axes.barh(range(len(lines)), widths, 0.7, begins, **_look(position)))
        begins += widths
    axes.set_xlabel(value)
    drawing.legend(handles, parts, "outside lower center")
    return drawing.picture(data, "shares", value)


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
    width, height = 7.6 + name_column(shapes), len(shapes) * (0.2 * len(presets) + 0.22) + 0.9
    drawing = Drawing("How much of the hardware does a linear layer use?", width, height, *notes)
    thick, both = 0.84 / len(presets), drawing.panels(2, 2, sharex=True, sharey=True)
    for axes, way in zip(both, ("forward", "backward"), strict=True):
        rows(axes, shapes)
        for position, name in enumerate(presets):
            part, look = data[(data["pass"] == way) & (data["preset"] == name)], _look(position)
            middles = _middles([*part["shape"]], shapes, position - (len(presets) - 1) / 2, thick)
            _tracks(axes, middles, part, unit, thick, look["color"])
            axes.barh(middles, part[unit], thick, label=name, **look)
        axes.set(title=way, xlabel=f"{unit} (more is better)")
        axes.set_xlim(0, 1.14 * data[[unit, "peak"]].max(axis=None))
    handles, names = both[0].get_legend_handles_labels()
    peak = Line2D([], [], color="0.2", linewidth=1.4)
    drawing.legend([*handles, peak], [*names, "peak, and the share of it"], "outside lower center")
    return drawing.picture(data, "speeds", unit)


def _tracks(
    axes: Axes, middles: Sequence[float], part: pd.DataFrame, unit: str, thick: float, colour: str
) -> None:
    """Draw a pale bar up to each known peak, with a line at the peak and the share of it behind the bars."""
    beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "size": 7, "color": "0.3"}
    for middle, speed, peak, share in zip(middles, part[unit], part["peak"], part["share"], strict=True):
        if np.isfinite(peak):
            axes.barh(middle, peak, thick, linewidth=0, color=colour, alpha=0.13)
            axes.vlines(peak, middle - thick / 2, middle + thick / 2, color="0.2", linewidth=1.4)
            text = axes.annotate(f"{share:.0%}", (max(speed, peak), middle), (4, 0), **beside)
            text.set_in_layout(False)
