"""Text on disk, in files, JSON lines or Parquet, as a stream of pieces for a tokeniser.

A piece is a document, or a part of one that is cut where no token would span the cut. A split into training
and validation text keeps pieces whole.
"""

import glob
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ablate.errors import first_line
from ablate.files import user_path

_BLOCK = 1 << 22
_ROWS = 1000
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".bin")
"""Endings of files that are no text."""
_LINE, _WORD = re.compile(rb"\S\n(?=\S)"), re.compile(rb"\S(?= \S)")
"""Positions at which a text may be cut without splitting a word of GPT-2's, and so a token of a BPE."""


class Piece(NamedTuple):
    """A document, or a part of one."""

    content: bytes
    first: bool
    """True if it begins a document."""
    name: str
    """Name of the file, with the line or row if it holds many documents."""
    offset: int = 0
    """Offset of its first byte in the document."""


def named(patterns: Iterable[str]) -> list[Path]:
    """Return the files that match paths or globs with `~` and `**`, sorted within each pattern, none twice.

    OSError if a pattern matches no file.
    """
    result: dict[Path, None] = {}
    for pattern in patterns:
        paths = [Path(path) for path in sorted(glob.glob(str(user_path(pattern)), recursive=True))]
        files = [path for path in paths if path.is_file()]
        if not files:
            raise OSError(f"no file matches {pattern!r}{': it is a folder' if paths else ''}")
        result |= dict.fromkeys(files)
    return list(result)


def pieces(paths: Sequence[Path], column: str, longest: int) -> Iterator[Piece]:
    """Yield all documents of some files, in order: a column of JSON lines or Parquet, or a text file each.

    A text file is cut into pieces of `longest` bytes or fewer. OSError if a file cannot be read, ValueError
    if it is damaged, or has no text in that column.
    """
    for path in paths:
        if path.suffix in (".jsonl", ".ndjson"):
            yield from _lines(path, column)
        elif path.suffix == ".parquet":
            yield from _rows(path, column)
        else:
            yield from _file(path, longest)


def document(value: object, name: str, column: str, columns: Iterable[str]) -> Piece:
    """Return the piece for a row's value. ValueError, with row's name and columns, if it is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{name}: no text in column {column!r}; its columns: {', '.join(columns)}")
    return Piece(value.encode("utf-8", "surrogatepass"), True, name)


def _file(path: Path, longest: int) -> Iterator[Piece]:
    offset, rest = 0, b""
    with path.open("rb") as file:
        while block := file.read(max(_BLOCK, longest)):
            rest += block
            while len(rest) > longest:
                end = _cut(rest, longest)
                yield Piece(rest[:end], offset == 0, str(path), offset)
                offset, rest = offset + end, rest[end:]
    if rest:
        yield Piece(rest, offset == 0, str(path), offset)


def _cut(text: bytes, longest: int) -> int:
    """Return the end of the first piece: after the last line, else the last word, else the last character."""
    for seam in (_LINE, _WORD):
        last = None
        for last in seam.finditer(text, 0, longest):  # noqa: B007 - the last one is wanted
            pass
        if last:
            return last.end()
    end = longest
    while end > max(1, longest - 4) and text[end] & 0xC0 == 0x80:  # within a character of UTF-8
        end -= 1
    return end


def _lines(path: Path, column: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            row = row if isinstance(row, dict) else {}
            yield document(row.get(column), f"{path}:{number}", column, row)


def _rows(path: Path, column: str) -> Iterator[Piece]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise ValueError(f"{path}: no column {column!r}; its columns: {', '.join(names)}")
            for batch_number, batch in enumerate(table.iter_batches(_ROWS, columns=[column])):
                for number, value in enumerate(batch.column(0).to_pylist(), batch_number * _ROWS):
                    yield document(value, f"{path}, row {number}", column, names)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a Parquet file that can be read: {first_line(error)}") from None
