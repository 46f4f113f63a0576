"""What a sweep wants, what of it is done, and what runs next. Statuses of trials change here and nowhere else.

Its memory of statuses and of what waits is a mirror of the ledger that it alone writes, so that nothing is counted anew for each event.
"""

import heapq
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ablate.arms import CONFIRM, Arm, KnobError, label
from ablate.data.facts import KINDS, facts
from ablate.experiment import Experiment
from ablate.forks import Family
from ablate.ledger import DATA, FINISHED, Ledger
from ablate.points import infeasible
from ablate.store import Store
from ablate.trial import TrialSpec
from ablate.yamlfile import InputError

_VERSIONS = ("numerics_version", "workload_version")


@dataclass(frozen=True)
class Work:
    """One trial that waits to run, for the arm that wanted it first."""

    trial: int
    arm: Arm
    seed: int
    optuna: int | None
    spec: TrialSpec

    @property
    def estimate(self) -> float:
        """Seconds of one core that the workload says it takes."""
        return self.arm.config.cost(not self.arm.recipe.plain)


class Agenda:
    """One run of one experiment: what it wants, in the ledger and in the order in which it should run."""

    def __init__(self, experiment: Experiment, ledger: Ledger, store: Store, device: str, fork: bool, fresh: float | None) -> None:
        """`fork`: trials that begin alike run what they share once. `fresh`: a result from before this moment is put aside."""
        self.experiment, self.ledger, self.store, self.device = experiment, ledger, store, device
        self.reused: set[str] = set()
        self.family = Family()
        self._fork, self._fresh = fork, fresh
        self._status: dict[int, str] = {}
        self._data: set[Any] = set()
        """Sources whose facts the ledger has."""
        self.count: Counter[str] = Counter()
        """Trials wanted, by status."""
        self.proposed = 0
        """Points that the search has proposed so far."""
        self.seconds = 0.0
        """Estimate for all that waits."""
        self._queue: list[tuple[tuple[int, int, int], Work]] = []
        self._arrived: list[Work] = []
        """Not yet in the queue, since their place depends on what else is wanted."""
        self._arrivals = itertools.count()
        self._places = {seed: place for place, seed in enumerate(experiment.seeds)}

    # What is wanted

    def everything(self, accept: bool = False, points: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """Want what the file names now; what an earlier version of it named stays in the ledger, out of the answer. Returns what changed.

        InputError where what is done was computed by other versions of the code, unless `accept`. `points`: what a search had proposed,
        where the ledger does not know it any more.
        """
        before = {(member["name"], member["seed"]): member for member in self.ledger.members()}
        proposed = [json.loads(arm["knobs"]) for arm in self.ledger.arms() if arm["optuna"] is not None] or points
        with self.ledger.transaction():
            self.ledger.unwant()
            numbers = itertools.count()
            for arm in self.experiment.arms:
                self.want(arm, None if arm.name in self.experiment.added or self.experiment.search else next(numbers))
            if self.experiment.search:
                for knobs in proposed:
                    with suppress(KnobError):  # told when it was proposed
                        self.propose(knobs, next(numbers))
            if not accept:
                self._refuse_other_versions(before)
        return self._edits(before)

    def want(self, arm: Arm, optuna: int | None = None, seeds: Iterable[int] | None = None) -> int:
        """Put an arm with its seeds into the ledger; adopt what is finished, queue what is not. Returns the arm's number."""
        number = self.ledger.add_arm(arm.name, arm.knobs, self._arm_number(arm.baseline), optuna)
        for seed in self.experiment.seeds if seeds is None else seeds:
            spec = self.experiment.spec(arm, seed, self.device)
            self.family.add(spec)
            trial = self.ledger.add_member(number, seed, spec.id, spec.wire)
            self._describe_data(spec)
            if trial in self._status:
                continue
            self._note(trial, self.ledger.status(trial))
            if not self.adopt(trial, spec.id) and self._status[trial] != "pruned":
                if self._status[trial] != "pending":  # its folder is gone
                    self.settle(trial, "pending")
                self._arrived.append(Work(trial, arm, seed, optuna, spec))
                self.seconds += self._arrived[-1].estimate
        return number

    def _describe_data(self, spec: TrialSpec) -> None:
        """Note what the trial's data are, once for all that use them."""
        config = spec.config.capture if getattr(spec.config, "captured", False) else spec.config
        source = getattr(config, "data", None)
        if isinstance(source, KINDS) and (fingerprint := spec.config.fingerprint()) not in self._data:
            self._data.add(fingerprint)
            self.ledger.describe(**{f"{DATA}{fingerprint}": json.dumps(facts(source))})

    def grow(self) -> list[str]:
        """Want more seeds of the arms that are undecided, and of their baselines; which those are. Nothing without growth."""
        from ablate.results import undecided  # pandas: only where seeds grow

        growth, told = self.experiment.growth, []
        arms = {arm.name: arm for arm in self.experiment.arms}
        while growth and not self:  # what is adopted may leave an arm undecided still
            counts = Counter(member["name"] for member in self.ledger.members())
            wanted = [(arms[name], arms[base], growth.more(counts[name])) for name, base in undecided(self.ledger)]
            wanted = [(arm, baseline, seeds) for arm, baseline, seeds in wanted if seeds]
            if not wanted:
                break
            for arm, baseline, seeds in wanted:
                told.append(f"{arm.name}: undecided after {counts[arm.name]} seeds, {len(seeds)} more")
                self._more(baseline, seeds)
                self._more(arm, seeds)
        return told

    def confirm(self) -> list[str]:
        """Want the winner of a search, and its baseline, on seeds that took no part in choosing it. Nothing where that is not asked for."""
        from ablate.results import fresh_seeds, winner

        search = self.experiment.search
        name = winner(self.ledger, infeasible=infeasible(self.ledger, self.experiment))
        if name is None:
            return ["no arm of the search is better than its baseline and keeps the constraints: there is nothing to confirm"]
        chosen = next(row for row in self.ledger.arms() if row["name"] == name)
        arm, baseline = self.experiment.propose(json.loads(chosen["knobs"]))
        seeds = fresh_seeds(self.ledger, search.confirm)
        self.want(baseline, seeds=seeds)
        self.want(replace(arm, name=CONFIRM + name), seeds=seeds)
        return [f"the search is over: its best arm, {name}, runs again on {len(seeds)} fresh seeds"]

    def _more(self, arm: Arm, seeds: Iterable[int]) -> None:
        """More seeds of an arm that is wanted, which keeps its place in the study."""
        number = self.ledger.arm(arm.name)
        self.want(arm, next(row["optuna"] for row in self.ledger.arms() if row["arm"] == number), seeds)

    def propose(self, knobs: Mapping[str, Any], number: int) -> int:
        """Want a searched arm and its baseline; returns its number. KnobError, and no members, where its knobs contradict each other."""
        self.proposed += 1
        rounded = {knob: float(f"{value:.3g}") if isinstance(value, float) else value for knob, value in knobs.items()}
        name = f"{number}: {label(rounded)}"  # the number keeps it unique
        try:
            arm, baseline = self.experiment.propose(knobs)
        except KnobError:
            self.ledger.add_arm(name, knobs, None, number)
            raise
        if arm.baseline:  # else it is its own
            self.want(baseline)
        return self.want(replace(arm, name=name), number)

    def adopt(self, trial: int, trial_id: str) -> bool:
        """Take over a result that the store has, from this sweep or any other; whether there was one."""
        result = self.store.result(trial_id)
        if result and self._fresh and result["started"] < self._fresh:
            self.store.retire(trial_id)
            self.ledger.forget(trial)
            self._note(trial, "pending")
            result = None
        if result is None:
            return False
        if self._status[trial] not in FINISHED:
            self.ledger.record(trial, self.store.events(trial_id))
            self.settle(trial, result["status"], result["reason"], result["seconds"], reused=True)
        self.reused.add(trial_id)
        return True

    @property
    def asks_left(self) -> int:
        """Points that the search may still propose."""
        search = self.experiment.search
        return search.trials - self.proposed if search else 0

    def _arm_number(self, name: str | None) -> int | None:
        """A baseline's number in the ledger; arms are named in any order, so it may have to be made room for first."""
        if name is None:
            return None
        known = self.ledger.arm(name)
        if known is not None:
            return known
        baseline = next(arm for arm in self.experiment.arms if arm.name == name)
        return self.ledger.add_arm(name, baseline.knobs, None, None)

    def _refuse_other_versions(self, before: Mapping[tuple[str, int], Any]) -> None:
        """A sweep half of whose results come from other code than the rest answers nothing."""
        outdated: Counter[str] = Counter()
        changes = set()
        for member in self.ledger.members():
            old = before.get((member["name"], member["seed"]))
            if old is None or old["id"] == member["id"] or old["status"] not in FINISHED:
                continue
            then, now = json.loads(old["spec"]), json.loads(member["spec"])
            differing = {key for key in then.keys() | now.keys() if then.get(key) != now.get(key)} - {"id"}
            if differing and differing <= set(_VERSIONS):
                changes |= {f"{key.replace('_', ' ')} {then.get(key)}, now {now.get(key)}" for key in differing}
                outdated[old["id"]] += 1
        if outdated:
            left = self.count["pending"]
            raise InputError(
                [
                    f"{self.experiment.file}: {len(outdated)} trials are done under {' and '.join(sorted(changes))}, and {left} would run:"
                    " the code that computes them has changed in the middle of this sweep. Check out the code that it began with, or"
                    " give --accept-version to run all of it under this one; what is done stays in the store"
                ]
            )

    def _edits(self, before: Mapping[tuple[str, int], Any]) -> list[str]:
        """What the file wants that it did not before, and the other way round, in one line."""
        now = {(member["name"], member["seed"]) for member in self.ledger.members()}
        if not before or now == before.keys():
            return []
        changes = {"arm": ({name for name, _ in now}, {name for name, _ in before if not name.startswith(CONFIRM)})}
        if not self.experiment.growth and not self.experiment.search:  # which have seeds beside the file's
            changes["seed"] = ({seed for _, seed in now}, {seed for _, seed in before})
        told = []
        for what, (new, old) in changes.items():
            told += [f"+{_counted(len(new - old), what)}"] if new - old else []
            told += [f"{_counted(len(old - new), what)} no longer wanted (kept)"] if old - new else []
        return [f"the file was edited: {', '.join(told)}"] if told else []

    # What happens to it

    def start(self, trial: int, trial_id: str, now: float) -> int:
        """A new attempt of a trial; returns its number."""
        attempt = self.store.begin(trial_id)
        self.ledger.start_attempt(trial, attempt, now)
        self._note(trial, "running")
        return attempt

    def settle(self, trial: int, status: str, reason: str | None = None, seconds: float | None = None, reused: bool = False) -> None:
        """Set a trial's status."""
        self.ledger.settle(trial, status, reason, seconds, reused)
        self._note(trial, status)

    def _note(self, trial: int, status: str) -> None:
        if trial in self._status:
            self.count[self._status[trial]] -= 1
        self._status[trial] = status
        self.count[status] += 1

    # What runs next

    def __len__(self) -> int:
        return len(self._queue) + len(self._arrived)

    def next(self, coming: set[str]) -> Work | None:
        """What should run now; None where all that waits should wait for a state in `coming`, which running trials will leave."""
        self._line_up()
        late = []
        found = None
        while self._queue and found is None:
            item = heapq.heappop(self._queue)
            if self._ready(item[1], coming):
                found = item[1]
                self.seconds -= found.estimate
            else:
                late.append(item)
        for item in late:
            heapq.heappush(self._queue, item)
        return found

    def drop(self, wanted: Callable[[Work], bool]) -> list[Work]:
        """Take what fits out of the queue."""
        self._line_up()
        dropped = [work for _, work in self._queue if wanted(work)]
        self._queue = [item for item in self._queue if not wanted(item[1])]
        heapq.heapify(self._queue)
        self.seconds -= sum(work.estimate for work in dropped)
        return dropped

    def points(self, spec: TrialSpec) -> list[tuple[int, str]]:
        """The states on a trial's way that others pass through too, furthest first. Records before them are as often as telemetry says."""
        if not self._fork:
            return []
        often = self.experiment.telemetry
        cadence = f"{often.every}-{often.shadow}-{often.log}"
        return [(step, f"{name}-{cadence}") for step, name in self.family.points(spec)]

    def tidy(self) -> None:
        """Remove the shared checkpoints of this sweep, which every trial that wanted one has read."""
        for spec in self.family:
            for _, name in self.points(spec):
                self.store.shared(name).unlink(missing_ok=True)

    def _line_up(self) -> None:
        for work in self._arrived:
            heapq.heappush(self._queue, (self._rank(work), work))
        self._arrived = []

    def _rank(self, work: Work) -> tuple[int, int, int]:
        """Pairs complete early; of trials that begin alike, the one that others follow furthest goes first."""
        place = self._places.get(work.seed, work.seed)
        return place, -sum(step for step, _ in self.points(work.spec)), next(self._arrivals)

    def _ready(self, work: Work, coming: set[str]) -> bool:
        """Whether a trial need not wait: a running one will leave nothing that lies further on its way than what is there."""
        for _, name in self.points(work.spec):
            if self.store.shared(name).exists():
                return True
            if name in coming:
                return False
        return True


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
