"""Maps on a page: tables of tinted cells, with their numbers as a table elsewhere.

A sensitivity map has groups of layers down, operands across, and the damage of each cell. A search for a
cause has units down, rounds across, and the evidence on each unit, beside the proof.
"""

import math
from collections.abc import Iterator

from ablate.reports.answer_measurements import Measurements
from ablate.reports.page import Part, Text
from ablate.reports.plain_text import html_text, inline
from ablate.reports.table import VERDICT, Cell, DrawnTable, Table, tinted_map
from ablate.results.blame import amount, names_of
from ablate.results.comparisons import Comparisons
from ablate.results.number_text import bounds, interval, minus
from ablate.results.paired_stats import Difference
from ablate.results.sensitivity import AGREEMENT, MappedCell, Sensitivity, sensitivity
from ablate.results.verdict_text import verdict_text

_ALL = "all"
"""Word for a group without a name: the whole model, or all operands."""
_STRONG = 6.0
"""Standard errors of the strongest tint of evidence."""


def _drawn(title: str, drawing: str, note: str, table: Table) -> DrawnTable:
    csv = f'<a href="figures/{table.name}.csv">CSV</a>'
    return DrawnTable(
        f'<div class="maps"><p><b>{title}</b></p>{drawing}<p class="about">{note} {csv}</p></div>', table
    )


def map_parts(sweep: Measurements) -> list[Part]:
    """Return the picture of a map, and sentences on what it does and does not show; empty without a map.
    Nothing is tinted if a check failed, or while the sweep runs."""
    if (found := sensitivity(sweep)) is None:
        return []
    metric, unit, coloured = sweep.metric, sweep.unit, sweep.answer.valid and not sweep.running
    at = {(cell.group, cell.part): cell for cell in found.cells}
    most = max((abs(each.shrunk) for each in found.cells if each.ranked), default=0.0) if coloured else 0.0

    def cell_at(group: str, part: str) -> str:
        if (cell := at.get((group, part))) is None:
            return "<td></td>"
        tinted = cell.ranked and most > 0
        share = f' style="--share:{100 * abs(cell.shrunk) / most:.0f}%"' if tinted else ""
        worse = (cell.total.mean > 0) == (metric.direction == "minimize")
        kind = f" {'less' if worse else 'more'}" if tinted else " unranked"
        text = minus(interval(cell.total)).replace(" ±", "<small> ±") + "</small>"
        text = f"<b>{text}</b>" if cell.resolved and coloured else text
        return f'<td class="number{kind}"{share} title="{html_text("; ".join(_said(cell)))}">{text}</td>'

    rows = {group or _ALL: [cell_at(group, part) for part in found.columns] for group in found.groups}
    times = f", error {found.times:g} times as large" if found.times > 1 else ""
    title = f"{metric.name}{f', {unit}' if unit else ''}: damage of each cell alone{times}"
    note = (
        "Tint: damage, pulled towards the mean of its product as far as noise demands. Bold: told from zero,"
        " after Holm's correction. Grey: its product is not ranked."
    )
    numbers: list[dict[str, Cell]] = [
        {
            "cell": cell.name,
            "damage": _sortable(cell.total),
            "direct": _sortable(cell.parts.direct) if cell.parts else "",
            "learnt": _sortable(cell.parts.learnt) if cell.parts else "",
            "shrunk": (minus(f"{cell.shrunk:+.2g}"), cell.shrunk),
            "ranked": "yes" if cell.ranked else "no",
            VERDICT: verdict_text(cell.verdict, short=True),
        }
        for cell in sorted(found.cells, key=lambda cell: cell.shrunk, reverse=metric.direction == "minimize")
    ]
    drawing = tinted_map([part or _ALL for part in found.columns], rows)
    picture = _drawn(inline(title), drawing, note, Table.of("map", numbers))
    return [picture, Text("\n\n".join(_sentences(found, unit)))]


def _said(cell: MappedCell) -> Iterator[str]:
    yield f"{cell.name}: {minus(bounds(cell.total))}, {verdict_text(cell.verdict, short=True)}"
    if cell.parts:
        yield f"direct {minus(interval(cell.parts.direct))}"
        yield f"learnt {minus(interval(cell.parts.learnt))}"


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
                ", without an interval: too few seeds say if damage adds up."
                if not found.excess.has_interval
                else ": within this, damage adds up."
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


def search_parts(sweep: Comparisons) -> list[Part]:
    """Return the picture of a search that has ended a round; empty before, and for another experiment."""
    if not ((search := sweep.search) and search.rounds):
        return []
    units, proofs = list(enumerate(names_of(sweep.ledger).units)), search.proofs or {}
    alone = {place: amount(search, proofs[place], sweep.unit) for place, _ in units if place in proofs}
    drawn = {
        name: [_evidence(each.estimates[place], place in each.candidates) for each in search.rounds]
        for place, name in units
    }
    for place, name in units if proofs else ():
        text = html_text(alone.get(place, ""))
        drawn[name].append(f"<td>{f'<b>{text}</b>' if place in search.culprits else text}</td>")
    rounds = {f"round {number}": each.estimates for number, each in enumerate(search.rounds, 1)}
    rows: list[dict[str, Cell]] = [
        {
            "unit": name,
            **{head: (f"{values[place]:+.1f}", values[place]) for head, values in rounds.items()},
            "alone": alone.get(place, ""),
            "culprit": "yes" if place in search.culprits else "",
        }
        for place, name in units
    ]
    last = '<th scope="col">alone, on fresh seeds</th>' if proofs else ""
    note = (
        "After each round of pairs of random halves: the damage of a unit, given the candidates, over its"
        " standard error. Bold: candidates, then run alone."
    )
    title = "How the search went: evidence on each unit, in standard errors"
    return [_drawn(title, tinted_map(rounds, drawn, last=last), note, Table.of("search", rows))]


def _evidence(value: float, candidate: bool) -> str:
    share, text = 100 * min(1.0, max(0.0, value) / _STRONG), minus(f"{value:+.1f}")
    text = f"<b>{text}</b>" if candidate else text
    return f'<td class="number less" style="--share:{share:.0f}%">{text}</td>'
