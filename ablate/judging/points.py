"""Values of one run while its source is read: each metric and step has one value, or the source is refused.

Two rows of a table that give one value twice are copies. Two that give different values are refused, since
nothing says which is right. In a log, whose lines are in the order of time, a metric whose step goes back to
another value is a restart: the later values belong to the run that reached the end, so they count, and values
of the abandoned attempt from that step on are dropped. Both are counted and said. A tracker's metrics may
count different steps, so there each metric is by itself.
"""

from collections.abc import Iterable
from typing import Self

from ablate.errors import InputError, brief
from ablate.judging.cells import MOST_STEP, same


class Points:
    """Values of one run, by metric and step.

    With `in_time`, values arrive in the order of time, so a step that goes back is a restart; with
    `one_axis`, all metrics count the same steps, so one that restarts shows that all did.
    """

    def __init__(self, where: str, in_time: bool = False, one_axis: bool = True) -> None:
        self._where, self._in_time, self._one_axis = where, in_time, one_axis
        self._values: dict[str, dict[int, tuple[float, int]]] = {}
        self._last: dict[str, int] = {}
        self._copies = 0
        self._restarts: list[tuple[int, int, int]] = []

    @classmethod
    def of(cls, where: str, scalars: Iterable[tuple[int, str, float]]) -> Self:
        """Return the values of a tracker's run: step, metric and value in the order of time."""
        points = cls(where, in_time=True, one_axis=False)
        for number, (step, name, value) in enumerate(scalars, 1):
            points.add(number, step, name, value)
        return points

    def add(self, line: int, step: int, name: str, value: float) -> None:
        """Add a value, perhaps NaN or infinite, of a line of the source, from 1.

        InputError if the metric has another value at this step, or no float holds the step.
        """
        if step > MOST_STEP:
            raise InputError(f"{self._where}: line {line}: the step {step} is beyond 2^53")
        series = self._values.setdefault(name, {})
        if step in series and same(series[step][0], value):
            self._copies += 1
            return
        last = self._last.get(name, -1)
        if step < last and self._in_time:
            self._restarts.append((line, last, step))
            for other in self._values if self._one_axis else (name,):
                kept = {at: entry for at, entry in self._values[other].items() if at < step}
                self._values[other], self._last[other] = kept, max(kept, default=-1)
        elif step in series:
            before, at = series[step]
            raise InputError(
                f"{self._where}: {brief(name)} at step {step} is {before!r} in line {at} and {value!r}"
                f" in line {line}; keep one of the two"
            )
        self._values[name][step] = value, line
        self._last[name] = max(self._last.get(name, -1), step)

    def records(self) -> dict[str, dict[int, float]]:
        """Return value by step, by metric; steps ascend."""
        return {
            name: {step: series[step][0] for step in sorted(series)}
            for name, series in self._values.items()
            if series
        }

    def sentences(self) -> list[str]:
        """Return a sentence on copies, and one on restarts, if there were any."""
        sentences = []
        if self._copies:
            sentences.append(f"{self._where}: {self._copies} values stand there twice; each counts once")
        if self._restarts:
            line, last, step = self._restarts[0]
            more = f", and {len(self._restarts) - 1} times more" if len(self._restarts) > 1 else ""
            sentences.append(
                f"{self._where}: the step goes back from {last} to {step} in line {line}{more}, as after a"
                " restart; the later values count"
            )
        return sentences
