"""One line of a comparison: the measured call of a library, or the reason why it is not measured.

This file imports no library but ours.
"""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import metadata
from io import StringIO
from typing import Any

import ablate

WARM_UP = 2
"""Rounds before those that count."""


@dataclass
class Entry:
    """A library, its computation, and the time that it took, or the reason why it is not measured."""

    name: str
    computes: str
    distribution: str = ""
    """Name that it is installed under; empty for ours."""
    build: Callable[..., Callable[[], Any]] | None = None
    """Function that imports the library and returns the timed call, given the arguments of `prepare`.

    None if the entry cannot be measured.
    """
    why: str = ""
    """Reason why the entry is not measured; empty if it is."""
    call: Callable[[], Any] | None = None
    first: Any = None
    """Result of the first call, which is not timed."""
    seconds: list[float] = field(default_factory=list)
    learned: dict[str, Any] = field(default_factory=dict)
    """Measurements beside the time, by column."""

    @property
    def version(self) -> str | None:
        """Return the installed version; None if it is not installed."""
        try:
            return metadata.version(self.distribution) if self.distribution else ablate.__version__
        except metadata.PackageNotFoundError:
            return None

    @property
    def counted(self) -> list[float]:
        """Return the seconds of the rounds that count; [] if it was not measured."""
        return self.seconds[WARM_UP:]

    @property
    def median(self) -> float:
        """Return the median seconds of one call; nan if it was not measured."""
        return statistics.median(self.counted) if self.counted else math.nan

    def prepare(self, *given: Any) -> None:
        """Build the call and make it once. A missing library or an exception becomes the entry's reason."""
        if self.build is None:
            return
        if self.version is None:
            self.why = f"{self.distribution} is not installed; it is in benchmarks/requirements.txt"
            return
        try:
            with redirect_stdout(StringIO()):  # some print when they are imported
                call = self.build(*given)
                self.first = call()
            self.call = call
        except Exception as error:  # the boundary to other people's code: what it says is the row
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Record an exception as the reason why the entry is not measured."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self.why = f"{self.why} ({reason})" if self.why else reason
        self.call, self.seconds = None, []


def measure(
    entries: list[Entry], rounds: int, after: Callable[[Entry, Any], None] | None = None, least: float = 0.0
) -> None:
    """Time every entry in turn within each round, so that changes of the machine's speed affect all alike.

    Args:
        entries: entries after `prepare`; those that cannot be measured are left out.
        rounds: number of rounds that count; `WARM_UP` more come before them.
        after: function of an entry and the result of its call; called after each round, and not timed.
        least: seconds for which a shorter call is repeated: its data are then in cache, as in training.
    """
    for _ in range(rounds + WARM_UP):
        for entry in entries:
            if entry.call is None:
                continue
            try:
                repeats = 1 + int(least / entry.seconds[0]) if entry.seconds else 1
                start = time.perf_counter()
                for _ in range(repeats):
                    result = entry.call()
                entry.seconds.append((time.perf_counter() - start) / repeats)
            except Exception as error:  # as in prepare()
                entry.fail(error)
                continue
            if after:
                after(entry, result)
