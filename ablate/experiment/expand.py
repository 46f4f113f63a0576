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
from dataclasses import replace

from ablate.errors import Problem, Reading, nearest, settled
from ablate.experiment.arms import Arm, KnobError, Knobs, NoSuchKnob
from ablate.experiment.draft import Against, Draft
from ablate.experiment.mapped_cells import cell_knobs
from ablate.experiment.roles import BAD, CONFIRM, NULL
from ablate.experiment.schema import MOST_ARMS
from ablate.experiment.search_space import alike, conditions, grid, values_at
from ablate.experiment.yaml_document import Document, Path_
from ablate.numerics.spec import Spec
from ablate.recipes import PRESETS, Recipe


def with_arms(draft: Draft) -> Reading[Draft]:
    """Return the draft with the arms of a grid or of a list, or those at the ends of a search's ranges: the
    arms of a search are not known yet. Those at its ends stand for them, so that mistakes show before the
    search starts."""
    file, document, knobs = draft.keys, draft.document, draft.space
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
        named = yield from cell_knobs(file.map, draft.base, document)
        points = [(name, values, dict.fromkeys(values, ("map",))) for name, values in named.items()]
    elif file.search or not all(dimension.ends() for dimension in knobs.values()):
        return replace(draft, ends=(yield from _ends(draft)))
    else:
        least = math.prod(len(dimension.choices) for dimension in knobs.values() if not dimension.when)
        indices = list(itertools.islice(grid(knobs), MOST_ARMS + 1)) if least <= MOST_ARMS else []
        if least > MOST_ARMS or len(indices) > MOST_ARMS:
            yield document.problem(
                ("ablate",),
                f"makes more than {MOST_ARMS} arms, the largest number in a grid; "
                "add `search` to sample them",
            )
            return draft
        points = [
            (None, values_at(point, knobs), {knob: _position(draft, knob, i) for knob, i in point.items()})
            for point in indices
        ]
    arms: list[Arm] = []
    first: dict[tuple[Spec, Recipe, bool], Arm] = {}
    for name, values, positions in points:
        arm = yield from _built(draft, values, name, positions)
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
    return replace(draft, arms=tuple(arms))


def _built(
    draft: Draft, knobs: Knobs, name: str | None, positions: Mapping[str, Path_], *, at_end: bool = False
) -> Reading[Arm | None]:
    """Build an arm as `StartingPoint.arm` does. Return None, with each reason yielded, if that is not
    possible. `positions` has the path in the file of each knob's value."""
    try:
        return draft.base.arm(knobs, name, at_end=at_end)
    except KnobError as error:
        for knob, why in error.reasons:
            path: Path_ = ("ablate",) if name is None else ("arms", name)
            if knob is not None and knob not in knobs and knob.partition(".")[0] == "recipe":
                if "recipe" in knobs:
                    knob = "recipe"
                elif knob == "recipe" or all(other.startswith("workload.") for other in knobs):
                    path = ("recipe",)
            if isinstance(why, NoSuchKnob) and name is None and knob is not None and knob in positions:
                yield draft.document.problem(positions[knob][:2], why)  # once, not for each of its values
            elif knob is not None and knob in knobs:
                yield draft.document.problem(positions.get(knob, path), why, knobs[knob])
            else:
                yield draft.document.problem(path, why)
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


def _ends(draft: Draft) -> Reading[tuple[Arm, ...]]:
    """Return arms with one knob at each of its choices or ends, and other knobs only as its conditions need
    them."""
    arms = []
    for knob, dimension in draft.space.items():
        needed = conditions(knob, draft.space)
        positions = {
            other: _position(draft, other, number)
            for other, value in needed.items()
            for number, choice in enumerate(draft.space[other].choices)
            if alike(choice, value)
        }
        for index, value in enumerate(dimension.ends()):
            positions[knob] = _position(draft, knob, index)
            arms.append((yield from _built(draft, needed | {knob: value}, None, positions, at_end=True)))
    return tuple(arm for arm in arms if arm)


def _position(draft: Draft, knob: str, index: int) -> Path_:
    """Return the path in the file of one of a knob's `ends`: a choice, or a bound of its range; of the range
    itself for a value within it."""
    kind = draft.space[knob].kind
    path: Path_ = ("ablate", knob)
    if isinstance(draft.document.mapping("ablate").get(knob), dict):
        path = (*path, kind)
    return path if kind == "uniform" and index > 1 else (*path, index)


# Baselines


def read_against(draft: Draft) -> Reading[Against]:
    """Read the baseline: a preset, an arm by its name, or knobs. Exactly an arm's knobs name that arm. A
    preset's name under `against` means the preset. An arm of the same name must therefore have the preset's
    recipe."""
    value, document, arms = draft.keys.against, draft.document, {arm.name: arm for arm in draft.arms}
    if isinstance(value, dict):
        built = yield from _built(draft, value, "against", {knob: ("against", knob) for knob in value})
        same = (arm for arm in draft.arms if built and arm.content == built.content)
        return Against(value, next((arm for arm in same if arm.knobs.keys() == value.keys()), None))
    if not isinstance(value, str):
        why = "must be a preset, an arm's name, or knobs as {knob: value}"
        yield document.problem(("against",), why, value)
    elif value in PRESETS:
        if value in arms and arms[value].recipe != PRESETS[value]():
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
    elif value in arms:
        return Against(arms[value].knobs, arms[value])
    elif value not in (draft.keys.arms or {}):  # otherwise the arm's own mistake was noted
        why = f"no such baseline: neither a preset nor an arm; {nearest(value, [*PRESETS, *arms])}"
        yield document.problem(("against",), why, value)
    return Against({})


def compared(arm: Arm, baseline: Arm) -> Arm:
    """Return the arm with the name of its baseline; without one if it is the baseline."""
    return replace(arm, baseline=None if arm.content == baseline.content else baseline.name)


def with_added(draft: Draft) -> Draft:
    """Return the draft with all arms, each with the name of its baseline. InputError if a baseline cannot be
    built, or another arm that the file asks for cannot be added."""
    added, arms = settled(_with_baselines(draft))
    draft = replace(draft, arms=(*added, *arms), added=frozenset(arm.name for arm in added))
    known_bad, bad = settled(_known_bad(draft))
    null = settled(_null_arm(draft))
    keys = draft.keys.changed({"design.bad": known_bad}) if draft.keys.design else draft.keys
    return replace(draft, arms=(*draft.arms, *bad, *null), keys=keys)


def _with_baselines(draft: Draft) -> Reading[tuple[list[Arm], list[Arm]]]:
    """Return the baselines that are not among the arms, and the arms, each with the name of its own
    baseline."""
    if draft.keys.search:
        names = draft.keys.ablate or ()
        varies = any(name.startswith("workload.") and not draft.against.pins(name) for name in names)
        baseline = None if varies else (yield from _buildable(draft, {}, "the search"))
        return ([baseline] if baseline else []), []
    added: dict[str, Arm] = {}
    with_names = []
    by_content = {arm.content: arm for arm in reversed(draft.arms)}
    for arm in draft.arms:
        baseline = yield from _buildable(draft, arm.knobs, f"arm {arm.name!r}")
        if baseline is None:
            continue
        listed = by_content.get(baseline.content)
        if listed is None:
            added[baseline.name] = baseline
        with_names.append(compared(arm, listed or baseline))
    for name in {arm.name for arm in draft.arms} & set(added):
        why = "has the name of the baseline, but other contents; choose another name"
        yield draft.document.problem(("arms", name), why)
    return list(added.values()), with_names


def _buildable(draft: Draft, knobs: Knobs, owner: str) -> Reading[Arm | None]:
    """Return the baseline of some knobs; None, with the problem yielded, if it cannot be built."""
    try:
        return draft.baseline(knobs)
    except KnobError as error:
        yield draft.document.problem(("against",), f"the baseline of {owner} cannot be run: {error}")
        return None


def _known_bad(draft: Draft) -> Reading[tuple[str | None, list[Arm]]]:
    """Return the name of the design's known-bad arm, None if there is none; and that arm if it has to be
    added."""
    bad = draft.keys.design.bad if draft.keys.design else None
    names = [arm.name for arm in draft.arms]
    if bad is None or bad in names:
        return bad, []
    if bad not in PRESETS:
        why = f"neither an arm nor a preset; {nearest(bad, [*names, *PRESETS])}"
        yield draft.document.problem(("design", "bad"), why, bad)
        return bad, []
    by_content = {arm.content: arm for arm in reversed(draft.arms)}
    arm = draft.base.arm({"recipe": bad})
    if same := by_content.get(arm.content):
        return same.name, []
    listed = by_content.get(draft.baseline({}).content)
    if listed is None:
        why = "the sweep has no baseline at the workload's own values; name one of its arms instead"
        yield draft.document.problem(("design", "bad"), why, bad)
        return bad, []
    arm = replace(arm, name=f"{BAD}{bad}", baseline=listed.name, known_bad=True)
    return arm.name, [arm]


def _null_arm(draft: Draft) -> Reading[list[Arm]]:
    if not draft.keys.null:
        return []
    first = next((arm for arm in draft.arms if arm.baseline is None), None)
    if first is None or not first.config.twins:
        why = (
            "needs a baseline and a workload whose weights are known (gpt, finetune, python), so that its"
            " twin can be made; leave it out"
        )
        yield draft.document.problem(("null",), why)
        return []
    return [replace(first, name=f"{NULL}{first.name}", baseline=first.name, twin=True)]
