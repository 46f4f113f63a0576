"""Scalars of TensorBoard's event files that others wrote, read by TensorBoard's own reader of records.

TensorBoard skips what it cannot read; here a record whose checksum is wrong is an error, and an end that is
cut, as a killed run leaves it, is reported.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.errors import InputError, one_line
from ablate.files import Json

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

PATTERN = "*tfevents*"
"""Names of event files."""


@dataclass(frozen=True)
class EventRun:
    """Scalars and hyperparameters of one folder."""

    scalars: list[tuple[int, str, float]]
    """Step, tag and value, in the order of time."""
    config: dict[str, Json] = field(default_factory=dict)
    """Hyperparameters, if the run has them."""
    cut: list[Path] = field(default_factory=list)
    """Files that end within a record."""


def folders_of(place: Path) -> list[Path]:
    """Return the folders at and below a place that hold event files."""
    return sorted({path.parent for path in place.rglob(PATTERN) if path.is_file()})


def read_events(folder: Path) -> EventRun:
    """Return what the event files of a folder hold. InputError if TensorBoard is not installed, or a file is
    damaged."""
    run = EventRun([])
    for path in sorted(path for path in folder.glob(PATTERN) if path.is_file()):
        for step, value in _values(path, run):
            number = _scalar(value, path)
            if number is not None:
                run.scalars.append((step, value.tag, number))
            elif value.metadata.plugin_data.plugin_name == "hparams":
                run.config.update(_hyperparameters(value))
    return run


def _values(path: Path, run: EventRun) -> "Iterator[tuple[int, Summary.Value]]":
    """Yield step and value of each summary of a file; note one that is cut."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.tensorflow_stub import errors
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    except ImportError as error:
        raise InputError(f"{path}: {error}; `pip install tensorboard`") from None
    reader = PyRecordReader_New(str(path))
    while True:
        try:
            reader.GetNext()
            event = Event.FromString(reader.record())
        except errors.OutOfRangeError:
            return
        except (errors.DataLossError, DecodeError, OverflowError) as error:
            if "truncated" in str(error):
                run.cut.append(path)
                return
            raise InputError(f"{path}: the event file is damaged: {one_line(str(error))}") from None
        if event.step < 0:
            raise InputError(f"{path}: step {event.step} is below 0")
        for value in event.summary.value:
            yield event.step, value


def _scalar(value: "Summary.Value", path: Path) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor") or value.metadata.plugin_data.plugin_name not in ("scalars", ""):
        return None
    from tensorboard.util import tensor_util

    try:
        array = tensor_util.make_ndarray(value.tensor)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {one_line(value.tag)}: {error}") from None
    return float(array.item()) if array.size == 1 and array.dtype.kind in "fiu" else None


def _hyperparameters(value: "Summary.Value") -> dict[str, Json]:
    from google.protobuf.message import DecodeError
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    try:
        data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    except DecodeError:
        return {}
    config: dict[str, Json] = {}
    for name, entry in data.session_start_info.hparams.items():
        kind = entry.WhichOneof("kind")
        known = kind in ("bool_value", "number_value", "string_value")
        config[name] = getattr(entry, kind) if known else None
    return config
