"""Figure of a training by Transformer Engine beside the same training emulated, and beside emulated ones that
differ in the last bits of their sums. It makes no verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ablate.reports.figures.style import COLOURS, GREY, Drawing, Picture, house

_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "te": ("Transformer Engine", {"color": COLOURS[3], "linestyle": "-", "linewidth": 1.6, "zorder": 3}),
    "emulated": (
        "emulated",
        {"color": COLOURS[0], "linestyle": (0, (5, 1.5)), "linewidth": 1.6, "zorder": 3},
    ),
    "bf16": ("bf16", {"color": COLOURS[2], "linestyle": (0, (1.5, 1.2)), "linewidth": 1.2, "zorder": 3}),
}
_PERTURBED: tuple[str, dict[str, Any]] = (
    "emulated, last bits otherwise",
    {"color": GREY, "linestyle": "-", "linewidth": 0.8, "zorder": 2},
)
"""Label and line of a run by its name; all perturbed runs share one label."""


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
    data = pd.DataFrame(
        (title, run, step, loss, abs(loss - exact))
        for title, runs in losses.items()
        for run, values in runs.items()
        for step, (loss, exact) in enumerate(zip(values, runs["emulated"], strict=False), 1)
    ).set_axis(["recipe", "run", "step", "loss", "distance"], axis=1)
    note = "Grey: emulated runs that differ in the last bits of their fp32 sums alone."
    drawing = Drawing(question, 4.6 * len(losses) + 0.4, 5.2, note)
    axes, handles = drawing.panels(2 * len(losses), len(losses), sharex=True), dict[str, Line2D]()
    for above, below, title in zip(axes, axes[len(losses) :], losses, strict=False):
        for panel, value in ((above, "loss"), (below, "distance")):
            for run, selected in data[data["recipe"] == title].groupby("run", sort=False):
                if (run, value) != ("emulated", "distance"):
                    text, look = _LOOKS.get(str(run), _PERTURBED)
                    (line,) = panel.plot(selected["step"], selected[value], **look)
                    handles.setdefault(text, line)
        above.set(title=title, ylabel="loss")
        above.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.set_yscale("symlog", linthresh=1e-6)
        below.set(xlabel="step", ylabel="|loss - emulated|")
    drawing.legend(list(handles.values()), list(handles), "outside lower center")
    return drawing.picture(data, "parity")
