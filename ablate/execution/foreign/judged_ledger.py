"""The ledger of runs that were not started here, from which they are judged like the runs of a sweep."""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ablate.cache import key_of
from ablate.errors import InputError, nearest
from ablate.execution.foreign.names import places_of
from ablate.execution.foreign.run import ForeignRun
from ablate.experiment.roles import ELSEWHERE
from ablate.experiment.schema import Metric
from ablate.files import Busy, Json, lock
from ablate.results.comparisons import Comparisons
from ablate.store.judged import FOREIGN, Judged, Occasion
from ablate.store.ledger import Ledger
from ablate.store.ledger_integrity import tally
from ablate.store.ledger_rows import ArmRow
from ablate.training.metric_names import NAMING, recordable

_USUAL = ("val/loss", "eval/loss", "eval_loss", "validation_loss", "val_loss", "valid_loss", "val_bpb")
"""Metrics that are compared unless one is named: the first that all runs have."""
_LAST_STEP = "train/loss"
_FEWEST_RERUNS = 3
"""Smallest number of reruns whose spread is described."""
_MOST_FIELDS = 4
"""Largest number of fields that a sentence names."""


@dataclass(frozen=True)
class Question:
    """Comparison that runs from elsewhere are to answer."""

    against: str
    """Name of the arm that all others are compared with."""
    metric: str | None = None
    """Metric whose last values are compared; None: the usual one of the runs."""
    min_effect: float | str | None = None
    """Smallest difference that matters, in the metric's unit or as a share, `0.1%`; None: not given."""
    direction: Literal["minimize", "maximize"] = "minimize"
    ignored: Sequence[str] = ()
    """Fields of configurations that may differ within an arm."""
    floor: str | None = None
    """Arm with reruns of one configuration, described by their spread and not compared; None: none."""


@dataclass(frozen=True)
class Chosen:
    """Runs that can be compared, and the metric that they are compared by."""

    runs: Sequence[ForeignRun]
    metric: Metric
    steps: int
    """Last step of the metric in the longest run."""
    reruns: Sequence[float] = ()
    """Last values of the reruns of one configuration."""
    left_out: Sequence[str] = ()
    """Sentences on runs that are not among them."""


def write_ledger(
    state: Path,
    name: str,
    runs: Sequence[ForeignRun],
    question: Question,
    said: Sequence[str],
    places: Sequence[str],
) -> list[str]:
    """Write the ledger of these runs to `sweeps/NAME` of a state folder, in place of an earlier one.

    Args:
        state: State folder.
        name: Name of the judgement.
        runs: The runs.
        question: The comparison.
        said: Sentences of the reader on what it guessed.
        places: Files, folders or addresses that were read.

    Returns:
        Further sentences, on what is decided here: the metric, runs that are left out.

    Raises:
        InputError: The runs cannot be compared, or a sweep has this name.
    """
    chosen, more = prepared(runs, question)
    path = state / "sweeps" / name / "ledger.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with lock(path.parent / "lock", wait=False):
            sources = digests(places)
            before = _earlier(path, name, sources)
            unfinished = path.with_name(f"{path.name}.unfinished")
            unfinished.unlink(missing_ok=True)
            with closing(Ledger(unfinished)) as ledger, ledger.transaction():
                _fill(ledger, name, chosen, question)
                origin = Judged(
                    sources,
                    [*said, *more],
                    all(run.seed is not None for run in runs),
                    differing(chosen.runs, question),
                    before.times if before else (),
                    chosen.left_out,
                    sum(map(_nonfinite, chosen.runs)),
                    chosen.reruns,
                )
                origin.judged(_now(chosen.metric, question)).write(ledger)
            for suffix in ("-wal", "-shm"):
                path.with_name(f"{path.name}{suffix}").unlink(missing_ok=True)
            unfinished.rename(path)
    except Busy as busy:
        raise InputError(
            [f"{name}: another process ({busy}) writes this name; wait for it, or use --as"]
        ) from None
    return more


def add_to_sweep(
    state: Path,
    name: str,
    runs: Sequence[ForeignRun],
    question: Question,
    said: Sequence[str],
    places: Sequence[str],
) -> list[str]:
    """Add runs to the ledger of a sweep, as arms beside its own that were not started here.

    They are compared with an arm of the sweep, unpaired, by its metric; runs of an arm that was added before
    are replaced.

    Args:
        state: State folder.
        name: Name of the sweep.
        runs: The runs.
        question: The comparison; `against` may be empty if the sweep has one baseline.
        said: Sentences of the reader on what it guessed.
        places: Files, folders or addresses that were read.

    Returns:
        Sentences on what is decided here.

    Raises:
        InputError: There is no such sweep or arm, the sweep runs, or the runs lack its metric.
    """
    path = state / "sweeps" / name / "ledger.db"
    if not path.exists():
        known = sorted(each.parent.name for each in state.glob("sweeps/*/ledger.db"))
        hint = nearest(name, known) if known else f"no sweep has been run in {state} yet"
        raise InputError([f"--into {name}: no such sweep; {hint}"])
    try:
        with lock(path.parent / "lock", wait=False), closing(Ledger(path)) as ledger:
            if Judged.alone(ledger):
                raise InputError([f"--into {name}: it holds judged runs alone; judge all files together"])
            metric = _metric_of_sweep(ledger, question)
            _refuse_unlike(ledger)
            base = _baseline(ledger, question.against)
            chosen, more = _prepared(runs, replace(question, metric=metric.name), metric)
            _require_same_end(ledger, chosen)
            before = Judged.of(ledger)
            origin = Judged(
                {**(before.sources if before else {}), **digests(places)},
                [*(before.said if before else ()), *said, *more],
                all(run.seed is not None for run in runs),
                times=before.times if before else (),
            )
            with ledger.transaction():
                numbers = {}
                for arm in dict.fromkeys(run.arm for run in chosen.runs):
                    numbers[arm] = ledger.add_arm(f"{ELSEWHERE}{arm}", {}, base.arm, None, "foreign")
                    ledger.withdraw(numbers[arm])
                add_runs(ledger, numbers, chosen)
                origin.judged(_now(metric, replace(question, against=base.name))).write(ledger)
    except Busy as busy:
        raise InputError([f"--into {name}: another process ({busy}) runs this sweep; wait for it"]) from None
    return more


def _metric_of_sweep(ledger: Ledger, question: Question) -> Metric:
    """Return the metric of a sweep; InputError if the question names another, or another smallest effect."""
    metric = ledger.facts.metric
    if question.metric not in (None, metric.name):
        raise InputError([f"--metric {question.metric}: {ledger.name} is compared by {metric.name}"])
    if question.direction == "maximize" != metric.direction:
        raise InputError([f"--maximize: {ledger.name} minimizes {metric.name}"])
    if question.floor is not None:
        raise InputError(["--floor: reruns are described in a judgement of their own, without --into"])
    if question.min_effect is not None:
        raise InputError([f"--min-effect: that of {ledger.name} stands in its file; leave it out"])
    return metric


def _refuse_unlike(ledger: Ledger) -> None:
    """Raise InputError for a sweep whose comparisons are no differences of last values."""
    if ledger.facts.design is not None:
        raise InputError(
            [f"--into {ledger.name}: it compares windows of forks, which other runs do not have"]
        )
    if Comparisons(ledger).relative:
        raise InputError([f"--into {ledger.name}: it compares tensors, by ratios at equal seeds"])


def _require_same_end(ledger: Ledger, chosen: Chosen) -> None:
    """Raise InputError if runs end at another step than those of the sweep."""
    name = chosen.metric.name
    own = {
        max(ledger.series(member.trial, name), default=-1)
        for member in ledger.members()
        if member.status == "done" and member.role != "foreign"
    }
    theirs = {max(run.records[name]) for run in chosen.runs}
    if own and theirs - own:
        steps, here = (", ".join(map(str, sorted(each))) for each in (theirs, own))
        raise InputError([f"the last {name} is of step {steps}, and of step {here} in {ledger.name}"])


def _baseline(ledger: Ledger, against: str) -> ArmRow:
    """Return the arm of a sweep that is compared with; InputError if it is not said, or not there."""
    arms = [arm for arm in ledger.arms() if arm.role != "foreign"]
    found = [arm for arm in arms if (arm.name == against if against else arm.baseline is None)]
    if len(found) != 1:
        names = [arm.name for arm in arms]
        raise InputError([f"--against {against}: name one arm of {ledger.name}; {nearest(against, names)}"])
    return found[0]


def _now(metric: Metric, question: Question) -> Occasion:
    effect = "" if metric.min_effect is None else str(metric.min_effect)
    return Occasion(time.time(), question.against, metric.name, metric.direction, effect)


def _earlier(path: Path, name: str, sources: Mapping[str, str]) -> Judged | None:
    """Return the origin of an earlier judgement of this name; InputError if a sweep has the name."""
    if not path.exists():
        return None
    with closing(Ledger(path, readonly=True)) as ledger:
        before = Judged.alone(ledger)
    if before is None:
        raise InputError(
            [
                f"{name}: a sweep of this name is in {path.parent}; give another name with --as, or add"
                f" the runs to its report with --into {name}"
            ]
        )
    if not before.sources.keys() & sources.keys():
        raise InputError([f"{name}: holds runs of {before.places}; give another name with --as"])
    return before


def prepared(runs: Sequence[ForeignRun], question: Question) -> tuple[Chosen, list[str]]:
    """Return the runs that can be compared with their metric, and sentences on what was decided.

    Raises:
        InputError: No runs, no such metric or arm, or an arm that is two configurations.
    """
    name = question.metric or _usual_metric(runs)
    metric = Metric(name=name, direction=question.direction, min_effect=_effect(question.min_effect))
    said: list[str] = []
    if question.metric is None:
        better = "lower" if question.direction == "minimize" else "higher"
        said = [f"metric: {name}, the {better} the better"]
    chosen, more = _prepared(runs, question, metric)
    arms = list(dict.fromkeys(run.arm for run in chosen.runs))
    if question.against not in arms:
        raise InputError([f"--against {question.against}: no such arm; {nearest(question.against, arms)}"])
    if len(arms) < 2:
        raise InputError([f"only {arms[0]} has runs with {metric.name}: there is nothing to compare it with"])
    return chosen, said + more


def _prepared(runs: Sequence[ForeignRun], question: Question, metric: Metric) -> tuple[Chosen, list[str]]:
    """Return the finished runs with this metric, and sentences on those that are left out."""
    said: list[str] = []
    names = sorted({name for run in runs for name in run.records})
    known = nearest(metric.name, names) if names else "the runs have no metrics"
    if not any(metric.name in run.records for run in runs):
        raise InputError([f"no run has a metric {metric.name!r}; {known}"])
    if not recordable(metric.name):
        raise InputError([f"metric {metric.name!r}: {NAMING}; rename it: --metric NAME={metric.name}"])
    kept = []
    for run in runs:
        if run.status != "done":
            said.append(f"{run.name} is left out: it is {run.status}")
        elif metric.name not in run.records or not run.records[metric.name]:
            said.append(f"{run.name} is left out: it has no {metric.name}")
        else:
            kept.append(run)
    if not kept:
        raise InputError([f"no run is left: {'; '.join(said[:3])}"])
    _require_one_configuration(kept, question)
    steps = max(max(run.records[metric.name]) for run in kept)
    again = [run.records[metric.name] for run in kept if run.arm == question.floor]
    reruns = [series[max(series)] for series in again]
    if len({max(series) for series in again}) > 1:
        raise InputError([f"--floor {question.floor}: its runs end at different steps"])
    if question.floor is not None and len(reruns) < _FEWEST_RERUNS:
        raise InputError(
            [f"--floor {question.floor}: has {len(reruns)} runs; a spread needs {_FEWEST_RERUNS} or more"]
        )
    kept = [run for run in kept if run.arm != question.floor]
    left_out = tuple(said)
    if metric.name == _LAST_STEP:
        said.append(
            f"{metric.name} is the loss of one batch: its last value is noisier than a mean of several"
        )
    return Chosen(kept, metric, steps, reruns, left_out), said


def _nonfinite(run: ForeignRun) -> bool:
    """Return True if any value of a run is NaN or infinite."""
    return not all(math.isfinite(value) for steps in run.records.values() for value in steps.values())


def _effect(given: float | str | None) -> float | str | None:
    """Return a smallest effect that matters as an experiment file has it; InputError for another text."""
    if given is None:
        return None
    text = str(given).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise InputError([f"min_effect {text}: is no positive number, or share such as 0.1%"])
    return f"{number:.15f}".rstrip("0").rstrip(".") + "%" if text.endswith("%") else number


def _usual_metric(runs: Sequence[ForeignRun]) -> str:
    """Return the metric that is usually compared, if all runs have it; else the only one. InputError for
    several others."""
    shared = set.intersection(*(set(run.records) for run in runs)) if runs else set()
    found = next((name for name in _USUAL if name in shared), None)
    if found or len(shared) == 1:
        return found or shared.pop()
    listed = ", ".join(sorted(shared)[:12]) or "none"
    raise InputError([f"--metric is needed: metrics that all runs have are {listed}"])


def _require_one_configuration(runs: Sequence[ForeignRun], question: Question) -> None:
    """Raise InputError if the runs of an arm have different configurations, with the fields.

    A field with another value in every run of the source, such as an id or a time, does not count.
    """
    own = own_fields(runs)
    problems = []
    for arm in dict.fromkeys(run.arm for run in runs):
        found = {
            name: values
            for name, values in _values_by_field([run for run in runs if run.arm == arm]).items()
            if len(values) > 1 and name not in own and name not in question.ignored
        }
        if found:
            shown = "; ".join(f"{name} {_listed(values)}" for name, values in [*found.items()][:_MOST_FIELDS])
            first = next(iter(found))
            fields = " ".join(f"--ignore {name}" for name in [*found][:_MOST_FIELDS])
            problems.append(
                f"{arm}: its runs have different configurations ({shown}), so their spread is not that of"
                f" seeds; name the arms by these fields too (--column arm=ARM,{first}), or pass {fields}"
            )
    if problems:
        raise InputError(problems)


def _listed(values: Iterable[str]) -> str:
    first = sorted(values)
    return " and ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")


def own_fields(runs: Sequence[ForeignRun]) -> set[str]:
    """Return the fields of configurations that have another value in every run: ids, names, times."""
    values = _values_by_field(runs)
    if len({run.arm for run in runs}) == len(runs):  # one run an arm: each field has as many values
        return set()
    return {name for name, found in values.items() if len(found) == len(runs)}


def _values_by_field(runs: Sequence[ForeignRun]) -> dict[str, set[str]]:
    """Return the values of every field as text; `not set` for a run without it."""
    names = {name for run in runs for name in run.config}
    return {
        name: {str(run.config[name]) if name in run.config else "not set" for run in runs} for name in names
    }


def differing(runs: Sequence[ForeignRun], question: Question) -> dict[str, dict[str, list[Json]]]:
    """Return, by arm, the fields whose value differs from the baseline's, with both values."""
    skipped = own_fields(runs) | {*question.ignored}
    first: dict[str, Mapping[str, Json]] = {}
    for run in runs:
        first.setdefault(run.arm, run.config)
    base = first[question.against]
    return {
        arm: {
            name: [base.get(name), config.get(name)]
            for name in sorted({*base, *config} - skipped)
            if base.get(name) != config.get(name)
        }
        for arm, config in first.items()
        if arm != question.against
    }


def numbered(runs: Sequence[ForeignRun]) -> list[tuple[ForeignRun, int]]:
    """Return the runs with a seed each. Runs without one get numbers that no other arm has: no pairs."""
    taken = {run.seed for run in runs if run.seed is not None}
    if big := next((run for run in runs if run.seed is not None and abs(run.seed) >= 1 << 63), None):
        raise InputError([f"{big.name}: seed {big.seed} is too large; it has at most 63 bits"])
    free = iter(number for number in range(len(taken) + len(runs)) if number not in taken)
    return [(run, next(free) if run.seed is None else run.seed) for run in runs]


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
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return f"{changed[0]}{more} changed or went since it was read"
    return f"read from {judged.places}" + (", unchanged since" if read else "")


# Into the ledger


def _fill(ledger: Ledger, name: str, chosen: Chosen, question: Question) -> None:
    """Write facts, arms and runs."""
    metric = chosen.metric
    others = [arm for arm in dict.fromkeys(run.arm for run in chosen.runs) if arm != question.against]
    what = others[0] if len(others) == 1 else f"any of {len(others)} arms"
    facts = ledger.facts
    facts.name, facts.interval, facts.ended = name, "t", "done"
    facts.question = f"Does {what} differ from {question.against} by {metric.name}?"
    facts.metric, facts.metrics = metric, [metric.name]
    numbers = {question.against: ledger.add_arm(question.against, {}, None, None, "baseline")}
    for arm in others:
        numbers[arm] = ledger.add_arm(arm, {}, numbers[question.against], None)
    add_runs(ledger, numbers, chosen)


def add_runs(ledger: Ledger, numbers: Mapping[str, int], chosen: Chosen) -> None:
    """Add runs to the arms of a ledger, as trials that are over.

    Args:
        ledger: Ledger that is open for writing, in a transaction.
        numbers: Number of each arm by name.
        chosen: The runs.
    """
    now, metric = time.time(), chosen.metric.name
    for run, seed in numbered(chosen.runs):
        series = run.records[metric]
        last = max(series)
        config: dict[str, Json] = {**run.config, "steps": chosen.steps, "last": last}
        values = [[name, sorted(steps.items())] for name, steps in sorted(run.records.items())]
        spec = json.dumps({"workload": {FOREIGN: config}, "seed": seed, "run": run.name})
        identity = key_of(FOREIGN, run.arm, values, spec)
        trial = ledger.add_member(numbers[run.arm], seed, identity, spec)
        ledger.record(
            trial,
            (
                {"step": step, "time": now, "metrics": {name: value}}
                for name, steps in run.records.items()
                if recordable(name)
                for step, value in steps.items()
            ),
        )
        why = None if math.isfinite(series[last]) else f"{metric} is {series[last]} at its last step, {last}"
        ledger.settle(trial, "diverged" if why else "done", why)
        ledger.seal_records(trial, str(tally(ledger, trial).sealed()["sha256"]))
