"""Trials that begin alike: how long they stay alike, so that what they share runs once."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ablate.trial import TrialSpec


class Family:
    """All trials of a sweep, by what they have in common from the start."""

    def __init__(self, specs: Iterable[TrialSpec] = ()) -> None:
        self._groups: dict[str, dict[str, TrialSpec]] = defaultdict(dict)
        for spec in specs:
            self.add(spec)

    def add(self, spec: TrialSpec) -> None:
        """Count a trial in, if it can be forked at all."""
        if spec.segments:
            self._groups[spec.history(1)].setdefault(spec.id, spec)

    def __iter__(self) -> Iterator[TrialSpec]:
        return (spec for group in self._groups.values() for spec in group.values())

    def points(self, spec: TrialSpec) -> list[tuple[int, str]]:
        """Where `spec` parts from others: steps after which its state is theirs too, furthest first, and the name of that state."""
        if not spec.segments:
            return []
        others = (other for name, other in self._groups[spec.history(1)].items() if name != spec.id)
        steps = sorted({spec.alike(other) for other in others} - {spec.config.steps}, reverse=True)
        return [(step, spec.history(step)) for step in steps]

    def steps(self) -> tuple[int, int]:
        """Training steps of all that can be forked: run each for itself, and with what is shared run once."""
        alone = together = 0
        for group in self._groups.values():
            earlier: list[TrialSpec] = []
            for spec in group.values():
                known = max((spec.alike(other) for other in earlier), default=0)
                alone, together = alone + spec.config.steps, together + spec.config.steps - known
                earlier.append(spec)
        return alone, together
