"""CSV exports of a chart of Weights & Biases: a column of steps, and three columns for each run.

    "Step","bf16-s0 - val/loss","bf16-s0 - val/loss__MIN","bf16-s0 - val/loss__MAX"

If the axis is another, such as tokens, the steps are those of the run's column `bf16-s0 - _step`.
The first of the three is a mean, over runs in a grouped chart and over steps in a long one. So a chart counts
only if minimum and maximum equal it; others are refused, since no run has their values.

A table with a column a run, `step,bf16_s0,bf16_s1`, is read by the pattern of its columns' names.
"""

from collections.abc import Sequence
from pathlib import PurePath
from shlex import quote

from ablate.errors import InputError, brief
from ablate.judging import cells
from ablate.judging.columns import USUAL, Columns, plain
from ablate.judging.named_runs import NamedRun
from ablate.judging.names import is_of
from ablate.judging.points import Points
from ablate.judging.tables import Table

_BETWEEN = " - "
_BOUNDS = ("__MIN", "__MAX")
_STEP = "_step"
"""Metric of a run's steps, which a chart has if its axis is another."""
_HISTORY = "export the history of each run: `run.history().to_csv()` of W&B's API"


def is_chart(names: Sequence[str]) -> bool:
    """Return True for the columns of a chart's export."""
    others = {*names[1:]}
    return any(name.endswith(_BOUNDS) and name[:-5] in others and _BETWEEN in name for name in others)


def chart_runs(table: Table) -> list[NamedRun]:
    """Return the runs of a chart. InputError if its axis is not the step, or its values are means."""
    axis, *series = table.columns
    runs: dict[str, NamedRun] = {}
    for column in series:
        if column.endswith(_BOUNDS) and column[:-5] in series:
            continue
        name, between, metric = column.rpartition(_BETWEEN)
        if not between:
            shown = brief(column)
            raise InputError(f"{table.where}: column {shown!r} is not 'RUN - METRIC', as W&B names it")
        if metric == _STEP:
            continue
        steps = axis if plain(axis) in USUAL["step"] else f"{name}{_BETWEEN}{_STEP}"
        if steps not in table.columns:
            raise InputError(
                f"{table.where}: the chart's axis is {brief(axis)!r}, and no column {brief(steps)!r} has the"
                " steps; choose Step, and export again"
            )
        _fill(runs.setdefault(name, _empty(table, name)).points, table, steps, column, metric)
    return [run for run in runs.values() if run.points.records()]


def run_columns(table: Table, columns: Columns) -> list[NamedRun]:
    """Return the runs of a table with a column of steps and else one for each run; none if it is another.

    The user's pattern is that of the columns' names. It is another table if its file's name is of the
    pattern, or a column says arm, seed or run of a row. InputError if some columns are of the pattern and
    others are not, or a cell is not a number.
    """
    steps = [name for name in table.columns if name == columns.step or plain(name) in USUAL["step"]][:1]
    names = [name for name in table.columns if name not in steps]
    pattern = columns.name or ""
    by_rows = any(plain(name) in (*USUAL["arm"], *USUAL["seed"], *USUAL["run"]) for name in names)
    if not steps or by_rows or "{seed}" not in pattern or is_of(pattern, PurePath(table.where).stem):
        return []
    runs = [_empty(table, name) for name in names if is_of(pattern, name)]
    if len(runs) < 2:
        return []
    others = (name for name in names if not is_of(pattern, name) and name not in columns.without)
    if (other := next(others, None)) is not None:
        raise InputError(
            f"{table.where}: {len(runs)} columns are runs by {pattern!r}, and column {brief(other)!r}"
            f" is not; --without {quote(brief(other))} leaves it out"
        )
    metric = columns.asked or next(iter((columns.metrics or {}).values()), "value")
    for run in runs:
        _fill(run.points, table, steps[0], run.name, metric)
    return runs


def _empty(table: Table, name: str) -> NamedRun:
    where = f"{table.where}: {brief(name)}"
    return NamedRun(where, name, Points(where))


def _fill(points: Points, table: Table, steps: str, column: str, metric: str) -> None:
    """Add the values of a column; `steps` is the column of its steps."""
    names = [own + bound for own in (column, steps) for bound in ("", *_BOUNDS)]
    beside = {name: table.columns[name] for name in names if name in table.columns}
    for row, line in enumerate(table.lines):
        shown = column
        cell_of = {name: cells_of[row] for name, cells_of in beside.items()}
        try:
            if cells.is_empty(cell_of[column]):
                if any(not cells.is_empty(cell_of.get(column + bound)) for bound in _BOUNDS):
                    raise ValueError("is empty, and its minimum or maximum is not")
                continue
            means: dict[str, float] = {}
            for shown in beside:
                value = cells.number(cell_of[shown])
                mean = means.setdefault(shown if shown in (column, steps) else shown[:-5], value)
                if not cells.same(value, mean):
                    raise ValueError(f"differs from the mean {mean!r}: the chart shows means; {_HISTORY}")
            shown = steps
            points.add(line, cells.step_of(cell_of[steps]), metric, means[column])
        except ValueError as error:
            raise InputError(f"{table.at(row)}: column {brief(shown)!r}: {error}") from None
