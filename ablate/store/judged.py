"""Origin of runs in a ledger that no sweep started: the fact `judged`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Self

from ablate.files import Json
from ablate.store.ledger import Ledger

FOREIGN = "foreign"
"""Name, in a spec, of the workload of a run that was not started here."""


@dataclass(frozen=True)
class Occasion:
    """One time at which runs from elsewhere were judged."""

    time: float
    """Unix time."""
    against: str
    metric: str
    direction: str
    min_effect: str
    """Smallest effect that matters, as it was given; empty if none was."""

    @property
    def text(self) -> str:
        """The comparison in words."""
        goal, effect = f"{self.metric} {self.direction}d", self.min_effect or "none"
        return f"{goal} against {self.against}, min_effect {effect}"


@dataclass(frozen=True)
class Judged:
    """Runs from elsewhere: where they were read, and every time they were judged."""

    sources: Mapping[str, str]
    """SHA-256 of each file or folder that was read, by its place; empty for a server."""
    said: Sequence[str]
    """Sentences on what was guessed, left out or put together while reading."""
    seeded: bool
    """False if the source names no seeds."""
    differing: Mapping[str, Mapping[str, Sequence[Json]]] = field(default_factory=dict)
    """Values of the baseline and of an arm, by arm and by field of their configurations."""
    times: Sequence[Occasion] = ()
    left_out: Sequence[str] = ()
    """Sentences on runs that are not compared, such as crashed ones."""
    nonfinite: int = 0
    """Compared runs with a NaN or an infinity in any record."""
    reruns: Sequence[float] = ()
    """Last values of reruns of one configuration, which are not compared."""

    @classmethod
    def of(cls, ledger: Ledger) -> Self | None:
        """Return the origin of a ledger's runs; None for those of a sweep alone."""
        text = ledger.facts.judged
        if not text:
            return None
        content = json.loads(text)
        return cls(**content | {"times": [Occasion(**each) for each in content["times"]]})

    @classmethod
    def alone(cls, ledger: Ledger) -> Self | None:
        """Return the same if all runs of the ledger are from elsewhere, so that no experiment made it."""
        return None if ledger.facts.text else cls.of(ledger)

    def write(self, ledger: Ledger) -> None:
        """Store it in a ledger that is open for writing."""
        ledger.facts.judged = json.dumps(asdict(self))

    def judged(self, now: Occasion) -> Self:
        """Return it with one more judgement, unless that is the last one again."""
        again = self.times and replace(self.times[-1], time=now.time) == now
        return self if again else replace(self, times=[*self.times, now])

    @property
    def places(self) -> str:
        """Names of what was read, in words: the first two, and the number of the others."""
        first, more = [*self.sources][:2], len(self.sources) - 2
        return ", ".join(first) + (f" and {more} more" if more > 0 else "")

    @property
    def text(self) -> str:
        """The origin of the runs, and the day on which they were first judged."""
        when = datetime.fromtimestamp(self.times[0].time, UTC) if self.times else None
        return f"not started here: read from {self.places}" + (f" on {when:%Y-%m-%d}" if when else "")
