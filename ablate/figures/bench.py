"""What `ablate bench` measured, as bars. It measures nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ablate.figures.style import COLOURS, HATCHES, Picture, canvas, finished, house, legend, name_column, panels, rows, stem

Line = dict[str, Any]


@house
def bars(lines: Sequence[Line], value: str, label: str, hue: str) -> Picture | None:
    """Measured values as bars, a group for each label coloured by `hue`; a panel for each shape and dtype. None of no lines."""
    if not lines:
        return None
    data = pd.DataFrame(lines)
    apart = [name for name in ("shape", "dtype") if name in data and name != label and data[name].nunique() > 1]
    data["panel"] = data[apart].astype(str).agg(", ".join, axis=1) if apart else ""
    parts, labels, hues = (list(dict.fromkeys(data[name])) for name in ("panel", label, hue))
    question = f"What does each {hue} reach in {value}, by {label}?"
    columns = min(2, len(parts))
    height = (len(labels) * (0.16 * len(hues) + 0.14) + 0.9) * -(-len(parts) // columns) + 0.3
    body = canvas(question, 4.4 * columns + name_column(map(str, labels)), height)
    thick = 0.8 / len(hues)
    for axes, part in zip(panels(body, len(parts), columns, sharex=True, sharey=True), parts, strict=True):
        rows(axes, [str(name) for name in labels])
        for place, name in enumerate(hues):
            found = data[(data["panel"] == part) & (data[hue] == name)].groupby(label, sort=False)[value].mean()
            places = [labels.index(each) + (place - (len(hues) - 1) / 2) * thick for each in found.index]
            look = {"color": COLOURS[place % len(COLOURS)], "hatch": HATCHES[place % len(HATCHES)], "edgecolor": "white"}
            axes.barh(places, found, thick, linewidth=0, label=str(name), **look)
        axes.set_title(part)
        axes.tick_params(labelbottom=True)
    for axes in body.axes[-columns:]:
        axes.set_xlabel(value)
    drawn = {name: handle for axes in body.axes for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend(body, list(drawn.values()), list(drawn), "lower center")
    return finished(stem("bars", value), question, body, data.drop(columns="panel"))


@house
def shares(lines: Sequence[Line], value: str, label: str, parts: Sequence[str]) -> Picture | None:
    """Each line's value as a bar, divided into the shares of its parts. None of no lines."""
    if not lines:
        return None
    data = pd.DataFrame(
        [{label: line[label], "part": part, "share": line[part], value: line[value] * line[part]} for line in lines for part in parts]
    )
    names = [str(line[label]) for line in lines]
    question = "Where does a step spend its time?"
    body = canvas(question, 6 + name_column(names), 0.5 * len(lines) + 1.1)
    axes = body.subplots()
    rows(axes, names)
    begins = np.zeros(len(lines))
    handles = []
    for place, part in enumerate(parts):
        widths = data.loc[data["part"] == part, value].to_numpy(float)
        look = {"color": COLOURS[place % len(COLOURS)], "hatch": HATCHES[place % len(HATCHES)], "edgecolor": "white"}
        handles.append(axes.barh(range(len(lines)), widths, 0.7, begins, linewidth=0, **look))
        begins += widths
    axes.set_xlabel(value)
    legend(body, handles, parts, "lower center")
    return finished(stem("shares", value), question, body, data)
