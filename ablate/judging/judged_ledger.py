"""The ledger of runs that were not started here, from which they are judged like the runs of a sweep."""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from ablate.cache import key_of
from ablate.errors import InputError, nearest, some_of
from ablate.execution.sweep_control import check, damage, exclusive, put_aside
from ablate.experiment.roles import ELSEWHERE
from ablate.experiment.schema import Metric
from ablate.files import Busy, Json, lock, no_folder_name
from ablate.judging.chosen_runs import Chosen, Question, comparable, differing, numbered, prepared
from ablate.judging.compared_step import last_until
from ablate.judging.names import places_of
from ablate.judging.run import Found, by_arm
from ablate.results.comparisons import Comparisons
from ablate.store.checked_ledger import absent, difference, folders, refusal
from ablate.store.databases import BESIDE
from ablate.store.judged import FOREIGN, Judged, Occasion, Reading
from ablate.store.judged_files import keep, kept_alone
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import ArmRow
from ablate.store.trial_store import Event, Store
from ablate.training.metric_names import recordable


def write_ledger(state: Path, name: str, found: Found, question: Question, files: bool = True) -> list[str]:
    """Write the ledger of these runs to `sweeps/NAME` of a state folder, in place of an earlier one.

    With `files`, the files of the runs, too. Return further sentences, on what is decided here: the metric,
    runs that are left out; where a damaged ledger is kept. InputError if the runs cannot be compared, or a
    sweep has this name.
    """
    if why := no_folder_name(name):
        raise InputError(f"--as: {why}; give a name such as nvfp4_lr")
    chosen, more = prepared(found.runs, question)
    path = state / "sweeps" / name / "ledger.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with lock(path.parent / "lock", wait=False):
            reading = _reading(found, chosen, more)
            before, damaged = _earlier(path, name, reading.sources)
            unfinished = path.with_name(f"{path.name}.unfinished")
            unfinished.unlink(missing_ok=True)
            with closing(Ledger(unfinished)) as ledger, ledger.transaction():
                arms = [
                    arm for arm in dict.fromkeys(run.arm for run in chosen.runs) if arm != question.against
                ]
                what = arms[0] if len(arms) == 1 else f"any of {len(arms)} arms"
                facts = ledger.facts
                facts.name, facts.interval, facts.ended = name, "t", "done"
                facts.question = f"Does {what} differ from {question.against} by {chosen.metric.name}?"
                facts.metric, facts.metrics = chosen.metric, [chosen.metric.name]
                base = ledger.add_arm(question.against, {}, None, None, "baseline")
                numbers = {arm: ledger.add_arm(arm, {}, base, None) for arm in arms}
                add_runs(ledger, {question.against: base} | numbers, chosen)
                times = before.times if before else ()
                origin = Judged([reading], differing(chosen.runs, question), times, chosen.reruns)
                origin.judged(_now(chosen.metric, question)).write(ledger)
                if files:
                    more += keep(ledger, Store(state))
            if damaged:
                more.append(f"The old ledger ({damaged}) is kept as {put_aside(path)}")
            for suffix in BESIDE:
                path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
            unfinished.rename(path)
    except Busy as busy:
        why = f"another process ({busy}) writes this name; wait for it, or use --as"
        raise InputError(f"{name}: {why}") from None
    return more


def add_to_sweep(state: Path, name: str, found: Found, question: Question) -> list[str]:
    """Add runs to the ledger of a sweep, as arms beside its own that were not started here.

    They are compared with an arm of the sweep, unpaired, by its metric; `question.against` may be empty if
    the sweep has one baseline. Runs of an arm that was added before are replaced. Return sentences on what is
    decided here. InputError if there is no such sweep or arm, the sweep runs, or the runs lack its metric.
    """
    (folder,) = folders(state, [name])
    if why := absent(path := folder / "ledger.db"):
        raise InputError(why)
    check(path.parent, "")
    with exclusive(path.parent, f"--into {name}", "; wait for it"), closing(Ledger(path)) as ledger:
        if Judged.alone(ledger):
            raise InputError(f"--into {name}: it holds judged runs alone; judge all files together")
        metric = _metric_of_sweep(ledger, question)
        base, series = _baseline(ledger, question.against), metric.name
        done = (each for each in ledger.members() if each.status == "done" and each.role != "foreign")
        own = sorted({max(ledger.series(member.trial, series), default=-1) for member in done})
        steps = [run.records.get(series, ()) for run in found.runs]
        at = next((end for end in own[::-1] if any(end in each for each in steps)), None)
        chosen, more = comparable(found.runs, replace(question, metric=series, at=at), metric)
        theirs = {last_until(run.records[series], chosen.steps) for run in chosen.runs}
        if own and theirs.difference(own):
            there, here = (", ".join(map(str, sorted(each))) for each in (theirs, own))
            raise InputError(f"the last {series} is of step {there}, and of step {here} in {ledger.name}")
        reading = _reading(found, chosen, more)
        before = Judged.of(ledger) or Judged([])
        kept = [part for each in before.readings if (part := each.without(reading.arms))]
        origin = Judged([*kept, reading], times=before.times)
        with ledger.transaction():
            numbers = {}
            for arm in reading.arms:
                numbers[arm] = ledger.add_arm(f"{ELSEWHERE}{arm}", {}, base.arm, None, "foreign")
                ledger.withdraw(numbers[arm])
            add_runs(ledger, numbers, chosen)
            origin.judged(_now(metric, replace(question, against=base.name))).write(ledger)
            more += keep(ledger, Store(state))
    return more


def _reading(found: Found, chosen: Chosen, more: Sequence[str]) -> Reading:
    """Return what a ledger keeps on all runs of one command, on those compared, and what was said of them."""
    arms = by_arm(chosen.runs)
    return Reading(
        [*arms],
        digests(found.places),
        [*found.said, *more],
        all(run.seed is not None for run in found.runs if run.arm),
        chosen.left_out,
        {arm: sum(not run.finite for run in of_arm) for arm, of_arm in arms.items()},
        chosen.warnings,
    )


def _metric_of_sweep(ledger: Ledger, question: Question) -> Metric:
    """Return the metric of a sweep.

    InputError if the question names another one, or another smallest effect, or if the comparisons of the
    sweep are no differences of last values.
    """
    metric = ledger.facts.metric
    if question.metric not in (None, metric.name):
        raise InputError(f"--metric {question.metric}: {ledger.name} is compared by {metric.name}")
    if question.direction not in (None, metric.direction):
        raise InputError(f"--maximize: {ledger.name} {metric.direction}s {metric.name}; leave it out")
    if question.at is not None:
        raise InputError(f"--at: runs are compared at the last step of {ledger.name}; leave it out")
    if question.floor is not None:
        raise InputError("--floor: reruns are described in a judgement of their own, without --into")
    if question.min_effect is not None:
        raise InputError(f"--min-effect: that of {ledger.name} stands in its file; leave it out")
    if ledger.facts.design is not None:
        raise InputError(f"--into {ledger.name}: it compares windows of forks, which other runs do not have")
    if Comparisons(ledger).relative:
        raise InputError(f"--into {ledger.name}: it compares tensors, by ratios at equal seeds")
    return metric


def _baseline(ledger: Ledger, against: str) -> ArmRow:
    """Return the arm of a sweep that is compared with; InputError if it is not said, or not there."""
    arms = [arm for arm in ledger.arms() if arm.role != "foreign"]
    found = [arm for arm in arms if (arm.name == against if against else arm.baseline is None)]
    if len(found) != 1:
        names = [arm.name for arm in arms]
        raise InputError(f"--against {against}: name one arm of {ledger.name}; {nearest(against, names)}")
    return found[0]


def _now(metric: Metric, question: Question) -> Occasion:
    effect = "" if metric.min_effect is None else str(metric.min_effect)
    return Occasion(time.time(), question.against, metric.name, metric.direction, effect, question.at)


def _earlier(path: Path, name: str, sources: Mapping[str, str]) -> tuple[Judged | None, str]:
    """Return the earlier judgement of this name, and the damage to its ledger. InputError for a sweep."""
    kept, why = kept_alone(path.parent), absent(path)
    before = Judged.parse(kept.origin, name) if kept else None
    if why and not (path.parent / "judged.json").exists():
        return None, ""
    damaged = "" if why else damage(path) or ""
    if not (why or damaged):
        with closing(Ledger(path, readonly=True)) as ledger:
            before, damaged = Judged.alone(ledger) or before, difference(ledger) or ""
    if damaged and before is None:
        raise InputError(refusal(path, damaged))
    if before is None:
        raise InputError(
            f"{name}: a sweep of this name is in {path.parent}; give another name with --as, or add"
            f" the runs to its report with --into {name}"
        )
    if not before.sources.keys() & sources.keys():
        raise InputError(f"{name}: holds runs of {before.places}; give another name with --as")
    return before, damaged


def digests(places: Sequence[str]) -> dict[str, str]:
    """Return the digests of all files and folders of some places, by their paths."""
    found: dict[str, str] = {}
    for place in places:
        try:
            paths = [str(path) for path, _ in places_of(place)]
        except InputError:  # an address, or values
            paths = [place]
        found.update((path, digest_of(path)) for path in paths)
    return found


def digest_of(place: str) -> str:
    """Return the SHA-256 of a file, or of all files of a folder by name; empty for any other place."""
    path, found = Path(place), hashlib.sha256()
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    if not path.is_dir():
        return ""
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with suppress(OSError):
                found.update(f"{file.relative_to(path)}\0".encode())
                found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def changed_since(judged: Judged) -> str:
    """Return which of the files that runs were read from have changed since, in words."""
    read = {place: digest for place, digest in judged.sources.items() if digest}
    changed = [place for place, digest in read.items() if digest_of(place) != digest]
    if changed:
        return f"{some_of(changed, 1)} no longer has what was read"
    return f"read from {judged.places}" + (", unchanged since" if read else "")


def add_runs(ledger: Ledger, numbers: Mapping[str, int], chosen: Chosen) -> None:
    """Add runs to the arms of a ledger in a transaction, as trials that are over; `numbers` is by arm."""
    now, metric = time.time(), chosen.metric.name
    measured = {run.arm for run in chosen.runs}
    for run, seed in numbered([*chosen.runs, *(run for run in chosen.short if run.arm in measured)]):
        series = run.records[metric]
        last = last_until(series, chosen.steps)
        config: dict[str, Json] = {**run.config, "steps": chosen.steps, "last": last}
        values = [[name, sorted(steps.items())] for name, steps in sorted(run.records.items())]
        spec = json.dumps({"workload": {FOREIGN: config}, "seed": seed, "run": run.name})
        identity = key_of(FOREIGN, run.arm, values, spec)
        trial = ledger.add_member(numbers[run.arm], seed, identity, spec)
        events: list[Event] = [
            {"step": step, "time": now, "metrics": {name: value}}
            for name, steps in run.records.items()
            if recordable(name)
            for step, value in steps.items()
            if step <= chosen.steps
        ]
        damaged = ledger.recorded(trial) and ledger.digest(trial) != ledger.records_seal(trial)
        (ledger.renew if damaged else ledger.record)(trial, events)
        why = None if math.isfinite(series[last]) else f"{metric} is {series[last]} at its last step, {last}"
        if run in chosen.short:
            ledger.settle(trial, "failed", f"left out as asked: it ends at step {last} of {chosen.steps}")
        else:
            ledger.settle(trial, "diverged" if why else "done", why)
        ledger.seal_records(trial, ledger.digest(trial) or "")
