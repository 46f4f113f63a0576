"""CSV files: comma, semicolon or tab between cells, a header, and as many cells in each row."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

from ablate.errors import InputError, brief
from ablate.judging.tables import Row, Table
from ablate.judging.text_files import text

_BETWEEN = ",;\t"
_REMARK = "#"
"""First character of remarks above the header."""
_MOST_CELL = 1 << 20


def read_table(path: Path, fields: Mapping[str, str]) -> Table:
    """Return the table of a CSV file.

    Args:
        path: the file.
        fields: what its path says.

    Raises:
        InputError: it cannot be read, is empty, has two columns of one name, or a row of another length.
    """
    content = text(path)
    header = next((line for line in content.splitlines() if line.strip() and line[0] != _REMARK), "")
    between = max(_BETWEEN, key=header.count)
    reader = csv.reader(io.StringIO(content, newline=""), delimiter=between, strict=True)
    names: list[str] | None = None
    rows: list[Row] = []
    before = csv.field_size_limit(_MOST_CELL)  # of the whole process
    try:
        for row in reader:
            if not any(cell.strip() for cell in row) or (names is None and row[0].startswith(_REMARK)):
                continue
            if names is None:
                names = _names(row, path)
            elif len(row) != len(names):
                raise InputError(
                    f"{path}: line {reader.line_num} has {len(row)} cells, and the header has"
                    f" {len(names)}; the file is cut or damaged there, or a cell needs quotes"
                )
            else:
                rows.append((reader.line_num, dict(zip(names, row, strict=True))))
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from None
    finally:
        csv.field_size_limit(before)
    if names is None:
        raise InputError(f"{path}: there is no header")
    if names[0] == "":  # the index that pandas writes
        rows = [(line, {name: cell for name, cell in row.items() if name}) for line, row in rows]
        names = names[1:]
    return Table(str(path), names, rows, fields)


def _names(row: list[str], path: Path) -> list[str]:
    names = [cell.strip() for cell in row]
    if "" in names[1:] or names == [""]:
        raise InputError(f"{path}: column {names.index('', min(1, len(names) - 1)) + 1} has no name")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{path}: two columns are named {brief(twice)!r}")
    return names
