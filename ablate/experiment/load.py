"""From an experiment as written to an experiment as meant: YAML in, arms and trial specs out, or every mistake at its place."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ablate.errors import InputError, nearest
from ablate.experiment.arms import Arm, Base, KnobError, reason
from ablate.experiment.engine_selection import Choice, check, choose, misfit
from ablate.experiment.phases import unreached
from ablate.experiment.roles import CONFIRM
from ablate.experiment.schema import (
    MOST_ARMS,
    MOST_TRIALS,
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
from ablate.experiment.search_checks import check_search
from ablate.experiment.search_space import (
    Dimension,
    conditions,
    grid,
    refuse_twins,
    size,
    space,
    spell_out,
    values_at,
)
from ablate.experiment.trial_spec import TrialSpec
from ablate.experiment.yaml_document import Document, read
from ablate.numerics.spec import Spec
from ablate.recipes import PRESETS, Recipe
from ablate.training.workloads import WORKLOADS

_LONGEST_NAME = 200
"""Bytes: file systems take 255, and files named after a sweep have suffixes."""
_MISPLACED = dict.fromkeys(
    ("pruner", "rungs"),
    "belongs under search: the arms of a grid are compared seed by seed, and none of them may end early",
)


@dataclass(frozen=True)
class Against:
    """Baseline that a file names: knobs, applied at each arm's own workload values, or one arm, for all others."""

    knobs: Mapping[str, Any]
    arm: Arm | None = None
    """The arm that was named, which keeps its own workload values."""

    def pins(self, knob: str) -> bool:
        """Return True if the baseline itself sets this workload knob, a part of it or what it is part of."""
        return any(f"{knob}.".startswith(f"{own}.") or f"{own}.".startswith(f"{knob}.") for own in self.knobs)


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
    against: Against
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
    notes: tuple[str, ...] = ()
    """What is odd about the file, though it can be run, each with its place in it."""

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

    @cached_property
    def most_searched(self) -> int:
        """Number of arms that the search can propose: its trials, or all points of a smaller space; 0 for a grid."""
        return size(self.space, self.search.trials) if self.search else 0

    def propose(self, knobs: Mapping[str, Any]) -> tuple[Arm, Arm]:
        """Build a searched arm and its baseline; KnobError with every reason where one of them cannot be run."""
        arm, baseline = self.base.arm(knobs), _baseline(self.base, self.against, knobs)
        for one in (arm, baseline):
            if why := self.resources.misfit(one.config, one.recipe, self.engine):
                raise KnobError([("resources", why)])
            if why := misfit(self.engine, one, self.resources.most):
                raise KnobError([("engine", why)])
        return _compared(arm, baseline), baseline

    def spec(self, arm: Arm, seed: int, device: str) -> TrialSpec:
        """The trial of one member."""
        return TrialSpec(
            workload=self.base.workload,
            config=arm.config,
            recipe=arm.recipe,
            seed=seed,
            engine=self.engine,
            device=device,
        )


def sweep_name(path: Path) -> str:
    """Return the name of the sweep that a file describes: its own without the suffix. InputError if no folder can have that name."""
    name = path.stem
    if not name.strip(".") or name.startswith("."):
        why = f"a sweep is named after its file, and {name!r} is the name of no folder, or of a hidden one"
    elif "/" in name or "\\" in name or not name.isprintable():
        why = f"a sweep is named after its file, and {name!r} holds a separator or a character that cannot be printed"
    elif len(name.encode()) > _LONGEST_NAME:
        why = f"a sweep is named after its file, and this name has more than {_LONGEST_NAME} bytes"
    else:
        return name
    raise InputError([f"{str(path)!r}: {why}; rename the file, to rht_sr.yaml for example"])


def load(path: Path, device: str | None = None) -> Experiment:
    """Read, check and expand an experiment file; InputError with every problem where it cannot be run as it stands.

    `device`: the class of device that it is to run on, which decides between engines; None: whatever is here.
    """
    name = sweep_name(path)
    document = read(path)
    spell_out(document)
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
    _check_constraints(file, base, document)
    check_search(file, base, ends, len(seeds), metrics, name, document)
    document.check()
    baselines, compared = _with_baselines(file, base, arms, against, document)
    if (trials := len(seeds) * len((*baselines, *compared))) > MOST_TRIALS:
        document.problem(
            ("seeds",), f"make {trials} trials of all arms; an experiment has at most {MOST_TRIALS}"
        )
    _refuse_unmeasured(file, base, [arm.name for arm in (*baselines, *compared)], document)
    choice = _engine(file, (*baselines, *compared, *ends), device, document)
    _refuse_misfits(file, (*baselines, *compared), choice, document)
    return Experiment(
        name=name,
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
        notes=tuple(_notes(file, knobs, (*baselines, *compared, *ends), document)),
    )


def _notes(
    file: ExperimentFile, knobs: Mapping[str, Dimension], arms: Iterable[Arm], document: Document
) -> Iterator[str]:
    """Yield what is odd about the file, though it can be run."""
    if file.search and (points := size(knobs, file.search.trials)) < file.search.trials:
        why = f"the space has {points} points, so the search ends once it has proposed each of them"
        yield document.told(("search", "trials"), why, file.search.trials)
    arms = list(arms)
    named = next(
        (arm for arm in arms if file.arms and arm.name == file.against and arm.name in PRESETS), None
    )
    if named and any(arm.baseline not in (None, named.name) for arm in arms):
        why = f"arms of other workload values are compared with preset {named.name} at their own values, not with this arm"
        right = "if this arm is meant, give it a name that is no preset's"
        yield document.told(("arms", named.name), f"{why}; {right}")
    for name, why in unreached(arms, file.recipe):
        yield document.told(("arms", name) if file.arms else ("ablate",), why)


def _surface(document: Document) -> ExperimentFile:
    """The file's top level. Keys that are wrong are noted and left out, so that what is wrong elsewhere shows too."""
    content = {"schema": 1, "question": "-"} | document.value
    try:
        return ExperimentFile.model_validate(document.value)
    except ValidationError as error:
        for problem in error.errors():
            missing = problem["type"] == "missing"
            why = _MISPLACED.get(problem["loc"][-1]) if problem["loc"][1:] == () else None
            document.problem(
                problem["loc"],
                why or reason(problem, ExperimentFile),
                *(() if missing else (problem["input"],)),
            )
            content.pop(problem["loc"][0], None)
    if "workload" not in content:
        document.check()
    return ExperimentFile.model_validate({"schema": 1, "question": "-"} | content)


def _check_engine(file: ExperimentFile, document: Document) -> None:
    try:
        check(file.engine)
    except ValueError as error:
        document.problem(("engine",), str(error), file.engine)


def _engine(
    file: ExperimentFile, arms: tuple[Arm, ...], device: str | None, document: Document
) -> Choice | None:
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
        document.problem(
            ("workload",), f"names {len(file.workload)} workloads; give one of {', '.join(WORKLOADS)}"
        )
        return None
    ((name, values),) = file.workload.items()
    if name not in WORKLOADS:
        document.problem(("workload", name), f"no such workload; {nearest(name, WORKLOADS)}")
        return None
    base = Base(
        name,
        values or {},
        file.recipe if file.recipe in PRESETS else "nvfp4",
        Path(document.file).parent.resolve(),
    )
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
        document.problem(
            ("seeds",), f"a search runs its arms on a fixed number of seeds; write seeds: {file.seeds.start}"
        )
    return file.seeds.first, file.seeds


def _metrics(file: ExperimentFile, base: Base | None, document: Document) -> tuple[Metric, ...]:
    """One metric, or several as a list; noted are those that the workload does not measure."""
    if not isinstance(file.metric, list):
        return (_metric(file.metric, ("metric",), base, document),)
    if not file.metric:
        document.problem(("metric",), "is an empty list: name what arms are compared by", file.metric)
    found = tuple(
        _metric(value, ("metric", index), base, document) for index, value in enumerate(file.metric)
    )
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


def _arms(
    file: ExperimentFile, base: Base, knobs: Mapping[str, Dimension], document: Document
) -> tuple[list[Arm], list[Arm]]:
    """Return the arms of a grid or a list; for a search none, but those at the ends of each knob, so that mistakes show now."""
    if file.arms is not None:
        _refuse_names(file.arms, document)
        points = [
            (name, turned, {knob: ("arms", name, knob) for knob in turned})
            for name, turned in file.arms.items()
        ]
    elif file.search or not all(dimension.ends() for dimension in knobs.values()):
        return [], _ends(base, knobs, document)
    else:
        least = math.prod(len(dimension.choices) for dimension in knobs.values() if not dimension.when)
        indices = list(itertools.islice(grid(knobs), MOST_ARMS + 1)) if least <= MOST_ARMS else []
        if least > MOST_ARMS or len(indices) > MOST_ARMS:
            document.problem(
                ("ablate",),
                f"makes more than {MOST_ARMS} arms, the most that fit a grid; a `search` samples them",
            )
            return [], []
        points = [
            (None, values_at(point, knobs), {knob: ("ablate", knob, i) for knob, i in point.items()})
            for point in indices
        ]
    arms: list[Arm] = []
    first: dict[tuple[Spec, Recipe], Arm] = {}
    for name, turned, positions in points:
        arm = _try(base, turned, name, positions, document)
        if arm is None:
            continue
        twin = first.setdefault(arm.content, arm)
        if twin is not arm:
            path = ("ablate",) if name is None else ("arms", name)
            document.problem(
                path,
                f"arm {arm.name!r} is the same as {twin.name!r}: a duplicate arm would be run and counted twice",
            )
        arms.append(arm)
    return arms, []


def _refuse_names(names: Iterable[str], document: Document) -> None:
    """Note names that no arm can have: without a visible character, or with the prefix of the arms that rerun a search's winner."""
    for name in names:
        if not name.strip():
            why = f"arm {name!r} has an empty name; name it after what it changes, for example no_rht"
            document.problem(("arms", name), why)
        elif name.startswith(CONFIRM):
            why = f"arm {name!r}: the prefix {CONFIRM!r} is for the arm that runs a search's winner again"
            right = name.removeprefix(CONFIRM).strip() or "no_rht"
            document.problem(("arms", name), f"{why}; leave it out: {right!r}")


def _ends(base: Base, knobs: Mapping[str, Dimension], document: Document) -> list[Arm]:
    """Arms with one knob at each of its values or ends, beside what it needs of the others."""
    tried = (
        _try(
            base,
            conditions(knob, knobs) | {knob: value},
            None,
            {knob: ("ablate", knob, index)},
            document,
            tried=True,
        )
        for knob, dimension in knobs.items()
        for index, value in enumerate(dimension.ends())
    )
    return [arm for arm in tried if arm]


def _check_constraints(file: ExperimentFile, base: Base, document: Document) -> None:
    """Note constraints on a metric that the workload does not measure, that stand twice, or that guide no search."""
    for index, constraint in enumerate(file.constraints):
        _refuse_unknown(constraint.metric, ("constraints", index, "metric"), base, document)
    refuse_twins(
        ("constraints",), [constraint.words.rpartition(" ")[0] for constraint in file.constraints], document
    )
    if file.constraints and file.search is None:
        document.problem(
            ("constraints",),
            "guide a search, and this is none: every arm is run and compared; leave them out",
        )


def _try(
    base: Base,
    knobs: Mapping[str, Any],
    name: str | None,
    positions: Mapping[str, tuple],
    document: Document,
    tried: bool = False,
) -> Arm | None:
    try:
        return base.arm(knobs, name, tried=tried)
    except KnobError as error:
        for knob, why in error.reasons:
            shown = (knobs[knob],) if knob in knobs else ()
            document.problem(
                positions.get(knob, ("ablate",) if name is None else ("arms", name)), why, *shown
            )
        return None


def _against(file: ExperimentFile, base: Base, arms: list[Arm], document: Document) -> Against:
    """Read the baseline: a preset, an arm by its name, or knobs; exactly an arm's knobs name that arm.

    A preset is compared at each arm's own workload values, so it does not stand for an arm of its name: that arm has to have the
    preset's recipe.
    """
    value, named = file.against, {arm.name: arm for arm in arms}
    if isinstance(value, dict):
        built = _try(base, value, "against", {knob: ("against", knob) for knob in value}, document)
        alike = (arm for arm in arms if built and arm.content == built.content)
        return Against(value, next((arm for arm in alike if arm.knobs.keys() == value.keys()), None))
    if not isinstance(value, str):
        document.problem(("against",), "must be a preset, an arm's name, or knobs as {knob: value}", value)
    elif value in PRESETS:
        if value in named and named[value].recipe != PRESETS[value]():
            why = f"an arm named after preset {value}, with another recipe, so that `against: {value}` could mean either"
            right = "give the arm a name that is no preset's, and write that under against if it is meant"
            document.problem(("arms", value), f"{why}; {right}")
        return Against({"recipe": value})
    else:
        if value in named:
            return Against(named[value].knobs, named[value])
        if value not in (file.arms or {}):  # else what is wrong with the arm was noted
            why = f"no such baseline: neither a preset nor an arm; {nearest(value, [*PRESETS, *named])}"
            document.problem(("against",), why, value)
    return Against({})


def _baseline(base: Base, against: Against, knobs: Mapping[str, Any]) -> Arm:
    """Return what an arm with these knobs is compared with: the arm that the file names, or the baseline's knobs at
    this arm's workload values, except those that the baseline sets itself."""
    if against.arm is not None:
        return against.arm
    varied = {knob: value for knob, value in knobs.items() if knob.startswith("workload.")}
    return base.arm(
        {**against.knobs, **{knob: value for knob, value in varied.items() if not against.pins(knob)}}
    )


def _noted_baseline(
    base: Base, against: Against, knobs: Mapping[str, Any], whose: str, document: Document
) -> Arm | None:
    """Return `_baseline`; None, with the problem noted, if it cannot be run."""
    try:
        return _baseline(base, against, knobs)
    except KnobError as error:
        document.problem(("against",), f"the baseline of {whose} cannot be run: {error}")
        return None


def _compared(arm: Arm, baseline: Arm) -> Arm:
    return Arm(
        arm.name,
        arm.knobs,
        arm.config,
        arm.recipe,
        None if arm.content == baseline.content else baseline.name,
    )


def _with_baselines(
    file: ExperimentFile, base: Base, arms: list[Arm], against: Against, document: Document
) -> tuple[list[Arm], list[Arm]]:
    """The baselines that are not among the arms, and the arms, each with the name of its own baseline."""
    if file.search:
        varies = any(knob.startswith("workload.") and not against.pins(knob) for knob in file.ablate)
        known = None if varies else _noted_baseline(base, against, {}, "the search", document)
        document.check()
        return ([known] if known else []), []
    extra: dict[str, Arm] = {}
    compared = []
    named = {arm.content: arm for arm in reversed(arms)}
    for arm in arms:
        baseline = _noted_baseline(base, against, arm.knobs, f"arm {arm.name!r}", document)
        if baseline is None:
            continue
        known = named.get(baseline.content)
        if known is None:
            extra[baseline.name] = known = baseline
        compared.append(_compared(arm, known))
    for name in {arm.name for arm in arms} & set(extra):
        document.problem(("arms", name), "is the baseline's name too, but another arm; choose another name")
    document.check()
    return list(extra.values()), compared
