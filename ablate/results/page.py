"""What a report is made of: headings, sentences, tables and pictures, each as HTML and as Markdown. No
numbers here."""

import base64
import csv
import html
import itertools
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ablate.errors import printable
from ablate.results.plain_text import csv_cell, footnotes, markdown_cell


class Part(Protocol):
    """A piece of a page."""

    def html(self) -> str:
        """As HTML that needs nothing from outside."""

    def markdown(self) -> str:
        """As Markdown."""

    def save(self, folder: Path) -> None:
        """Write the data behind it, and its pictures, into the folder."""


VERDICT = "verdict"
"""Column of a table that its rows' classes colour and that has the marks of their notes."""
_CLASSES = ("better", "worse", "equivalent", "undecided", "diverged", "baseline")
"""Classes of rows that the style sheet knows."""


@dataclass(frozen=True)
class Text:
    """Paragraphs; `kind` is a CSS class: `verdict` is what a reader sees first."""

    text: str
    kind: str = ""

    def html(self) -> str:
        """A paragraph for each that an empty line ends; `code` and **bold** as in Markdown."""
        mark = f' class="{self.kind}"' if self.kind else ""
        return "\n".join(f"<p{mark}>{_inline(part)}</p>" for part in self.text.split("\n\n"))

    def markdown(self) -> str:
        """As it is."""
        return f"**{self.text}**" if self.kind == "verdict" else self.text

    def save(self, folder: Path) -> None:
        """A text has no data."""


@dataclass(frozen=True)
class Code:
    """A file's text, character by character."""

    text: str
    language: str = ""

    def html(self) -> str:
        """Preformatted."""
        return f'<pre class="file">{html.escape(self.text, quote=False)}</pre>'

    def markdown(self) -> str:
        """Fenced by more backticks than any line of it begins with."""
        longest = max((len(ticks) for ticks in re.findall("`+", self.text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}{self.language}\n{self.text.rstrip()}\n{fence}"

    def save(self, folder: Path) -> None:
        """A text has no data."""


@dataclass(frozen=True)
class Table:
    """Rows by column name. A cell is text, or (text, number to sort by). Columns with numbers stand right;
    clicking a head sorts."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    caption: str = ""
    classes: Sequence[str] = ()
    """A row's class, which colours its verdict; empty for none."""
    notes: Sequence[Sequence[str]] = ()
    """Notes on each row: numbered under the table, their marks behind the row's verdict; a column of their
    own in the CSV."""

    @property
    def empty(self) -> bool:
        """True where no row says anything but which row it is."""
        return len(self.columns) < 2

    @property
    def columns(self) -> list[str]:
        """Names, those left out in which no row has anything."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return [name for name in names if any(_text(row.get(name)) not in ("", "-") for row in self.rows)]

    def html(self) -> str:
        """A table whose rows can be sorted."""
        right = {name for name in self.columns if any(isinstance(row.get(name), tuple) for row in self.rows)}
        head = "".join(
            f'<th{_right(name, right)}><button type="button">{_inline(name)}</button></th>'
            for name in self.columns
        )
        marks, notes = footnotes(self.notes)
        cells = [
            "".join(self._cell(row, name, right, mark) for name in self.columns)
            for row, mark in itertools.zip_longest(self.rows, marks, fillvalue="")
        ]
        body = "\n".join(
            f"<tr{_class(name)}>{inside}</tr>" for name, inside in itertools.zip_longest(self.classes, cells)
        )
        caption = "<br>".join(_inline(line) for line in (*notes, self.caption) if line)
        caption = f"<caption>{caption}</caption>" if caption else ""
        return (
            f'<div class="scroll"><table class="sortable" id="table-{self.name}">{caption}<thead><tr>{head}</tr></thead>'
            f"\n<tbody>\n{body}\n</tbody></table></div>"
        )

    def _cell(self, row: Mapping[str, Any], name: str, right: set[str], mark: str) -> str:
        value = row.get(name)
        key = f' data-sort="{value[1]!r}"' if isinstance(value, tuple) and math.isfinite(value[1]) else ""
        kind = _right(name, right) or (' class="verdict"' if name == VERDICT else "")
        return f"<td{kind}{key}>{_inline(_text(value) + (mark if name == VERDICT else ''))}</td>"

    def markdown(self) -> str:
        """A pipe table."""
        marks, notes = footnotes(self.notes)
        lines = [self.columns, ["---"] * len(self.columns)]
        for row, mark in itertools.zip_longest(self.rows, marks, fillvalue=""):
            lines.append([_text(row.get(name)) + (mark if name == VERDICT else "") for name in self.columns])
        table = "\n".join(f"| {' | '.join(markdown_cell(cell) for cell in line)} |" for line in lines)
        return "\n\n".join(filter(None, [table, "  \n".join(notes), self.caption]))

    def save(self, folder: Path) -> None:
        """The texts of the cells as CSV."""
        folder.mkdir(parents=True, exist_ok=True)
        names = [*self.columns, *(["notes"] if any(self.notes) else [])]
        with (folder / f"{self.name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([csv_cell(name) for name in names])
            for row, notes in itertools.zip_longest(self.rows, self.notes, fillvalue=()):
                texts = [*(_text(row.get(name)) for name in self.columns), "; ".join(notes)]
                writer.writerow([csv_cell(text) for text in texts[: len(names)]])


@dataclass(frozen=True)
class Gallery:
    """PNG files side by side, each under its title; `name` begins the names of their copies."""

    name: str
    pictures: Sequence[tuple[str, Path]]

    def html(self) -> str:
        """The files themselves, in the page."""
        figures = (
            f'<figure><figcaption>{_inline(title)}</figcaption><img alt="{html.escape(title)}"'
            f' src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"></figure>'
            for title, path in self.pictures
        )
        return f'<div class="gallery">{"".join(figures)}</div>'

    def markdown(self) -> str:
        """A pipe table of one row, with links to the copies, from the folder above."""
        titles = [markdown_cell(title) for title, _ in self.pictures]
        links = [f"![](figures/{copy})" for copy in self._copies()]
        return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(links), links))

    def save(self, folder: Path) -> None:
        """Copy them."""
        folder.mkdir(parents=True, exist_ok=True)
        for copy, (_, path) in zip(self._copies(), self.pictures, strict=True):
            shutil.copyfile(path, folder / copy)

    def _copies(self) -> list[str]:
        """File names, no two alike."""
        slugs = (re.sub(r"[^\w.=]+", "-", title) for title, _ in self.pictures)
        return [f"{self.name}-{number}-{slug}.png" for number, slug in enumerate(slugs, 1)]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; nothing where nothing does. `folded`: a reader opens it."""

    title: str
    parts: Sequence[Part]
    folded: bool = False

    def html(self) -> str:
        """The parts in order under an h2, or none."""
        inside = "\n".join(part.html() for part in self.parts)
        if not self.parts:
            return ""
        if self.folded:
            return f"<details><summary><h2>{_inline(self.title)}</h2></summary>\n{inside}\n</details>"
        return f"<h2>{_inline(self.title)}</h2>\n{inside}" if self.title else inside

    def markdown(self) -> str:
        """The same in Markdown."""
        if not self.parts:
            return ""
        return "\n\n".join(
            [*([f"## {self.title}"] if self.title else []), *(part.markdown() for part in self.parts)]
        )

    def save(self, folder: Path) -> None:
        """What its parts save."""
        for part in self.parts:
            part.save(folder)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/markdown": self.markdown(), "text/plain": self.title}


def section(title: str, *parts: Part | Iterable[Part] | None, folded: bool = False) -> Section:
    """A section of those parts that there are; a table that says nothing is none."""
    groups = [part if isinstance(part, list | tuple) else (part,) for part in parts]
    return Section(title, [part for group in groups for part in group if _says(part)], folded)


def _says(part: Part | None) -> bool:
    return part is not None and not (isinstance(part, Table) and part.empty)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return str(value[0])
    return "" if value is None else str(value)


def _right(name: str, right: set[str]) -> str:
    return ' class="number"' if name in right else ""


def _class(name: str | None) -> str:
    return f' class="{name}"' if name in _CLASSES else ""


def _inline(text: str) -> str:
    """Escaped, with `code` and **bold**."""
    escaped = html.escape(printable(text), quote=False)
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", re.sub(r"`(.+?)`", r"<code>\1</code>", escaped))
