"""One line of a comparison: what is measured, or why it is not. It imports no library but ours."""

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
    """A library, what it computes, and how long it took; without `build`, `why` says what keeps it from being measured."""

    name: str
    computes: str
    distribution: str = ""
    """The name that it is installed under; empty for ours."""
    build: Callable[..., Callable[[], Any]] | None = None
    """Imports the library and makes, of what is given to prepare(), the call that is timed."""
    why: str = ""
    call: Callable[[], Any] | None = None
    first: Any = None
    """The result of the first call, which is not timed."""
    seconds: list[float] = field(default_factory=list)
    learned: dict[str, Any] = field(default_factory=dict)
    """What was found out beside the time, by column."""

    @property
    def version(self) -> str | None:
        """The installed version; None where it is not installed."""
        try:
            return metadata.version(self.distribution) if self.distribution else ablate.__version__
        except metadata.PackageNotFoundError:
            return None

    @property
    def counted(self) -> list[float]:
        """Seconds of the rounds that count; empty where it was not measured."""
        return self.seconds[WARM_UP:]

    @property
    def median(self) -> float:
        """Seconds of one call; nan where it was not measured."""
        return statistics.median(self.counted) if self.counted else math.nan

    def prepare(self, *given: Any) -> None:
        """Build the call and make it once; what is missing or goes wrong is why the row is not measured."""
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
        """Not measured, because of this."""
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self.why = f"{self.why} ({told})" if self.why else told
        self.call, self.seconds = None, []


def measure(
    entries: list[Entry], rounds: int, after: Callable[[Entry, Any], None] | None = None, least: float = 0.0
) -> None:
    """Time every entry in turn within each round, so that a change of the machine's speed meets all of them alike.

    What takes less than `least` seconds is repeated for that long: its data are then in cache, as in training. `after`, which is not
    timed, is given each entry and its result.
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
