"""Shared prefixes: trials with equal settings up to some step, so that these steps run only once."""

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from ablate.errors import InputError
from ablate.experiment.trial_spec import TrialSpec
from ablate.store.ledger import Ledger
from ablate.training.trial_run import Telemetry


def note(telemetry: Telemetry) -> str:
    """Return the suffix of a shared state's name: how often records before it were made, which its trial's
    history lacks."""
    return f"-{telemetry.every}-{telemetry.shadow}-{telemetry.log}"


class Family:
    """All trials of a sweep, grouped by their common prefixes. `note` is the suffix of every shared state's
    name, for everything else that a state depends on, such as how often it is recorded."""

    def __init__(self, specs: Iterable[TrialSpec] = (), note: str = "") -> None:
        self._note = note
        self._groups: dict[str, dict[str, TrialSpec]] = defaultdict(dict)
        self.resumed: dict[str, int] = {}
        """Step of each trial's own checkpoint, by id; trials without one are missing."""
        for spec in specs:
            self.add(spec)

    def add(self, spec: TrialSpec, resumed: int = 0) -> None:
        """Add a trial if it can share a prefix. `resumed`: step of its own checkpoint, 0 if it has none."""
        if spec.segments:
            self._groups[spec.history(1)].setdefault(spec.id, spec)
            if resumed:
                self.resumed[spec.id] = resumed

    def __iter__(self) -> Iterator[TrialSpec]:
        return (spec for group in self._groups.values() for spec in group.values())

    def points(self, spec: TrialSpec) -> list[tuple[int, str]]:
        """Return the steps at which `spec` separates from others, and those at which windows leave a trunk
        that it passes through, furthest first, with the name of the state after each."""
        if not spec.segments:
            return []
        steps = set(spec.kept_steps)
        for name, other in self._groups[spec.history(1)].items():
            if name != spec.id:
                alike = spec.alike(other)
                steps |= {alike, *(step for step in other.kept_steps if step <= alike)}
        return [(step, self._name(spec, step)) for step in sorted(steps - {spec.steps}, reverse=True)]

    def steps(self, run: Collection[str] | None = None, left: Collection[str] = ()) -> dict[str, int]:
        """Return the number of steps that each trial computes, by id, if trials run in the order in which
        they were added. `run`: ids of the trials that run; None for all. `left`: names of the states that
        earlier runs left in the store."""
        computed: dict[str, int] = {}
        for group in self._groups.values():
            before: list[str] = []
            for spec in (
                group.values() if run is None else [spec for name, spec in group.items() if name in run]
            ):
                computed[spec.id] = self.computed(spec, before, left)
                before.append(spec.id)
        return computed

    def computed(self, spec: TrialSpec, before: Iterable[str], left: Collection[str] = ()) -> int:
        """Return the number of steps that a trial computes after the trials in `before` (ids) have run.

        It resumes from its own checkpoint, or from the furthest state at which it separates from another
        trial of the family and that a trial in `before` or an earlier run has left, whichever is further. A
        trial that resumes from its own checkpoint leaves no state before it. No state is left after the last
        step: trials that are equal to the end share the steps before the last separation of a third one, and
        each computes the rest itself.
        """
        if not spec.segments:
            return spec.steps
        group = self._groups[spec.history(1)]
        alike = {name: spec.alike(other) for name, other in group.items() if name != spec.id}
        runs = {(self.resumed.get(name, 0), alike[name]) for name in before if name in alike}
        parts = {*alike.values(), *spec.kept_steps} - {spec.steps}
        left_by_runs = (step for step in parts if any(first < step <= last for first, last in runs))
        left_before = (step for step in parts if left and self._name(spec, step) in left)
        start = max((*left_by_runs, *left_before), default=0)
        return spec.steps - max(start, self.resumed.get(spec.id, 0))

    def _name(self, spec: TrialSpec, step: int) -> str:
        return f"{spec.history(step)}{self._note}"

    def trunks(self) -> set[str]:
        """Return the names of the states at which windows leave a trunk: another sweep may fork it too."""
        return {self._name(spec, step) for spec in self for step in spec.kept_steps}


def wanted_elsewhere(state: Path, sweep: str) -> tuple[set[str] | None, set[str]]:
    """Return the names of the shared states that other unfinished sweeps need, None if one of them does not
    record its needs; and of the states at which windows of other sweeps leave their trunks."""
    wanted: set[str] | None = set()
    trunks: set[str] = set()
    for path in state.glob("sweeps/*/ledger.db"):
        if path.parent.name == sweep:
            continue
        try:
            with closing(Ledger(path, readonly=True)) as other:
                trunks |= other.facts.trunks or set()
                if other.unfinished():
                    shared = other.facts.shared  # None: just begun
                    wanted = None if wanted is None or shared is None else wanted | shared
        except (sqlite3.Error, InputError):  # damaged, or another version's
            wanted = None
    return wanted, trunks
