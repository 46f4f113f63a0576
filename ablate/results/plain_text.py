"""Text of users in terminals, tables, Markdown and spreadsheets, where some characters are commands.

Names, questions, knob values, paths and messages of exceptions come from files that other people write. An
escape character in them controls a terminal, a line break forges a line of a log, and `=` at the start of a
CSV cell starts a formula. `cli.common.console` turns Rich's markup off.
"""

import re
from collections.abc import Sequence

from ablate.errors import one_line

_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.][^()|!=@'\"]*$|$)")


def footnotes(rows: Sequence[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Number the notes on a table's rows. Equal notes have one number.

    Args:
        rows: Notes on each row.

    Returns:
        Marks of each row (`¹ ³`), and the notes, each behind its mark.
    """
    numbers = {
        note: str(number).translate(_RAISED)
        for number, note in enumerate(dict.fromkeys(n for row in rows for n in row), 1)
    }
    return [" ".join(numbers[note] for note in row) for row in rows], [
        f"{mark} {note}" for note, mark in numbers.items()
    ]


def csv_cell(value: object) -> object:
    """Return a cell that no spreadsheet reads as a formula: text that begins like one gets an apostrophe
    before it. Numbers stay as they are."""
    if not isinstance(value, str) or not _FORMULA.match(value):
        return value
    return f"'{value}"


def markdown_cell(text: str) -> str:
    """Return the text as a cell of a pipe table: in one line, without a column's end or a tag."""
    return re.sub(r"<(?=[a-zA-Z/!?])", r"\\<", one_line(text).replace("|", r"\|"))
