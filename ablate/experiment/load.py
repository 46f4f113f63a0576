"""Load an experiment: read a YAML file, check it, expand it to arms, or report every mistake at its line and
column.

A sweep runs for hours, so a mistake in its file has to show before the first trial starts, and all mistakes
at once. `load` goes through the file in stages: plain values with positions (`yaml_document`), types and
ranges of keys (`schema`), the knobs (`search_space`), the arms that they make (`expand`), the baseline of
each (`baseline`), the engine for all of them (`engine_selection`). A stage notes its problems in the document
and replaces a wrong value by its default, so that later stages still find theirs. Example:

    experiment = load(Path("experiments/rht_sr.yaml"), device="cpu")
    [arm.name for arm in experiment.arms]              # baselines first
    experiment.spec(experiment.arms[0], 0, "cpu").id   # 16 hex digits

Refused are, for example: keys that do not exist (with the nearest one, or the path where the key
belongs), two arms that resolve to the same recipe and workload, metrics that the workload does not measure,
phases of a schedule that no step reaches, recipes that the requested engine cannot compute, and grids with
too many arms. What is odd but can run becomes a note instead (`Experiment.notes`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from ablate.engines.hardware import Machine
from ablate.errors import InputError, nearest
from ablate.experiment.arms import RECIPE_FILES, Arm, KnobError, Knobs, StartingPoint, keys
from ablate.experiment.asked import check_asked, check_kept
from ablate.experiment.baseline import Against, baseline_of, compared, read_against, with_baselines
from ablate.experiment.engine_selection import Choice, check, choose, misfit
from ablate.experiment.expand import arms_and_ends
from ablate.experiment.forked_design import misfits as fork_misfits
from ablate.experiment.forked_design import resolved
from ablate.experiment.metric_checks import metrics_in, refuse_metric
from ablate.experiment.misplaced_keys import misplaced, with_paths, without_alternatives
from ablate.experiment.phases import unreached
from ablate.experiment.recipe_source import load as recipe_of
from ablate.experiment.recipe_source import parse, recipe_name
from ablate.experiment.roles import BAD, NULL
from ablate.experiment.schema import (
    MOST_TRIALS,
    Asked,
    Budget,
    Constraint,
    Design,
    ExperimentFile,
    Growth,
    Metric,
    Published,
    Resources,
    Search,
    TelemetryKeys,
)
from ablate.experiment.search_checks import check_search
from ablate.experiment.search_space import Dimension, refuse_twins, size, space, spell_out
from ablate.experiment.trial_spec import TrialSpec
from ablate.experiment.yaml_document import Document, read, with_values
from ablate.experiment.yaml_document import parse as parse_yaml
from ablate.files import Json
from ablate.recipes import PRESETS, Recipe
from ablate.training.fork_design import Forks
from ablate.training.metric_names import target_of
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.python import Python
from ablate.training.workloads.trained import Trained

_LONGEST_NAME = 200
"""Largest length of a sweep's name in bytes: file systems allow 255, and files named after a sweep have
suffixes."""


@dataclass(frozen=True)
class Experiment:
    """Checked contents of an experiment file: every arm that it names can be built."""

    name: str
    file: str
    text: str
    question: str
    base: StartingPoint
    space: Mapping[str, Dimension]
    arms: tuple[Arm, ...]
    """Arms known from the start, baselines first: all arms of a grid, only the baseline of a search."""
    added: frozenset[str]
    """Names of those baselines that the file's own arms do not include."""
    against: Against
    seeds: tuple[int, ...]
    """Seeds that every arm gets."""
    growth: Growth | None
    """Rule that adds seeds to an undecided arm; None: no seeds are added."""
    metrics: tuple[Metric, ...]
    """Metrics by which arms are compared, the main one first."""
    published: tuple[Published, ...]
    search: Search | None
    constraints: tuple[Constraint, ...]
    resources: Resources
    engine: str
    engine_why: str
    """Reason why `auto` selected the emulator; empty if the file names an engine or Transformer Engine was
    selected."""
    retry: int
    patience: float
    budget: Budget
    telemetry: TelemetryKeys
    design: Design | None = None
    """Forks of a trunk in place of full runs; None: full runs."""
    asked: Asked | None = None
    """The comparison that the question is about; None: inferred."""
    notes: tuple[str, ...] = ()
    """Remarks on what is odd in the file but can run, each with its line and column."""

    @property
    def metric(self) -> Metric:
        """Main metric, by which an arm is judged and which MLflow shows."""
        return self.metrics[0]

    @property
    def objectives(self) -> tuple[Metric, ...]:
        """Metrics of the Optuna study: all metrics of a search, the main metric of a grid."""
        return self.metrics if self.search else self.metrics[:1]

    @property
    def prunes(self) -> bool:
        """Return True if arms may be pruned before their last step."""
        return self.search is not None and self.search.pruner is not None

    @cached_property
    def most_searched(self) -> int:
        """Largest number of arms that the search can propose: its trials, or all points of a smaller space; 0
        for a grid."""
        return size(self.space, self.search.trials) if self.search else 0

    def propose(self, knobs: Knobs) -> tuple[Arm, Arm]:
        """Build the arm that a sampler proposed, and its baseline.

        Args:
            knobs: value of each knob.

        Returns:
            The arm and its baseline.

        Raises:
            KnobError: one of the two cannot be run; with every reason.
        """
        arm, baseline = self.base.arm(knobs), baseline_of(self.base, self.against, knobs)
        for candidate in (arm, baseline):
            if why := self.resources.misfit(candidate.config, candidate.recipe, self.engine):
                raise KnobError([("resources", why)])
            if why := misfit(self.engine, candidate, self.resources.most):
                raise KnobError([("engine", why)])
            if self.design and (unfit := [*fork_misfits(self.design, candidate.config, candidate.recipe)]):
                raise KnobError([*unfit])
        return compared(arm, baseline), baseline

    def forks(self, arm: Arm) -> Forks | None:
        """Return the windows of an arm's trials; None for full runs."""
        return resolved(self.design, arm.config) if self.design else None

    def spec(self, arm: Arm, seed: int, device: str) -> TrialSpec:
        """Return the trial of an arm at a seed, on a class of device (`cpu` or `cuda`)."""
        return TrialSpec(
            workload=self.base.workload,
            config=arm.config,
            recipe=arm.recipe,
            seed=seed,
            engine=self.engine,
            device=device,
            forks=self.forks(arm),
            twin=arm.twin,
        )


def sweep_name(path: Path) -> str:
    """Return the name of a file's sweep: the file's name without its suffix. InputError if no folder can have
    that name."""
    name = path.stem
    if not name.strip(".") or name.startswith("."):
        why = f"a sweep is named after its file, and a folder named {name!r} is hidden or impossible"
    elif "/" in name or "\\" in name or not name.isprintable():
        why = (
            f"a sweep is named after its file, and {name!r} contains a separator or an unprintable character"
        )
    elif len(name.encode()) > _LONGEST_NAME:
        why = f"a sweep is named after its file, and this name has more than {_LONGEST_NAME} bytes"
    else:
        return name
    raise InputError([f"{str(path)!r}: {why}; rename the file, to rht_sr.yaml for example"])


def load(
    path: Path, device: str | None = None, count: int | None = None, machine: Machine | None = None
) -> Experiment:
    """Read, check and expand an experiment file.

    Args:
        path: the YAML file. Its name without the suffix is the name of the sweep.
        device: class of device that trials will run on (`cpu` or `cuda`), on which `engine: auto` depends;
            None: that of this machine.
        count: number of seeds in place of the file's, as if it were written there; None: the file's.
        machine: description of the machine that the engine is chosen for; None: this machine.

    Returns:
        The experiment. Every arm that it names can be built and computed by its engine.

    Raises:
        InputError: the file cannot be run as it is; with every problem, each at its line and column.
    """
    name = sweep_name(path)
    document = read(path)
    if count is not None:
        document = parse_yaml(with_values(document.text, {"seeds": count}), document.file)
    spell_out(document)
    file = _surface(document)
    _check_engine(file, document)
    base = _base(file, document)
    seeds, growth = _seeds(file, document)
    metrics = metrics_in(file, base, document)
    knobs = space(file, document)
    if base is None:
        document.check()
    assert base is not None, "without a base, a problem has been noted"
    arms, ends = arms_and_ends(file, base, knobs, document)
    against = read_against(file, base, arms, document)
    _check_constraints(file, base, document)
    check_search(file, base, ends, len(seeds), metrics, name, document)
    document.check()
    added, arms = with_baselines(file, base, arms, against, document)
    design, bad = _known_bad(file, base, against, [*added, *arms], document)
    null = _null_arm(file, [*added, *arms], document)
    every_arm = (*added, *arms, *bad, *null)
    asked = check_asked(file, knobs, every_arm, document)
    document.check()
    _check_design(file, base, (*every_arm, *ends), metrics, document)
    if (trials := len(seeds) * len(every_arm)) > MOST_TRIALS:
        document.problem(
            ("seeds",), f"make {trials} trials of all arms; an experiment has at most {MOST_TRIALS}"
        )
    _refuse_unmeasured(file, base, [arm.name for arm in every_arm], document)
    check_kept(file, every_arm, document)
    choice = _engine(file, (*every_arm, *ends), device, machine, document)
    _refuse_misfits(file, every_arm, choice, document)
    return Experiment(
        name=name,
        file=str(path),
        text=document.text,
        question=file.question.strip(),
        base=base,
        space=knobs,
        arms=every_arm,
        added=frozenset(arm.name for arm in added),
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
        design=design,
        asked=asked,
        notes=tuple(_notes(file, base, knobs, (*every_arm, *ends), document)),
    )


_LEVELS = ("val/loss", "val/loss_bf16")
"""Metrics that a forked trial has at the end of its windows."""


def _null_arm(file: ExperimentFile, arms: list[Arm], document: Document) -> list[Arm]:
    """Return the twin of the first baseline, if the file asks for one."""
    if not file.null:
        return []
    first = next((arm for arm in arms if arm.baseline is None), None)
    if first is None or not isinstance(first.config, Trained | Python):
        document.problem(
            ("null",),
            "needs a baseline and a workload whose weights are known (gpt, mae, finetune, python), "
            "so that its twin can be made; leave it out",
        )
        document.check()
        return []
    return [replace(first, name=f"{NULL}{first.name}", baseline=first.name, twin=True)]


def _known_bad(
    file: ExperimentFile, base: StartingPoint, against: Against, arms: list[Arm], document: Document
) -> tuple[Design | None, list[Arm]]:
    """Return the design with the name of its known-bad arm, and that arm if it has to be added."""
    design = file.design
    if design is None or design.bad is None or any(arm.name == design.bad for arm in arms):
        return design, []
    if design.bad not in PRESETS:
        names = [*(arm.name for arm in arms), *PRESETS]
        document.problem(
            ("design", "bad"), f"neither an arm nor a preset; {nearest(design.bad, names)}", design.bad
        )
        document.check()
    arm = base.arm({"recipe": design.bad})
    same = next((other for other in arms if other.content == arm.content), None)
    if same:
        return design.model_copy(update={"bad": same.name}), []
    baseline = baseline_of(base, against, {})
    listed = next((other for other in arms if other.content == baseline.content), None)
    if listed is None:
        document.problem(
            ("design", "bad"),
            "the sweep has no baseline at the workload's own values; name one of its arms instead",
            design.bad,
        )
        document.check()
        return design, []
    arm = replace(arm, name=f"{BAD}{design.bad}", baseline=listed.name, known_bad=True)
    return design.model_copy(update={"bad": arm.name}), [arm]


def _check_design(
    file: ExperimentFile,
    base: StartingPoint,
    arms: Iterable[Arm],
    metrics: Iterable[Metric],
    document: Document,
) -> None:
    """Note what cannot be forked, each reason once."""
    if file.design is None:
        return
    shown, shapes = set(), dict[tuple[object, ...], str]()
    for arm in arms:
        misfits = [*fork_misfits(file.design, arm.config, arm.recipe)]
        if not misfits:
            forks = resolved(file.design, arm.config)
            shapes.setdefault((forks.positions, forks.windows), arm.name)
        for field, why in misfits:
            if (field, why) not in shown:
                shown.add((field, why))
                at = field.partition(".")[0]
                document.problem(
                    ("design",) if at != "workload" else ("workload", base.workload, *field.split(".")[1:]),
                    f"arm {arm.name!r}: {field}: {why}" if field != "design" else why,
                )
    if len(shapes) > 1:
        one, other = list(shapes.values())[:2]
        document.problem(
            ("design",),
            f"arms {one!r} and {other!r} train other windows, since their steps, warm-up or decay differ, and"
            " damage depends on the window; write an experiment for each",
        )
    for metric in metrics:
        levels = {*_LEVELS, *(base.config.of_readings if isinstance(base.config, Trained) else ())}
        if metric.name not in levels and (isinstance(base.config, Trained) or target_of(metric.name)):
            document.problem(
                ("metric",),
                f"a forked trial is compared at the end of its windows, by {' or '.join(_LEVELS)}",
                metric.name,
            )
    if file.published:
        document.problem(
            ("published",), "are figures of full runs, and a forked design measures damage; leave them out"
        )
    if file.search and file.search.pruner:
        document.problem(
            ("search", "pruner"), "has nothing to prune by: windows are evaluated at their ends; leave it out"
        )
    document.check()


def _notes(
    file: ExperimentFile,
    base: StartingPoint,
    knobs: Mapping[str, Dimension],
    arms: Iterable[Arm],
    document: Document,
) -> Iterator[str]:
    """Yield a remark on each thing that is odd in the file but can run."""
    if file.search and (points := size(knobs, file.search.trials)) < file.search.trials:
        why = f"the space has {points} points, so the search ends once it has proposed each of them"
        yield document.remark(("search", "trials"), why, file.search.trials)
    arms = list(arms)
    named = next(
        (arm for arm in arms if file.arms and arm.name == file.against and arm.name in PRESETS), None
    )
    if named and any(arm.baseline not in (None, named.name) for arm in arms):
        why = f"the baseline of arms with other workload values is preset {named.name} at their values"
        right = "to compare with this arm, give it a name that is no preset's"
        yield document.remark(("arms", named.name), f"{why}, not this arm; {right}")
    for name, why in unreached(arms, base.preset):
        yield document.remark(("arms", name) if file.arms else ("ablate",), why)


def _surface(document: Document) -> ExperimentFile:
    """Return the file's top level. Wrong keys are noted and left out, so that other mistakes show too."""
    defaults: dict[str, Json] = {"schema": 1, "question": "-"}
    content = defaults | document.value
    try:
        return ExperimentFile.model_validate(document.value)
    except ValidationError as error:
        for problem in without_alternatives(error.errors(), document.value):
            missing = problem["type"] == "missing"
            why = misplaced(problem, next(iter(document.mapping(["workload"])), None))
            document.problem(problem["loc"], why, *(() if missing else (problem["input"],)))
            content.pop(str(problem["loc"][0]), None)
    if "workload" not in content:
        document.check()
    return ExperimentFile.model_validate(defaults | content)


def _check_engine(file: ExperimentFile, document: Document) -> None:
    try:
        check(file.engine)
    except ValueError as error:
        document.problem(("engine",), str(error), file.engine)


def _engine(
    file: ExperimentFile,
    arms: tuple[Arm, ...],
    device: str | None,
    machine: Machine | None,
    document: Document,
) -> Choice:
    """Return the engine of all arms. InputError if the requested engine cannot compute them."""
    try:
        return choose(file.engine, arms, device, layout=file.resources.most, machine=machine)
    except ValueError as error:
        document.problem(("engine",), str(error), file.engine)
        document.check()
        raise


def _refuse_misfits(file: ExperimentFile, arms: tuple[Arm, ...], choice: Choice, document: Document) -> None:
    """Refuse arms that cannot be divided among the requested ranks."""
    for arm in arms:
        if why := file.resources.misfit(arm.config, arm.recipe, choice.engine):
            document.problem(("resources",), f"arm {arm.name}: {why}")
            break
    document.check()


def _base(file: ExperimentFile, document: Document) -> StartingPoint | None:
    preset, own = _recipe(file, document)
    if len(file.workload) != 1:
        document.problem(
            ("workload",), f"names {len(file.workload)} workloads; give one of {', '.join(WORKLOADS)}"
        )
        return None
    ((name, values),) = file.workload.items()
    if name not in WORKLOADS:
        document.problem(("workload", name), f"no such workload; {nearest(name, WORKLOADS)}")
        return None
    base = StartingPoint(name, values or {}, preset, Path(document.file).parent.resolve(), own)
    try:
        base.arm({"recipe": "bf16"})
    except KnobError as error:
        wrong = set()
        for path, why in error.reasons:
            parts = (path or "").split(".")[1:]
            valid = keys(WORKLOADS[name])
            if parts and parts[0] not in valid:
                why = with_paths(why, parts[0], name, valid)
            document.problem(("workload", name, *parts), why, *_value(values, parts))
            wrong |= set(parts[:1])
        return _without(base, wrong)  # so that other mistakes show too
    return base


def _without(base: StartingPoint, wrong: Collection[str]) -> StartingPoint | None:
    """Return the base without some values of its workload; None if it cannot run without them."""
    rest = replace(base, values={field: value for field, value in base.values.items() if field not in wrong})
    try:
        rest.arm({"recipe": "bf16"})
    except KnobError:
        return None
    return rest


def _recipe(file: ExperimentFile, document: Document) -> tuple[str, Recipe | None]:
    """Return the name of the recipe that the arms begin from, and the recipe itself if it is no preset."""
    source = file.recipe
    if isinstance(source, str) and source in PRESETS:
        return source, None
    try:
        if isinstance(source, dict):
            return recipe_name(source), parse(source)
        if Path(source).suffix in RECIPE_FILES:
            return Path(source).stem, recipe_of(Path(document.file).parent / Path(source).expanduser())
        document.problem(
            ("recipe",), f"no such preset; {nearest(source, PRESETS)}; a recipe file ends in .yaml", source
        )
    except (ValueError, InputError) as error:
        document.problem(("recipe",), str(error), *(() if isinstance(source, dict) else (source,)))
    return "nvfp4", None


def _value(content: Json, parts: list[str]) -> tuple[Json, ...]:
    for part in parts:
        if not isinstance(content, dict) or part not in content:
            return ()
        content = content[part]
    return (content,)


def _seeds(file: ExperimentFile, document: Document) -> tuple[tuple[int, ...], Growth | None]:
    """Return the seeds of every arm, and their growth; a search has none, since its sampler compares means
    over fixed seeds."""
    if not isinstance(file.seeds, Growth):
        return file.seeds, None
    if file.search:
        document.problem(
            ("seeds",), f"a search runs its arms on a fixed number of seeds; write seeds: {file.seeds.start}"
        )
    return file.seeds.first, file.seeds


def _refuse_unmeasured(
    file: ExperimentFile, base: StartingPoint, arms: list[str], document: Document
) -> None:
    """Refuse published figures of arms or metrics that this experiment does not have."""
    for index, figure in enumerate(file.published):
        refuse_metric(figure.metric, ("published", index, "metric"), base, document)
        for key in ("arm", "against"):
            name = getattr(figure, key)
            if name is not None and name not in arms and not file.search:
                document.problem(("published", index, key), f"no such arm; {nearest(name, arms)}", name)
    document.check()


def _check_constraints(file: ExperimentFile, base: StartingPoint, document: Document) -> None:
    """Note constraints on a metric that the workload does not measure, duplicates, and constraints without a
    search."""
    for index, constraint in enumerate(file.constraints):
        refuse_metric(constraint.metric, ("constraints", index, "metric"), base, document)
    refuse_twins(
        ("constraints",),
        [constraint.description.rpartition(" ")[0] for constraint in file.constraints],
        document,
    )
    if file.constraints and file.search is None:
        document.problem(
            ("constraints",),
            "have no effect without a search: every arm of a grid is run and compared; leave them out",
        )
