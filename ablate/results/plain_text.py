"""Text of users in places where it could be more than text: terminals, tables, Markdown and spreadsheets.

Names, questions, knob values, paths and messages of exceptions come from files that other people write. An
escape character in them drives a terminal, a line break forges a line of a log, `=` at the start of a CSV
cell is a formula. Rich's markup is turned off altogether by `cli.console`.
"""

import re
from collections.abc import Sequence

from ablate.errors import one_line

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.][^()|!=@'\"]*$|$)")


def footnotes(rows: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Number the notes on a table's rows, equal ones once. Return each row's marks (`¹ ³`), and the notes
    behind their marks."""
    numbers = {
        note: str(number).translate(_RAISED)
        for number, note in enumerate(dict.fromkeys(n for row in rows for n in row), 1)
    }
    return [" ".join(numbers[note] for note in row) for row in rows], [
        f"{mark} {note}" for note, mark in numbers.items()
    ]


def csv_cell(value: object) -> object:
    """Return a cell that no spreadsheet takes for a formula: text that begins like one gets an apostrophe.
    Numbers stay as they are."""
    if not isinstance(value, str) or not _FORMULA.match(value):
        return value
    return f"'{value}"


def markdown_cell(text: str) -> str:
    """Return the text as a cell of a pipe table: in one line, without a column's end or a tag."""
    return re.sub(r"<(?=[a-zA-Z/!?])", r"\\<", one_line(text).replace("|", r"\|"))
