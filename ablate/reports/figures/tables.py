"""Selections from the tidy frame of records for figures: rows of some metrics, statistics over seeds, and few
enough arms and steps. Nothing is drawn here."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import pandas as pd

from ablate.experiment.schema import Metric
from ablate.reports.figures.style import MOST_ARMS, Mark, marks
from ablate.training.metric_names import Name, parse

_MOST_POINTS = 400
"""Largest number of points of a line. More are finer than a screen."""
FEWEST_POINTS = 3
"""Smallest number of points of a plot. Fewer are a sentence, or two numbers of a table."""
_KEPT = ["sweep", "arm", "baseline", "seed", "step", "tokens", "metric", "value"]


def named(name: str | Metric) -> Metric:
    """Return the metric of a name: one of which less is better. A metric is returned as it is."""
    return Metric(name=name) if isinstance(name, str) else name


def chosen(table: pd.DataFrame, wanted: Callable[[Name], bool], **columns: str) -> pd.DataFrame:
    """Return the rows with a finite value of the metrics whose parsed name is `wanted`.

    `columns` adds fields of the name to each row: `error="metric"` adds a column `error` with the last part
    of the name. Arms of several sweeps are named `sweep: arm`. A name is parsed once, however many rows it
    has.
    """
    metrics = table["metric"].astype("category").cat
    names, codes = [parse(str(text)) for text in metrics.categories], metrics.codes.to_numpy()
    chosen_codes = [code for code, name in enumerate(names) if wanted(name)]
    rows = np.isin(codes, chosen_codes) & np.isfinite(table["value"].to_numpy(float))
    selected = table.loc[rows, _KEPT].astype(
        dict.fromkeys(("sweep", "arm", "baseline", "seed", "metric"), object)
    )
    for column, field in columns.items():
        selected[column] = np.array([getattr(name, field) for name in names], dtype=object)[codes[rows]]
    if selected["sweep"].nunique() > 1:
        for name in ("baseline", "arm"):
            selected[name] = (selected["sweep"] + ": " + selected[name]).where(selected[name].notna(), None)
    return selected.astype({"step": float, "tokens": float, "value": float})


def of(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return the rows with a finite value of one metric."""
    return chosen(table, lambda name: name == parse(metric))


def errors_of_slots(table: pd.DataFrame, errors: Collection[str]) -> pd.DataFrame:
    """Return the rows of operand slots' errors, means over layers, with the slot and the error."""

    def wanted(name: Name) -> bool:
        return name.family == "quant" and bool(name.slot) and not name.layer and name.metric in errors

    return chosen(table, wanted, slot="slot", error="metric")


def arms(selected: pd.DataFrame, metric: Metric) -> tuple[list[str], int]:
    """Return the arms to draw, and the number of all arms. Drawn are the best, by the mean over seeds of each
    run's last value, and the baselines of these."""
    present = list(dict.fromkeys(selected["arm"]))
    if len(present) <= MOST_ARMS:
        return present, len(present)
    lasts = last(selected).groupby("arm")["value"].mean()
    best = set(lasts.sort_values(ascending=metric.direction == "minimize", kind="stable").index[:MOST_ARMS])
    best |= set(selected.loc[selected["arm"].isin(best), "baseline"].dropna())
    shown = [arm for arm in present if arm in best]
    return shown, len(present)


def looks(records: pd.DataFrame, shown: Sequence[str]) -> dict[str, Mark]:
    """Return the marks of the arms that are drawn, named as `chosen` names them: the same in every figure of
    these records, which have all arms; baselines grey."""
    found = records[["sweep", "arm", "baseline"]].drop_duplicates()
    several = found["sweep"].nunique() > 1
    prefix = found["sweep"].astype(str) + ": " if several else ""
    every = marks(prefix + found["arm"].astype(str), set(prefix + found["baseline"].dropna().astype(str)))
    return {arm: every[arm] for arm in shown}


def last(selected: pd.DataFrame) -> pd.DataFrame:
    """Return the row of the last step of every arm, seed and metric."""
    return selected.sort_values("step", kind="stable").groupby(["arm", "seed", "metric"], sort=False).tail(1)


def over_seeds(selected: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return mean, smallest and largest value over seeds at each step, in ascending order of steps: a row for
    each step and combination of the columns `by`, with `by`, step, tokens, seeds, mean, low and high."""
    groups = selected.sort_values("step", kind="stable").groupby([*by, "step"], sort=False)
    return groups.agg(
        tokens=("tokens", "first"),
        seeds=("seed", "nunique"),
        mean=("value", "mean"),
        low=("value", "min"),
        high=("value", "max"),
    ).reset_index()


def long_enough(lines: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return the lines, a row for each group and step, of the groups that have enough steps to be drawn as a
    curve. Groups are combinations of the columns `by`, such as `arm`."""
    return lines[lines.groupby(list(by), sort=False)["step"].transform("nunique") >= FEWEST_POINTS]


def thinned(lines: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return at most about `_MOST_POINTS` rows of each group at equal distances, and its last row."""
    position, size = (
        lines.groupby(list(by), sort=False)["step"].transform(how) for how in ("cumcount", "size")
    )
    return lines[(position % np.ceil(size / _MOST_POINTS) == 0) | (position == size - 1)]
