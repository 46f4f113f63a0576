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

from ablate.errors import InputError
from ablate.execution.estimate import Clock, Load, Timed
from ablate.execution.shared_prefixes import Family, note, wanted_elsewhere
from ablate.execution.study_points import GivenUp, infeasible, inside
from ablate.experiment.arms import Arm, KnobError, label
from ablate.experiment.edits import edits, versions_alone
from ablate.experiment.load import Experiment
from ablate.experiment.roles import CONFIRM, Role, role_of
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import Busy, Damaged
from ablate.results.ledger import DATA, Ledger
from ablate.results.ledger_integrity import strays, tally
from ablate.results.ledger_rows import FINISHED
from ablate.results.trial_store import Store
from ablate.results.verify import doubted
from ablate.training.data.facts import KINDS, facts


@dataclass(frozen=True)
class Work:
    """One trial that waits to run, for the arm that wanted it first."""

    trial: int
    arm: Arm
    seed: int
    optuna: int | None
    spec: TrialSpec
    load: Load
    part: float = 1.0
    """Part of its steps that it computes: the others are those of a trial that begins alike."""


class Scheduler:
    """One run of one experiment: what it wants, in the ledger and in the order in which it should run."""

    def __init__(
        self,
        experiment: Experiment,
        ledger: Ledger,
        store: Store,
        device: str,
        fork: bool,
        fresh: float | None,
    ) -> None:
        """`fork`: trials that begin alike run what they share once. `fresh`: a result from before this moment is put aside."""
        self.experiment, self.ledger, self.store, self.device = experiment, ledger, store, device
        self.reused: set[str] = set()
        self.clock = Clock(experiment, ledger, store, device)
        self.family = Family(note=note(experiment.telemetry))
        self._fork, self._fresh = fork, fresh
        self._status: dict[int, str] = {}
        self._data: set[Any] = set()
        """Sources whose facts the ledger has."""
        self.count: Counter[str] = Counter()
        """Trials wanted, by status."""
        self.proposed = 0
        """Points that the search has proposed so far, those too that repeat an earlier one."""
        self._distinct: set[str] = set()
        """Those of them that lie in today's space, each once, as JSON."""
        self._first: dict[Any, int] = {}
        """Arm first proposed at a point, by what is run there, or by its knobs if it cannot be run."""
        self._shared: set[str] = set()
        """Names of the states that trials of this run share; the ledger has them, for sweeps that end meanwhile."""
        self._begun: list[str] = []
        """Ids of the trials that were queued in this run: those that come later share what these compute."""
        self._queue: list[tuple[tuple[int, int, int], Work]] = []
        self._arrived: list[Work] = []
        """Not yet in the queue, since their place depends on what else is wanted."""
        self.news: list[str] = []
        """What was found damaged, and what became of it, until it is told."""
        self._retired: set[str] = set()
        """Trials whose folders were put aside: others may have gone on from their states."""
        self._works: dict[str, Work] = {}
        """All that is wanted, by the trial's id."""
        self._arrivals = itertools.count()
        self._places = {seed: place for place, seed in enumerate(experiment.seeds)}

    # What is wanted

    def everything(self, accept: bool = False, points: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """Want what the file names now; what an earlier version of it named stays in the ledger, out of the answer. Returns what changed.

        InputError where what is done was computed by other versions of the code, unless `accept`. `points`: what a search had proposed,
        where the ledger does not know it any more.
        """
        before = {(member["name"], member["seed"]): member for member in self.ledger.members()}
        proposed = [json.loads(point["knobs"]) for point in self.ledger.points()] or points
        with self.ledger.transaction():
            self.ledger.unwant()
            numbers = itertools.count()
            for arm in self.experiment.arms:
                self.want(
                    arm,
                    None if arm.name in self.experiment.added or self.experiment.search else next(numbers),
                )
            if self.experiment.search:
                for knobs in proposed:
                    with suppress(KnobError):  # told when it was proposed
                        self.propose(knobs, next(numbers))
            self._look_again()
            if not accept:
                self._refuse_other_versions(before)
        new = {(member["name"], member["seed"]): member for member in self.ledger.members()}
        gone = {point["name"] for point in self.ledger.points() if point["repeats"]}  # once arms of their own
        gone |= {
            name
            for (name, _), row in before.items()
            if role_of(row, bool(self.experiment.search), 1) == "confirmed"
        }
        seeds = (
            not self.experiment.growth and not self.experiment.search
        )  # which have seeds beside the file's
        return edits(before, new, gone, seeds)

    def want(
        self,
        arm: Arm,
        optuna: int | None = None,
        seeds: Iterable[int] | None = None,
        role: Role | None = None,
    ) -> int:
        """Put an arm with its seeds into the ledger; adopt what is finished, queue what is not. Returns the arm's number.

        `role`: by default what it is among the file's own arms, which for a search is the baseline.
        """
        own: Role = "baseline" if self.experiment.search or arm.name in self.experiment.added else "listed"
        number = self.ledger.add_arm(arm.name, arm.knobs, self._arm_number(arm.baseline), optuna, role or own)
        load = Load.of(arm, self.experiment, self.device)
        for seed in self.experiment.seeds if seeds is None else seeds:
            spec = self.experiment.spec(arm, seed, self.device)
            self.family.add(spec, self.store.checkpoint_step(spec.id))
            trial = self.ledger.add_member(number, seed, spec.id, spec.wire)
            self._describe_data(spec)
            if trial in self._status:
                continue
            self._note(trial, self.ledger.status(trial))
            self._works[spec.id] = Work(trial, arm, seed, optuna, spec, load)
            if not self.adopt(trial, spec.id):
                self._wait(self._works[spec.id])
        return number

    def _wait(self, work: Work) -> None:
        """Have a trial run that is not finished, unless it was given up."""
        self._renew(work.trial, work.spec.id)
        if self._status[work.trial] == "pruned":
            return
        if self._status[work.trial] != "pending":  # its folder is gone
            self.settle(work.trial, "pending")
        self._arrived.append(work)

    def _renew(self, trial: int, trial_id: str) -> None:
        """Where the ledger says of an unfinished trial what its events do not say, its records go: they are told again in order.

        Those of a trial that was given up, and is not told again, are read from its events.
        """
        over, kept = self._status[trial] == "pruned", self.ledger.records_seal(trial)
        if not self.ledger.recorded(trial) and not (over and kept):
            return
        if over and kept and self._digest(trial) == kept:  # the ledger is sound, whatever became of the files
            return
        events = list(self.store.events(trial_id, strict=False))
        if (over and kept) or strays(self.ledger, trial, events):
            self.ledger.renew(trial, events if over else ())
            self._seal(trial)
            if (folder := self.store.folder(trial_id)).exists():
                self.news.append(
                    f"trial {trial_id}: the ledger held records that are not in {folder}; they are read again from there"
                )

    def _look_again(self) -> None:
        """A trial may have gone on from the state of one whose folder was put aside since: then it has lost its beginning."""
        while self._retired:
            self._retired = set()
            for trial_id in sorted(self.reused):
                if not self.adopt(self._works[trial_id].trial, trial_id):
                    self._wait(self._works[trial_id])

    def _describe_data(self, spec: TrialSpec) -> None:
        """Note what the trial's data are, once for all that use them."""
        config = spec.config.capture if getattr(spec.config, "captured", False) else spec.config
        source = getattr(config, "data", None)
        if isinstance(source, KINDS) and (fingerprint := spec.config.fingerprint()) not in self._data:
            self._data.add(fingerprint)
            self.ledger.describe(**{f"{DATA}{fingerprint}": json.dumps(facts(source))})

    def grow(self) -> list[str]:
        """Want more seeds of the arms that are undecided, and of their baselines; which those are. Nothing without growth."""
        from ablate.results.next_runs import undecided  # pandas: only where seeds grow

        growth, told = self.experiment.growth, []
        arms = {arm.name: arm for arm in self.experiment.arms}
        while growth and not self:  # what is adopted may leave an arm undecided still
            counts = Counter(member["name"] for member in self.ledger.members())
            wanted = [
                (arms[name], arms[base], growth.more(counts[name])) for name, base in undecided(self.ledger)
            ]
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
        from ablate.results.next_runs import fresh_seeds, winner

        search = self.experiment.search
        name = winner(self.ledger, infeasible=infeasible(self.ledger, self.experiment))
        if name is None:
            return [
                "no arm of the search is better than its baseline and keeps the constraints: there is nothing to confirm"
            ]
        chosen = next(row for row in self.ledger.arms() if row["name"] == name)
        arm, baseline = self.experiment.propose(json.loads(chosen["knobs"]))
        seeds = fresh_seeds(self.ledger, search.confirm)
        self.want(baseline, seeds=seeds)
        self.want(replace(arm, name=CONFIRM + name), seeds=seeds, role="confirmed")
        return [f"the search is over: its best arm, {name}, runs again on {len(seeds)} fresh seeds"]

    def _more(self, arm: Arm, seeds: Iterable[int]) -> None:
        """More seeds of an arm that is wanted, which keeps its place in the study."""
        number = self.ledger.arm(arm.name)
        self.want(arm, next(row["optuna"] for row in self.ledger.arms() if row["arm"] == number), seeds)

    def propose(self, knobs: Mapping[str, Any], number: int) -> int:
        """Want a searched arm and its baseline; returns its number, or that of a point that repeats an earlier arm.

        KnobError, and no members, if its knobs contradict each other.
        """
        self.proposed += 1
        written = json.dumps(knobs, sort_keys=True)
        if inside(knobs, self.experiment.space) is not None:
            self._distinct.add(written)
        rounded = {
            knob: float(f"{value:.3g}") if isinstance(value, float) else value
            for knob, value in knobs.items()
        }
        name = f"{number}: {label(rounded)}"  # the number keeps it unique
        try:
            arm, baseline = self.experiment.propose(knobs)
        except KnobError as error:
            refused = self.ledger.add_arm(
                name, knobs, None, number, "refused", self._first.get(written), str(error)
            )
            self._first.setdefault(written, refused)
            raise
        if arm.content in self._first:
            return self.ledger.add_arm(name, knobs, None, number, "searched", self._first[arm.content])
        if arm.baseline:  # else it is its own
            self.want(baseline)
        self._first[arm.content] = self.want(replace(arm, name=name), number, role="searched")
        return self._first[arm.content]

    def adopt(self, trial: int, trial_id: str) -> bool:
        """Take over a result that the store has, from this sweep or any other; returns False where there is none that can be trusted.

        Its records are compared with the result. A folder that does not match is put aside, and the trial runs again.
        """
        self.reused.discard(trial_id)
        try:
            result = self.store.result(trial_id)
            if result and self._fresh and result.get("started", 0.0) < self._fresh:
                self._retire(trial, trial_id)
                result = None
            if result is None:
                return False
            self._take_over(trial, trial_id, result)
        except Damaged as error:
            self._put_aside(trial, trial_id, error)
            return False
        self.reused.add(trial_id)
        return True

    def _take_over(self, trial: int, trial_id: str, result: Mapping[str, Any]) -> None:
        """Have in the ledger what the trial's folder says. Damaged where that does not agree with itself.

        Files that were compared before are read again only where their sizes or times have changed.
        """
        row, signature = self.ledger.trial(trial), self.store.signature(trial_id)
        finished = row.finished
        agrees = finished and self._agrees(trial, result)
        if not agrees or self.ledger.files_seen(trial_id) != signature:
            events = self.store.proven(trial_id, result)
            if finished:
                doubted(self.ledger, self.store, row, result, events)
            if not finished:
                self.ledger.record(trial, events)
                agrees = self._agrees(trial, result)
            if not agrees:
                self.ledger.renew(trial, events)
                self._seal(trial)
                if finished:
                    folder = self.store.folder(trial_id)
                    self.news.append(
                        f"trial {trial_id}: its records in the ledger were damaged; read again from {folder}"
                    )
            self.ledger.files_seen(trial_id, signature)
        if (row.status, row.reason, row.seconds) != (result["status"], result["reason"], result["seconds"]):
            reused = row.reused if finished else True
            self.settle(trial, result["status"], result["reason"], result["seconds"], reused)

    def _agrees(self, trial: int, result: Mapping[str, Any]) -> bool:
        """Return True if the ledger's records of a trial are those that its result was committed with, and those that were sealed.

        A result of an earlier version does not say; records without a seal get one if they agree.
        """
        digest, kept = self._digest(trial), self.ledger.records_seal(trial)
        agrees = (
            digest is not None
            and digest == result.get("records", {}).get("sha256", digest)
            and kept in (None, digest)
        )
        if agrees and kept is None:
            self.ledger.seal_records(trial, digest)
        return agrees

    def _digest(self, trial: int) -> str | None:
        """Return the digest of a trial's records in the ledger, None if one cannot be read."""
        try:
            return tally(self.ledger, trial).sealed()["sha256"]
        except ValueError:
            return None

    def _seal(self, trial: int) -> None:
        """Have the ledger keep the digest of a trial's records, unless it has one of them already."""
        if self.ledger.records_seal(trial) is None and (digest := self._digest(trial)):
            self.ledger.seal_records(trial, digest)

    def confirm_records(self, trial: int, trial_id: str, result: Mapping[str, Any]) -> str | None:
        """Compare what was heard of a trial that has just finished with its result; returns why it has to run again, None where not."""
        if self._agrees(trial, result):
            self.ledger.files_seen(trial_id, self.store.signature(trial_id))
            return None
        try:
            self.ledger.renew(trial, self.store.proven(trial_id, result))
            self._seal(trial)
        except Damaged as error:
            self.store.retire(trial_id)
            return str(error)
        return None

    def _put_aside(self, trial: int, trial_id: str, error: Damaged) -> None:
        """Retire a damaged folder, unless another process holds the trial, whose result is to come then."""
        try:
            with self.store.claim(trial_id, 0, wait=False):
                aside = self._retire(trial, trial_id)
        except Busy:
            return
        self.news.append(f"{error}. The folder is kept as {aside}, and the trial runs again")

    def _retire(self, trial: int, trial_id: str) -> Any:
        aside = self.store.retire(trial_id)
        self._retired.add(trial_id)
        self.ledger.forget(trial)
        self._note(trial, "pending")
        return aside

    @property
    def asks_left(self) -> int:
        """Arms that the search may still propose: 0 once all of its trials, or all points of its space, are."""
        search, most = self.experiment.search, self.experiment.most_searched
        return min(search.trials - self.proposed, most - len(self._distinct)) if search else 0

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
            if differing := versions_alone(then, now):
                changes |= {
                    f"{key.replace('_', ' ')} {then.get(key)}, now {now.get(key)}" for key in differing
                }
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

    # What happens to it

    def start(self, trial: int, trial_id: str, now: float) -> int:
        """A new attempt of a trial; returns its number."""
        attempt = self.store.begin(trial_id)
        self.ledger.start_attempt(trial, attempt, now)
        self._note(trial, "running")
        return attempt

    def settle(
        self,
        trial: int,
        status: str,
        reason: str | None = None,
        seconds: float | None = None,
        reused: bool = False,
    ) -> None:
        """Set a trial's status, for one that does not run any more, and seal its records."""
        self.ledger.settle(trial, status, reason, seconds, reused)
        self._seal(trial)
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
                self.clock.count(found.load, -found.part)
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
        for work in dropped:
            self.clock.count(work.load, -work.part)
        return dropped

    def give_up(self, arm: int, step: int) -> None:
        """Settle the waiting trials of an arm that its pruner gave up before its ledger was lost, with the records of their folders."""
        own, reason = self.ledger.own_trials(arm), GivenUp(self.experiment.search.pruner, step).reason
        for work in self.drop(lambda work: work.trial in own):
            self.ledger.record(work.trial, self.store.events(work.spec.id, strict=False))
            self.settle(work.trial, "pruned", reason)

    def seconds_left(self, running: Iterable[Timed], slots: int, confirmed: bool) -> float:
        """Seconds until all is over that waits, runs or may still be proposed."""
        self._line_up()
        return self.clock.left(running, slots, self.asks_left, confirmed)

    def points(self, spec: TrialSpec) -> list[tuple[int, str]]:
        """The states on a trial's way that others pass through too, furthest first. Records before them are as often as telemetry says."""
        return self.family.points(spec) if self._fork else []

    def tidy(self) -> None:
        """Remove the shared checkpoints that no trial can use any more, whichever run left them.

        Those that an unfinished sweep of this state folder wants stay. If what one wants is not known, only this sweep's
        own are removed.
        """
        found = self.store.checkpoints()
        wanted = wanted_elsewhere(self.store.root, self.ledger.name) if found else set()
        own = {name for spec in self.family for _, name in self.family.points(spec)} if found else set()
        for path in found:
            name = path.name.partition(".pt")[0]  # or a part of one that a killed trial was writing
            if name not in (wanted or ()) and (wanted is not None or name in own):
                path.unlink(missing_ok=True)

    def _line_up(self) -> None:
        for work in self._arrived:
            if self._fork:
                part = self.family.computed(work.spec, self._begun) / work.spec.config.steps
                work = replace(work, part=part)
                self._begun.append(work.spec.id)
            self.clock.count(work.load, work.part)
            heapq.heappush(self._queue, (self._rank(work), work))
        if self._arrived:
            self._arrived = []
            self.ledger.describe(shared=json.dumps(sorted(self._shared)))

    def _rank(self, work: Work) -> tuple[int, int, int]:
        """Pairs complete early; of trials that begin alike, the one that others follow furthest goes first."""
        place, points = self._places.get(work.seed, work.seed), self.points(work.spec)
        self._shared |= {name for _, name in points}
        return place, -sum(step for step, _ in points), next(self._arrivals)

    def _ready(self, work: Work, coming: set[str]) -> bool:
        """Whether a trial need not wait: a running one will leave nothing that lies further on its way than what is there."""
        for _, name in self.points(work.spec):
            if self.store.shared(name).exists():
                return True
            if name in coming:
                return False
        return True
