"""Text of users in terminals, tables, Markdown and spreadsheets, where some characters are commands.

Names, questions, knob values, paths and messages of exceptions come from files that other people write. An
escape character in them controls a terminal, a line break forges a line of a log, and `=` at the start of a
CSV cell starts a formula. `cli.common.console` turns Rich's markup off.
"""

import html
import re
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from ablate.errors import one_line, printable

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_NUMBER = re.compile(r"(?<![\w.=/-])[-+±]?\d[\d.,]*(?:e[-+]?\d+)?")
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.][^()|!=@'\"]*$|$)")


def footnotes(rows: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Number the notes on each of a table's rows. Equal notes have one number. Return the marks of each row
    (`¹ ³`), and the notes, each behind its mark."""
    notes = dict.fromkeys(note for row in rows for note in row)
    marks = {note: str(number).translate(_RAISED) for number, note in enumerate(notes, 1)}
    below = [f"{mark} {note}" for note, mark in marks.items()]
    return [" ".join(marks[note] for note in row) for row in rows], below


def csv_cell(value: object) -> object:
    """Return a cell that no spreadsheet reads as a formula and no terminal obeys: text that begins like a
    formula gets an apostrophe before it, hidden characters are escapes. Numbers stay as they are."""
    if not isinstance(value, str):
        return value
    return ("'" if _FORMULA.match(value) else "") + printable(value)


def html_text(text: str, quote: bool = True) -> str:
    """Return the text escaped for HTML, hidden characters as escapes. `quote`: for attributes, too."""
    return html.escape(printable(text), quote=quote)


def with_minus(text: str) -> str:
    """Return text whose negative numbers have a minus sign in place of the hyphen: −0.5, 2e−05. Values behind
    `=` keep it, as in names of arms, which readers copy."""
    return _NUMBER.sub(lambda found: found[0].replace("-", "\N{MINUS SIGN}"), text)


def inline(text: str) -> str:
    """Return text escaped for HTML, with the Markdown of `code` and **bold** as tags, and with minus signs
    outside of code."""
    parts = html_text(text, quote=False).split("`")
    escaped = "`".join(part if number % 2 else with_minus(part) for number, part in enumerate(parts))
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", re.sub(r"`(.+?)`", r"<code>\1</code>", escaped))


def markdown_text(text: str) -> str:
    """Return the text of Markdown without tags, links and images; `code` and **bold** stay."""
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", printable(text).replace("](", r"]\("))


def markdown_cell(text: str) -> str:
    """Return `markdown_text` as a cell of a pipe table or a sentence: in one line, without a column's end."""
    return one_line(markdown_text(text)).replace("|", r"\|")


def pipe_table(lines: Iterable[Iterable[str]]) -> str:
    """Return lines of cells, which are Markdown: those of the head, of the line below it, and of the rows."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def duration(seconds: float) -> str:
    """Format a duration: `45 s`, `3 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def time_left(seconds: float) -> str:
    """Format the estimate of what a sweep still takes; one that has run out says so."""
    return f"about {duration(max(1.0, seconds))} left" if seconds > 0 else "longer than estimated"


def wrapped(text: Text, console: Console, most: int) -> list[Text]:
    """Return styled text in at most `most` lines that fit the width of a terminal; a text that needs more
    ends with `…`."""
    lines = [*text.wrap(console, console.width)]
    if len(lines) > most:
        lines = lines[:most]
        for last in lines[-1:]:
            last.truncate(console.width - 2)
            last.rstrip()
            last.append(" …")
    return lines
