"""Origin of runs in a ledger that no sweep started: the fact `judged`."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Self

from ablate.errors import InputError, some_of
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
    at: int | None = None
    """Step that was asked for; None if none was."""

    @property
    def text(self) -> str:
        """The comparison in words."""
        goal, effect = f"{self.metric} {self.direction}d", self.min_effect or "none"
        step = "" if self.at is None else f", at step {self.at}"
        return f"{goal} against {self.against}, min_effect {effect}{step}"


@dataclass(frozen=True)
class Reading:
    """Runs from elsewhere that one command read, and what it decided."""

    arms: Sequence[str]
    """Arms that it gave; of those that a later command gives again, nothing is left here."""
    sources: Mapping[str, str]
    """SHA-256 of each file or folder that was read, by its place; empty for a server."""
    said: Sequence[str]
    """Sentences on what was guessed, left out or put together while reading."""
    seeded: bool
    """False if the source names no seeds."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sentences on runs that are not compared, such as crashed ones, by arm."""
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    """Compared runs with a NaN or an infinity in any record, by arm."""
    warnings: Sequence[str] = ()
    """Sentences that stand with the answer, such as one on runs that continue beyond the compared step."""

    def without(self, arms: Collection[str]) -> Self | None:
        """Return what is left of it once other runs replace those of these arms; None if nothing is."""
        kept = [arm for arm in self.arms if arm not in arms]
        gone = {sentence for arm in arms for sentence in self.left_out.get(arm, ())}
        part = replace(
            self,
            arms=kept,
            said=[sentence for sentence in self.said if sentence not in gone],
            left_out={arm: said for arm, said in self.left_out.items() if arm not in arms},
            nonfinite={arm: self.nonfinite.get(arm, 0) for arm in kept},
        )
        return part if kept else None


@dataclass(frozen=True)
class Judged:
    """Runs from elsewhere: where they were read, and every time they were judged."""

    readings: Sequence[Reading]
    """One for runs that are judged alone; one a command for those in a sweep's ledger."""
    differing: Mapping[str, Mapping[str, Sequence[Json]]] = field(default_factory=dict)
    """Values of the baseline and of an arm, by arm and by field of their configurations."""
    times: Sequence[Occasion] = ()
    reruns: Sequence[float] = ()
    """Last values of reruns of one configuration, which are not compared."""

    @classmethod
    def of(cls, ledger: Ledger) -> Self | None:
        """Return the origin of a ledger's runs; None for those of a sweep alone."""
        text = ledger.facts.judged
        return cls.parse(text, ledger.name) if text else None

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Return the origin in the text of a fact of a ledger with this name."""
        content = json.loads(text)
        if not all("warnings" in each for each in content.get("readings", [{}])):
            raise InputError(f"{name}: its runs were judged by an earlier version; judge them again")
        times = [Occasion(**each) for each in content["times"]]
        readings = [Reading(**each) for each in content["readings"]]
        return cls(**content | {"times": times, "readings": readings})

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
    def sources(self) -> dict[str, str]:
        """SHA-256 of everything that was read, by its place."""
        return {place: digest for each in self.readings for place, digest in each.sources.items()}

    @property
    def said(self) -> list[str]:
        """Sentences on what was guessed, left out or put together."""
        return [sentence for each in self.readings for sentence in each.said]

    @property
    def seeded(self) -> bool:
        """False if a source names no seeds."""
        return all(each.seeded for each in self.readings)

    @property
    def left_out(self) -> list[str]:
        """Sentences on runs that are not compared."""
        return [text for each in self.readings for said in each.left_out.values() for text in said]

    @property
    def nonfinite(self) -> int:
        """Number of compared runs with a NaN or an infinity in any record."""
        return sum(count for each in self.readings for count in each.nonfinite.values())

    @property
    def places(self) -> str:
        """Names of what was read, in words: the first two, and the number of the others."""
        return some_of([*self.sources], 2)

    @property
    def text(self) -> str:
        """The origin of the runs, and the day on which they were first judged."""
        when = datetime.fromtimestamp(self.times[0].time, UTC) if self.times else None
        return f"not started here: read from {self.places}" + (f" on {when:%Y-%m-%d}" if when else "")
