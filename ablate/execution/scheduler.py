"""Trials that a sweep needs, their statuses, and the results that it can reuse. Only this file sets statuses.

An experiment names arms; each arm runs on several seeds; several arms, and several sweeps, may need the same
trial. The scheduler writes what is needed to the ledger, takes finished results from the trial store, and
puts the rest into a `TrialQueue`. For example, a sweep of 2 arms on 3 seeds has 6 members. If another sweep
has run the baseline already, its 3 results are reused and only 3 trials are queued.

A result is reused only if its records agree with it. A damaged folder is renamed and its trial runs again.
The scheduler refuses a sweep whose finished trials come from other versions of the code, unless the user
accepts to run all of it again.

Statuses are kept in memory as well, so that nothing is counted again for each event. The ledger has one
writer, so the two cannot differ.
"""

import itertools
import json
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ablate.errors import InputError
from ablate.execution.same_code import SameCode
from ablate.execution.study_points import GivenUp, inside
from ablate.execution.time_model import Load
from ablate.execution.trial_queue import TrialQueue, Work
from ablate.experiment.arms import Arm, KnobError, label
from ablate.experiment.edits import edits, versions_alone
from ablate.experiment.load import Experiment
from ablate.experiment.roles import CONFIRM, GROUPS, Role
from ablate.files import Busy, Damaged, Json
from ablate.store.judged_files import keep
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED, Member
from ablate.store.trial_store import Result, Store
from ablate.training.data.corpus import facts
from ablate.training.workloads import context_free

_END_SECONDS = 10.0
"""Time in which the process of a trial ends after its executor was closed."""


class Scheduler:
    """Members of one run of one experiment: recorded in the ledger, reused from the store, or queued."""

    def __init__(
        self,
        experiment: Experiment,
        ledger: Ledger,
        store: Store,
        device: str,
        fork: bool,
        fresh: float | None,
    ) -> None:
        """Start without members; call `everything` to request those of the experiment. `fork`: run a prefix
        that several trials share only once. `fresh`: Unix time in seconds; results that were started before
        it are put aside; None reuses all."""
        self.experiment, self.ledger, self.store, self.device = experiment, ledger, store, device
        self.reused: set[str] = set()
        self.queue = TrialQueue(experiment, ledger, store, device, fork)
        self._fresh = fresh
        self._status: dict[int, str] = {}
        self._data: set[str] = set()
        """Fingerprints of the data sources whose facts the ledger has."""
        self.count: Counter[str] = Counter()
        """Number of requested trials, by status."""
        self.proposed = 0
        """Number of points that the search has proposed, including repetitions of earlier ones."""
        self._distinct: set[str] = set()
        """Distinct proposed points inside the current space, as JSON."""
        self._first: dict[Hashable, int] = {}
        """First arm at a point, keyed by the arm's content, or by its knobs if it cannot run."""
        self.news: list[str] = []
        """Lines about damaged files and their repair that were not shown yet."""
        self._retired: set[str] = set()
        """Ids of trials whose folders were put aside: other trials may have started from their states."""
        self._works: dict[str, Work] = {}
        self.same_code: SameCode | None = None
        """Finished trials that are taken over although the code was edited; None without `--same-code`."""

    # Members

    def everything(
        self, accept: bool = False, points: Sequence[Mapping[str, Json]] = (), same_code: bool = False
    ) -> list[str]:
        """Request all members that the experiment names now; return lines about members added, removed and
        changed since the last run. Members that the file named once and names no more stay in the ledger,
        outside of the answer.

        `accept`: allow finished trials of other versions of the code, which are then run again; else they are
        an InputError. `points`: knobs that a search had proposed, used if the ledger has none of its points.
        `same_code`: take finished trials over whose code alone was edited.
        """
        before = {(member.name, member.seed): member for member in self.ledger.members()}
        if same_code:
            self.same_code = SameCode(self.experiment, self.ledger, self.store)
        proposed = [json.loads(point.knobs) for point in self.ledger.points()] or points
        with self.ledger.transaction():
            self.ledger.unwant()
            numbers = itertools.count()
            for arm in self.experiment.arms:
                shown = not (arm.name in self.experiment.added or arm.outside or self.experiment.keys.search)
                self.want(arm, next(numbers) if shown else None)
            if self.experiment.keys.search:
                for knobs in proposed:
                    with suppress(KnobError):  # reported when it was proposed
                        self.propose(knobs, next(numbers))
            for arm_row in self.ledger.arms():
                for member, error in self._holes(arm_row.arm):
                    self._put_aside(member.trial, member.id, error)
            while self._retired:  # a reused trial that started from such a folder has lost its prefix
                self._retired = set()
                for trial_id in sorted(self.reused):
                    if not self.adopt(self._works[trial_id].trial, trial_id):
                        self._wait(self._works[trial_id])
            if not accept:
                self._refuse_other_versions(before)
        new = {(member.name, member.seed): member for member in self.ledger.members()}
        gone = {point.name for point in self.ledger.points() if point.repeats}  # once arms of their own
        gone |= {name for (name, _), row in before.items() if row.role in ("confirmed", *GROUPS)}
        keys = self.experiment.keys
        seeds = not keys.growth and not keys.search  # those add seeds to the file's
        taken = self.same_code.news() if self.same_code else []
        return taken + edits(before, new, gone, seeds) + keep(self.ledger, self.store)

    def want(
        self,
        arm: Arm,
        optuna: int | None = None,
        seeds: Iterable[int] | None = None,
        role: Role | None = None,
    ) -> int:
        """Request an arm on its seeds, by default the experiment's: reuse finished results, and queue the
        other trials. Return the arm's number in the ledger. `optuna`: its number in the study; None if it is
        not in the study. `role`: by default that of the file's own arms, which in a search is `baseline`."""
        added = self.experiment.keys.search or arm.name in self.experiment.added
        own: Role = "baseline" if added else "listed"
        own = "null" if arm.twin else "bad" if arm.known_bad else own
        number = self.ledger.add_arm(arm.name, arm.knobs, self._arm_number(arm.baseline), optuna, role or own)
        load = Load.of(arm, self.experiment, self.device)
        for seed in self.experiment.seeds if seeds is None else seeds:
            spec = self.experiment.spec(arm, seed, self.device)
            self.queue.family.add(spec, self.store.checkpoint_step(spec.id))
            trial = self.ledger.add_member(number, seed, spec.id, spec.wire)
            source = spec.config.data_source
            if source is not None and (data := spec.config.fingerprint()) not in self._data:
                self._data.add(data)
                self.ledger.facts.add_data(data, facts(source))
            if trial in self._status:
                continue
            self._note(trial, self.ledger.status(trial))
            self._works[spec.id] = Work(trial, arm, seed, spec, load)
            if self.same_code:
                self.same_code.take(spec)
            if not self.adopt(trial, spec.id):
                self._wait(self._works[spec.id])
        return number

    def _wait(self, work: Work) -> None:
        self._renew(work.trial, work.spec.id)
        if self._status[work.trial] == "pruned":
            return
        if self._status[work.trial] != "pending":  # its folder is gone
            self.settle(work.trial, "pending")
        self.queue.add(work)

    def _renew(self, trial: int, trial_id: str) -> None:
        """Delete an unfinished trial's records in the ledger if its event files lack them. The records of a
        pruned trial, which does not run again, are read from its event files instead."""
        pruned, seal = self._status[trial] == "pruned", self.ledger.records_seal(trial)
        if not self.ledger.recorded(trial) and not (pruned and seal):
            return
        if pruned and seal and self.ledger.digest(trial) == seal:
            return  # the ledger is intact, even if the files are not
        events = list(self.store.events(trial_id, strict=False))
        if (pruned and seal) or self.ledger.strays(trial, events):
            self.ledger.renew(trial, events if pruned else ())
            self._seal(trial)
            if (folder := self.store.folder(trial_id)).exists():
                self.news.append(
                    f"trial {trial_id}: the ledger held records that are not in {folder};"
                    " they are read again from there"
                )

    def grow(self) -> list[str]:
        """Request more seeds for undecided arms and their baselines; return a line for each arm. Nothing
        without `growth`."""
        from ablate.results.next_runs import undecided  # imports pandas: only if seeds grow

        growth, lines = self.experiment.keys.growth, []
        arms = {arm.name: arm for arm in self.experiment.arms}
        while growth and not self.queue:  # after reused results an arm may still be undecided
            counts = Counter(member.name for member in self.ledger.members())
            wanted = [
                (arms[name], arms[base], seeds)
                for name, base in undecided(self.ledger)
                if (seeds := growth.more(counts[name]))
            ]
            if not wanted:
                break
            for arm, baseline, seeds in wanted:
                lines.append(f"{arm.name}: undecided after {counts[arm.name]} seeds, {len(seeds)} more")
                for grown in (baseline, arm):  # its number in the study stays
                    number = next(row.optuna for row in self.ledger.arms() if row.name == grown.name)
                    self.want(grown, number, seeds)
        return lines

    def blame(self) -> list[str]:
        """Request the runs that the search for a cause wants next; return a line for each round. Nothing
        without `blame`."""
        from ablate.results.blame import news, replayed  # imports numpy: only for such a search

        lines: list[str] = []
        while self.experiment.blamed and not self.queue:  # after reused results more may be wanted
            _, _, names = self.experiment.blamed
            search = replayed(self.ledger)
            seeds: dict[frozenset[int], list[int]] = {}
            known = {(member.name, member.seed) for member in self.ledger.members()}
            for units, seed in search.wanted:
                if (names.arm(search.stage, units), seed) not in known:
                    seeds.setdefault(units, []).append(seed)
            if not seeds:
                break
            for units, own in seeds.items():
                arm = self.experiment.group(names.arm(search.stage, units), units)
                self.want(arm, seeds=own, role="half" if search.stage == "search" else "alone")
            lines.append(f"blame: {news(search, names)}")
        return lines

    def confirm(self) -> list[str]:
        """Request the winner of a search and its baseline on fresh seeds, which took no part in choosing it.
        Return one line that names the winner, or says that no arm qualifies; nothing if the experiment asks
        for no confirmation."""
        from ablate.results.next_runs import fresh_seeds, winner

        search = self.experiment.keys.search
        if search is None or search.confirm is None:
            return []
        name = winner(self.ledger)
        if name is None:
            none = "no arm of the search is better than its baseline and keeps the constraints"
            return [f"{none}: there is nothing to confirm"]
        chosen = next(row for row in self.ledger.arms() if row.name == name)
        arm, baseline = self.experiment.propose(json.loads(chosen.knobs))
        seeds = fresh_seeds(self.ledger, search.confirm)
        self.want(baseline, seeds=seeds)
        self.want(replace(arm, name=CONFIRM + name), seeds=seeds, role="confirmed")
        return [f"the search is over: its best arm, {name}, runs again on {len(seeds)} fresh seeds"]

    def propose(self, knobs: Mapping[str, Json], number: int) -> int:
        """Request a proposed arm and its baseline; return the arm's number in the ledger, or that of the
        earlier arm that this point repeats. `number`: the point's in the study. KnobError if the knobs
        contradict each other; the ledger then notes the refusal, and nothing is requested."""
        self.proposed += 1
        point = json.dumps(knobs, sort_keys=True)
        if inside(knobs, self.experiment.space) is not None:
            self._distinct.add(point)
        short = {knob: float(f"{at:.3g}") if isinstance(at, float) else at for knob, at in knobs.items()}
        name = f"{number}: {label(short)}"  # the number keeps it unique
        try:
            arm, baseline = self.experiment.propose(knobs)
        except KnobError as error:
            first = self._first.get(point)
            refused = self.ledger.add_arm(name, knobs, None, number, "refused", first, str(error))
            self._first.setdefault(point, refused)
            raise
        if arm.content in self._first:
            return self.ledger.add_arm(name, knobs, None, number, "searched", self._first[arm.content])
        if arm.baseline:  # None: the arm is its own baseline
            self.want(baseline)
        self._first[arm.content] = self.want(replace(arm, name=name), number, role="searched")
        return self._first[arm.content]

    def adopt(self, trial: int, trial_id: str) -> bool:
        """Reuse a result from the store, computed by this sweep or any other; return False if the trial has
        to run. Its records are compared with the result. A folder that does not agree is put aside."""
        self.reused.discard(trial_id)
        try:
            result = self.store.result(trial_id)
            if result and self._fresh and result["started"] < self._fresh:
                self._retire(trial, trial_id)
                result = None
            if result is None:
                if self.ledger.trial(trial).finished:  # else both runs of it would count
                    path = self.store.folder(trial_id) / "result.json"
                    raise Damaged(path, "missing, although the trial had finished")
                return False
            self._take_over(trial, trial_id, result)
        except Damaged as error:
            self._put_aside(trial, trial_id, error)
            return False
        self.reused.add(trial_id)
        return True

    def _take_over(self, trial: int, trial_id: str, result: Result) -> None:
        """Bring the ledger up to date with a trial's folder. Damaged if the folder contradicts itself. Files
        compared earlier are read again only if their sizes or times have changed."""
        row, signature = self.ledger.trial(trial), self.store.signature(trial_id)
        finished = row.finished
        agrees = finished and self._agrees(trial, result)
        if not agrees or self.ledger.files_seen(trial_id) != signature:
            events = self.store.proven(trial_id, result)
            if not finished:
                self.ledger.record(trial, events)
                agrees = self._agrees(trial, result)
            if not agrees:
                self.ledger.renew(trial, events)
                self._seal(trial)
                if finished:
                    folder = self.store.folder(trial_id)
                    why = f"its records in the ledger were damaged; read again from {folder}"
                    self.news.append(f"trial {trial_id}: {why}")
            self.ledger.files_seen(trial_id, signature)
        if result["status"] == "done":
            self.ledger.note_context_free(trial, context_free(result))
        if (row.status, row.reason, row.seconds) != (result["status"], result["reason"], result["seconds"]):
            reused = row.reused if finished else True
            self.settle(trial, result["status"], result["reason"], result["seconds"], reused)

    def _agrees(self, trial: int, result: Result) -> bool:
        """Return True if the ledger's records of a trial match the digest in its result and the ledger's own
        seal. Records without a seal get one if they agree."""
        records, kept = self.ledger.digest(trial), self.ledger.records_seal(trial)
        if records is None or records != result["records"]["sha256"]:
            return False
        if kept is None:
            self.ledger.seal_records(trial, records)
        return kept in (None, records)

    def _seal(self, trial: int) -> None:
        if self.ledger.records_seal(trial) is None and (records := self.ledger.digest(trial)):
            self.ledger.seal_records(trial, records)

    def confirm_records(self, trial: int, trial_id: str, result: Result) -> str | None:
        """Compare the records received from a trial that has just finished with the result that it committed.
        Return None if they agree, or could be read again from its files; else the reason to run the trial
        again."""
        try:
            if self._agrees(trial, result):
                self.ledger.files_seen(trial_id, self.store.signature(trial_id))
            else:
                self.ledger.renew(trial, self.store.proven(trial_id, result))
                self._seal(trial)
            for member, error in self._holes(self._arm_number(self._works[trial_id].arm.name), trial):
                if member.trial == trial:
                    raise error
                self.store.retire(member.id)
                self.settle(member.trial, "failed", str(error))
        except Damaged as error:
            self.store.retire(trial_id)
            return str(error)
        return None

    def _holes(self, arm: int | None, ended: int | None = None) -> Iterator[tuple[Member, Damaged]]:
        """Yield the finished members of an arm that were interrupted, and lack steps that other seeds have.
        Only a command can be ahead of its records when it is killed: it continues from its own checkpoint.
        `ended`: number of a trial that has ended, and is not settled yet."""
        if self.experiment.base.config.in_process:
            return
        names = {"train/loss", *(metric.name for metric in self.experiment.metrics)}
        steps: dict[str, set[tuple[int, str]]] = {}
        members = [row for row in self.ledger.members(arm) if row.trial == ended or row.status == "done"]
        for row in members:
            steps[row.id] = {(step, name) for name in names for step in self.ledger.series(row.trial, name)}
        everything = set[tuple[int, str]]().union(*steps.values())
        for row in members:
            last = max(steps[row.id], default=(0, ""))[0]
            lacking = sorted(key for key in everything - steps[row.id] if key[0] < last)
            if lacking and row.role != "foreign" and self.store.last_attempt(row.id) > 1:
                step, name = lacking[0]
                why = f"lacks {len(lacking)} values of other seeds, the first {name} at step {step}"
                yield row, Damaged(self.store.folder(row.id), f"its run was interrupted, and {why}")

    def _put_aside(self, trial: int, trial_id: str, error: Damaged) -> None:
        """Rename a damaged folder, unless another process holds the trial and will write a result."""
        try:
            with self.store.claim(trial_id, 0, wait=False):
                aside = self._retire(trial, trial_id)
        except Busy:
            return
        kept = f"The folder is kept as {aside}, and the" if aside else "The"
        self.news.append(f"{error}. {kept} trial runs again")

    def discard(self, trial: int, trial_id: str) -> None:
        """Put aside what a trial wrote whose process is ending; the trial is pending again. If another
        process holds the trial, its files stay."""
        deadline = time.monotonic() + _END_SECONDS
        while True:
            try:
                with self.store.claim(trial_id, 0, wait=False):
                    self._retire(trial, trial_id)
                return
            except Busy:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.1)

    def _retire(self, trial: int, trial_id: str) -> Path | None:
        aside = self.store.retire(trial_id)
        self._retired.add(trial_id)
        self.ledger.forget(trial)
        self._note(trial, "pending")
        return aside

    @property
    def asks_left(self) -> int:
        """Number of arms that the search may still propose; 0 once all its trials, or all points of its
        space, were proposed."""
        search, most = self.experiment.keys.search, self.experiment.most_searched
        return min(search.trials - self.proposed, most - len(self._distinct)) if search else 0

    def _arm_number(self, name: str | None) -> int | None:
        """Return a baseline's number in the ledger; add it if its turn has not come, since arms are listed in
        any order."""
        if name is None:
            return None
        number = self.ledger.arm(name)
        if number is not None:
            return number
        baseline = next(arm for arm in self.experiment.arms if arm.name == name)
        return self.ledger.add_arm(name, baseline.knobs, None, None)

    def _refuse_other_versions(self, before: Mapping[tuple[str, int], Member]) -> None:
        """Raise InputError if part of this sweep was computed by other versions of the code, and trials would
        run: its arms could not be compared."""
        outdated, changes = set[str](), set[str]()
        for member in self.ledger.members():
            old = before.get((member.name, member.seed))
            if old is None or old.id == member.id or old.status not in FINISHED:
                continue
            then, now = old.resolved.content, member.resolved.content
            if differing := versions_alone(then, now):
                for key in differing:
                    changes.add(f"{key.replace('_', ' ')} {then.get(key)}, now {now.get(key)}")
                outdated.add(old.id)
        pending = self.count["pending"]  # if none, this code has computed all of it before
        if outdated and pending:
            raise InputError(
                f"{self.experiment.file}: {len(outdated)} trials are done under"
                f" {' and '.join(sorted(changes))}, and {pending} would run: the code that computes them"
                " has changed in the middle of this sweep. Check out the code that it began with, or give"
                " --accept-version to run all of it under this one; what is done stays in the store"
            )

    # Statuses

    def start(self, trial: int, trial_id: str, now: float) -> int:
        """Record a new attempt of a trial at Unix time `now`; return the attempt's number."""
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
        """Set the status of a trial that is not running any more, and seal its records."""
        self.ledger.settle(trial, status, reason, seconds, reused)
        self._seal(trial)
        self._note(trial, status)

    def _note(self, trial: int, status: str) -> None:
        if trial in self._status:
            self.count[self._status[trial]] -= 1
        self._status[trial] = status
        self.count[status] += 1

    def give_up(self, arm: int, step: int) -> None:
        """Mark an arm's waiting trials as pruned, and read their records from their folders. Needed if the
        ledger was lost after the pruner had ended the arm at `step`."""
        search, own = self.experiment.keys.search, self.ledger.own_trials(arm)
        reason = GivenUp(search.pruner if search else None, step).reason
        for work in self.queue.drop(lambda work: work.trial in own):
            self.ledger.record(work.trial, self.store.events(work.spec.id, strict=False))
            self.settle(work.trial, "pruned", reason)
