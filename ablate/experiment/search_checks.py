"""Check a search as a whole: its sampler, pruner, rungs, constraints and warm start against its objectives,
seeds and arms.

`schema` has checked the single values before. Problems are noted in the document, none is raised.
"""

import itertools
import math

from ablate.experiment.arms import Arm, StartingPoint
from ablate.experiment.schema import FEWEST_SEEDS, SEVERAL, ExperimentFile, Metric, Search
from ablate.experiment.search_space import refuse_twins
from ablate.experiment.yaml_document import Document
from ablate.training.workloads import Workload

_SHOWN = 6


def check_search(
    file: ExperimentFile,
    base: StartingPoint,
    ends: list[Arm],
    seeds: int,
    metrics: tuple[Metric, ...],
    name: str,
    document: Document,
) -> None:
    """Note what is wrong with the search of the sweep `name`, if the file has one.

    Args:
        file: the file.
        base: starting point of every arm.
        ends: arms at the ends of each knob.
        seeds: number of seeds of an arm.
        metrics: metrics by which arms are compared, the main one first.
        name: name of the sweep.
        document: file in which problems are noted.
    """
    search = file.search
    if search is None:
        return
    if file.constraints and search.sampler == "cmaes":
        document.problem(
            ("search", "sampler"),
            "takes no constraints; tpe, gp and nsga2 learn where they hold",
            search.sampler,
        )
    if len(metrics) > 1:
        _check_several(search, len(metrics), document)
    elif search.pruner == "wilcoxon":
        _check_wilcoxon(search, seeds, document)
    elif search.pruner:
        _check_rungs(search, metrics[0].name, [base.config, *(arm.config for arm in ends)], document)
    if search.rungs and not search.pruner:
        document.problem(("search", "rungs"), "has no effect without a pruner, such as pruner: median")
    refuse_twins(("search", "warm"), list(search.warm), document)
    if name in search.warm:
        document.problem(
            ("search", "warm"), f"names {name}, this sweep itself, which always starts with its own arms"
        )


def _check_several(search: Search, objectives: int, document: Document) -> None:
    if search.sampler not in SEVERAL:
        why = f"takes one objective, and metric lists {objectives}; {', '.join(SEVERAL)} take several"
        document.problem(("search", "sampler"), why, search.sampler)
    if search.pruner:
        why = f"judges by one objective, and metric lists {objectives}"
        right = "leave the pruner out, or give one metric"
        document.problem(("search", "pruner"), f"{why}: {right}", search.pruner)


def _check_wilcoxon(search: Search, seeds: int, document: Document) -> None:
    if search.rungs:
        document.problem(
            ("search", "rungs"),
            "has no effect: wilcoxon judges an arm as each of its seeds ends, not at steps",
        )
    if seeds < FEWEST_SEEDS:
        why = (
            f"cannot stop an arm before the last of {seeds} seeds: its test needs 4 pairs to tell arms apart"
        )
        right = f"give {FEWEST_SEEDS} seeds or more"
        document.problem(("search", "pruner"), f"{why}; {right}", search.pruner)
    if search.warm:
        why = "compares arms seed by seed, and the arms of an earlier sweep have no values by seed"
        right = "use median, asha or hyperband, or leave warm out"
        document.problem(("search", "pruner"), f"{why}; {right}", search.pruner)


def _check_rungs(search: Search, metric: str, configs: list[Workload], document: Document) -> None:
    """Note rungs at which not every arm has the metric, and rungs that do not grow as the pruner needs."""
    rungs, path = search.rungs, ("search", "rungs")
    valid = _common([config.recorded(metric) for config in configs])
    listed = ", ".join(map(str, valid[:_SHOWN])) + (f", ... {valid[-1]}" if len(valid) > _SHOWN else "")
    if not valid:
        document.problem(
            ("search", "pruner"),
            f"there is no step before the last at which every arm has {metric}",
            search.pruner,
        )
    elif not rungs:
        document.problem(
            ("search", "pruner"),
            f"needs rungs, the steps at which arms are judged; valid are {listed}",
            search.pruner,
        )
    for index, rung in enumerate(rungs):
        if valid and rung not in valid:
            document.problem(
                (*path, index), f"not every arm has {metric} there, before its end; valid are {listed}", rung
            )
    if list(rungs) != sorted(set(rungs)):
        document.problem(path, "must rise", list(rungs))
    elif search.pruner == "hyperband" and len(rungs) == 1:
        document.problem(
            path,
            "hyperband starts its brackets at different rungs: give two or more, or use asha",
            list(rungs),
        )
    elif search.pruner in ("asha", "hyperband") and not _geometric(rungs):
        why = f"{search.pruner} keeps one arm in n at each rung, which comes after n times as many steps"
        document.problem(path, f"{why}: such as 50, 100, 200", list(rungs))


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
