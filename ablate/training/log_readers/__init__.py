"""Readers of the logs that training stacks print: from lines of text to steps and metrics.

One file a stack, which imports nothing of it; `READERS` is the registry. A reader takes one line at a time,
so that a running command and a finished file are read alike.

    reader = open_reader("torchtitan")
    reader("step: 10  loss:  7.84212  grad_norm: ...")    # LogRecord(10, {"train/loss": 7.84212, ...})
"""

from collections.abc import Callable, Mapping
from functools import partial

from ablate.training.log_readers import hf, lightning, megatron, pattern, torchtitan
from ablate.training.log_readers.lines import LineReader, LogRecord, OneRank, Unreadable, metric_name

LogFormat = str | Mapping[str, str | int]
"""Format of a log: its name; or one of `OPTIONS` with its value, such as `{"regex": "..."}`."""

READERS: dict[str, Callable[[], LineReader]] = {
    "torchtitan": lambda: torchtitan.read,
    "megatron": lambda: megatron.read,
    "lightning": lightning.MetricsRows,
    **{name: partial(pattern.Pattern, *form) for name, form in pattern.FORMS.items()},
}
"""Readers by the name of the stack, each for one log from its first line."""


def _printed_dicts(value: str | int) -> LineReader:
    if not str(value).isdigit() or int(value) < 1:
        raise ValueError(f"hf: {value!r} is not a number of steps from 1; {hf.NO_STEP}")
    return hf.PrintedDicts(int(value))


OPTIONS: dict[str, Callable[[str | int], LineReader]] = {
    "hf": _printed_dicts,
    "regex": lambda value: pattern.Pattern(str(value)),
}
"""Readers that need a value: steps between two dicts of Hugging Face's Trainer, or an expression."""


def format_of(text: str) -> LogFormat:
    """Return the format that a word names, as in a command: `torchtitan`, `hf:10`, `regex:EXPRESSION`."""
    name, colon, value = text.partition(":")
    return {name: value} if colon and name in OPTIONS else text


def open_reader(form: LogFormat) -> LineReader:
    """Return a reader for one log, from its first line.

    ValueError, in one sentence, if there is no such format, or its value is wrong.
    """
    if form == "hf":
        raise ValueError(hf.NO_STEP)
    if isinstance(form, str):
        name, opened = form, READERS.get(form)
    else:
        ((name, value),) = form.items()
        opened = partial(OPTIONS[name], value) if name in OPTIONS else None
    if opened is None:
        raise ValueError(f"no format of logs is {name!r}; there are {', '.join([*READERS, *OPTIONS])}")
    return OneRank(opened())


__all__ = [
    "OPTIONS",
    "READERS",
    "LineReader",
    "LogFormat",
    "LogRecord",
    "Unreadable",
    "format_of",
    "metric_name",
    "open_reader",
]
