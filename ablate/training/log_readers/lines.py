"""Lines of logs as every reader gets them, and the record that a reader makes of one.

A training stack prints for people: colours, a progress bar that a carriage return removes, and the rank
before each line. `plain` takes these away, so that a reader sees the text that the stack formatted.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

METRICS = {
    "train/loss": ("loss", "train_loss", "training_loss", "train/loss", "loss/train", "lm_loss", "lm loss"),
    "val/loss": (
        *("val_loss", "eval_loss", "validation_loss", "valid_loss", "loss/val", "loss/validation"),
        *("val/loss", "eval/loss", "valid/loss", "validation/loss"),
    ),
    "grad/norm": ("grad_norm", "train/grad_norm", "grad/norm", "gradient_norm", "grad norm"),
    "train/lr": ("lr", "learning_rate", "train/learning_rate", "train/lr", "learning rate"),
}
"""Usual names of metrics, by the name that they have here."""
_OURS = {name: ours for ours, names in METRICS.items() for name in names}
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANK = re.compile(r"^\[(?:rank|default)(\d+)\]:\s?")
_FLOAT = re.compile(
    r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|(nan|inf|infinity))", re.ASCII | re.IGNORECASE
)


class Unreadable(ValueError):
    """A line that begins as one with metrics and cannot be read whole. The message says why."""


@dataclass(frozen=True)
class LogRecord:
    """Metrics of one line, or of one step."""

    step: int
    """Optimizer steps done, from 1; 0 before the first."""
    metrics: Mapping[str, float]
    """Value by the metric's name here; NaN and infinities as they were printed."""


LineReader = Callable[[str], LogRecord | None]
"""Reader of one kind of log: the record of a line; None for a line without metrics. Unreadable for one that
is cut or damaged. Lines arrive in the order of the log, since some say their step by their place."""


class OneRank:
    """Reader of the lines of one rank, the first that prints metrics, whatever launcher wrote the log.

    Metrics of other ranks are passed over. Unreadable are those with a rank's prefix after some without one,
    which may be of the same rank.
    """

    def __init__(self, reader: LineReader) -> None:
        self._reader = reader
        self._rank: int | None = None
        self._decided = False

    def __call__(self, line: str) -> LogRecord | None:
        rank, text = plain(line)
        if self._decided and rank != self._rank:
            if self._rank is None and self._reader(text) is not None:
                raise Unreadable("a rank stands before its metrics, and none before earlier ones")
            return None
        record = self._reader(text)
        if record is not None:
            self._rank, self._decided = rank, True
        return record


def plain(line: str) -> tuple[int | None, str]:
    """Return the rank that torchrun wrote before a line, if any, and the text without colours and bars."""
    text = _COLOUR.sub("", line.rstrip("\r\n")).rpartition("\r")[2]
    rank = _RANK.match(text)
    return (int(rank[1]), text[rank.end() :]) if rank else (None, text)


def number(text: str) -> float:
    """Return the number that a text is, NaN and infinities included. ValueError if no float can hold it."""
    form = _FLOAT.fullmatch(text.strip())
    if form is None:
        raise ValueError(f"{text.strip()[:60]!r} is not a number")
    value = float(text)
    if math.isinf(value) and form[1] is None:
        raise ValueError(f"{text.strip()[:60]!r} does not fit a float")
    return value


def metric_name(text: str) -> str:
    """Return the name that a metric has here: `val/loss` for `eval_loss`; any other name as it is."""
    return _OURS.get(text.strip().lower(), text.strip())
