"""Priority queue of the trials that wait to run: pairs first, and trials that share a prefix in the order
that saves most steps.

Lower seeds come first in every arm, so that paired differences exist early. Within a seed, a trial whose
checkpoints serve others furthest goes first. A trial waits while a running trial is about to write a state
that it can start from.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ablate.execution.shared_prefixes import Family, note, wanted_elsewhere
from ablate.execution.time_model import Countdown, Load, Timed
from ablate.experiment.arms import Arm
from ablate.experiment.load import Experiment
from ablate.experiment.trial_spec import TrialSpec
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

_TRUNKS_SHARE = 0.1
"""Largest share of the disk's free space that the states of trunks take once a sweep is over."""


@dataclass(frozen=True)
class Work:
    """One waiting trial, with the first arm that requested it."""

    trial: int
    arm: Arm
    seed: int
    spec: TrialSpec
    load: Load
    part: float = 1.0
    """Share of its steps that it computes itself; the others come from a shared checkpoint."""


class TrialQueue:
    """Waiting trials of one run, in the order in which they should start."""

    def __init__(self, experiment: Experiment, ledger: Ledger, store: Store, device: str, fork: bool) -> None:
        """Start empty. `fork`: run a prefix that several trials share only once."""
        self.countdown = Countdown(experiment, ledger, store, device)
        self.family = Family(note=note(experiment.keys.telemetry))
        self._ledger, self._store, self._fork = ledger, store, fork
        self._shared: set[str] = set()
        """Names of the states that trials of this run share; the ledger keeps them for sweeps that end
        meanwhile."""
        self._begun: list[str] = []
        """Ids of the trials queued in this run: later trials can start from their states."""
        self._ranked: list[tuple[tuple[int, int, int], Work]] = []
        """Heap, by seed, then most shared steps first, then order of arrival."""
        self._arrived: list[Work] = []
        """Not ranked yet: their rank depends on the other trials that are requested."""
        self._arrivals = itertools.count()
        self._seed_ranks = {seed: rank for rank, seed in enumerate(experiment.seeds)}

    def __len__(self) -> int:
        return len(self._ranked) + len(self._arrived)

    def add(self, work: Work) -> None:
        self._arrived.append(work)

    def next(self, coming: set[str]) -> Work | None:
        """Remove and return the trial to start now; None if all should wait for a state that running trials
        will leave. `coming`: names of the shared states that they will write."""
        self._rank_arrived()
        postponed = []
        chosen = None
        while self._ranked and chosen is None:
            item = heapq.heappop(self._ranked)
            if self._ready(item[1], coming):
                chosen = item[1]
                self.countdown.waiting[chosen.load, chosen.part] -= 1
            else:
                postponed.append(item)
        for item in postponed:
            heapq.heappush(self._ranked, item)
        return chosen

    def drop(self, matches: Callable[[Work], bool]) -> list[Work]:
        """Remove and return all trials that match."""
        self._rank_arrived()
        dropped = [work for _, work in self._ranked if matches(work)]
        self._ranked = [item for item in self._ranked if not matches(item[1])]
        heapq.heapify(self._ranked)
        for work in dropped:
            self.countdown.waiting[work.load, work.part] -= 1
        return dropped

    def seconds_left(self, running: Iterable[Timed], slots: int, asks: int, confirmed: bool) -> float:
        """Return the seconds until every trial that waits, runs or may still be proposed is over."""
        self._rank_arrived()
        return self.countdown.left(running, slots, asks, confirmed)

    def fork_points(self, spec: TrialSpec) -> list[tuple[int, str]]:
        """Return step and name of each state that this trial shares with others, furthest first. Records
        before such a state are as frequent as the telemetry settings say."""
        return self.family.points(spec) if self._fork else []

    def tidy(self) -> None:
        """Remove shared checkpoints that no trial can use any more, whichever run left them.

        Those that an unfinished sweep of this state folder needs stay. If the needs of one are unknown, only
        this sweep's own checkpoints are removed. States of trunks stay too, since another sweep can fork
        them, the most recently used first, while they take less than a tenth of the disk's free space.
        """
        if not (paths := self._store.checkpoints()):
            return
        wanted, trunks = wanted_elsewhere(self._store.root, self._ledger.name)
        trunks |= self.family.trunks()
        own = {name for spec in self.family for _, name in self.family.points(spec)}
        for path in paths:
            name = path.name.partition(".pt")[0]  # or the unfinished file of a trial that was killed
            whole = path.name == f"{name}.pt"
            if whole and name in trunks:
                continue
            if name not in (wanted or ()) and (wanted is not None or name in own):
                path.unlink(missing_ok=True)
        self._store.trim(trunks - (wanted or set()), _TRUNKS_SHARE)

    def _rank_arrived(self) -> None:
        for work in self._arrived:
            if self._fork:
                part = self.family.computed(work.spec, self._begun) / work.spec.steps
                work = replace(work, part=part)
                self._begun.append(work.spec.id)
            self.countdown.waiting[work.load, work.part] += 1
            points = self.fork_points(work.spec)
            self._shared |= {name for _, name in points}
            shared_steps, seed = sum(step for step, _ in points), self._seed_ranks.get(work.seed, work.seed)
            heapq.heappush(self._ranked, ((seed, -shared_steps, next(self._arrivals)), work))
        if self._arrived:
            self._arrived = []
            with self._ledger.atomic():
                self._ledger.facts.shared = self._shared
                self._ledger.facts.trunks = self.family.trunks()

    def _ready(self, work: Work, coming: set[str]) -> bool:
        """Return True unless a running trial will leave a state further along this trial than those in the
        store."""
        for _, name in self.fork_points(work.spec):
            if self._store.shared(name).exists():
                return True
            if name in coming:
                return False
        return True
