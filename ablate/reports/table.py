"""One type for tables: rows, and columns that make a cell of each row; drawn in four forms.

    columns = [Column("arm", lambda arm: arm.name), Column("memory", lambda arm: arm.memory / 1e6, unit="MB")]
    Table("arms", arms, columns).markdown()

A terminal, a page, a note and a CSV file draw the same cells, so that an arm reads the same everywhere.
Columns in which no row has content are left out, and columns with numbers are aligned right.
"""

import csv
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from rich.cells import cell_len
from rich.table import Table as RichTable
from rich.text import Text

from ablate.errors import one_line
from ablate.reports.plain_text import (
    csv_cell,
    footnotes,
    html_text,
    inline,
    markdown_cell,
    markdown_text,
    pipe_table,
)
from ablate.results.number_text import interval, shortened
from ablate.results.paired_stats import Difference
from ablate.results.verdict_text import KINDS

VERDICT = "verdict"
"""Name of the column that is coloured by the class of its row, and that has the marks of the row's notes."""
NAMES = ("arm", "baseline", "comparison", "from", "to", "turned to", "with")
"""Names of columns with names of arms, or parts of them, whose long numbers are shortened for people."""
_STYLES = {kind: words.colour for kind, words in KINDS.items() if words.colour} | {"baseline": "dim"}
"""Colour of a verdict in a terminal, by the class of its row."""
_CLASSES = (*_STYLES, "equivalent", "undecided", "diverged", "question")
"""Classes of rows in the style sheet."""
_GAP = 2
"""Spaces between columns in a terminal."""


class Link(str):
    """Text of a cell that leads to a file or a page."""

    target: str

    def __new__(cls, text: str, target: str) -> "Link":
        link = super().__new__(cls, text)
        link.target = target
        return link


class Html(str):
    """Text of a page that is HTML already."""


def link(file: Path, report: Path | None) -> str:
    """Return the name of a file as a cell that leads to it; empty if there is none, or nowhere to link from.
    `report`: folder of the report's figures, from which links lead to the state folder; None: no links."""
    if report is None or not file.exists():
        return ""
    return Link(file.name, os.path.relpath(file, report.absolute().parent))


Cell = str | float | tuple[str, float] | None
"""Cell of a table: text, a number that its column writes, or text with the number to sort by. None, NaN and
an empty text are empty cells."""
Source = str | Callable[[Any], "Cell | Difference"] | tuple[str | Callable[[Any], float], str]
"""Content of a column: the path of a row's attribute, or a function of the row; for a number that sorts,
beside its format."""
Row = TypeVar("Row")
Form = Literal["terminal", "html", "markdown", "csv"]


@dataclass(frozen=True)
class Column(Generic[Row]):
    """Column of a table."""

    name: str
    """Its head. A line break in it is one in a terminal, else a space."""
    cell: Callable[[Row], Cell]
    """Cell of a row, with the number to sort by."""
    unit: str = ""
    """Unit behind cells that are numbers; on a page, in the head."""
    digits: int = 0
    """Decimals of cells that are numbers."""
    short: Callable[[Row], str] | None = None
    """Cell of a row in a terminal that is too narrow."""
    only: Collection[Form] = ("terminal", "html", "markdown", "csv")
    """Forms that have the column. A single one has it without content, too."""

    def text(self, cell: Cell, empty: str = "") -> str:
        """Return a cell as text; `empty`: text of a number that is missing."""
        if isinstance(cell, int | float):
            return empty if math.isnan(cell) else f"{cell:,.{self.digits}f} {self.unit}".rstrip()
        return (cell[0] if isinstance(cell, tuple) else cell) or ""


def cell(value: "Cell | Difference", form: str = "") -> Cell:
    """Return a cell that sorts: a difference with its interval, a whole number, or any in a format; empty for
    NaN. Other content stays as it is."""
    if isinstance(value, Difference):
        return interval(value), value.mean
    if isinstance(value, int) or (form and isinstance(value, float)):
        return "" if math.isnan(value) else (format(value, form), value)
    return value


def content(row: object, source: Source) -> Cell:
    path, form = source if isinstance(source, tuple) else (source, "")
    return cell(attrgetter(path)(row) if isinstance(path, str) else path(row), form)


def only(form: Form, *columns: Column[Row]) -> list[Column[Row]]:
    """Return the columns for one form alone."""
    return [replace(column, only=(form,)) for column in columns]


@dataclass(frozen=True)
class _Drawn:
    """Column as one form has it."""

    name: str
    right: bool
    cells: Sequence[Cell]
    texts: Sequence[str]


@dataclass(frozen=True)
class Table(Generic[Row]):
    """Table that is part of a page or of a terminal's output. On a page, clicking on a column's head sorts
    the rows."""

    name: str
    """Stem of its CSV file's name."""
    rows: Sequence[Row]
    columns: Sequence[Column[Row]]
    caption: str = ""
    """Markdown below it, or `Html` for a page alone."""
    classes: Sequence[str] = ()
    """Classes of each row, which colour its verdict; empty for none."""
    notes: Sequence[Sequence[str]] = ()
    """Notes on each row: numbered below the table, with their marks behind the row's verdict. The CSV file
    has them in a column of their own."""
    groups: Sequence[Html] = ()
    """Title of each row's group on a page; its rows are not sorted then."""
    key: str = ""
    """Line above it on a page."""

    @staticmethod
    def of(
        name: str,
        rows: Sequence[Mapping[str, Cell]],
        caption: str = "",
        classes: Sequence[str] = (),
        notes: Sequence[Sequence[str]] = (),
    ) -> "Table[Mapping[str, Cell]]":
        """Return a table of rows that are cells by the name of their column."""
        names = dict.fromkeys(name for row in rows for name in row)
        columns = [Column[Mapping[str, Cell]](name, methodcaller("get", name)) for name in names]
        return Table(name, rows, columns, caption, classes, notes)

    @staticmethod
    def by_columns(
        name: str, rows: Iterable[object], columns: Mapping[str, Source], caption: str = "", **marks: Any
    ) -> "Table[Mapping[str, Cell]] | None":
        """Return a table of objects, with the content of each column by its head; None without an object.
        `marks`: classes and notes of the rows."""
        cells = [{head: content(row, source) for head, source in columns.items()} for row in rows]
        return Table.of(name, cells, caption, **marks) if cells else None

    @property
    def empty(self) -> bool:
        """True if the table has no row, or no more than one column with content."""
        return not self.rows or len(self._filled) < 2

    @cached_property
    def _filled(self) -> list[tuple[Column[Row], list[Cell]]]:
        def shown(column: Column[Row], cells: list[Cell]) -> bool:
            return len(column.only) == 1 or any(column.text(cell) not in ("", "-") for cell in cells)

        every = ((column, [column.cell(row) for row in self.rows]) for column in self.columns)
        return [(column, cells) for column, cells in every if shown(column, cells)]

    def _drawn(self, form: Form) -> tuple[list[_Drawn], list[str]]:
        """Return the columns of a form, and the notes below them."""
        marks, notes = footnotes(self.notes)
        drawn = []
        for column, cells in self._filled:
            texts = [column.text(cell, "-" if form == "terminal" else "") for cell in cells]
            if form == "html" and column.unit:  # once, in the head
                column = replace(column, name=f"{column.name}, {column.unit}", unit="")
                texts = [column.text(cell) for cell in cells]
            if column.name in NAMES and form != "csv":
                texts = [*map(shortened(texts), texts)]
            if column.name == VERDICT and marks and form != "csv":
                texts = [f"{text}{mark}" for text, mark in zip(texts, marks, strict=True)]
            if form in column.only:
                name = column.name if form in ("terminal", "html") else column.name.replace("\n", " ")
                right = any(isinstance(cell, tuple | int | float) for cell in cells)
                drawn.append(_Drawn(name, right, cells, texts))
        return drawn, notes

    def html(self) -> str:
        """Return the table in a box that scrolls."""
        drawn, notes = self._drawn("html")
        before, after = ("", "") if self.groups else ('<button type="button">', "</button>")
        head = "".join(f'<th{_css(one)} scope="col">{before}{_html(one.name)}{after}</th>' for one in drawn)
        columns = [map(_td, [one] * len(self.rows), one.cells, one.texts) for one in drawn]
        nothing, body, last = [""] * len(self.rows), [], ""
        above, kinds = self.groups or nothing, self.classes or nothing
        for group, kind, *cells in zip(above, kinds, *columns, strict=True):
            if group != last:
                title = f'<th colspan="{len(drawn)}" scope="colgroup">{group}</th>'
                body.append(f'<tr class="group">{title}</tr>')
            css = _class(*(word for word in kind.split() if word in _CLASSES))
            body.append(f"<tr{css}>{''.join(cells)}</tr>")
            last = group
        caption = "<br>".join(_html(line) for line in (*notes, self.caption) if line)
        inside, key = "\n".join(body), f'<p class="about">{_html(self.key)}</p>' if self.key else ""
        return (
            f'{key}<div class="scroll"><table class="{"effects" if self.groups else "sortable"}"'
            f' id="table-{self.name}">{f"<caption>{caption}</caption>" if caption else ""}'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{inside}\n</tbody></table></div>"
        )

    def markdown(self) -> str:
        """Return a pipe table with its notes and its caption."""
        drawn, notes = self._drawn("markdown")
        columns = [[one.name, "---:" if one.right else "---", *one.texts] for one in drawn]
        table = pipe_table(map(markdown_cell, line) for line in zip(*columns, strict=True))
        caption = "" if isinstance(self.caption, Html) else markdown_text(self.caption)
        return "\n\n".join(filter(None, [table, "  \n".join(map(markdown_cell, notes)), caption]))

    def save(self, folder: Path) -> None:
        """Write the texts of the cells as a CSV file."""
        folder.mkdir(parents=True, exist_ok=True)
        columns = [[one.name, *one.texts] for one in self._drawn("csv")[0]]
        if any(self.notes):
            columns.append(["notes", *map("; ".join, self.notes)])
        with (folder / f"{self.name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(map(csv_cell, line) for line in zip(*columns, strict=True))

    def first(self, most: int) -> "Table[Row]":
        """Return the table with its first rows alone, without notes and caption."""
        rows, classes = self.rows[:most], self.classes[:most]
        return replace(self, rows=rows, classes=classes, notes=(), caption="", groups=())

    def terminal(
        self, width: int | None = None, dispensable: Sequence[str] = (), cut: bool = False
    ) -> RichTable:
        """Return the table for a terminal of `width` columns. Rather than wrap a cell, it has short cells,
        then leaves the columns `dispensable` out, in this order, which a line below names. None: everything
        is shown.

        `cut`: cut the cells of the first column rather than wrap any, so that a row is one line.
        """
        drawn, notes = self._drawn("terminal")
        drawn = [replace(one, texts=[*map(one_line, one.texts)]) for one in drawn]
        if not _fits(drawn, width):
            short = {column.name: [*map(column.short, self.rows)] for column in self.columns if column.short}
            drawn = [replace(one, texts=short.get(one.name, one.texts)) for one in drawn]
        dropped = []
        for name in dispensable:
            if not _fits(drawn, width) and any(one.name == name for one in drawn):
                dropped.append(name)
                drawn = [one for one in drawn if one.name != name]
        notes += [self.caption] if self.caption and not isinstance(self.caption, Html) else []
        notes += [f"{', '.join(dropped)}: in a wider terminal, and in the report"] if dropped else []
        table = RichTable(header_style="bold", pad_edge=False, box=None, padding=(0, _GAP, 0, 0))
        if notes:
            table.caption, table.caption_justify, table.caption_style = "\n".join(notes), "left", "dim"
        for one in drawn:
            fixed = cut and one is not drawn[0]
            justify: Literal["left", "right"] = "right" if one.right else "left"
            table.add_column(one.name, justify=justify, overflow="fold", no_wrap=fixed)
        kinds, columns = self.classes or [""] * len(self.rows), [one.texts for one in drawn]
        for kind, *texts in zip(kinds, *columns, strict=True):
            cells = [
                Text(text, _STYLES.get(kind, "") if one.name == VERDICT else "")
                for one, text in zip(drawn, texts, strict=True)
            ]
            for cell in cells if cut else ():
                cell.no_wrap, cell.overflow = True, "ellipsis"
            table.add_row(*cells)
        return table


def _fits(columns: Sequence[_Drawn], width: int | None) -> bool:
    """Return True if no cell has to be wrapped in a terminal of `width` columns."""
    widths = [max(cell_len(text) for text in (*one.name.split("\n"), *one.texts)) for one in columns]
    return width is None or sum(widths) + _GAP * (len(widths) - 1) <= width


def _html(text: str) -> str:
    return text if isinstance(text, Html) else inline(text)


def tinted_map(
    heads: Iterable[str], rows: Mapping[str, Iterable[str]], title: str = "", last: str = ""
) -> str:
    """Return a table of tinted cells as HTML: heads of the columns of numbers as text; the cells of each row
    by its name, the caption and the head of a further column as HTML."""
    head = "".join(f'<th class="number" scope="col">{inline(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{html_text(name)}</th>{"".join(cells)}</tr>' for name, cells in rows.items()
    )
    return (
        f'<div class="scroll"><table class="map">{title}<thead><tr><td></td>{head}{last}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _class(*names: str) -> str:
    return f' class="{" ".join(names)}"' if names else ""


def _css(drawn: _Drawn) -> str:
    """Return the class of a column's head and cells as an attribute."""
    return _class("number") if drawn.right else _class("drawn") if isinstance(drawn.name, Html) else ""


def _td(drawn: _Drawn, cell: Cell, text: str) -> str:
    """Return a cell as HTML, with the number to sort by."""
    value = cell[1] if isinstance(cell, tuple) else cell if isinstance(cell, int | float) else math.nan
    key = f' data-sort="{value!r}"' if math.isfinite(value) else ""
    css = _css(drawn) or (_class(VERDICT) if drawn.name == VERDICT else "")
    inside = (
        f'<a href="{html_text(cell.target)}">{_html(text)}</a>' if isinstance(cell, Link) else _html(text)
    )
    return f"<td{css}{key}>{inside}</td>"


@dataclass(frozen=True)
class DrawnTable:
    """Part of a report that is a drawing on a page; elsewhere a text, or without one the table of its
    numbers."""

    drawing: str
    """HTML."""
    table: Table
    text: str = ""
    """Markdown."""

    def html(self) -> str:
        return self.drawing

    def markdown(self) -> str:
        return self.text or self.table.markdown()

    def save(self, folder: Path) -> None:
        """Write the numbers as CSV."""
        self.table.save(folder)
