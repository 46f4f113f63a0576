"""Load an experiment: read a YAML file, check it, expand it to arms, or report every mistake at its line and
column.

A sweep runs for hours, so a mistake in its file has to show before the first trial starts, and all mistakes
at once. `load` is one pass: text becomes a frozen document with positions (`yaml_document`), the document a
`Draft` with types (`schema`), knobs (`search_space`), arms and their baselines (`expand`), and the draft
passes a list of `checks`. Readers and checks write to nothing: they yield problems, and a reader puts a
default in the place of a wrong value, so that later ones still find theirs. `settled` ends a stage and raises
all its problems at once. Example:

    experiment = load(Path("experiments/rht_sr.yaml"), device="cpu")
    [arm.name for arm in experiment.arms]              # baselines first
    experiment.spec(experiment.arms[0], 0, "cpu").id   # 16 hex digits

Refused are, for example: keys that do not exist (with the nearest one, or the path where the key
belongs), two arms that resolve to the same recipe and workload, metrics that the workload does not measure,
phases of a schedule that no step reaches, recipes that the requested engine cannot compute, and grids with
too many arms. What is odd but can run becomes a note instead (`Experiment.notes`).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from ablate.engines.hardware import Machine
from ablate.errors import InputError, Problem, Reading, nearest, settled
from ablate.experiment.arms import RECIPE_FILES, Arm, KnobError, Knobs, StartingPoint, keys
from ablate.experiment.blame_design import BlameDesign, BlameNames
from ablate.experiment.blame_units import Units, blamed
from ablate.experiment.checks import CHECKS, CHECKS_OF_FILE, all_of
from ablate.experiment.draft import Draft
from ablate.experiment.engine_selection import misfit
from ablate.experiment.expand import compared, read_against, with_added, with_arms
from ablate.experiment.forked_design import misfits as fork_misfits
from ablate.experiment.forked_design import resolved
from ablate.experiment.metric_checks import metrics_in
from ablate.experiment.misplaced_keys import misplaced, with_paths, without_alternatives
from ablate.experiment.phases import never_begins
from ablate.experiment.recipe_source import load as recipe_of
from ablate.experiment.recipe_source import parse, recipe_name
from ablate.experiment.schema import ExperimentFile, Metric
from ablate.experiment.search_space import size, space, spelled_out
from ablate.experiment.trial_spec import TrialSpec
from ablate.experiment.yaml_document import Document, read, with_values
from ablate.experiment.yaml_document import parse as parse_yaml
from ablate.files import Json, no_folder_name, user_path
from ablate.recipes import PRESETS, Recipe
from ablate.training.fork_design import Forks
from ablate.training.workloads import GONE, WORKLOADS


@dataclass(frozen=True, kw_only=True)
class Experiment(Draft):
    """Checked contents of an experiment file: every arm that it names can be built."""

    engine: str
    """Engine of all arms."""
    engine_why: str
    """Reason why `auto` selected the emulator; empty if the file names an engine or Transformer Engine was
    selected."""
    notes: tuple[str, ...] = ()
    """Remarks on what is odd in the file but can run, each with its line and column."""

    @property
    def file(self) -> str:
        """Path of the file."""
        return self.document.file

    @property
    def text(self) -> str:
        """Text of the file."""
        return self.document.text

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that every arm gets."""
        return self.keys.first_seeds

    @property
    def metric(self) -> Metric:
        """Main metric, by which an arm is judged and which MLflow shows."""
        return self.metrics[0]

    @property
    def objectives(self) -> tuple[Metric, ...]:
        """Metrics of the Optuna study: all metrics of a search, the main metric of a grid."""
        return self.metrics if self.keys.search else self.metrics[:1]

    @property
    def prunes(self) -> bool:
        """Return True if arms may be pruned before their last step."""
        return self.keys.search is not None and self.keys.search.pruner is not None

    @cached_property
    def most_searched(self) -> int:
        """Largest number of arms that the search can propose: its trials, or all points of a smaller space; 0
        for a grid."""
        return size(self.space, self.keys.search.trials) if self.keys.search else 0

    @cached_property
    def blamed(self) -> tuple[BlameDesign, Units, BlameNames] | None:
        """Search for the cause of the recipe's gap, its units and their names; None without `blame`."""
        return blamed(self.keys, self.arms) if self.keys.blame else None

    def group(self, name: str, units: frozenset[int]) -> Arm:
        """Return the arm that quantises some units (by number) of the search for a cause."""
        assert self.blamed is not None, "the file has `blame`"
        _, parts, names = self.blamed
        whole = next(arm for arm in self.arms if arm.name == names.whole)
        return replace(whole, name=name, recipe=parts.recipe(units))

    def propose(self, knobs: Knobs) -> tuple[Arm, Arm]:
        """Build the arm that a sampler proposed, and its baseline. KnobError, with the reasons, if one of the
        two cannot be run."""
        arm, baseline = self.base.arm(knobs), self.baseline(knobs)
        resources, design = self.keys.resources, self.keys.design
        for candidate in (arm, baseline):
            if why := resources.misfit(candidate.config, candidate.recipe, self.engine):
                raise KnobError([("resources", why)])
            if why := misfit(self.engine, candidate, resources.most):
                raise KnobError([("engine", why)])
            if design and (unfit := [*fork_misfits(design, candidate.config, candidate.recipe)]):
                raise KnobError([*unfit])
        return compared(arm, baseline), baseline

    def forks(self, arm: Arm) -> Forks | None:
        """Return the windows of an arm's trials; None for full runs."""
        return resolved(self.keys.design, arm.config) if self.keys.design else None

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
    if why := no_folder_name(path.stem):
        rename = "rename the file, to rht_sr.yaml for example"
        raise InputError(f"{str(path)!r}: a sweep is named after its file, and {why}; {rename}")
    return path.stem


def load(
    path: Path, device: str | None = None, count: int | None = None, machine: Machine | None = None
) -> Experiment:
    """Read, check and expand an experiment file. Every arm that it names can be built and computed by its
    engine. InputError if the file cannot be run as it is; with every problem, each at its line and column.

    The file's name without the suffix is the name of the sweep. `device`: class of device that trials will
    run on (`cpu` or `cuda`), on which `engine: auto` depends; None: that of this machine. `count`: number of
    seeds in place of the file's, as if it were written there; None: the file's. `machine`: description of the
    machine that the engine is chosen for; None: this machine.
    """
    name = sweep_name(path)
    document = read(path)
    if count is not None:
        document = parse_yaml(with_values(document.text, {"seeds": count}), document.file)
    draft = settled(_draft(name, document, device, machine))
    assert draft is not None, "without a base, a problem has been found"
    draft = with_added(draft)
    for checks in CHECKS:
        settled(all_of(checks, draft))
    contents = {field.name: getattr(draft, field.name) for field in fields(draft)}
    choice, notes = draft.choice, tuple(map(str, _notes(draft)))
    return Experiment(**contents, engine=choice.engine, engine_why=choice.why, notes=notes)


def _draft(
    name: str, document: Document, device: str | None, machine: Machine | None
) -> Reading[Draft | None]:
    """Read a document; None if there is no base that arms could be built from."""
    document = yield from spelled_out(document)
    file = yield from _keys(document)
    if file is None:
        return None
    base = yield from _base(file, document)
    if file.blame and file.growth:
        why = f"a search for a cause has a fixed number of seeds; write seeds: {file.growth.start}"
        yield document.problem(("seeds",), why)
    if file.search and file.growth:  # its sampler compares means over fixed seeds
        why = f"a search runs its arms on a fixed number of seeds; write seeds: {file.growth.start}"
        yield document.problem(("seeds",), why)
    metrics = yield from metrics_in(file, base, document)
    knobs = yield from space(file, document)
    if base is None:
        return None
    draft = Draft(name, document, file, base, knobs, metrics, device, machine)
    draft = yield from with_arms(draft)
    draft = replace(draft, against=(yield from read_against(draft)))
    yield from all_of(CHECKS_OF_FILE, draft)
    return draft


def _notes(draft: Draft) -> Iterator[Problem]:
    """Yield a remark, in the form of a problem, on each thing that is odd in the file but can run."""
    file, document = draft.keys, draft.document
    if file.search and (points := size(draft.space, file.search.trials)) < file.search.trials:
        why = f"the space has {points} points, so the search ends once it has proposed each of them"
        yield document.problem(("search", "trials"), why, file.search.trials)
    arms = (*draft.arms, *draft.ends)
    named = next(
        (arm for arm in arms if file.arms and arm.name == file.against and arm.name in PRESETS), None
    )
    if named and any(arm.baseline not in (None, named.name) for arm in arms):
        why = f"arms with other workload values are compared with preset {named.name} at their values"
        right = "To compare with this arm, give it a name that no preset has"
        yield document.problem(("arms", named.name), f"{why}, not with this arm. {right}")
    shown = set()
    for arm in arms:  # a phase that the file itself names is refused instead
        preset = str(arm.knobs.get("recipe", draft.base.preset))
        for phase in PRESETS[preset]().schedule if preset in PRESETS else ():
            late = never_begins(phase, arm.config.length) if phase in arm.recipe.schedule else None
            if late and (preset, late) not in shown:
                shown.add((preset, late))
                path = ("arms", arm.name) if file.arms else ("ablate",)
                yield document.problem(path, f"the phase of preset {preset} in arm {arm.name!r}: {late}")


def _keys(document: Document) -> Reading[ExperimentFile | None]:
    """Return the file's keys with their types. Wrong ones are left out, so that other mistakes show too; None
    if the workload is wrong."""
    defaults: dict[str, Json] = {"schema": 1, "question": "-"}
    content = defaults | {**document.value}
    try:
        return ExperimentFile.model_validate(document.value)
    except ValidationError as error:
        for problem in without_alternatives(error.errors(), {**document.value}):
            missing = problem["type"] == "missing"
            why = misplaced(problem, next(iter(document.mapping("workload")), None))
            yield document.problem(problem["loc"], why, *(() if missing else (problem["input"],)))
            content.pop(str(problem["loc"][0]), None)
    return ExperimentFile.model_validate(defaults | content) if "workload" in content else None


def _base(file: ExperimentFile, document: Document) -> Reading[StartingPoint | None]:
    preset, own = yield from _recipe(file, document)
    if len(file.workload) != 1:
        why = f"names {len(file.workload)} workloads; give one of {', '.join(WORKLOADS)}"
        yield document.problem(("workload",), why)
        return None
    ((name, values),) = file.workload.items()
    if name not in WORKLOADS:
        why = f"{name} {GONE[name]}" if name in GONE else f"no such workload; {nearest(name, WORKLOADS)}"
        yield document.problem(("workload", name), why)
        return None
    base = StartingPoint(name, values or {}, preset, Path(document.file).parent.resolve(), own, _read)
    try:
        base.arm({"recipe": "bf16"})
    except KnobError as error:
        wrong = set()
        for path, why in error.reasons:
            parts = (path or "").split(".")[1:]
            valid = keys(WORKLOADS[name])
            if parts and parts[0] not in valid:
                why = with_paths(why, parts[0], name, valid)
            yield document.problem(("workload", name, *parts), why, *_value(values, parts))
            wrong |= set(parts[:1])
        return _without(base, wrong)  # so that other mistakes show too
    return base


def _read(path: Path) -> Recipe:
    try:
        return recipe_of(path)
    except (ValueError, InputError) as error:
        raise KnobError([("recipe", str(error))]) from None


def _without(base: StartingPoint, wrong: Collection[str]) -> StartingPoint | None:
    """Return the base without some values of its workload; None if it cannot run without them."""
    rest = replace(base, values={field: value for field, value in base.values.items() if field not in wrong})
    try:
        rest.arm({"recipe": "bf16"})
    except KnobError:
        return None
    return rest


def _recipe(file: ExperimentFile, document: Document) -> Reading[tuple[str, Recipe | None]]:
    source = file.recipe
    if isinstance(source, str) and source in PRESETS:
        return source, None
    try:
        if isinstance(source, dict):
            return recipe_name(source), parse(source, folder=Path(document.file).parent)
        if Path(source).suffix in RECIPE_FILES:
            return Path(source).stem, recipe_of(Path(document.file).parent / user_path(source))
        why = f"no such preset; {nearest(source, PRESETS)}; a recipe file ends in .yaml"
    except (ValueError, InputError) as error:
        why = str(error)
    yield document.problem(("recipe",), why, *(() if isinstance(source, dict) else (source,)))
    return "nvfp4", None


def _value(content: Json, parts: list[str]) -> tuple[Json, ...]:
    for part in parts:
        if not isinstance(content, dict) or part not in content:
            return ()
        content = content[part]
    return (content,)
