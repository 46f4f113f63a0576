"""Any log, by a regular expression whose groups are the step and the metrics.

    {regex: 'iter (?P<step>\\d+): loss (?P<train__loss>\\S+), time'}

A group's name is the metric's; usual names become ours (`loss` is `train/loss`), and two underscores become a
slash. A line that does not match has no metrics. Refused is a match whose values are not numbers.
"""

import re

from ablate.training.log_readers.lines import LogRecord, Unreadable, metric_name, number


class Pattern:
    """Reader of lines that match an expression.

    Args:
        expression: regular expression of Python, with a group `step` and at least one more.

    Raises:
        ValueError: it is not an expression, or lacks a group.
    """

    def __init__(self, expression: str) -> None:
        try:
            self._form = re.compile(expression)
        except re.error as error:
            raise ValueError(f"regex: {error}: {expression!r}") from None
        groups = self._form.groupindex.keys()
        if "step" not in groups or len(groups) < 2:
            raise ValueError(
                f"regex: name the step and a metric: (?P<step>\\d+) and, say, (?P<loss>\\S+): {expression!r}"
            )
        self._names = {name: metric_name(name.replace("__", "/", 1)) for name in groups if name != "step"}

    def __call__(self, line: str) -> LogRecord | None:
        """Return the record of a line; None if it does not match. Unreadable if a group is not a number."""
        match = self._form.search(line)
        if match is None:
            return None
        groups = match.groupdict()
        step = (groups.pop("step") or "").strip()
        if not (step.isascii() and step.isdigit()):
            raise Unreadable(f"the group step is {step[:60]!r}, not a whole number")
        try:
            metrics = {self._names[name]: number(text) for name, text in groups.items() if text is not None}
        except ValueError as error:
            raise Unreadable(f"step {step}: {error}") from None
        return LogRecord(int(step), metrics)
