"""Parquet files, and folders of them."""

from collections.abc import Mapping
from pathlib import Path

from ablate.errors import InputError, brief
from ablate.files import Json
from ablate.judging.tables import Row, Table

_MOST_ROWS = 10_000_000


def read_table(path: Path, fields: Mapping[str, str]) -> Table:
    """Return the table of a Parquet file.

    Args:
        path: the file.
        fields: what its path says.

    Raises:
        InputError: it cannot be read, or two columns have one name.
    """
    import pyarrow as pa
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if file.metadata.num_rows > _MOST_ROWS:
            raise InputError(f"{path}: {file.metadata.num_rows} rows are more than can be judged")
        table = file.read()
        table.validate(full=True)
        names = [name.strip() for name in table.column_names]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"{path}: two columns are named {brief(twice)!r}")
        columns = [[_cell(value) for value in column.to_pylist()] for column in table.columns]
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError, OverflowError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{path}: not a Parquet file that can be read: {brief(why)}") from None
    rows: list[Row] = [
        (number, dict(zip(names, cells, strict=True)))
        for number, cells in enumerate(zip(*columns, strict=True), 1)
    ]
    names = [name for name in names if name != "__index_level_0__"]
    return Table(str(path), names, rows, fields)


def _cell(value: object) -> Json:
    """Return a value as JSON has it; anything else, such as a time, as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
