"""Runs from elsewhere that can be compared: their metric, their arms, and what is left out or refused."""

import math
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Literal

from ablate.errors import InputError, brief, by_key, nearest
from ablate.experiment.schema import Metric
from ablate.files import Json
from ablate.judging.columns import direction_of, is_rate
from ablate.judging.compared_step import compared_step, last_until, longer_text
from ablate.judging.own_fields import own_fields, unlike_seeds, values_by_field, with_rates
from ablate.judging.run import ForeignRun, by_arm
from ablate.training.metric_names import NAMING, recordable

_USUAL = ("val/loss", "eval/loss", "eval_loss", "validation_loss", "val_loss", "valid_loss", "val_bpb")
"""Metrics that are compared unless one is named: the first that all runs have."""
_LAST_STEP = "train/loss"
_MOST_ARMS = 30
"""Largest number of arms that a sentence lists."""
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
    direction: Literal["minimize", "maximize"] | None = None
    """Direction of improvement; None: the one that the metric's name says."""
    ignored: Sequence[str] = ()
    """Fields of configurations that may differ within an arm."""
    without: Sequence[str] = ()
    """Names of runs that are left out although they ended: only runs that are shorter than the others."""
    floor: str | None = None
    """Arm with reruns of one configuration, described by their spread and not compared; None: none."""
    at: int | None = None
    """Step whose values are compared; None: the last one that most runs have."""

    def counts(self, run: ForeignRun) -> bool:
        """Return True for a run that is done, or whose status is among the ignored fields."""
        return run.status == "done" or (bool(run.states) and {*run.states} <= {*self.ignored})


@dataclass(frozen=True)
class Chosen:
    """Runs that can be compared, and the metric that they are compared by."""

    runs: Sequence[ForeignRun]
    metric: Metric
    steps: int
    """Step that is compared. What runs record beyond it does not count."""
    reruns: Sequence[float] = ()
    """Last values of the reruns of one configuration."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Sentences on runs that are not among them, by arm."""
    short: Sequence[ForeignRun] = ()
    """Those of them that were left out because they ended early. They count as runs without a result."""
    warnings: Sequence[str] = ()
    """Sentences that stand with the answer: on runs that continue beyond the step that is compared, and on
    pairs whose further seeds differ."""


def prepared(runs: Sequence[ForeignRun], question: Question) -> tuple[Chosen, list[str]]:
    """Return the runs that can be compared with their metric, and sentences on what was decided.

    InputError for no runs, no such metric or arm, or an arm that is two configurations.
    """
    if question.against not in (named := dict.fromkeys(run.arm for run in runs if run.arm)):
        fields = (field for run in runs for field, value in run.config.items() if value == question.against)
        column = next((f"; --column {shlex.quote(f'arm={field}')} has it" for field in fields), "")
        hint = nearest(question.against, named, _MOST_ARMS)
        raise InputError(f"--against {question.against}: no such arm; {hint}{column}")
    name = question.metric or _usual_metric([run for run in runs if question.counts(run)] or runs)
    recorded = {each for run in runs for each in run.records}
    if name not in recorded and name.startswith("eval_") and f"val/{name[5:]}" in recorded:
        name = f"val/{name[5:]}"  # as Hugging Face's Trainer has it, and here its evaluations are named
    direction = question.direction or direction_of(name)
    metric = Metric(name=name, direction=direction, min_effect=_effect(question.min_effect))
    said = [f"metric: {name}, the {'lower' if direction == 'minimize' else 'higher'} the better"]
    chosen, more = comparable(runs, question, metric)
    arms = list(dict.fromkeys(run.arm for run in chosen.runs))
    why = "".join(f"; {sentence}" for sentences in chosen.left_out.values() for sentence in sentences[:1])
    if question.against not in arms:
        hint = nearest(question.against, arms)
        raise InputError(f"--against {question.against}: no such arm; {hint}{why}")
    if len(arms) < 2:
        lone = f"only {arms[0]} has runs with {metric.name}"
        raise InputError(f"{lone}: there is nothing to compare it with{why}")
    spellings = by_key((arm.strip().lower(), arm) for arm in arms)
    said += [
        f"{' and '.join(map(brief, alike))} are arms of their own, and differ in capitals or spaces alone"
        for alike in spellings.values()
        if len(alike) > 1
    ]
    return chosen, said + more


def comparable(runs: Sequence[ForeignRun], question: Question, metric: Metric) -> tuple[Chosen, list[str]]:
    """Return the finished runs with this metric, and sentences on those that are left out."""
    left_out = defaultdict[str, list[str]](list)
    for run in runs:
        if any(
            "\ud800" <= character <= "\udfff" for character in run.arm
        ):  # half a pair, or a byte of a path
            raise InputError(f"{run.name}: its arm, {brief(run.arm)}, is not Unicode text; rename it")
    names = sorted({name for run in runs for name in run.records})
    known = nearest(metric.name, names) if names else "the runs have no metrics"
    if not any(metric.name in run.records for run in runs):
        raise InputError(f"no run has a metric {metric.name!r}; {known}")
    if not recordable(metric.name):
        rename = f"--metric {shlex.quote(f'NAME={metric.name}')}"
        raise InputError(f"metric {metric.name!r}: {NAMING}; rename it: {rename}")
    usable, kept = [], []
    open_ends = defaultdict[tuple[str, str], list[ForeignRun]](list)
    for run in runs:
        if not question.counts(run):
            open_ends[run.arm, run.ended].append(run)
        elif run.records.get(metric.name):
            usable.append(run)
        else:
            left_out[run.arm].append(f"{run.name} is left out: it has no {metric.name}")
    for (arm, _), alike in open_ends.items():
        left_out[arm].append(_unfinished(alike))
    judged = [run for run in usable if run.arm != question.floor] or usable
    steps = compared_step(judged, question.against, metric.name, question.at) if judged else 0
    for run in usable:
        if last_until(run.records[metric.name], steps) >= 0:
            kept.append(with_rates(run, metric.name, steps))
        else:
            left_out[run.arm].append(f"{run.name} is left out: it has no {metric.name} up to step {steps}")
    said = [sentence for sentences in left_out.values() for sentence in sentences]
    if not kept:
        raise InputError(f"no run is left: {'; '.join(said[:3])}")
    said += [f"{run.name} counts as asked: {run.ended}" for run in kept if run.status != "done"]
    _require_one_configuration(kept, question)
    unlike = unlike_seeds([run for run in kept if run.arm != question.floor], question.against)
    unlike = {name: found for name, found in unlike.items() if name not in question.ignored}
    if own := sorted(own_fields(kept) - {*question.ignored, *unlike}):
        said.append(f"not compared, since they say which run it is: {', '.join(map(brief, own))}")
    said += (warnings := [*unlike.values()])
    misfits = {run.short_name for run in runs if not run.arm}
    short = _short(kept, question, metric.name, steps, misfits)
    for run in short:
        end = f"it ends at step {max(run.records[metric.name])} of {steps}"
        said.append(
            f"{run.name} is left out as asked: {end}; if it failed, {run.arm} looks better than it is"
        )
        left_out[run.arm].append(said[-1])
    kept = [run for run in kept if run not in short]
    again = [run.records[metric.name] for run in kept if run.arm == question.floor]
    kept = [run for run in kept if run.arm != question.floor]
    if longer := longer_text(kept, metric.name, steps, question.at is not None):
        said.append(longer)
        warnings.append(longer)
    said += _remedies(kept, metric.name, steps)
    ends = [steps if steps in series else max(series) for series in again]
    reruns = [series[end] for series, end in zip(again, ends, strict=True)]
    if len({*ends}) > 1:
        raise InputError(f"--floor {question.floor}: its runs end at different steps")
    if question.floor is not None and len(reruns) < _FEWEST_RERUNS:
        few = f"has {len(reruns)} runs; a spread needs {_FEWEST_RERUNS} or more"
        raise InputError(f"--floor {question.floor}: {few}")
    if metric.name == _LAST_STEP:
        said.append(
            f"{metric.name} is the loss of one batch: its last value is noisier than a mean of several"
        )
    return Chosen(kept, metric, steps, reruns, dict(left_out), short, warnings), said


def _unfinished(runs: Sequence[ForeignRun]) -> str:
    """Return a sentence on runs of one arm that are not done, for one reason."""
    first, names = runs[0], ", ".join(run.short_name for run in runs)
    subject = f"{len(runs)} runs of {first.arm} ({names}) are" if len(runs) > 1 else f"{first.name} is"
    ignored = " ".join(f"--ignore {shlex.quote(name)}" for name in first.states)
    return f"{subject} left out: {first.ended}" + f" ({ignored})" * bool(ignored)


def _short(
    runs: Sequence[ForeignRun], question: Question, metric: str, steps: int, misfits: Collection[str]
) -> list[ForeignRun]:
    """Return the runs that the question leaves out; InputError for one that is not there, or not short."""
    short = []
    for name in question.without:
        if name in misfits:
            continue
        ends = f" ({name})"
        named = [run for run in runs if name in (run.name, run.short_name) or run.name.endswith(ends)]
        if len(named) != 1:
            hint = nearest(name, (run.short_name for run in runs))
            why = f"{len(named)} runs have this name" if named else f"no such run; {hint}"
            raise InputError(f"--without {name}: {why}")
        if not _ended_early(named[0], metric, steps):
            last, value = max(named[0].records[metric].items())
            raise InputError(
                f"--without {name}: its last {metric} is {value:g} at step {last} of {steps}; only a run"
                " that ended early, without having diverged, can be left out: choosing biases verdicts"
            )
        short += named
    return short


def _ended_early(run: ForeignRun, metric: str, steps: int) -> bool:
    """Return True if a run has no value at a step, and a finite one before it: one without has diverged."""
    end = last_until(run.records[metric], steps)
    return end < steps and math.isfinite(run.records[metric][end])


def _remedies(runs: Sequence[ForeignRun], metric: str, steps: int) -> Iterator[str]:
    """Yield how an arm gets a verdict of which runs lack the step that is compared."""
    short = [run for run in runs if _ended_early(run, metric, steps)]
    whole = {run.arm for run in runs if steps in run.records[metric]}
    for run in [run for run in short if run.arm in whole][:_MOST_FIELDS]:
        yield (
            f"{run.name} ends at step {max(run.records[metric])} of {steps}, so {run.arm} has no verdict;"
            f" --without {shlex.quote(run.short_name)} leaves it out, and the report says so"
        )
    usable = [{*run.records[metric]} for run in runs if run in short or steps in run.records[metric]]
    if short and (shared := set.intersection(*usable)):
        yield f"--at {max(shared)} compares all runs at the last step that they share"


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
        raise InputError(f"min_effect {text}: is no positive number, or share such as 0.1%")
    return f"{Decimal(text.removesuffix('%')).normalize():f}%" if text.endswith("%") else number


def _usual_metric(runs: Sequence[ForeignRun]) -> str:
    """Return the metric that is usually compared, if all runs have it; else the only one. InputError for
    several others."""
    shared = set.intersection(*(set(run.records) for run in runs)) if runs else set()
    found = next((name for name in _USUAL if name in shared), None)
    if found or len(shared) == 1:
        return found or shared.pop()
    listed = ", ".join(sorted(shared)[:12]) or "none"
    raise InputError(f"--metric is needed: metrics that all runs have are {listed}")


def _require_one_configuration(runs: Sequence[ForeignRun], question: Question) -> None:
    """Raise InputError, with the fields, if runs of an arm differ in more than ids, places and times."""
    skipped = own_fields(runs) | {*question.ignored}
    problems = []
    for arm, of_arm in by_arm(runs).items():
        fields = values_by_field(of_arm).items()
        found = {name: sorted(values) for name, values in fields if len(values) > 1 and name not in skipped}
        if found:
            named = [*found][:_MOST_FIELDS]
            shown = "; ".join(
                f"{name} {' and '.join(found[name][:3])}"
                + f" and {len(found[name]) - 3} more" * (len(found[name]) > 3)
                for name in named
            )
            options = " ".join(f"--ignore {shlex.quote(name)}" for name in named)
            seed = f" or as the seed (--column {shlex.quote(f'seed={named[0]}')})"
            recorded = is_rate(named[0]) and any(is_rate(name) for run in runs for name in run.records)
            column = "" if recorded else f" (--column {shlex.quote(f'arm=ARM,{named[0]}')})"
            problems.append(
                f"{arm}: its runs have different configurations ({shown}), so their spread is not that of"
                f" seeds; name the arms by these fields too{column}"
                f"{seed * all(run.seed is None for run in runs)}, or pass {options} if they do not matter"
            )
    if problems:
        raise InputError(*problems)


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
        raise InputError(f"{big.name}: seed {big.seed} is too large; it has at most 63 bits")
    free = iter(number for number in range(len(taken) + len(runs)) if number not in taken)
    return [(run, next(free) if run.seed is None else run.seed) for run in runs]
