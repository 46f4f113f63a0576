"""Folders of offline runs of Weights & Biases, `wandb/offline-run-*/run-*.wandb`.

Such a file is a log in LevelDB's format: blocks of 32 KiB with records, each with a checksum, and a record is
a protobuf message of W&B. Of its messages only the fields that matter here are described (`_MESSAGES`), by
their numbers in `wandb/proto/wandb_internal.proto`, so that the package wandb is not needed. A record whose
checksum is wrong is refused; a last one that is cut, as a killed run leaves it, is left out and said.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ablate.errors import InputError, brief
from ablate.files import Json, flat
from ablate.judging import cells
from ablate.judging.named_runs import NamedRun
from ablate.judging.points import Points
from ablate.judging.table_files import content

_MAGIC = b":W&B"
_BEGIN = 7
"""Bytes of the file's header, and of each record's."""
_BLOCK = 1 << 15
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "Record": {
        "history": (2, "HistoryRecord"),
        "config": (5, "ConfigRecord"),
        "run": (17, "RunRecord"),
        "exit": (18, "RunExitRecord"),
    },
    "HistoryRecord": {"item": (1, "*Item"), "step": (2, "HistoryStep")},
    "HistoryStep": {"num": (1, "int64")},
    "ConfigRecord": {"update": (1, "*Item")},
    "RunRecord": {"config": (4, "ConfigRecord"), "display_name": (8, "string")},
    "RunExitRecord": {"exit_code": (1, "int32")},
    "Item": {"key": (1, "string"), "nested_key": (2, "*string"), "value_json": (16, "string")},
}
"""Number and type of each field, by message and name; a star is a repeated field."""
_TYPES = {"int64": 3, "int32": 5, "string": 9, "message": 11}
"""Numbers of types in protobuf's descriptors."""
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
"""Texts that W&B writes for numbers that JSON lacks."""


class _Cut(Exception):
    """The file ends within a record."""


def files_of(place: Path) -> list[Path]:
    """Return a file, or the files of runs in a folder, each once: `latest-run` is a link to one of them."""
    return [place] if place.is_file() else sorted({path.resolve() for path in place.rglob("run-*.wandb")})


@cache
def message_class() -> Any:
    """Return the class of a record's message, which has the fields of `_MESSAGES`."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name="ablate/wandb.proto", package="ablate_wandb", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.removeprefix("*")
            added = message.field.add(name=field, number=number, label=3 if kind != plain else 1)
            added.type = _TYPES.get(plain, _TYPES["message"])
            if plain in _MESSAGES:
                added.type_name = f".ablate_wandb.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ablate_wandb.Record"))


def read_run(path: Path, said: list[str]) -> NamedRun:
    """Return the run of a file, and say that its end is cut, if it is.

    InputError if the file is damaged, or the run logged no numbers.
    """
    from google.protobuf.message import DecodeError

    message = message_class()
    points = Points(str(path), in_time=True)
    name, config, status = path.stem, dict[str, Json](), "running"
    try:
        for number, data in enumerate(_records(content(path), path), 1):
            record = message.FromString(data)
            if record.HasField("run"):
                name = record.run.display_name or name
                config |= _items(record.run.config.update)
            elif record.HasField("config"):
                config |= _items(record.config.update)
            elif record.HasField("exit"):
                status = "done" if record.exit.exit_code == 0 else "failed"
            elif record.HasField("history"):
                _add(points, number, record.history)
    except _Cut:
        said.append(f"{path}: the end of the file is cut; what is whole counts")
    except (DecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: a record is damaged: {brief(str(error))}") from None
    if not points.records():
        raise InputError(f"{path}: the run logged no numbers")
    plain = {key: value for key, value in flat(config, "/") if value != {} and not key.startswith("_wandb")}
    return NamedRun(f"{path}: {brief(name)}", name, points, plain, status)


def _add(points: Points, number: int, history: Any) -> None:
    """Add the values of one call of `wandb.log`. `history` is a HistoryRecord."""
    values = dict(flat(_items(history.item), "/"))
    step = history.step.num if history.HasField("step") else values.get("_step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError("a record of history has no step")
    for name, value in values.items():
        numeric = (isinstance(value, int | float) and not isinstance(value, bool)) or value in _NOT_FINITE
        if numeric and not name.startswith("_"):
            points.add(number, step, name, cells.number(value))


def _items(items: Any) -> dict[str, Json]:
    """Return items of W&B's protocol, whose values are JSON, by key; nested keys with slashes."""
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _records(data: bytes, path: Path) -> Iterator[bytes]:
    """Yield the records of a file. _Cut at an end within a record; ValueError for a wrong checksum."""
    if data[:4] != _MAGIC or len(data) < _BEGIN:
        raise InputError(f"{path}: not a file of W&B's offline runs")
    position, parts = _BEGIN, list[bytes]()
    while position < len(data):
        left = _BLOCK - position % _BLOCK
        if left < _BEGIN:
            position += left
            continue
        if position + _BEGIN > len(data):
            raise _Cut
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        body = data[position + _BEGIN : position + _BEGIN + length]
        if _BEGIN + length > left:
            raise ValueError(f"byte {position}: its length leaves the block")
        if len(body) < length:
            raise _Cut
        if zlib.crc32(bytes([kind]) + body) != checksum:
            raise ValueError(f"byte {position}: its checksum is wrong")
        if (kind in (_FULL, _FIRST)) == bool(parts) or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            raise ValueError(f"byte {position}: a part of a record is missing")
        position += _BEGIN + length
        parts.append(body)
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts.clear()
    if parts:
        raise _Cut
