"""JSON lines, and JSON files that are a list of objects, or one flat object: each object is a row.

Objects within a row become columns with slashes.

{"arm": "bf16", "seed": 0, "step": 100, "val": {"loss": 3.21}}     # column val/loss
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ablate.errors import InputError, brief
from ablate.files import Json
from ablate.judging.named_runs import flat
from ablate.judging.tables import Row, Table
from ablate.judging.text_files import text


def read_lines(path: Path, fields: Mapping[str, str], said: list[str]) -> Table:
    """Return the table of a file of JSON lines.

    Args:
        path: the file.
        fields: what its path says.
        said: list to which a sentence on a last line that is cut is added.

    Raises:
        InputError: it cannot be read, or a line is not an object.
    """
    rows: list[Row] = []
    lines = text(path).split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append((number, _row(_parsed(line))))
        except ValueError as error:
            if number == len(lines) and rows:
                said.append(f"{path}: the last line is cut and left out")
                continue
            raise InputError(f"{path}: line {number} is not a JSON object: {error}") from None
    return _table(path, rows, fields)


def read_list(path: Path, fields: Mapping[str, str]) -> Table:
    """Return the table of a JSON file. InputError if it is not a list of objects."""
    try:
        content = _parsed(text(path))
        if isinstance(content, dict):
            _require_flat(content)
            content = [content]
        if not isinstance(content, list):
            raise ValueError("it is not a list of objects, one a row")
        rows = [(number, _row(entry)) for number, entry in enumerate(content, 1)]
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    return _table(path, rows, fields)


def _require_flat(content: Mapping[str, Json]) -> None:
    """Raise ValueError for an object that holds others, or a curve: it is not one row."""
    inner = {
        name: value
        for name, value in content.items()
        if isinstance(value, dict)
        or (isinstance(value, list) and any(isinstance(each, list | dict) for each in value))
    }
    if not inner:
        return
    first, value = next(iter(inner.items()))
    way = (
        "write a list of objects, one a row, or give final values in Python:"
        " ablate.judge({'bf16': [3.10, 3.12]}, 'bf16')"
    )
    if all(isinstance(value, dict) and "0" in value for value in content.values()):
        way = "as pandas' to_json() writes it, a column a key; write rows, to_json(orient='records')"
    elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
        way = f"write the list of its {brief(first)!r} alone to the file, one object a row"
    names = ", ".join(map(brief, [*inner][:4]))
    raise ValueError(f"it is an object with {names}, and not a row of plain values: {way}")


def is_state(path: Path) -> bool:
    """Return True for a `trainer_state.json`, by its content."""
    try:
        content = _parsed(text(path))
    except (InputError, ValueError):
        return False
    return isinstance(content, dict) and "log_history" in content


def _table(path: Path, rows: Sequence[Row], fields: Mapping[str, str]) -> Table:
    names = [*dict.fromkeys(name for _, row in rows for name in row)]
    complete = [(number, {name: row.get(name) for name in names}) for number, row in rows]
    return Table(str(path), names, complete, fields)


def _row(entry: Json) -> dict[str, Json]:
    if not isinstance(entry, dict):
        raise ValueError("it is not an object")
    return {
        name.strip(): json.dumps(value) if isinstance(value, list) else value
        for name, value in flat(entry).items()
        if not isinstance(value, list) or len(value) <= 8  # such as Adam's betas; a longer one is a curve
    }


def _parsed(text: str) -> Json:
    """Return the value of JSON. ValueError if it is none, or an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    content: dict[str, Json] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {brief(key)[:60]!r} is there twice")
        content[key] = value
    return content
