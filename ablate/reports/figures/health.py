"""Figures of the health of runs: errors of quantisation by operand, and divergence."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from ablate.experiment.schema import Metric
from ablate.recipes.recipe import SLOTS
from ablate.reports.figures import tables
from ablate.reports.figures.curves import draw_lines, name_lines
from ablate.reports.figures.style import (
    COLOURS,
    MOST_ARMS,
    Drawing,
    Picture,
    best_of,
    heat,
    house,
    label,
    name_column,
    plain,
)
from ablate.results.summary import ArmSummary
from ablate.training.metric_names import FIRST_NONFINITE, parse

_SQNR = Metric(name="sqnr_db", direction="maximize")
_STATES = {
    "done": ("#dfe9e2", ""),
    "done, value not finite": (COLOURS[8], "?"),
    "diverged": (COLOURS[3], "×"),
    "missing": ("white", "–"),
}
"""Colour and text of a run's cell by the state of the run."""
_COUNTED = ("nan/loss", "nan/grad", "nan/activation", "nan/steps_skipped")


@house
def slot_errors(records: pd.DataFrame) -> Picture | None:
    """Draw the signal to quantisation noise ratio (`quant/<slot>/sqnr_db`, dB, mean over layers) of each
    operand over steps, in one panel for each slot; None if it was not recorded at three steps."""
    by = ["slot", "arm"]
    selected = tables.long_enough(tables.errors_of_slots(records, {"sqnr_db"}), by)
    if selected.empty:
        return None
    shown, total = tables.arms(selected, _SQNR)
    lines = tables.thinned(tables.over_seeds(selected[selected["arm"].isin(shown)], by), by)
    slots = in_order(lines["slot"])
    note = (
        "Signal to quantisation noise in dB (more is better), mean over layers and seeds; bands: from the"
        " smallest to the largest seed."
    )
    columns = min(3, len(slots))
    height = max(2.1 * -(-len(slots) // columns) + 0.3, 0.3 * len(shown) + 0.4)
    question = "How much of each operand survives its quantisation?"
    drawing = Drawing(question, 2.5 * columns + 2.6, height, note, best_of(len(shown), total))
    looks, every = tables.looks(records, shown), drawing.panels(len(slots), columns, sharex=True, sharey=True)
    for axes, slot in zip(every, slots, strict=True):
        draw_lines(axes, lines[lines["slot"] == slot], "step", looks)
        axes.set_title(slot)
        axes.grid(axis="y")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    drawing.body.supxlabel("step", size="medium")
    drawing.body.supylabel("SQNR, dB", size="medium")
    name_lines(drawing, looks)
    return drawing.picture(lines.rename(columns={"mean": "sqnr_db"}), "slot_errors")


@house
def divergence(arms: Sequence[ArmSummary], table: pd.DataFrame | None = None) -> Picture | None:
    """Draw the state of every run: done, diverged or missing, and counts of values that were not finite. None
    without a run. If there are many arms, those that lost most runs are drawn.

    `table`: records with `nan/*`, the steps of divergence and the counts, which are summed over the run and
    over seeds; None: neither is drawn.
    """
    total = len(arms)
    losses = {arm.name: len(arm.given) - len(arm.values) for arm in arms}
    worst = set(sorted(losses, key=lambda name: -losses[name])[:MOST_ARMS])
    arms = [arm for arm in arms if arm.name in worst and arm.given]
    if not arms:
        return None
    selected = pd.DataFrame(columns=["arm", "seed", "metric", "value"])
    if table is not None:
        selected = tables.chosen(table, lambda name: name.family == "nan")
    lines = [(arm.name, seed, _state(arm, seed)) for arm in arms for seed in sorted(arm.given)]
    run = ["arm", "seed"]
    ends = selected[selected["metric"] == FIRST_NONFINITE].set_index(run)["value"].astype(float)
    counts = _run_counts(selected[selected["metric"].isin(_COUNTED)])
    kinds = [kind for kind in _COUNTED if kind in counts]
    data = pd.DataFrame(lines, columns=[*run, "state"]).join(ends.rename("diverged_at_step"), on=run)
    data = data.join(counts[kinds], on=run).fillna(dict.fromkeys(kinds, 0.0))
    seeds, names = sorted(set(data["seed"])), [arm.name for arm in arms]
    fewer = "" if len(names) == total else f"The {len(names)} of {total:,} arms that lost most runs."
    counted = "Right: values that were not finite, over all seeds." if kinds else ""
    cells = max(1.6, min(0.55 * len(seeds), 7))
    width, height = cells + 1.1 * len(kinds) + name_column(names) + 0.6, 0.34 * len(names) + 1.2
    question = "Which runs reached their end, and which diverged?"
    drawing = Drawing(question, width, height, counted, fewer)
    ratios = (cells, *([1.1 * len(kinds)] if kinds else []))
    state_axes, *count_axes = drawing.body.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
    _runs(state_axes, data, names, seeds)
    for axes in count_axes:
        _counts(axes, data.groupby("arm", sort=False)[kinds].sum().to_numpy(), kinds)
    present = [state for state in _STATES if state in set(data["state"])]
    handles = [Patch(facecolor=_STATES[state][0], edgecolor="0.6") for state in present]
    drawing.legend(handles, present, "outside lower left")
    return drawing.picture(data, "divergence")


def _run_counts(selected: pd.DataFrame) -> pd.DataFrame:
    """Return each run's counts: the last record of a running total, the sum of counts of intervals."""
    so_far = selected["metric"].map(lambda text: parse(text).is_total).astype(bool)
    rows = pd.concat([selected[~so_far], tables.last(selected[so_far])]) if so_far.any() else selected
    return rows.pivot_table("value", ["arm", "seed"], "metric", "sum", observed=True)


def _state(arm: ArmSummary, seed: int) -> str:
    """Return the state of an arm's run at a seed: one of `_STATES`."""
    if seed in arm.diverged:
        return "diverged"
    if seed in arm.missing:
        return "missing"
    return "done" if seed in arm.values else "done, value not finite"


def _runs(axes: Axes, data: pd.DataFrame, names: list[str], seeds: list[int]) -> None:
    """Draw one cell for each run, with a text in it, so that states differ in grey print, too."""
    states = np.full((len(names), len(seeds)), np.nan)
    texts = [["" for _ in seeds] for _ in names]
    for line in data.itertuples():
        row, column = names.index(line.arm), seeds.index(line.seed)
        states[row, column] = list(_STATES).index(line.state)
        step = f"{line.diverged_at_step:g}" if np.isfinite(line.diverged_at_step) else ""
        texts[row][column] = (line.state == "diverged" and step) or _STATES[line.state][1]
    few = texts if len(seeds) <= 16 else None
    heat(
        axes,
        states,
        -0.5,
        len(_STATES) - 0.5,
        few,
        ListedColormap([colour for colour, _ in _STATES.values()]),
    )
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    every = -(-len(seeds) // 16)
    axes.set_xticks(range(0, len(seeds), every), [str(seed) for seed in seeds[::every]])
    steps = " (in a cell: the step at which it diverged)" if "diverged" in set(data["state"]) else ""
    axes.set_xlabel(f"seed{steps}")
    _lattice(axes, states.shape)


def _counts(axes: Axes, matrix: np.ndarray, kinds: list[str]) -> None:
    """Draw a matrix of counts, [arms, kinds]."""
    texts, tints = [[f"{value:,.0f}" for value in line] for line in matrix], np.log1p(matrix)
    heat(axes, tints, 0, 1.6 * max(tints.max(), 1), texts, "Greys")
    axes.set_yticks([])
    axes.set_xticks(range(len(kinds)), [plain(parse(kind).metric).replace("_", "\n") for kind in kinds])
    axes.set_xlabel("not finite")
    _lattice(axes, matrix.shape)


def _lattice(axes: Axes, shape: tuple[int, ...]) -> None:
    axes.set_xticks(np.arange(shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(shape[0] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    axes.set_axisbelow(False)


def in_order(slots: Iterable[str]) -> list[str]:
    """Return the slots in the order in which a layer uses them. Unknown slots come last."""
    return sorted(set(slots), key=lambda slot: (SLOTS.index(slot) if slot in SLOTS else len(SLOTS), slot))
