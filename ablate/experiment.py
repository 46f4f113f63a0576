"""From an experiment as written to an experiment as meant: YAML in, arms and trial specs out, or every mistake at its place."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ablate.arms import Arm, Base, KnobError, reason
from ablate.choice import Choice, check, choose, misfit
from ablate.numerics.spec import Spec
from ablate.recipes import PRESETS, Recipe
from ablate.space import Dimension, conditions, grid, refuse_twins, space, values_at
from ablate.surface import (
    FEWEST_SEEDS,
    SEVERAL,
    Budget,
    Constraint,
    ExperimentFile,
    Growth,
    Metric,
    Published,
    Resources,
    Search,
    TelemetryKeys,
)
from ablate.trial import TrialSpec
from ablate.workloads import WORKLOADS
from ablate.yamlfile import Document, nearest, read

_MOST_ARMS = 10_000
_SHOWN = 6
_MISPLACED = dict.fromkeys(
    ("pruner", "rungs"), "belongs under search: the arms of a grid are compared seed by seed, and none of them may end early"
)


@dataclass(frozen=True)
class Experiment:
    """An experiment, checked: every arm it names can be built."""

    name: str
    file: str
    text: str
    question: str
    base: Base
    space: Mapping[str, Dimension]
    arms: tuple[Arm, ...]
    """The arms known from the start, baselines first: all of a grid, only the baseline of a search."""
    added: frozenset[str]
    """Names of the baselines among them that the file's own arms do not include."""
    against: Mapping[str, Any]
    seeds: tuple[int, ...]
    """The seeds that every arm gets."""
    growth: Growth | None
    """How more are added to an arm that is undecided; None: never."""
    metrics: tuple[Metric, ...]
    """What arms are compared by, the main one first."""
    published: tuple[Published, ...]
    search: Search | None
    constraints: tuple[Constraint, ...]
    resources: Resources
    engine: str
    engine_why: str
    """Why `auto` took the emulator; empty where the file names an engine, or the GPU's was taken."""
    retry: int
    patience: float
    budget: Budget
    telemetry: TelemetryKeys

    @property
    def metric(self) -> Metric:
        """The main metric: what MLflow shows, and an arm is judged by."""
        return self.metrics[0]

    @property
    def objectives(self) -> tuple[Metric, ...]:
        """What the study is about: all metrics of a search; of a grid the main one, so that it shows the way there too."""
        return self.metrics if self.search else self.metrics[:1]

    @property
    def prunes(self) -> bool:
        """Whether arms may be given up before they are over."""
        return self.search is not None and self.search.pruner is not None

    def propose(self, knobs: Mapping[str, Any]) -> tuple[Arm, Arm]:
        """A searched arm and its baseline: the same workload values under the recipe it is compared with."""
        arm, baseline = self.base.arm(knobs), _baseline(self.base, self.against, knobs)
        for one in (arm, baseline):
            if why := self.resources.misfit(one.config, one.recipe, self.engine):
                raise KnobError([("resources", why)])
            if why := misfit(self.engine, one, self.resources.most):
                raise KnobError([("engine", why)])
        return _compared(arm, baseline), baseline

    def spec(self, arm: Arm, seed: int, device: str) -> TrialSpec:
        """The trial of one member."""
        return TrialSpec(workload=self.base.workload, config=arm.config, recipe=arm.recipe, seed=seed, engine=self.engine, device=device)


def load(path: Path, device: str | None = None) -> Experiment:
    """Read, check and expand an experiment file; InputError with every problem where it cannot be run as it stands.

    `device`: the class of device that it is to run on, which decides between engines; None: whatever is here.
    """
    document = read(path)
    file = _surface(document)
    _check_engine(file, document)
    base = _base(file, document)
    seeds, growth = _seeds(file, document)
    metrics = _metrics(file, base, document)
    knobs = space(file, document)
    if base is None:
        document.check()
    arms, ends = _arms(file, base, knobs, document)
    against = _against(file, base, arms, document)
    _check_search(file, base, ends, seeds, metrics, path.stem, document)
    document.check()
    baselines, compared = _with_baselines(file, base, arms, against, document)
    _refuse_unmeasured(file, base, [arm.name for arm in (*baselines, *compared)], document)
    choice = _engine(file, (*baselines, *compared, *ends), device, document)
    _refuse_misfits(file, (*baselines, *compared), choice, document)
    return Experiment(
        name=path.stem,
        file=str(path),
        text=document.text,
        question=file.question.strip(),
        base=base,
        space=knobs,
        arms=(*baselines, *compared),
        added=frozenset(arm.name for arm in baselines),
        against=against,
        seeds=seeds,
        growth=growth,
        metrics=metrics,
        published=file.published,
        search=file.search,
        constraints=file.constraints,
        resources=file.resources,
        engine=choice.engine,
        engine_why=choice.why,
        retry=file.retry,
        patience=file.patience,
        budget=file.budget,
        telemetry=file.telemetry,
    )


def _surface(document: Document) -> ExperimentFile:
    """The file's top level. Keys that are wrong are noted and left out, so that what is wrong elsewhere shows too."""
    content = {"schema": 1, "question": "-"} | document.value
    try:
        return ExperimentFile.model_validate(document.value)
    except ValidationError as error:
        for problem in error.errors():
            missing = problem["type"] == "missing"
            why = _MISPLACED.get(problem["loc"][-1]) if problem["loc"][1:] == () else None
            document.problem(problem["loc"], why or reason(problem, ExperimentFile), *(() if missing else (problem["input"],)))
            content.pop(problem["loc"][0], None)
    if "workload" not in content:
        document.check()
    return ExperimentFile.model_validate({"schema": 1, "question": "-"} | content)


def _check_engine(file: ExperimentFile, document: Document) -> None:
    try:
        check(file.engine)
    except ValueError as error:
        document.problem(("engine",), str(error), file.engine)


def _engine(file: ExperimentFile, arms: tuple[Arm, ...], device: str | None, document: Document) -> Choice | None:
    """The engine of all arms; raises where the one that was asked for cannot compute them."""
    try:
        return choose(file.engine, arms, device, layout=file.resources.most)
    except ValueError as error:
        document.problem(("engine",), str(error), file.engine)
        document.check()
        return None


def _refuse_misfits(file: ExperimentFile, arms: tuple[Arm, ...], choice: Choice, document: Document) -> None:
    """Arms that so many ranks cannot compute together."""
    for arm in arms:
        if why := file.resources.misfit(arm.config, arm.recipe, choice.engine):
            document.problem(("resources",), f"arm {arm.name}: {why}")
            break
    document.check()


def _base(file: ExperimentFile, document: Document) -> Base | None:
    if file.recipe not in PRESETS:
        document.problem(("recipe",), f"no such preset; {nearest(file.recipe, PRESETS)}", file.recipe)
    if len(file.workload) != 1:
        document.problem(("workload",), f"names {len(file.workload)} workloads; give one of {', '.join(WORKLOADS)}")
        return None
    ((name, values),) = file.workload.items()
    if name not in WORKLOADS:
        document.problem(("workload", name), f"no such workload; {nearest(name, WORKLOADS)}")
        return None
    base = Base(name, values or {}, file.recipe if file.recipe in PRESETS else "nvfp4")
    try:
        base.arm({"recipe": "bf16"})
    except KnobError as error:
        for path, why in error.reasons:
            parts = path.split(".")[1:]
            document.problem(("workload", name, *parts), why, *_value(values, parts))
        return replace(base, values={})  # so that what is wrong elsewhere shows too
    return base


def _value(content: Any, parts: list[str]) -> tuple[Any, ...]:
    for part in parts:
        if not isinstance(content, dict) or part not in content:
            return ()
        content = content[part]
    return (content,)


def _seeds(file: ExperimentFile, document: Document) -> tuple[tuple[int, ...], Growth | None]:
    """The seeds that every arm gets, and how they grow. Those of a search do not: its sampler was told a mean over them."""
    if not isinstance(file.seeds, Growth):
        return file.seeds, None
    if file.search:
        document.problem(("seeds",), f"a search runs its arms on a fixed number of seeds; write seeds: {file.seeds.start}")
    return file.seeds.first, file.seeds


def _metrics(file: ExperimentFile, base: Base | None, document: Document) -> tuple[Metric, ...]:
    """One metric, or several as a list; noted are those that the workload does not measure."""
    if not isinstance(file.metric, list):
        return (_metric(file.metric, ("metric",), base, document),)
    if not file.metric:
        document.problem(("metric",), "is an empty list: name what arms are compared by", file.metric)
    found = tuple(_metric(value, ("metric", index), base, document) for index, value in enumerate(file.metric))
    refuse_twins(("metric",), [metric.name for metric in found], document)
    return found or (Metric(),)


def _metric(value: Any, path: tuple[str | int, ...], base: Base | None, document: Document) -> Metric:
    try:
        metric = Metric.model_validate(value)
    except ValidationError as error:
        for problem in error.errors():
            document.problem((*path, *problem["loc"]), reason(problem, Metric), problem["input"])
        return Metric()
    _refuse_unknown(metric.name, (*path, "name"), base, document)
    return metric


def _refuse_unknown(name: str, path: tuple[str | int, ...], base: Base | None, document: Document) -> None:
    if base is not None and name not in (known := WORKLOADS[base.workload].METRICS):
        document.problem(path, f"no such metric of {base.workload}; {nearest(name, sorted(known))}", name)


def _refuse_unmeasured(file: ExperimentFile, base: Base, arms: list[str], document: Document) -> None:
    """Published figures of arms or metrics that this experiment does not have."""
    for index, figure in enumerate(file.published):
        _refuse_unknown(figure.metric, ("published", index, "metric"), base, document)
        for key in ("arm", "against"):
            name = getattr(figure, key)
            if name is not None and name not in arms and not file.search:
                document.problem(("published", index, key), f"no such arm; {nearest(name, arms)}", name)
    document.check()


def _arms(file: ExperimentFile, base: Base, knobs: Mapping[str, Dimension], document: Document) -> tuple[list[Arm], list[Arm]]:
    """The arms of a grid or a list; for a search none, but those at the ends of each knob, so that mistakes show now."""
    if file.arms is not None:
        points = [(name, turned, {knob: ("arms", name, knob) for knob in turned}) for name, turned in file.arms.items()]
    elif file.search or not all(dimension.ends() for dimension in knobs.values()):
        return [], _ends(base, knobs, document)
    else:
        indices = list(itertools.islice(grid(knobs), _MOST_ARMS + 1))
        if len(indices) > _MOST_ARMS:
            document.problem(("ablate",), f"makes more than {_MOST_ARMS} arms, the most that fit a grid; a `search` samples them")
            return [], []
        points = [(None, values_at(point, knobs), {knob: ("ablate", knob, i) for knob, i in point.items()}) for point in indices]
    arms: list[Arm] = []
    first: dict[tuple[Spec, Recipe], Arm] = {}
    for name, turned, positions in points:
        arm = _try(base, turned, name, positions, document)
        if arm is None:
            continue
        twin = first.setdefault(arm.content, arm)
        if twin is not arm:
            where = ("arms", name) if name else ("ablate",)
            document.problem(where, f"arm {arm.name!r} is the same as {twin.name!r}: a duplicate arm would be run and counted twice")
        arms.append(arm)
    return arms, []


def _ends(base: Base, knobs: Mapping[str, Dimension], document: Document) -> list[Arm]:
    """Arms with one knob at each of its values or ends, beside what it needs of the others."""
    tried = (
        _try(base, conditions(knob, knobs) | {knob: value}, None, {knob: ("ablate", knob, index)}, document)
        for knob, dimension in knobs.items()
        for index, value in enumerate(dimension.ends())
    )
    return [arm for arm in tried if arm]


def _check_search(
    file: ExperimentFile,
    base: Base,
    ends: list[Arm],
    seeds: tuple[int, ...],
    metrics: tuple[Metric, ...],
    name: str,
    document: Document,
) -> None:
    """Note what is wrong with a search as a whole; its single values were checked."""
    for index, constraint in enumerate(file.constraints):
        _refuse_unknown(constraint.metric, ("constraints", index, "metric"), base, document)
    refuse_twins(("constraints",), [constraint.words.rpartition(" ")[0] for constraint in file.constraints], document)
    search = file.search
    if search is None:
        if file.constraints:
            document.problem(("constraints",), "guide a search, and this is none: every arm is run and compared; leave them out")
        return
    if file.constraints and search.sampler == "cmaes":
        document.problem(("search", "sampler"), "takes no constraints; tpe, gp and nsga2 learn where they hold", search.sampler)
    if len(metrics) > 1:
        _check_several(search, len(metrics), document)
    elif search.pruner == "wilcoxon":
        _check_wilcoxon(search, len(seeds), document)
    elif search.pruner:
        _check_rungs(search, metrics[0].name, [base.config, *(arm.config for arm in ends)], document)
    if search.rungs and not search.pruner:
        document.problem(("search", "rungs"), "has no effect without a pruner, such as pruner: median")
    refuse_twins(("search", "warm"), list(search.warm), document)
    if name in search.warm:
        document.problem(("search", "warm"), f"names {name}, this sweep itself, which goes on from its own arms anyway")


def _check_several(search: Search, objectives: int, document: Document) -> None:
    if search.sampler not in SEVERAL:
        why = f"takes one objective, and metric lists {objectives}; {', '.join(SEVERAL)} take several"
        document.problem(("search", "sampler"), why, search.sampler)
    if search.pruner:
        why = f"judges by one objective, and metric lists {objectives}: leave the pruner out, or give one metric"
        document.problem(("search", "pruner"), why, search.pruner)


def _check_wilcoxon(search: Search, seeds: int, document: Document) -> None:
    if search.rungs:
        document.problem(("search", "rungs"), "has no effect: wilcoxon judges an arm as each of its seeds ends, not at steps")
    if seeds < FEWEST_SEEDS:
        why = f"cannot spare a seed of {seeds}: its test needs 4 pairs to tell arms apart; give {FEWEST_SEEDS} seeds or more"
        document.problem(("search", "pruner"), why, search.pruner)
    if search.warm:
        why = "compares seed by seed with the best arm, which an earlier sweep's has not; use median, asha or hyperband, or leave warm out"
        document.problem(("search", "pruner"), why, search.pruner)


def _check_rungs(search: Search, metric: str, configs: list[Spec], document: Document) -> None:
    """A pruner's rungs must be steps at which every arm has the metric, and grow as its rule says."""
    rungs, path = search.rungs, ("search", "rungs")
    valid = [step for step in configs[0].recorded(metric) if all(step in config.recorded(metric) for config in configs)]
    listed = ", ".join(map(str, valid[:_SHOWN])) + (f", ... {valid[-1]}" if len(valid) > _SHOWN else "")
    if not valid:
        document.problem(("search", "pruner"), f"there is no step before the last at which every arm has {metric}", search.pruner)
    elif not rungs:
        document.problem(("search", "pruner"), f"needs rungs, the steps at which arms are judged: of {listed}", search.pruner)
    for index, rung in enumerate(rungs):
        if valid and rung not in valid:
            document.problem((*path, index), f"not every arm has {metric} there, before its end; valid are {listed}", rung)
    if list(rungs) != sorted(set(rungs)):
        document.problem(path, "must rise", list(rungs))
    elif search.pruner == "hyperband" and len(rungs) == 1:
        document.problem(path, "hyperband starts its brackets at different rungs: give two or more, or use asha", list(rungs))
    elif search.pruner in ("asha", "hyperband") and not _geometric(rungs):
        why = f"{search.pruner} keeps one arm in n at each rung, which comes after n times as many steps: such as 50, 100, 200"
        document.problem(path, why, list(rungs))


def _geometric(rungs: tuple[int, ...]) -> bool:
    """Whether each rung is the same whole number of times the one before."""
    factor = rungs[1] // rungs[0] if rungs[1:] else 2
    return all(later == factor * earlier for earlier, later in itertools.pairwise(rungs))


def _try(base: Base, knobs: Mapping[str, Any], name: str | None, positions: Mapping[str, tuple], document: Document) -> Arm | None:
    try:
        return base.arm(knobs, name)
    except KnobError as error:
        for knob, why in error.reasons:
            shown = (knobs[knob],) if knob in knobs else ()
            document.problem(positions.get(knob, ("ablate",) if name is None else ("arms", name)), why, *shown)
        return None


def _against(file: ExperimentFile, base: Base, arms: list[Arm], document: Document) -> dict[str, Any]:
    """The baseline as knobs: of a preset, of an arm by name, or as written."""
    value = file.against
    if isinstance(value, dict):
        _try(base, value, "against", {knob: ("against", knob) for knob in value}, document)
        return value
    if not isinstance(value, str):
        document.problem(("against",), "must be a preset, an arm's name, or knobs as {knob: value}", value)
        return {}
    if value in PRESETS:
        return {"recipe": value}
    named = {arm.name: dict(arm.knobs) for arm in arms}
    if value in named:
        return named[value]
    document.problem(("against",), f"no such baseline: neither a preset nor an arm; {nearest(value, [*PRESETS, *named])}", value)
    return {}


def _baseline(base: Base, against: Mapping[str, Any], knobs: Mapping[str, Any]) -> Arm:
    """What an arm with these knobs is compared with: the baseline's recipe under the arm's own workload values."""
    workload = {knob: value for knob, value in knobs.items() if knob.startswith("workload.")}
    return base.arm({**against, **workload})


def _compared(arm: Arm, baseline: Arm) -> Arm:
    return Arm(arm.name, arm.knobs, arm.config, arm.recipe, None if arm.content == baseline.content else baseline.name)


def _with_baselines(
    file: ExperimentFile, base: Base, arms: list[Arm], against: Mapping[str, Any], document: Document
) -> tuple[list[Arm], list[Arm]]:
    """The baselines that are not among the arms, and the arms, each with the name of its own baseline."""
    if file.search:
        varies = any(knob.startswith("workload.") for knob in file.ablate)
        return ([] if varies else [_baseline(base, against, {})]), []
    extra: dict[str, Arm] = {}
    compared = []
    named = {arm.content: arm for arm in reversed(arms)}
    for arm in arms:
        baseline = _baseline(base, against, arm.knobs)
        known = named.get(baseline.content)
        if known is None:
            extra[baseline.name] = known = baseline
        compared.append(_compared(arm, known))
    for name in {arm.name for arm in arms} & set(extra):
        document.problem(("arms", name), "is the baseline's name too, but another arm; choose another name")
    document.check()
    return list(extra.values()), compared
