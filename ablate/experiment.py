"""From an experiment as written to an experiment as meant: YAML in, arms and trial specs out, or every mistake at its place."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ablate.arms import Arm, Base, KnobError, reason
from ablate.engines import resolve
from ablate.recipes import PRESETS
from ablate.surface import NOT_YET, Budget, ExperimentFile, Metric, Published, Search, TelemetryKeys
from ablate.trial import TrialSpec
from ablate.workloads import WORKLOADS
from ablate.yamlfile import Document, nearest, read

_MOST_ARMS = 10_000


@dataclass(frozen=True)
class Dimension:
    """One knob's range or choices."""

    kind: Literal["choice", "uniform", "int"]
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False

    def ends(self) -> tuple[Any, ...]:
        """Values to try, to see whether the range makes sense: every choice, or both ends; of real numbers a value between too."""
        if self.kind == "choice":
            return self.choices
        middle = () if self.kind == "int" else (self.low + (self.high - self.low) / math.pi,)
        return (self.low, self.high, *middle)


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
    metrics: tuple[Metric, ...]
    """What arms are compared by, the main one first."""
    published: tuple[Published, ...]
    search: Search | None
    engine: str
    retry: int
    budget: Budget
    telemetry: TelemetryKeys

    @property
    def metric(self) -> Metric:
        """The main metric: what a search optimises, and what MLflow and the study show."""
        return self.metrics[0]

    def propose(self, knobs: Mapping[str, Any]) -> tuple[Arm, Arm]:
        """A searched arm and its baseline: the same workload values under the recipe it is compared with."""
        arm, baseline = self.base.arm(knobs), _baseline(self.base, self.against, knobs)
        return _compared(arm, baseline), baseline

    def spec(self, arm: Arm, seed: int, device: str) -> TrialSpec:
        """The trial of one member."""
        return TrialSpec(workload=self.base.workload, config=arm.config, recipe=arm.recipe, seed=seed, engine=self.engine, device=device)


def load(path: Path) -> Experiment:
    """Read, check and expand an experiment file; InputError with every problem where it cannot be run as it stands."""
    document = read(path)
    file = _surface(document)
    _refuse_not_yet(document)
    engine = _engine(file, document)
    base = _base(file, document)
    metrics = _metrics(file, base, document)
    space = _space(file, document)
    if base is None:
        document.check()
    arms = _arms(file, base, space, document)
    against = _against(file, base, arms, document)
    document.check()
    baselines, compared = _with_baselines(file, base, arms, against, document)
    _refuse_unmeasured(file, base, [arm.name for arm in (*baselines, *compared)], document)
    return Experiment(
        name=path.stem,
        file=str(path),
        text=document.text,
        question=file.question.strip(),
        base=base,
        space=space,
        arms=(*baselines, *compared),
        added=frozenset(arm.name for arm in baselines),
        against=against,
        seeds=file.seeds,
        metrics=metrics,
        published=file.published,
        search=file.search,
        engine=engine,
        retry=file.retry,
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
            document.problem(problem["loc"], reason(problem, ExperimentFile), *(() if missing else (problem["input"],)))
            content.pop(problem["loc"][0], None)
    if "workload" not in content:
        document.check()
    return ExperimentFile.model_validate({"schema": 1, "question": "-"} | content)


def _refuse_not_yet(document: Document) -> None:
    for path, why in NOT_YET.items():
        value = document.value
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            document.problem(path, why)
    resources = document.value.get("resources")
    if isinstance(resources, dict) and isinstance(resources.get("gpus"), int) and resources["gpus"] > 1:
        document.problem(("resources", "gpus"), "trials on several GPUs are not yet available; use 0 or 1")
    if isinstance(document.value.get("metric"), list) and document.value.get("search"):
        document.problem(("metric",), "a search for several objectives is not yet available; give one metric")


def _engine(file: ExperimentFile, document: Document) -> str | None:
    try:
        return resolve(file.engine)
    except ValueError as error:
        document.problem(("engine",), str(error), file.engine)
        return None


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


def _metrics(file: ExperimentFile, base: Base | None, document: Document) -> tuple[Metric, ...]:
    """One metric, or several as a list; noted are those that the workload does not measure."""
    if not isinstance(file.metric, list):
        return (_metric(file.metric, ("metric",), base, document),)
    if not file.metric:
        document.problem(("metric",), "is an empty list: name what arms are compared by", file.metric)
    found = tuple(_metric(value, ("metric", index), base, document) for index, value in enumerate(file.metric))
    _refuse_twins(("metric",), [metric.name for metric in found], document)
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
        if figure.arm not in arms and not file.search:
            document.problem(("published", index, "arm"), f"no such arm; {nearest(figure.arm, arms)}", figure.arm)
    document.check()


def _space(file: ExperimentFile, document: Document) -> dict[str, Dimension]:
    if (file.ablate is None) == (file.arms is None):
        document.problem((), "give either `ablate` (knobs and their values) or `arms` (arms by name)")
        return {}
    if file.search and file.arms is not None:
        document.problem(("search",), "a search turns the knobs of `ablate`; `arms` lists points one by one")
    if file.ablate is not None and not file.ablate:
        document.problem(("ablate",), "is empty: name at least one knob, such as rht: [true, false]")
    if file.arms is not None and not file.arms:
        document.problem(("arms",), "is empty: name at least one arm")
    return {knob: _dimension(knob, values, file, document) for knob, values in (file.ablate or {}).items()}


def _dimension(knob: str, values: Any, file: ExperimentFile, document: Document) -> Dimension:
    path = ("ablate", knob)
    if isinstance(values, list):
        if not values:
            document.problem(path, "is an empty list: an empty grid; give the values to try", values)
        _refuse_twins(path, values, document)
        return Dimension("choice", choices=tuple(values))
    if not isinstance(values, dict):
        document.problem(path, f"is a single value; give a list, [{values}], or a range", values)
        return Dimension("choice")
    if file.search is None:
        document.problem(path, "is a range, which needs `search: {trials: ...}`; a grid takes a list of values")
    return _range(path, values, document)


def _refuse_twins(path: tuple[str, ...], values: list[Any], document: Document) -> None:
    for index, value in enumerate(values):
        if any(type(value) is type(other) and value == other for other in values[:index]):
            document.problem((*path, index), "stands twice", value)


def _range(path: tuple[str, ...], values: dict[str, Any], document: Document) -> Dimension:
    kinds = [kind for kind in ("uniform", "int", "choice") if kind in values]
    for key in values:
        if key not in ("uniform", "int", "choice", "log"):
            document.problem((*path, key), f"no such key of a range; {nearest(key, ('uniform', 'int', 'choice', 'log'))}")
    if len(kinds) != 1:
        document.problem(path, "is not a range; write {uniform: [low, high]}, {int: [low, high]} or {choice: [...]}")
        return Dimension("choice")
    kind, content, log = kinds[0], values[kinds[0]], values.get("log", False)
    if kind == "choice":
        if not isinstance(content, list) or not content:
            document.problem((*path, kind), "must be a list of at least one value", content)
            return Dimension("choice")
        _refuse_twins((*path, kind), content, document)
        return Dimension("choice", choices=tuple(content))
    types = (int,) if kind == "int" else (int, float)
    numbers = isinstance(content, list) and len(content) == 2 and all(type(x) in types for x in content)
    if not numbers or not all(map(math.isfinite, content)) or content[0] >= content[1]:
        document.problem((*path, kind), "must be [low, high] with low < high", content)
        return Dimension("choice")
    if type(log) is not bool or (log and content[0] <= 0):
        document.problem((*path, "log"), "must be true or false, and true only where low > 0", log)
    return Dimension(kind, low=content[0], high=content[1], log=log is True)


def _arms(file: ExperimentFile, base: Base, space: Mapping[str, Dimension], document: Document) -> list[Arm]:
    """The arms of a grid or a list; for a search none, but each knob's ends are tried, so that mistakes show now."""
    if file.arms is not None:
        points = [(name, knobs, {knob: ("arms", name, knob) for knob in knobs}) for name, knobs in file.arms.items()]
    elif file.search or not all(dimension.ends() for dimension in space.values()):
        for knob, dimension in space.items():
            for index, value in enumerate(dimension.ends()):
                _try(base, {knob: value}, None, {knob: ("ablate", knob, index)}, document)
        return []
    else:
        count = math.prod(len(dimension.choices) for dimension in space.values())
        if count > _MOST_ARMS:
            document.problem(("ablate",), f"makes {count} arms; at most {_MOST_ARMS} fit a grid, a `search` samples them")
            return []
        indices = itertools.product(*(range(len(dimension.choices)) for dimension in space.values()))
        points = [
            (
                None,
                {knob: space[knob].choices[i] for knob, i in zip(space, point, strict=True)},
                {knob: ("ablate", knob, i) for knob, i in zip(space, point, strict=True)},
            )
            for point in indices
        ]
    arms: list[Arm] = []
    for name, knobs, positions in points:
        arm = _try(base, knobs, name, positions, document)
        if arm is None:
            continue
        twin = next((other for other in arms if other.content == arm.content), None)
        if twin:
            where = ("arms", name) if name else ("ablate",)
            document.problem(where, f"arm {arm.name!r} is the same as {twin.name!r}: a duplicate arm would be run and counted twice")
        arms.append(arm)
    return arms


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
    for arm in arms:
        baseline = _baseline(base, against, arm.knobs)
        known = next((other for other in arms if other.content == baseline.content), None)
        if known is None:
            extra[baseline.name] = known = baseline
        compared.append(_compared(arm, known))
    for name in {arm.name for arm in arms} & set(extra):
        document.problem(("arms", name), "is the baseline's name too, but another arm; choose another name")
    document.check()
    return list(extra.values()), compared
