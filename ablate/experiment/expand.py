"""Expand a file into arms: the points of a grid, a list of named arms, or the ends of a search's ranges; and
the baseline of each arm.

A baseline is the preset, the knobs or the arm that a file names under `against`. A preset or knobs are
applied at each arm's own workload values: with `against: bf16`, the arm with `lr: 1e-3` is compared with bf16
at `lr: 1e-3`. A file may therefore have several baselines. An arm that is named as the baseline keeps its own
values and is the baseline of all other arms.

Each problem is yielded at the value that causes it, so that one reading shows all of them.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ablate.errors import Problem, Reading, nearest, settled
from ablate.experiment.arms import Arm, KnobError, Knobs, NoSuchKnob, StartingPoint
from ablate.experiment.mapped_cells import cell_knobs
from ablate.experiment.roles import BAD, CONFIRM, NULL
from ablate.experiment.schema import MOST_ARMS, ExperimentFile
from ablate.experiment.search_space import Dimension, conditions, grid, values_at
from ablate.experiment.yaml_document import Document, Path_
from ablate.numerics.spec import Spec
from ablate.recipes import PRESETS, Recipe


def arms_and_ends(
    file: ExperimentFile, base: StartingPoint, knobs: Mapping[str, Dimension], document: Document
) -> Reading[tuple[tuple[Arm, ...], tuple[Arm, ...]]]:
    """Return the arms of a grid or of a list, and the arms at the ends of a search's ranges. One of the two
    is empty: the arms of a search are not known yet. The arms at its ends stand for them, so that mistakes
    show before the search starts."""
    points: list[tuple[str | None, Knobs, dict[str, Path_]]]
    if file.blame:
        points = [(None, {}, {})]
    elif file.arms is not None:
        yield from _wrong_names(file.arms, document)
        points = [
            (name, values, {knob: ("arms", name, knob) for knob in values})
            for name, values in file.arms.items()
        ]
    elif file.map is not None:
        named = yield from cell_knobs(file.map, base, document)
        points = [(name, values, dict.fromkeys(values, ("map",))) for name, values in named.items()]
    elif file.search or not all(dimension.ends() for dimension in knobs.values()):
        return (), (yield from _ends(base, knobs, document))
    else:
        least = math.prod(len(dimension.choices) for dimension in knobs.values() if not dimension.when)
        indices = list(itertools.islice(grid(knobs), MOST_ARMS + 1)) if least <= MOST_ARMS else []
        if least > MOST_ARMS or len(indices) > MOST_ARMS:
            yield document.problem(
                ("ablate",),
                f"makes more than {MOST_ARMS} arms, the largest number in a grid; "
                "add `search` to sample them",
            )
            return (), ()
        points = [
            (None, values_at(point, knobs), {knob: ("ablate", knob, i) for knob, i in point.items()})
            for point in indices
        ]
    arms: list[Arm] = []
    first: dict[tuple[Spec, Recipe, bool], Arm] = {}
    for name, values, positions in points:
        arm = yield from build_arm(base, values, name, positions, document)
        if arm is None:
            continue
        twin = first.setdefault(arm.content, arm)
        if twin is not arm:
            path = ("ablate",) if name is None else ("arms", name)
            yield document.problem(
                path,
                f"arm {arm.name!r} is the same as {twin.name!r}: "
                "a duplicate arm would be run and counted twice",
            )
        arms.append(arm)
    return tuple(arms), ()


def build_arm(
    base: StartingPoint,
    knobs: Knobs,
    name: str | None,
    positions: Mapping[str, Path_],
    document: Document,
    at_end: bool = False,
) -> Reading[Arm | None]:
    """Build an arm. Return None, with each reason yielded, if that is not possible. `name` None: one made
    from the knobs. `positions` has the path in the file of each knob's value. `at_end`: the values are ends
    of ranges, not proposals (see `StartingPoint.arm`)."""
    try:
        return base.arm(knobs, name, at_end=at_end)
    except KnobError as error:
        for knob, why in error.reasons:
            path: Path_ = ("ablate",) if name is None else ("arms", name)
            if knob == "recipe" and knob not in knobs:
                path = ("recipe",)
            if knob is not None and knob.startswith("recipe.") and knob not in knobs:
                if "recipe" in knobs:
                    knob = "recipe"
                elif all(other.startswith("workload.") for other in knobs):
                    path = ("recipe",)
            if isinstance(why, NoSuchKnob) and name is None and knob is not None and knob in positions:
                yield document.problem(positions[knob][:2], why)  # once, not for each of its values
            elif knob is not None and knob in knobs:
                yield document.problem(positions.get(knob, path), why, knobs[knob])
            else:
                yield document.problem(path, why)
        return None


def _wrong_names(names: Iterable[str], document: Document) -> Iterator[Problem]:
    """Yield names without a visible character, and those with the prefix of arms that rerun a search's
    winner."""
    for name in names:
        if not name.strip():
            why = f"arm {name!r} has an empty name; name it after what it changes, for example no_rht"
            yield document.problem(("arms", name), why)
        elif name.startswith(CONFIRM):
            why = (
                f"arm {name!r}: the prefix {CONFIRM!r} is reserved for the arm that reruns a search's winner"
            )
            right = name.removeprefix(CONFIRM).strip() or "no_rht"
            yield document.problem(("arms", name), f"{why}; leave it out: {right!r}")


def _ends(
    base: StartingPoint, knobs: Mapping[str, Dimension], document: Document
) -> Reading[tuple[Arm, ...]]:
    """Return arms with one knob at each of its choices or ends, and other knobs only as its conditions need
    them."""
    arms = []
    for knob, dimension in knobs.items():
        for index, value in enumerate(dimension.ends()):
            values, position = conditions(knob, knobs) | {knob: value}, {knob: ("ablate", knob, index)}
            arms.append((yield from build_arm(base, values, None, position, document, at_end=True)))
    return tuple(arm for arm in arms if arm)


# Baselines


@dataclass(frozen=True)
class Against:
    """Baseline that a file names: knobs, applied at each arm's own workload values, or one arm, for all
    others."""

    knobs: Knobs
    arm: Arm | None = None
    """The arm that was named, which keeps its own workload values."""

    def pins(self, knob: str) -> bool:
        """Return True if the baseline itself sets this workload knob, a part of it, or a path that contains
        it."""
        return any(f"{knob}.".startswith(f"{own}.") or f"{own}.".startswith(f"{knob}.") for own in self.knobs)


def read_against(
    file: ExperimentFile, base: StartingPoint, arms: tuple[Arm, ...], document: Document
) -> Reading[Against]:
    """Read the baseline: a preset, an arm by its name, or knobs. Exactly an arm's knobs name that arm. A
    preset's name under `against` means the preset. An arm of the same name must therefore have the preset's
    recipe."""
    value, arms_by_name = file.against, {arm.name: arm for arm in arms}
    if isinstance(value, dict):
        built = yield from build_arm(
            base, value, "against", {knob: ("against", knob) for knob in value}, document
        )
        same = (arm for arm in arms if built and arm.content == built.content)
        return Against(value, next((arm for arm in same if arm.knobs.keys() == value.keys()), None))
    if not isinstance(value, str):
        yield document.problem(
            ("against",), "must be a preset, an arm's name, or knobs as {knob: value}", value
        )
    elif value in PRESETS:
        if value in arms_by_name and arms_by_name[value].recipe != PRESETS[value]():
            why = (
                f"this arm is named after preset {value} but has another recipe, "
                f"so `against: {value}` is ambiguous"
            )
            right = (
                "rename the arm to something that is no preset's name; "
                "if it is the baseline, write the new name under against"
            )
            yield document.problem(("arms", value), f"{why}; {right}")
        return Against({"recipe": value})
    else:
        if value in arms_by_name:
            return Against(arms_by_name[value].knobs, arms_by_name[value])
        if value not in (file.arms or {}):  # otherwise the arm's own mistake was noted
            names = [*PRESETS, *arms_by_name]
            why = f"no such baseline: neither a preset nor an arm; {nearest(value, names)}"
            yield document.problem(("against",), why, value)
    return Against({})


def baseline_of(base: StartingPoint, against: Against, knobs: Knobs) -> Arm:
    """Return the baseline of an arm with these knobs. KnobError if it cannot be built. It is the arm that the
    file names, or the baseline's knobs at the arm's workload values, except for values that the baseline sets
    itself."""
    if against.arm is not None:
        return against.arm
    workload = {
        knob: value
        for knob, value in knobs.items()
        if knob.startswith("workload.") and not against.pins(knob)
    }
    return base.arm({**against.knobs, **workload})


def compared(arm: Arm, baseline: Arm) -> Arm:
    """Return the arm with the name of its baseline; without one if it is the baseline."""
    return replace(arm, baseline=None if arm.content == baseline.content else baseline.name)


def with_added(
    listed: tuple[Arm, ...], file: ExperimentFile, base: StartingPoint, against: Against, document: Document
) -> tuple[tuple[Arm, ...], tuple[Arm, ...], ExperimentFile]:
    """Return all arms, baselines first; the baselines among them that the file does not list (in `listed`);
    and the file's keys with the name of the known-bad arm as `design.bad`. InputError if a baseline cannot be
    built, or another arm that the file asks for cannot be added."""
    added, arms = settled(_with_baselines(listed, file, base, against, document))
    arms = [*added, *arms]
    bad_name, bad = settled(_known_bad(arms, file, base, against, document))
    null = settled(_null_arm(arms, file, document))
    if file.design is not None:
        file = file.model_copy(update={"design": file.design.model_copy(update={"bad": bad_name})})
    return (*arms, *bad, *null), tuple(added), file


def _with_baselines(
    arms: tuple[Arm, ...], file: ExperimentFile, base: StartingPoint, against: Against, document: Document
) -> Reading[tuple[list[Arm], list[Arm]]]:
    """Return the baselines that are not among the arms, and the arms, each with the name of its own
    baseline."""
    if file.search:
        varies = any(knob.startswith("workload.") and not against.pins(knob) for knob in file.ablate or ())
        baseline = None
        if not varies:
            baseline = yield from _buildable(base, against, {}, "the search", document)
        return ([baseline] if baseline else []), []
    added: dict[str, Arm] = {}
    with_names = []
    by_content = {arm.content: arm for arm in reversed(arms)}
    for arm in arms:
        baseline = yield from _buildable(base, against, arm.knobs, f"arm {arm.name!r}", document)
        if baseline is None:
            continue
        listed = by_content.get(baseline.content)
        if listed is None:
            added[baseline.name] = baseline
        with_names.append(compared(arm, listed or baseline))
    for name in {arm.name for arm in arms} & set(added):
        yield document.problem(
            ("arms", name), "has the name of the baseline, but other contents; choose another name"
        )
    return list(added.values()), with_names


def _buildable(
    base: StartingPoint, against: Against, knobs: Knobs, owner: str, document: Document
) -> Reading[Arm | None]:
    """Return `baseline_of`; None, with the problem yielded, if it cannot be built."""
    try:
        return baseline_of(base, against, knobs)
    except KnobError as error:
        yield document.problem(("against",), f"the baseline of {owner} cannot be run: {error}")
        return None


def _known_bad(
    arms: list[Arm], file: ExperimentFile, base: StartingPoint, against: Against, document: Document
) -> Reading[tuple[str | None, list[Arm]]]:
    """Return the name of the design's known-bad arm, None if there is none; and that arm if it has to be
    added."""
    bad = file.design.bad if file.design else None
    if bad is None or any(arm.name == bad for arm in arms):
        return bad, []
    if bad not in PRESETS:
        why = f"neither an arm nor a preset; {nearest(bad, [*(arm.name for arm in arms), *PRESETS])}"
        yield document.problem(("design", "bad"), why, bad)
        return bad, []
    arm = base.arm({"recipe": bad})
    same = next((other for other in arms if other.content == arm.content), None)
    if same:
        return same.name, []
    baseline = baseline_of(base, against, {})
    listed = next((other for other in arms if other.content == baseline.content), None)
    if listed is None:
        why = "the sweep has no baseline at the workload's own values; name one of its arms instead"
        yield document.problem(("design", "bad"), why, bad)
        return bad, []
    arm = replace(arm, name=f"{BAD}{bad}", baseline=listed.name, known_bad=True)
    return arm.name, [arm]


def _null_arm(arms: list[Arm], file: ExperimentFile, document: Document) -> Reading[list[Arm]]:
    """Return the twin of the first baseline, if the file asks for one."""
    if not file.null:
        return []
    first = next((arm for arm in arms if arm.baseline is None), None)
    if first is None or not first.config.twins:
        yield document.problem(
            ("null",),
            "needs a baseline and a workload whose weights are known (gpt, finetune, python), "
            "so that its twin can be made; leave it out",
        )
        return []
    return [replace(first, name=f"{NULL}{first.name}", baseline=first.name, twin=True)]
