"""Files of tables: CSV, JSON lines, JSON and Parquet, each read whole into a `Table`, or refused at its line.

The readers are those of `csv` and `json`, and not pandas': `pandas.read_csv` fills a row that is cut with
empty cells and renames the second of two equal columns, and `read_json` takes the last of two equal keys and
gives no line of a mistake.

{"arm": "bf16", "seed": 0, "step": 100, "val": {"loss": 3.21}}     # JSON: column val/loss
"""

import codecs
import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.errors import InputError, as_input_error, brief, first_line
from ablate.files import Json, flat
from ablate.judging.tables import Table

if TYPE_CHECKING:
    import pyarrow

_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_BETWEEN = ",;\t"
_REMARK = "#"
"""First character of remarks above the header."""
_MOST_CHARACTERS = 1 << 20
"""Longest cell of a CSV file."""
_MOST_CELLS = 20_000_000
_MOST_BYTES = 1 << 29
"""Largest Parquet file, decoded: a small file may hold one value a billion times."""


def require_regular(path: Path) -> None:
    """Raise InputError for a device, a pipe or a socket, or a link to one: reading it may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: is a device, a pipe or a socket; write its content to a file")


def content(path: Path) -> bytes:
    """Return the bytes of a file. InputError if it cannot be read, or is empty."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name its files, such as '{path}/*.log'")
    require_regular(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if not data.strip():
        raise InputError(f"{path}: the file is empty")
    return data


def text(path: Path, errors: str = "strict") -> str:
    """Return the text of a file without its byte-order mark. InputError if it is not UTF-8 or UTF-16.
    `errors`: `replace` puts U+FFFD in the place of damaged bytes, and keeps zero bytes."""
    data = content(path)
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        decoded = data.decode(encoding, errors)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line} is not {encoding.removesuffix('-sig').upper()}"
            f" (byte {data[error.start]:#04x}); convert the file to UTF-8: `iconv -t utf-8`"
        ) from None
    if "\0" in decoded and errors == "strict":
        line = decoded.count("\n", 0, decoded.index("\0")) + 1
        raise InputError(f"{path}: line {line} has a zero byte; the file is damaged, or not text")
    return decoded


def read_csv(path: Path) -> Table:
    """Return the table of a CSV file: comma, semicolon or tab between cells, and a header.

    InputError if it cannot be read, is empty, has two columns of one name, or a row of another length.
    """
    decoded = text(path)
    header = next((line for line in decoded.splitlines() if line.strip() and line[0] != _REMARK), "")
    between = max(_BETWEEN, key="".join(header.split('"')[::2]).count)  # outside of quotes
    reader = csv.reader(io.StringIO(decoded, newline=""), delimiter=between, strict=True)
    names: list[str] | None = None
    rows: dict[int, list[str]] = {}
    before = csv.field_size_limit(_MOST_CHARACTERS)  # of the whole process
    try:
        for row in reader:
            if not any(cell.strip() for cell in row) or (names is None and row[0].startswith(_REMARK)):
                continue
            if names is None:
                names = [cell.strip() for cell in row]
                if "" in names[1:] or names == [""]:
                    number = names.index("", min(1, len(names) - 1)) + 1
                    raise InputError(f"{path}: column {number} has no name")
            elif len(row) != len(names):
                raise InputError(
                    f"{path}: line {reader.line_num} has {len(row)} cells, and the header has"
                    f" {len(names)}; the file is cut or damaged there, or a cell needs quotes"
                )
            else:
                rows[reader.line_num] = row
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from None
    finally:
        csv.field_size_limit(before)
    if names is None:
        raise InputError(f"{path}: there is no header")
    require_distinct(names, path)
    cells = zip(*rows.values(), strict=True) if rows else [()] * len(names)
    columns: dict[str, Sequence[Json]] = dict(zip(names, cells, strict=True))
    columns.pop("", None)  # the index that pandas writes
    return Table(str(path), columns, [*rows])


def require_distinct(names: Sequence[str], where: object) -> None:
    """Raise InputError if two columns have one name."""
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{where}: two columns are named {brief(twice)!r}")


def read_json_lines(path: Path, said: list[str]) -> Table:
    """Return the table of a file of JSON lines, and say that its last line is cut, if it is.

    InputError if it cannot be read, or a line is not an object.
    """
    rows: dict[int, dict[str, Json]] = {}
    lines = text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows[number] = _row(_parsed(line))
        except ValueError as error:
            if number == len(lines) and rows and isinstance(error, json.JSONDecodeError):
                said.append(f"{path}: the last line is cut and left out")
                continue
            raise InputError(f"{path}: line {number} is not a JSON object: {error}") from None
    return _of_rows(path, rows)


def read_json(path: Path) -> Table | None:
    """Return the table of a JSON file, a list of objects or a flat one; None for a `trainer_state.json`."""
    with as_input_error(ValueError, before=f"{path}: "):
        parsed = _parsed(text(path))
        if isinstance(parsed, dict):
            if "log_history" in parsed:
                return None
            _require_flat(parsed)
            parsed = [parsed]
        if not isinstance(parsed, list):
            raise ValueError("it is not a list of objects, one a row")
        rows = {number: _row(entry) for number, entry in enumerate(parsed, 1)}
    return _of_rows(path, rows)


def _require_flat(entry: Mapping[str, Json]) -> None:
    """Raise ValueError for an object that holds others, or a curve: it is not one row."""
    lists = {name: value for name, value in entry.items() if isinstance(value, list)}
    inner = [
        name
        for name, value in entry.items()
        if isinstance(value, dict) or any(isinstance(each, list | dict) for each in lists.get(name, ()))
    ]
    if not inner:
        return
    curves = (name for name in inner if all(isinstance(each, dict) for each in lists.get(name, [None])))
    curve = next(curves, None)
    way = (
        "write a list of objects, one a row, or give final values in Python:"
        " ablate.judge({'bf16': [3.10, 3.12]}, 'bf16')"
    )
    if all(isinstance(value, dict) and "0" in value for value in entry.values()):
        way = "as pandas' to_json() writes it, a column a key; write rows, to_json(orient='records')"
    elif curve is not None:
        way = f"write the list of its {brief(curve)!r} alone to the file, one object a row"
    names = ", ".join(map(brief, inner[:4]))
    raise ValueError(f"it is an object with {names}, and not a row of plain values: {way}")


def _of_rows(path: Path, rows: Mapping[int, Mapping[str, Json]]) -> Table:
    """Return the table of rows by their line, which need not have the same columns."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    columns = {name: [row.get(name) for row in rows.values()] for name in names}
    return Table(str(path), columns, [*rows])


def _row(entry: Json) -> dict[str, Json]:
    if not isinstance(entry, dict):
        raise ValueError('a row is not an object, such as {"step": 100, "val_loss": 3.21}')
    return _object(
        (name.strip(), json.dumps(value) if isinstance(value, list) else value)
        for name, value in flat(entry, "/")  # a list may be Adam's betas; a longer one is a curve
        if value != {} and (not isinstance(value, list) or len(value) <= 8)
    )


def _parsed(text: str) -> Json:
    """Return the value of JSON. ValueError if it is none, or an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: Iterable[tuple[str, Json]]) -> dict[str, Json]:
    entry: dict[str, Json] = {}
    for key, value in pairs:
        if key in entry:
            raise ValueError(f"the key {brief(key)[:60]!r} is there twice")
        entry[key] = value
    return entry


def read_parquet(path: Path, said: object) -> Table:
    """Return the table of a Parquet file, of which nothing is said.

    InputError if it cannot be read, is too large when decoded, or two columns have one name.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        texts = [field.name for field in file.schema_arrow if pa.types.is_string(field.type)]
        file = pyarrow.parquet.ParquetFile(path, read_dictionary=texts)  # else a text is decoded for each row
        footer = file.metadata
        count, width = footer.num_rows, footer.num_columns
        size = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
        if count * width > _MOST_CELLS or size > _MOST_BYTES:
            raise InputError(
                f"{path}: {count} rows of {width} columns ({size} bytes decoded) are more than can be judged;"
                " write only the columns and steps that are compared"
            )
        table = file.read()
        table.validate(full=True)
        names = [name.strip() for name in table.column_names]
        require_distinct(names, path)
        columns = dict(zip(names, map(_cells, table.columns), strict=True))
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError, OverflowError) as error:
        why = brief(first_line(error))
        raise InputError(f"{path}: not a Parquet file that can be read: {why}") from None
    columns.pop("__index_level_0__", None)
    return Table(str(path), columns, range(1, table.num_rows + 1))


def _cells(column: "pyarrow.ChunkedArray") -> list[Json]:
    import pyarrow as pa

    values: list[object] = []
    for chunk in column.chunks:
        if isinstance(chunk, pa.DictionaryArray):
            texts = chunk.dictionary.to_pylist()
            values += [None if index is None else texts[index] for index in chunk.indices.to_pylist()]
        else:
            values += chunk.to_pylist()
    return plain_cells(values)


def plain_cells(values: Iterable[object]) -> list[Json]:
    """Return the values of a column as JSON has them; anything else, such as a time, as text."""
    plain = bool | int | float | str | None
    texts = (each.decode(errors="replace") if isinstance(each, bytes) else each for each in values)
    return [each if isinstance(each, plain) else str(each) for each in texts]
