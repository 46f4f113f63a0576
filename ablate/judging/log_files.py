"""Logs of training stacks, one run a file, by the readers of `training/log_readers`.

A line that is cut or damaged is left out and said. So is a last line without an end: of a number at its end,
nothing shows that digits are missing. `trainer_state.json` of Hugging Face's Trainer is read as a log, too.
"""

from contextlib import suppress
from pathlib import Path

from ablate.errors import InputError, as_input_error, brief
from ablate.judging.named_runs import NamedRun
from ablate.judging.points import Points
from ablate.judging.table_files import text
from ablate.training.log_readers import OPTIONS, READERS, LogRecord, Unreadable, format_of, open_reader
from ablate.training.log_readers.hf import state_records

_MOST_GUESSED = 1 << 24
"""Most bytes of a log whose format is guessed."""


def read_log(path: Path, logs: str, said: list[str]) -> NamedRun:
    """Return the run of a log of a format such as `torchtitan`, `hf:10` or `regex:EXPRESSION`.

    Sentences on lines that are left out are added to `said`. InputError if the format does not exist, the
    file cannot be read, or no line has metrics.
    """
    with as_input_error(ValueError, before=f"--logs {brief(logs)}: "):
        reader = open_reader(format_of(logs))
    points = Points(str(path), in_time=True)
    damaged: list[str] = []
    decoded = text(path, "strict" if logs == "lightning" else "replace")
    *lines, last = decoded.split("\n")
    records = 0
    for number, line in enumerate(lines, 1):
        try:
            record = reader(line)
        except Unreadable as error:
            damaged.append(f"line {number}: {error}")
            continue
        if record is not None and "\ufffd" in line:
            damaged.append(f"line {number}: bytes of it are not text")
        elif record is not None:
            records += 1
            _add(points, number, record)
    try:
        of_metrics = bool(last.strip()) and reader(last) is not None
    except Unreadable:
        of_metrics = True
    unended = ["the last line has no end, so it may be cut; it is left out"] if of_metrics else []
    if not records:
        zeros = ["it has zero bytes, as UTF-16 has: convert it to UTF-8, `iconv -f utf-16 -t utf-8`"]
        why = "".join(f"; {sentence}" for sentence in (zeros * ("\0" in decoded) + damaged + unended)[:1])
        raise InputError(f"{path}: no line has metrics as {brief(logs)} prints them{why}")
    said += [f"{path}: {sentence}" for sentence in unended]
    if damaged and logs.startswith("hf"):
        raise InputError(f"{path}: {damaged[0]}")
    if damaged:
        count = f"{len(damaged)} lines are" if len(damaged) > 1 else "a line is"
        said.append(f"{path}: {count} left out; {damaged[0]}")
    return NamedRun(str(path), path.stem, points)


def likely(path: Path) -> list[str]:
    """Return the formats of which a file has metrics; all formats if it has none of any, or is large."""
    fitting = []
    for form in READERS:
        with suppress(InputError, OSError):
            if path.stat().st_size <= _MOST_GUESSED:
                read_log(path, form, [])
                fitting.append(form)
    return fitting or [*READERS, *(f"{name}:..." for name in OPTIONS)]


def read_state(path: Path) -> NamedRun:
    """Return the run of a `trainer_state.json`. InputError if it cannot be read."""
    points = Points(str(path), in_time=True)
    with as_input_error(Unreadable, before=f"{path}: "):
        for number, record in enumerate(state_records(text(path)), 1):
            _add(points, number, record)
    if not points.records():
        raise InputError(f"{path}: its log_history is empty")
    name = path.parent.parent.name if path.parent.name.startswith("checkpoint-") else path.parent.name
    return NamedRun(str(path), name, points)


def _add(points: Points, number: int, record: LogRecord) -> None:
    for name, value in record.metrics.items():
        points.add(number, record.step, name, value)
