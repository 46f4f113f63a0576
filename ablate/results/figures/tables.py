"""What is drawn of the tidy frame of `ablate.records`: rows of some metrics, over seeds, of few enough arms
and steps. It draws nothing."""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import pandas as pd

from ablate.experiment.schema import Metric
from ablate.results.figures.style import MOST_ARMS
from ablate.training.metric_names import Name, parse

_MOST_POINTS = 400
"""Of a line: more are finer than a screen."""
_KEPT = ["sweep", "arm", "baseline", "seed", "step", "tokens", "metric", "value"]


def named(name: str | Metric) -> Metric:
    """A metric by its name alone is one of which less is better."""
    return Metric(name=name) if isinstance(name, str) else name


def chosen(table: pd.DataFrame, wanted: Callable[[Name], bool], **columns: str) -> pd.DataFrame:
    """Return the rows with a finite value of the metrics whose name is `wanted`.

    The arms of several sweeps are `sweep: arm`. `columns` adds a field of the name to each row:
    `error="metric"` is a column `error` with the last part. A name is parsed once, however many rows it has.
    """
    metrics = table["metric"].astype("category").cat
    names, codes = [parse(str(text)) for text in metrics.categories], metrics.codes.to_numpy()
    chosen_codes = [code for code, name in enumerate(names) if wanted(name)]
    rows = np.isin(codes, chosen_codes) & np.isfinite(table["value"].to_numpy(float))
    found = table.loc[rows, _KEPT].astype(
        dict.fromkeys(("sweep", "arm", "baseline", "seed", "metric"), object)
    )
    for column, field in columns.items():
        found[column] = np.array([getattr(name, field) for name in names], dtype=object)[codes[rows]]
    if found["sweep"].nunique() > 1:
        for name in ("baseline", "arm"):
            found[name] = (found["sweep"] + ": " + found[name]).where(found[name].notna(), None)
    return found.astype({"step": float, "tokens": float, "value": float})


def of(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows with a finite value of one metric."""
    return chosen(table, lambda name: name == parse(metric))


def errors_of_slots(table: pd.DataFrame, errors: Collection[str], column: str = "error") -> pd.DataFrame:
    """Return the rows of operand slots' errors, means over layers, with the slot and, in `column`, the
    error."""

    def wanted(name: Name) -> bool:
        return (
            name.family == "quant" and name.slot is not None and name.layer is None and name.metric in errors
        )

    return chosen(table, wanted, **{"slot": "slot", column: "metric"})


def arms(found: pd.DataFrame, metric: Metric) -> tuple[list[str], int]:
    """The arms to draw, and of how many: the best by the mean over seeds of each run's last value, and the
    baselines of those."""
    present = list(dict.fromkeys(found["arm"]))
    if len(present) <= MOST_ARMS:
        return present, len(present)
    lasts = last(found).groupby("arm")["value"].mean()
    best = set(lasts.sort_values(ascending=metric.direction == "minimize", kind="stable").index[:MOST_ARMS])
    best |= set(found.loc[found["arm"].isin(best), "baseline"].dropna())
    shown = [arm for arm in present if arm in best]
    return shown, len(present)


def last(found: pd.DataFrame) -> pd.DataFrame:
    """Of every arm, seed and metric the row of its last step."""
    return found.sort_values("step", kind="stable").groupby(["arm", "seed", "metric"], sort=False).tail(1)


def over_seeds(found: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Mean, smallest and largest over seeds of each arm at each step, within `by`; steps ascend."""
    groups = found.sort_values("step", kind="stable").groupby([*by, "step"], sort=False)
    return groups.agg(
        tokens=("tokens", "first"),
        seeds=("seed", "nunique"),
        mean=("value", "mean"),
        low=("value", "min"),
        high=("value", "max"),
    ).reset_index()


def thinned(lines: pd.DataFrame, by: Sequence[str], most: int = _MOST_POINTS) -> pd.DataFrame:
    """Every so manyth row of each group, and its last."""
    place, size = (lines.groupby(list(by), sort=False)["step"].transform(how) for how in ("cumcount", "size"))
    return lines[(place % np.ceil(size / most) == 0) | (place == size - 1)]
