"""Checks of an experiment file that has been read: what contradicts what, and what cannot be run.

`schema` has checked the single values, and the readers that `load` calls each key that becomes something else
(knobs, arms, metrics). A check here is a pure function of the whole draft that yields problems at their
places. A new one is a function and its name in `CHECKS`, at the foot, or in `CHECKS_OF_FILE`.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from ablate.errors import Problem, Reading, nearest
from ablate.experiment.blame_design import FEWEST_SEEDS as FEWEST_PROOFS
from ablate.experiment.blame_units import blamed
from ablate.experiment.draft import Draft
from ablate.experiment.forked_design import misfits, resolved
from ablate.experiment.metric_checks import metric_problems
from ablate.experiment.schema import (
    FEWEST_SEEDS,
    MOST_TRIALS,
    SEVERAL,
    Asked,
    Search,
)
from ablate.experiment.search_space import Dimension, twins
from ablate.experiment.yaml_document import Document, display
from ablate.recipes.experts import ONLY_IN_FORKS
from ablate.training.metric_names import target_of
from ablate.training.workloads.base import Workload

_SHOWN = 6
_BY_WINNER = "a search answers by its winner on fresh seeds: answer: {family: winner}, with search.confirm"
_LEVELS = ("val/loss", "val/loss_bf16")
"""Metrics that a forked trial has at the end of its windows."""


Check = Callable[[Draft], Iterator[Problem]]


def all_of(checks: tuple[Check, ...], draft: Draft) -> Reading[None]:
    for check in checks:
        yield from check(draft)


# Before arms have baselines


def _constraints(draft: Draft) -> Iterator[Problem]:
    """Yield constraints on a metric that the workload does not measure, duplicates, and constraints without a
    search."""
    constraints, document = draft.keys.constraints, draft.document
    for index, constraint in enumerate(constraints):
        yield from metric_problems(constraint.metric, ("constraints", index, "metric"), draft.base, document)
    limits = [constraint.description.rpartition(" ")[0] for constraint in constraints]
    yield from twins(("constraints",), limits, document)
    if constraints and draft.keys.search is None:
        why = "have no effect without a search: every arm of a grid is run and compared; leave them out"
        yield document.problem(("constraints",), why)


def _search(draft: Draft) -> Iterator[Problem]:
    """Yield contradictions of a search's sampler, pruner, rungs and warm start with metrics, seeds and
    arms."""
    search, metrics, document = draft.keys.search, draft.metrics, draft.document
    if search is None:
        return
    if draft.keys.constraints and search.sampler == "cmaes":
        why = "takes no constraints; tpe, gp and nsga2 learn where they hold"
        yield document.problem(("search", "sampler"), why, search.sampler)
    if len(metrics) > 1:
        yield from _several(search, len(metrics), document)
    elif search.pruner == "wilcoxon":
        yield from _wilcoxon(search, len(draft.keys.first_seeds), document)
    elif search.pruner:
        configs = [draft.base.config, *(arm.config for arm in draft.ends)]
        yield from _rungs(search, metrics[0].name, configs, document)
    if search.rungs and not search.pruner:
        yield document.problem(("search", "rungs"), "has no effect without a pruner, such as pruner: median")
    yield from twins(("search", "warm"), list(search.warm), document)
    if draft.name in search.warm:
        why = f"names {draft.name}, this sweep itself, which always starts with its own arms"
        yield document.problem(("search", "warm"), why)


def _several(search: Search, objectives: int, document: Document) -> Iterator[Problem]:
    if search.sampler not in SEVERAL:
        why = f"takes one objective, and metric lists {objectives}; {', '.join(SEVERAL)} take several"
        yield document.problem(("search", "sampler"), why, search.sampler)
    if search.pruner:
        why = f"judges by one objective, and metric lists {objectives}"
        right = "leave the pruner out, or give one metric"
        yield document.problem(("search", "pruner"), f"{why}: {right}", search.pruner)


def _wilcoxon(search: Search, seeds: int, document: Document) -> Iterator[Problem]:
    if search.rungs:
        why = "has no effect: wilcoxon judges an arm as each of its seeds ends, not at steps"
        yield document.problem(("search", "rungs"), why)
    if seeds < FEWEST_SEEDS:
        why = (
            f"cannot stop an arm before the last of {seeds} seeds: its test needs 4 pairs to tell arms apart"
        )
        right = f"give {FEWEST_SEEDS} seeds or more"
        yield document.problem(("search", "pruner"), f"{why}; {right}", search.pruner)
    if search.warm:
        why = "compares arms seed by seed, and the arms of an earlier sweep have no values by seed"
        right = "use median, asha or hyperband, or leave warm out"
        yield document.problem(("search", "pruner"), f"{why}; {right}", search.pruner)


def _rungs(search: Search, metric: str, configs: list[Workload], document: Document) -> Iterator[Problem]:
    """Yield rungs at which not every arm has the metric, and rungs that do not grow as the pruner needs."""
    rungs, path = search.rungs, ("search", "rungs")
    valid = _common([config.recorded(metric) for config in configs])
    listed = ", ".join(map(str, valid[:_SHOWN])) + (f", ... {valid[-1]}" if len(valid) > _SHOWN else "")
    if not valid:
        why = f"there is no step before the last at which every arm has {metric}"
        yield document.problem(("search", "pruner"), why, search.pruner)
    elif not rungs:
        why = f"needs rungs, the steps at which arms are judged; valid are {listed}"
        yield document.problem(("search", "pruner"), why, search.pruner)
    for index, rung in enumerate(rungs):
        if valid and rung not in valid:
            yield document.problem(
                (*path, index), f"not every arm has {metric} there, before its end; valid are {listed}", rung
            )
    if list(rungs) != sorted(set(rungs)):
        yield document.problem(path, "must rise", list(rungs))
    elif search.pruner == "hyperband" and len(rungs) == 1:
        why = "hyperband starts its brackets at different rungs: give two or more, or use asha"
        yield document.problem(path, why, list(rungs))
    elif search.pruner in ("asha", "hyperband") and not _geometric(rungs):
        why = f"{search.pruner} keeps one arm in n at each rung, which comes after n times as many steps"
        yield document.problem(path, f"{why}: such as 50, 100, 200", list(rungs))


def _common(steps: list[range]) -> range:
    """Return the steps that all ranges contain. Each is a range of multiples of its first step, or empty."""
    if not all(steps):
        return range(0)
    every = math.lcm(*(one.start for one in steps))
    return range(every, min(one.stop for one in steps), every)


def _geometric(rungs: tuple[int, ...]) -> bool:
    """Return True if each rung is the same integer multiple of the one before."""
    factor = rungs[1] // rungs[0] if rungs[1:] else 2
    return all(later == factor * earlier for earlier, later in itertools.pairwise(rungs))


# With all arms


def _answer(draft: Draft) -> Iterator[Problem]:
    """Yield why the comparison that the question is about cannot be made. It is fixed before anything runs,
    so that an answer is never picked among comparisons by its size."""
    asked, document, search = draft.keys.answer, draft.document, draft.keys.search
    if asked is None:
        return
    if asked.family is not None:
        yield from _asked_family(asked.family, draft)
        return
    if search:
        yield document.problem(("answer",), _BY_WINNER)
        return
    if asked.knob is not None:
        yield from _asked_knobs(asked, draft.space, document)
        return
    by_name = {arm.name: arm for arm in draft.arms}
    for field, name in (("arm", asked.arm), ("against", asked.against)):
        if name is not None and name not in by_name:
            yield document.problem(("answer", field), f"no arm has this name; {nearest(name, by_name)}", name)
    arm = by_name.get(asked.arm or "")
    if arm and asked.against is None and arm.baseline is None:
        yield document.problem(
            ("answer", "arm"), "is a baseline; name the arm that it is compared with as against", arm.name
        )
    if asked.against == asked.arm:
        yield document.problem(("answer", "against"), "is the arm itself", asked.against)


def _asked_family(family: str, draft: Draft) -> Iterator[Problem]:
    search = draft.keys.search
    wrong = ""
    if family == "winner" and (search is None or search.confirm is None):
        wrong = "needs a search whose winner is run again on fresh seeds (search.confirm)"
    elif family != "winner" and search:
        wrong = _BY_WINNER
    elif family == "knobs" and not draft.space:
        wrong = "needs a grid: knobs under ablate"
    if wrong:
        yield draft.document.problem(("answer", "family"), wrong, family)


def _asked_knobs(asked: Asked, knobs: Mapping[str, Dimension], document: Document) -> Iterator[Problem]:
    named = [(("answer", "knob"), asked.knob or ""), *((("answer", "given", k), k) for k in asked.given)]
    for path, knob in named:
        if knob not in knobs:
            listed = nearest(knob, knobs) if knobs else "the file has no `ablate`"
            yield document.problem(path, f"is not turned by this file; {listed}", knob)
        elif len(knobs[knob].choices) < 2 and path[1] == "knob":
            yield document.problem(path, "has one value, so that there is nothing to compare", knob)
        elif knob == asked.knob and path[1] == "given":
            yield document.problem(path, "is the knob that is asked for; hold other knobs", knob)
    for knob, value in asked.given.items():
        if knob in knobs and not knobs[knob].holds(value):
            values = ", ".join(map(display, knobs[knob].choices))
            yield document.problem(("answer", "given", knob), f"is not among its values: {values}", value)


def _forks(draft: Draft) -> Iterator[Problem]:
    """Yield what cannot be forked, each reason once."""
    file, base, document = draft.keys, draft.base, draft.document
    if file.design is None:
        replaying = (arm for arm in (*draft.arms, *draft.ends) if arm.recipe.experts.replays)
        for arm in itertools.islice(replaying, 1):
            why = f"is missing: arm {arm.name!r}: recipe.experts.routing replay {ONLY_IN_FORKS}"
            yield document.problem(("design",), why)
        return
    shown, shapes = set(), dict[tuple[object, ...], str]()
    for arm in (*draft.arms, *draft.ends):
        reasons = [*misfits(file.design, arm.config, arm.recipe)]
        if not reasons:
            forks = resolved(file.design, arm.config)
            shapes.setdefault((forks.positions, forks.windows), arm.name)
        for field, why in reasons:
            if (field, why) not in shown:
                shown.add((field, why))
                at = field.partition(".")[0]
                yield document.problem(
                    ("design",) if at != "workload" else ("workload", base.workload, *field.split(".")[1:]),
                    f"arm {arm.name!r}: {field}: {why}" if field != "design" else why,
                )
    if len(shapes) > 1:
        one, other = list(shapes.values())[:2]
        yield document.problem(
            ("design",),
            f"arms {one!r} and {other!r} train other windows, since their steps, warm-up or decay differ, and"
            " damage depends on the window; write an experiment for each",
        )
    for metric in draft.metrics:
        levels = {*_LEVELS, *base.config.of_readings}
        if metric.name not in levels and (base.config.training or target_of(metric.name)):
            yield document.problem(
                ("metric",),
                f"a forked trial is compared at the end of its windows, by {' or '.join(_LEVELS)}",
                metric.name,
            )
    if file.published:
        yield document.problem(
            ("published",), "are figures of full runs, and a forked design measures damage; leave them out"
        )
    if file.search and file.search.pruner:
        yield document.problem(
            ("search", "pruner"), "has nothing to prune by: windows are evaluated at their ends; leave it out"
        )


def _blame(draft: Draft) -> Iterator[Problem]:
    """Yield why there is no search for a cause: its units, its budget, or runs that it may request."""
    if draft.keys.blame is None:
        return
    try:
        design, units, _ = blamed(draft.keys, draft.arms)
    except ValueError as error:
        yield draft.document.problem(("blame",), str(error))
        return
    if design.problem:
        few = len(design.seeds) < FEWEST_PROOFS
        coarse = "what" if draft.keys.blame.what == "parts" else "where"  # parts have no `where`
        key = ("blame", coarse) if design.units < 2 else ("seeds",) if few else ("blame", "budget")
        yield draft.document.problem(key, design.problem)
        return
    for why in units.impossible(design):
        yield draft.document.problem(("blame", "what"), why)


def _size(draft: Draft) -> Iterator[Problem]:
    if (trials := len(draft.keys.first_seeds) * len(draft.arms)) > MOST_TRIALS:
        why = f"make {trials} trials of all arms; an experiment has at most {MOST_TRIALS}"
        yield draft.document.problem(("seeds",), why)


def _published(draft: Draft) -> Iterator[Problem]:
    """Yield published figures of arms or metrics that this experiment does not have."""
    names, document = [arm.name for arm in draft.arms], draft.document
    for index, figure in enumerate(draft.keys.published):
        yield from metric_problems(figure.metric, ("published", index, "metric"), draft.base, document)
        for key in ("arm", "against"):
            name = getattr(figure, key)
            if name is not None and name not in names and not draft.keys.search:
                yield document.problem(
                    ("published", index, key), f"no such arm; {nearest(name, names)}", name
                )


def _kept_weights(draft: Draft) -> Iterator[Problem]:
    """Yield that weights would be kept of trials that have no one model at their end."""
    if not draft.keys.telemetry.keep_weights:
        return
    if draft.keys.design is not None:
        why = "forked trials end in a model for each window; leave it out"
    elif not all(arm.config.training for arm in draft.arms):
        why = "needs a workload that trains a model of its own (gpt, finetune); your code saves its own"
    else:
        return
    yield draft.document.problem(("telemetry", "keep_weights"), why)


def _engine(draft: Draft) -> Iterator[Problem]:
    """Yield why the engine cannot compute the arms, or the requested ranks cannot divide one."""
    file, document = draft.keys, draft.document
    try:
        engine = draft.choice.engine
    except ValueError as error:
        yield document.problem(("engine",), str(error), file.engine)
        return
    for arm in (*draft.arms, *draft.ends):
        if why := file.resources.misfit(arm.config, arm.recipe, engine):
            yield document.problem(("resources",), f"arm {arm.name}: {why}")
            return


CHECKS_OF_FILE: tuple[Check, ...] = (_constraints, _search)
"""Checks that need no arms but those that the file lists."""
CHECKS: tuple[tuple[Check, ...], ...] = (
    (_answer,),
    (_forks,),
    (_blame,),
    (_size, _published),
    (_kept_weights, _engine),
)
"""Checks of the whole draft, in their order; a group runs if those before it found nothing."""
