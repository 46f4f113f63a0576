"""Parts of a report: headings, sentences and pictures, each as HTML and as Markdown. `table` has its tables.

Nothing is computed here.
"""

import base64
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ablate.cache import key_of
from ablate.errors import one_line, printable
from ablate.reports.plain_text import html_text, inline, markdown_cell, markdown_text, pipe_table


class Part(Protocol):
    """Part of a page."""

    def html(self) -> str:
        """Return the part as HTML that loads no other files."""

    def markdown(self) -> str:
        """Return the part as Markdown."""

    def save(self, folder: Path) -> object:
        """Write its data and its pictures into the folder, which is created if it is missing; here: none."""
        return None


@dataclass(frozen=True)
class Text(Part):
    """Paragraphs of text."""

    text: str
    """Paragraphs separated by empty lines, with `code` and **bold** as in Markdown."""
    kind: Literal["", "warning", "compared"] = ""
    """CSS class."""

    def html(self) -> str:
        """Return one HTML paragraph for each paragraph."""
        mark = f' class="{self.kind}"' if self.kind else ""
        return "\n".join(f"<p{mark}>{inline(part)}</p>" for part in self.text.split("\n\n"))

    def markdown(self) -> str:
        return markdown_text(self.text)


@dataclass(frozen=True)
class Answered(Part):
    """The answer to the report's question, in a coloured box."""

    lead: str
    """Its first words."""
    text: str
    kind: Literal["answered", "even", "open", "none", "running"]
    """CSS class: answered; answered, nothing differs by as much as matters; not decided; without an answer,
    since a check failed; still being computed."""

    def html(self) -> str:
        text = inline(self.text).replace(" %", "&nbsp;%")
        return f'<p class="verdict {self.kind}"><b>{inline(self.lead)}</b> {text}</p>'

    def markdown(self) -> str:
        """Return the answer with bold first words."""
        text = markdown_text(self.text)
        return f"**{self.lead}** {text}" if self.lead else f"**{text}**"


@dataclass(frozen=True)
class Chips(Part):
    """Short remarks in a row, each with a mark of its kind."""

    chips: Sequence[tuple[str, str]]
    """Kind (passed, warning, failed or note) and text."""

    def html(self) -> str:
        items = (f'<li class="{kind}">{inline(text)}</li>' for kind, text in self._marked())
        return f'<ul class="chips" aria-label="Checks">{"".join(items)}</ul>'

    def markdown(self) -> str:
        """Return the remarks in one line."""
        return " · ".join(markdown_cell(text) for _, text in self._marked())

    def _marked(self) -> Iterator[tuple[str, str]]:
        for kind, text in self.chips:
            yield kind, f"{_MARKS[kind]} {text}".strip()


_MARKS = {"passed": "✓", "warning": "!", "failed": "✗", "note": ""}


@dataclass(frozen=True)
class Command(Part):
    """A command to copy, with a comment on what it does."""

    command: str
    comment: str = ""

    def html(self) -> str:
        """Return the command with a button that copies it; without scripts the button is hidden."""
        comment = f' <span class="comment"># {inline(self.comment)}</span>' if self.comment else ""
        command = html_text(self.command)
        return (
            f'<div class="command"><code>{command}</code>{comment}'
            f'<button type="button" class="copy" data-copy="{command}" hidden>copy</button></div>'
        )

    def markdown(self) -> str:
        comment = f"  # {self.comment}" if self.comment else ""
        return f"```sh\n{one_line(self.command + comment)}\n```"


@dataclass(frozen=True)
class Code(Part):
    """Text of a file, shown literally."""

    text: str
    language: str = ""
    """Language for syntax highlighting, such as `yaml`."""

    def html(self) -> str:
        return f'<pre class="file">{html_text(self.text, quote=False)}</pre>'

    def markdown(self) -> str:
        """Return a code block. Its fence is longer than any run of backticks in the text."""
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", self.text)), 0)
        return f"{fence}{self.language}\n{printable(self.text.rstrip())}\n{fence}"


@dataclass(frozen=True)
class Gallery:
    """PNG files side by side, each below its title."""

    name: str
    """Prefix of the names of their copies."""
    pictures: Sequence[tuple[str, Path]]
    """Title and file of each picture."""

    def html(self) -> str:
        """Return the pictures, embedded as data."""
        figures = (
            f"<figure><figcaption>{inline(title)}</figcaption>{png(path.read_bytes(), title)}</figure>"
            for title, path in self.pictures
        )
        return f'<div class="gallery">{"".join(figures)}</div>'

    def markdown(self) -> str:
        """Return a pipe table of one row, with links to the copies, relative to the folder above."""
        titles = [markdown_cell(title) for title, _ in self.pictures]
        links = [f"![](figures/{copy})" for copy in self._copies()]
        return pipe_table([titles, ["---"] * len(links), links])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for copy, (_, path) in zip(self._copies(), self.pictures, strict=True):
            shutil.copyfile(path, folder / copy)

    def _copies(self) -> list[str]:
        """Return the file names of the copies. They are distinct."""
        pictures = enumerate(self.pictures, 1)
        return [f"{file_stem(self.name, str(number), title)}.png" for number, (title, _) in pictures]


@dataclass(frozen=True)
class Section:
    """Heading with the parts below it; empty without parts."""

    title: str
    """Text of the heading; empty for none."""
    parts: Sequence[Part]
    folded: bool = False
    """True to hide the parts until a reader opens the section."""

    def html(self) -> str:
        """Return the heading (h2) and the parts in order."""
        inside = "\n".join(part.html() for part in self.parts)
        if not self.parts:
            return ""
        if self.folded:
            return f"<details><summary>{self._heading}</summary>\n{inside}\n</details>"
        return f"{self._heading}\n{inside}" if self.title else inside

    @property
    def _heading(self) -> str:
        return f'<h2 id="{slug(self.title)}">{inline(self.title)}</h2>'

    def markdown(self) -> str:
        if not self.parts:
            return ""
        heading = [f"## {markdown_cell(self.title)}"] if self.title else []
        return "\n\n".join([*heading, *(part.markdown() for part in self.parts)])

    def save(self, folder: Path) -> None:
        for part in self.parts:
            part.save(folder)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/markdown": self.markdown(), "text/plain": self.title}


def section(title: str, *parts: Part | Sequence[Part | None] | None, folded: bool = False) -> Section:
    """Return a section of a page. Its parts are parts, or lists of them; None and empty tables are left out.
    If it is `folded`, a reader opens it to see the parts."""
    groups = (group if isinstance(group, Sequence) else (group,) for group in parts)
    shown = [part for group in groups for part in group if part is not None]
    return Section(title, [part for part in shown if not getattr(part, "empty", False)], folded)


def png(content: bytes, label: str) -> str:
    """Return a PNG file as an element of a page."""
    return f'<img alt="{html_text(label)}" src="data:image/png;base64,{base64.b64encode(content).decode()}">'


def file_stem(*words: str) -> str:
    """Return words, such as a figure's and its metric's names, as the name of a file without its ending:
    `curves-val-loss`. One that a file system may refuse (255 bytes with the ending) is cut, and ends in
    digits of its hash."""
    stem = "-".join(re.sub(r"[^\w.=]+", "-", word).strip("-") for word in words)
    return stem if len(stem.encode()) <= 200 else f"{stem[:40]}-{key_of(stem)[:8]}"


def slug(title: str) -> str:
    """Return the name of a heading's anchor."""
    return re.sub(r"\W+", "-", title.lower()).strip("-")
