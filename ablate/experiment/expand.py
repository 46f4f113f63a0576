"""Expand the knobs of a file into arms: the points of a grid, a list of named arms, or the ends of a search's
ranges.

Each problem is yielded at the value that causes it, so that one reading shows all of them.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

from ablate.errors import Problem, Reading
from ablate.experiment.arms import Arm, KnobError, Knobs, NoSuchKnob, StartingPoint
from ablate.experiment.roles import CONFIRM
from ablate.experiment.schema import MOST_ARMS, ExperimentFile
from ablate.experiment.search_space import Dimension, conditions, grid, values_at
from ablate.experiment.yaml_document import Document, Path_
from ablate.numerics.spec import Spec
from ablate.recipes import Recipe


def arms_and_ends(
    file: ExperimentFile, base: StartingPoint, knobs: Mapping[str, Dimension], document: Document
) -> Reading[tuple[list[Arm], list[Arm]]]:
    """Return the arms of a grid or of a list, and the arms at the ends of a search's ranges.

    One of the two lists is empty: the arms of a search are not known yet. The arms at its ends stand for
    them, so that mistakes show before the search starts.
    """
    points: list[tuple[str | None, Knobs, dict[str, Path_]]]
    if file.arms is not None:
        yield from _wrong_names(file.arms, document)
        points = [
            (name, values, {knob: ("arms", name, knob) for knob in values})
            for name, values in file.arms.items()
        ]
    elif file.search or not all(dimension.ends() for dimension in knobs.values()):
        return [], (yield from _ends(base, knobs, document))
    else:
        least = math.prod(len(dimension.choices) for dimension in knobs.values() if not dimension.when)
        indices = list(itertools.islice(grid(knobs), MOST_ARMS + 1)) if least <= MOST_ARMS else []
        if least > MOST_ARMS or len(indices) > MOST_ARMS:
            yield document.problem(
                ("ablate",),
                f"makes more than {MOST_ARMS} arms, the largest number in a grid; "
                "add `search` to sample them",
            )
            return [], []
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
    return arms, []


def build_arm(
    base: StartingPoint,
    knobs: Knobs,
    name: str | None,
    positions: Mapping[str, Path_],
    document: Document,
    at_end: bool = False,
) -> Reading[Arm | None]:
    """Build an arm. Return None, with each reason yielded, if that is not possible.

    Args:
        base: what the arm starts from.
        knobs: values by knob.
        name: the arm's name; None: one made from its knobs.
        positions: path in the file of each knob's value.
        document: file that the values stand in.
        at_end: the values are ends of ranges, not proposals (see `StartingPoint.arm`).
    """
    try:
        return base.arm(knobs, name, at_end=at_end)
    except KnobError as error:
        for knob, why in error.reasons:
            path: Path_ = ("ablate",) if name is None else ("arms", name)
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


def _ends(base: StartingPoint, knobs: Mapping[str, Dimension], document: Document) -> Reading[list[Arm]]:
    """Return arms with one knob at each of its choices or ends, and other knobs only as its conditions need
    them."""
    arms = []
    for knob, dimension in knobs.items():
        for index, value in enumerate(dimension.ends()):
            values, position = conditions(knob, knobs) | {knob: value}, {knob: ("ablate", knob, index)}
            arms.append((yield from build_arm(base, values, None, position, document, at_end=True)))
    return [arm for arm in arms if arm]
