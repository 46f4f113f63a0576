"""Any log, by a regular expression whose groups are the step and the metrics.

    {regex: 'iter (?P<step>\\d+): loss (?P<train__loss>\\S+), time'}

A group's name is the metric's; usual names become ours (`loss` is `train/loss`), and two underscores become a
slash. A line that does not match has no metrics. Refused is a match whose values are not numbers.

`FORMS` has the expressions of stacks whose lines need no more than that. Each has a second one, of lines that
are cut or damaged unless the first matches them. Both match in linear time: no part of them can match one
text in two ways.
"""

import re

from ablate.training.log_readers.lines import LogRecord, Unreadable, metric_name, number

_LOSS = r"-?\d+\.\d{3,}|-?inf|nan"
"""Loss as Python prints it with a number of decimals; one with fewer is damaged."""
FORMS = {
    # step:125/1750 val_loss:4.4012 train_time:17321ms step_avg:141.98ms
    "modded-nanogpt": (
        rf"^step:(?P<step>\d{{1,9}})/\d{{1,9}}(?: train_loss:(?P<train_loss>{_LOSS}))?"
        rf"(?: val_loss:(?P<val_loss>{_LOSS}))?(?: val_bpb:(?P<val_bpb>{_LOSS}))?"
        r" train_time:\d+(?:\.\d+)?m?s(?: |$)",
        r"^step:\d|_loss:\d|train_time:\d",
    ),
}
"""Expression of a stack's lines, and one of lines that have some of its words, by the name of the stack."""


class Pattern:
    """Reader of lines that match an expression of Python, with a group `step` and at least one more.

    Lines that match `words` alone are damaged. ValueError if it is not an expression, or lacks a group.
    """

    def __init__(self, expression: str, words: str | None = None) -> None:
        try:
            self._form, self._words = re.compile(expression), words and re.compile(words)
        except re.error as error:
            raise ValueError(f"regex: {error}: {expression!r}") from None
        groups = self._form.groupindex.keys()
        if "step" not in groups or len(groups) < 2:
            raise ValueError(
                f"regex: name the step and a metric: (?P<step>\\d+) and, say, (?P<loss>\\S+): {expression!r}"
            )
        self._names = {name: metric_name(name.replace("__", "/", 1)) for name in groups if name != "step"}

    def __call__(self, line: str) -> LogRecord | None:
        match = self._form.search(line)
        if match is None:
            if self._words and self._words.search(line):
                raise Unreadable(f"a line with words of metrics is cut or damaged: {line.strip()[:60]!r}")
            return None
        groups = match.groupdict()
        step = (groups.pop("step") or "").strip()
        if not (step.isascii() and step.isdigit()):
            raise Unreadable(f"the group step is {step[:60]!r}, not a whole number")
        try:
            metrics = {self._names[name]: number(text) for name, text in groups.items() if text is not None}
        except ValueError as error:
            raise Unreadable(f"step {step}: {error}") from None
        return LogRecord(int(step), metrics) if metrics else None
