"""One run that was not started here, as its source has it: `ForeignRun`.

A source (a table, a log, a store of a tracker) is read into these and nothing else. Nothing here decides what
may be compared: `ForeignRun` keeps what the source says, also a NaN, an arm without a seed, and a
configuration.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ablate.errors import by_key
from ablate.files import Json
from ablate.judging.cells import shown

_TELLING = 3
"""Number of values from which two runs are not equal by chance."""


@dataclass(frozen=True)
class ForeignRun:
    """One run: its arm, its seed, its records and its configuration."""

    name: str
    """Name of the run in its source, as a person finds it there: `runs.csv: seed 3 of nvfp4`."""
    arm: str
    """Name of the setting that it trained."""
    seed: int | None
    """Its seed; None if the source does not say."""
    records: Mapping[str, Mapping[int, float]]
    """Value by step, by metric; values may be NaN or infinite, and steps ascend."""
    config: Mapping[str, Json] = field(default_factory=dict)
    """Fields that the source records about the run, without arm and seed."""
    status: str = "done"
    """`done`, `failed` or `running`, as the source says; `done` if it does not."""
    states: Mapping[str, str] = field(default_factory=dict)
    """Text of each field of the source that says that the run is not done; empty for an empty cell."""

    @classmethod
    def misfit(cls, name: str) -> Self:
        """Return a run that is left out as asked, and of no arm, since its name is not of the pattern."""
        return cls(name, "", None, {}, status="not of the pattern")

    @property
    def short_name(self) -> str:
        """Name without its place: `seed 3 of nvfp4`."""
        return self.name.rpartition(": ")[2]

    @property
    def ended(self) -> str:
        """Its status in the words of the source, for a sentence."""
        texts = [f"{name} is {shown(text) if text else 'empty'}" for name, text in self.states.items()]
        return " and ".join(texts) or f"it is {self.status}"

    @property
    def telling(self) -> bool:
        """True if it has so many values that another run has the same ones by no chance."""
        return sum(map(len, self.records.values())) >= _TELLING

    @property
    def finite(self) -> bool:
        """False if any of its values is NaN or infinite."""
        return all(math.isfinite(value) for steps in self.records.values() for value in steps.values())


@dataclass(frozen=True)
class Found:
    """Runs of all places that were read."""

    runs: Sequence[ForeignRun]
    """Runs in the order of the places; no two have the same arm and seed, unless they have no seed."""
    said: Sequence[str]
    """Sentences on what was guessed, merged or left out, for the user."""
    places: Sequence[str]
    """Files, folders, patterns of paths or addresses that were read."""


def by_arm(runs: Iterable[ForeignRun]) -> dict[str, list[ForeignRun]]:
    """Return the runs of each arm, in their order; there may be thousands of arms."""
    return by_key((run.arm, run) for run in runs)
