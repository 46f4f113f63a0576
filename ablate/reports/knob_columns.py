"""Columns of knobs in place of long names of arms: on a page, `rht=true sr=false` is two cells.

    arm     rht     sr      val/loss
    bf16                    2.4111
            true    false   2.4206

Notes, terminals and CSV files keep the names, which other commands take.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ablate.experiment.arms import label
from ablate.files import Json
from ablate.reports.table import Cell, Column, Row, Table, only
from ablate.results.summary import ArmSummary

_ARM = "arm"
_FEWEST = 2
"""Fewest knobs for columns of their own: one knob reads well as a name."""
Shown = TypeVar("Shown")


def by_knobs(part: Shown, arms: Sequence[ArmSummary]) -> Shown:
    """Return a table of arms with a column for each knob on a page, if the arms that have names made of knobs
    all set the same ones; everything else as it is."""
    # A baseline that is a preset has one knob, and keeps its name.
    several = [arm for arm in arms if len(arm.knobs) >= _FEWEST and label(arm.knobs) == arm.name]
    knobs = {arm.name: arm.knobs for arm in several}
    named = [arm for arm in arms if arm.role == "listed" and arm.baseline and arm.name not in knobs]
    same = len({frozenset(arm.knobs) for arm in several}) == 1
    if not isinstance(part, Table) or named or not same:
        return part
    columns: list[Column[Any]] = []
    for column in part.columns:
        columns += _columns(column, part.rows, knobs) if column.name == _ARM else [column]
    return replace(part, columns=columns)


def _columns(
    column: Column[Row], rows: Sequence[Row], knobs: Mapping[str, Mapping[str, Json]]
) -> list[Column[Row]]:
    def name(row: Row) -> str:
        return column.text(column.cell(row))

    def of(knob: str) -> Column[Row]:
        short = knob.removeprefix("workload.")

        def cell(row: Row) -> Cell:
            each = knobs.get(name(row), {})
            return label({knob: each[knob]}).removeprefix(f"{short}=") if knob in each else ""

        return Column(short, cell)

    def other(row: Row) -> Cell:
        return "" if name(row) in knobs else name(row)

    named = [Column[Row](_ARM, other)] if any(map(other, rows)) else []
    html = only("html", *named, *map(of, next(iter(knobs.values()))))
    return [*html, replace(column, only=("terminal", "markdown", "csv"))]
