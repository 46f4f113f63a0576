"""Figure of a training by Transformer Engine beside the same training emulated, and beside emulated ones that
differ in the last bits of their sums. It makes no verdict."""

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ablate.reports.figures.style import COLOURS, GREY, Picture, canvas, finished, house, legend, panels


@house
def overlay(
    losses: Mapping[str, Mapping[str, Sequence[float]]],
    question: str = "Does Transformer Engine train as the emulator does?",
) -> Picture | None:
    """Draw losses over steps in two panels for each recipe: the curves, and their distances from `emulated`;
    None without losses.

    `losses`: by step, by title of the recipe and name of the run. Each recipe has a run `emulated`.
    `question`: title of the picture.
    """
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
        question,
        4.6 * len(losses) + 0.4,
        5.2,
        "Grey: emulated runs that differ in the last bits of their fp32 sums alone.",
    )
    axes = panels(body, 2 * len(losses), len(losses), sharex=True)
    handles: dict[str, Line2D] = {}
    for column, title in enumerate(losses):
        for row, value in ((0, "loss"), (1, "distance")):
            each = axes[row * len(losses) + column]
            for run, selected in data[data["recipe"] == title].groupby("run", sort=False):
                if row and run == "emulated":
                    continue
                handles.setdefault(*_line(each, run, selected["step"], selected[value]))
            each.set_ylabel(value if row == 0 else "|loss - emulated|")
        axes[column].set_title(title)
        axes[len(losses) + column].set_yscale("symlog", linthresh=1e-6)
        axes[len(losses) + column].set_xlabel("step")
        axes[column].xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(body, list(handles.values()), list(handles), "outside lower center")
    return finished("parity", question, body, data)


def _line(axes: Axes, run: str, steps: pd.Series, values: pd.Series) -> tuple[str, Line2D]:
    """Draw one run, and return its label and line for the legend. All perturbed runs share one label."""
    looks: dict[str, tuple[str, object, float]] = {
        "te": (COLOURS[3], "-", 1.6),
        "emulated": (COLOURS[0], (0, (5, 1.5)), 1.6),
        "bf16": (COLOURS[2], (0, (1.5, 1.2)), 1.2),
    }
    colour, dash, width = looks.get(run, (GREY, "-", 0.8))
    (line,) = axes.plot(
        steps, values, color=colour, linestyle=dash, linewidth=width, zorder=3 if run in looks else 2
    )
    return {"te": "Transformer Engine"}.get(
        run, run if run in looks else "emulated, last bits otherwise"
    ), line
