"""A training by Transformer Engine over the same one emulated, and over emulated ones whose sums end
otherwise. It judges nothing."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ablate.results.figures.style import COLOURS, GREY, Picture, canvas, finished, house, legend, panels

_QUESTION = "Does Transformer Engine train as the emulator does?"


@house
def overlay(losses: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture | None:
    """Losses step by step, a column of two panels for each title: the curves, and how far each is from
    `emulated`. None of no losses."""
    if not losses:
        return None
    lines = [
        {
            "recipe": title,
            "run": run,
            "step": step,
            "loss": loss,
            "distance": abs(loss - runs["emulated"][step - 1]),
        }
        for title, runs in losses.items()
        for run, values in runs.items()
        for step, loss in enumerate(values[: len(runs["emulated"])], 1)
    ]
    data = pd.DataFrame(lines)
    body = canvas(
        _QUESTION,
        4.6 * len(losses) + 0.4,
        5.2,
        "Grey: emulated runs that differ in the last bits of their fp32 sums alone.",
    )
    axes = panels(body, 2 * len(losses), len(losses), sharex=True)
    handles = {}
    for place, title in enumerate(losses):
        for row, value in ((0, "loss"), (1, "distance")):
            each = axes[row * len(losses) + place]
            for run, found in data[data["recipe"] == title].groupby("run", sort=False):
                if row and run == "emulated":
                    continue
                handles.setdefault(*_line(each, run, found["step"], found[value]))
            each.set_ylabel(value if row == 0 else "|loss - emulated|")
        axes[place].set_title(title)
        axes[len(losses) + place].set_yscale("symlog", linthresh=1e-6)
        axes[len(losses) + place].set_xlabel("step")
        axes[place].xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(body, list(handles.values()), list(handles), "lower center")
    return finished("parity", _QUESTION, body, data)


def _line(axes: Axes, run: str, steps: pd.Series, values: pd.Series) -> tuple[str, Line2D]:
    """Drawn, and what stands for it in the legend: one word for all twins."""
    known = {
        "te": (COLOURS[3], "-", 1.6),
        "emulated": (COLOURS[0], (0, (5, 1.5)), 1.6),
        "bf16": (COLOURS[2], (0, (1.5, 1.2)), 1.2),
    }
    colour, dash, width = known.get(run, (GREY, "-", 0.8))
    (line,) = axes.plot(
        steps, values, color=colour, linestyle=dash, linewidth=width, zorder=3 if run in known else 2
    )
    return {"te": "Transformer Engine"}.get(
        run, run if run in known else "emulated, last bits otherwise"
    ), line
