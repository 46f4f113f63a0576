"""Picture of a map: groups of layers down, operands across, each cell tinted by its damage."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ablate.experiment.schema import Metric
from ablate.reports.page import Part, Text
from ablate.reports.plain_text import html_text, inline
from ablate.reports.table import VERDICT, Cell, Table, TablePicture, tinted_map
from ablate.results.number_text import bounds, interval, minus
from ablate.results.paired_stats import Difference
from ablate.results.sensitivity import AGREEMENT, MappedCell, Sensitivity
from ablate.results.verdict_text import verdict_text

_ALL = "all"
"""Word for a group without a name: the whole model, or all operands."""


@dataclass(frozen=True)
class MapPicture(TablePicture):
    """Map of a sweep on a page; a table elsewhere."""

    found: Sensitivity
    metric: Metric
    unit: str
    coloured: bool
    """False if a check failed, so that nothing may be tinted."""

    def html(self) -> str:
        """Return the map, and how to read it."""
        at = {(cell.group, cell.part): cell for cell in self.found.cells}
        rows = {
            group or _ALL: [self._cell(at.get((group, part))) for part in self.found.columns]
            for group in self.found.groups
        }
        unit = f", {self.unit}" if self.unit else ""
        times = f", error {self.found.times:g} times as large" if self.found.times > 1 else ""
        title = inline(f"{self.metric.name}{unit}: damage of each cell alone{times}")
        return (
            f'<div class="maps"><p><b>{title}</b></p>'
            f"{tinted_map([part or _ALL for part in self.found.columns], rows)}"
            '<p class="about">Tint: damage, pulled towards the mean of its product as far as noise demands.'
            " Bold: told from zero, after Holm's correction. Grey: its product is not ranked."
            ' <a href="figures/map.csv">CSV</a></p></div>'
        )

    def _cell(self, cell: MappedCell | None) -> str:
        if cell is None:
            return "<td></td>"
        most = max((abs(each.shrunk) for each in self.found.cells if each.ranked), default=0.0)
        tinted = self.coloured and cell.ranked and most > 0
        share = f' style="--share:{100 * abs(cell.shrunk) / most:.0f}%"' if tinted else ""
        worse = (cell.total.mean > 0) == (self.metric.direction == "minimize")
        kind = f" {'less' if worse else 'more'}" if tinted else " unranked"
        said = "; ".join(self._said(cell))
        text = minus(interval(cell.total)).replace(" ±", "<small> ±") + "</small>"
        strong = f"<b>{text}</b>" if cell.resolved and self.coloured else text
        return f'<td class="number{kind}"{share} title="{html_text(said)}">{strong}</td>'

    def _said(self, cell: MappedCell) -> Iterator[str]:
        yield f"{cell.name}: {minus(bounds(cell.total))}, {verdict_text(cell.verdict, short=True)}"
        if cell.parts:
            yield f"direct {minus(interval(cell.parts.direct))}"
            yield f"learnt {minus(interval(cell.parts.learnt))}"

    @property
    def table(self) -> Table:
        """Numbers of the drawing."""
        rows: list[dict[str, Cell]] = [
            {
                "cell": cell.name,
                "damage": _sortable(cell.total),
                "direct": _sortable(cell.parts.direct) if cell.parts else "",
                "learnt": _sortable(cell.parts.learnt) if cell.parts else "",
                "shrunk": (minus(f"{cell.shrunk:+.2g}"), cell.shrunk),
                "ranked": "yes" if cell.ranked else "no",
                VERDICT: verdict_text(cell.verdict, short=True),
            }
            for cell in sorted(self.found.cells, key=lambda cell: -cell.shrunk)
        ]
        return Table.of("map", rows)


def grid_table(found: Sensitivity, recipe: str) -> Table:
    """Return the map as a table for a terminal: groups of layers down, operands across. `recipe`: its
    name."""
    rows: dict[str, dict[str, Cell]] = {group: {"layers": group or _ALL} for group in found.groups}
    for cell in found.cells:
        rows[cell.group][cell.part or _ALL] = _sortable(cell.total)
    wholes = {"all cells": found.everything, f"{recipe}, its own error": found.recipe}
    together: list[dict[str, Cell]] = [
        {"layers": name, "together": _sortable(whole)} for name, whole in wholes.items() if whole
    ]
    return Table.of("map", [*rows.values(), *together])


def _sortable(difference: Difference) -> Cell:
    return minus(interval(difference)), difference.mean


def map_parts(found: Sensitivity | None, metric: Metric, unit: str, coloured: bool) -> list[Part]:
    """Return the picture of a map, and sentences on what it does and does not show; empty without a map.
    `unit`: the metric's, empty if it has no name; `coloured`: False if a check failed, so that nothing may be
    tinted."""
    if found is None:
        return []
    return [MapPicture(found, metric, unit, coloured), Text("\n\n".join(_sentences(found, unit)))]


def _sentences(found: Sensitivity, unit: str) -> Iterator[str]:
    word = f" {unit}" if unit else ""
    known = {name: each for name, each in found.rankings.items() if math.isfinite(each.agreement)}
    if known:
        ranks = (
            f"{name or 'all products'} {minus(f'{each.agreement:.2f}')} (equal cells: p {each.p:.2g})"
            for name, each in known.items()
        )
        yield (
            f"Rank correlation of the cells over disjoint halves of the seeds: {', '.join(ranks)}. Below"
            f" {AGREEMENT}, or if the cells may be equal, a product's cells are grey: not ranked. Only its"
            " largest is shown then, if it is told from all others."
        )
    if unranked := [name or "all products" for name in found.rankings if name not in known]:
        yield f"Not ranked for want of cells or seeds: {', '.join(unranked)}."
    if found.first:
        yield (
            f"Chosen on half of the seeds and measured on the other half, the largest"
            f" {found.first.product or 'cell'} costs {minus(f'{found.fresh:+.4f}')}{word}: the figure in the"
            " map is of the seeds that chose it, and somewhat too large."
        )
    if found.everything and found.excess:
        yield (
            f"All cells at once cost {minus(interval(found.everything))}{word}. The sum of the cells differs"
            f" from that by {minus(interval(found.excess))}"
            + (
                ": within this, damage adds up."
                if found.excess.low <= 0 <= found.excess.high
                else ", so damage does not add up."
            )
        )
    if math.isfinite(found.smallest):
        yield f"A cell would be seen, with a chance of 80 %, from {found.smallest:.2g}{word} on." + (
            f" The recipe itself, without amplification, costs {minus(interval(found.recipe))}{word}."
            if found.recipe
            else ""
        )
    if found.times > 1:
        yield (
            "It does not show that a small cell is harmless (a biased error shows late), how products compare"
            " (in one trial, damage of dgrad and wgrad grew twice as fast with the window as that of fprop),"
            " how large any damage is at the recipe's own error, what is particular to its errors (errors"
            " that change places in their operand gave the same order), or that the order holds for another"
            " model, checkpoint or length."
        )
