"""The knobs that an experiment turns: each one's values or range, and the condition under which it exists. No
meaning of any knob here."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ablate.errors import nearest
from ablate.experiment.schema import ExperimentFile
from ablate.experiment.yaml_document import Document, display
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

_KINDS = ("uniform", "int", "choice")


@dataclass(frozen=True)
class Dimension:
    """One knob's range or choices."""

    kind: Literal["choice", "uniform", "int"]
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    when: Mapping[str, Any] = field(default_factory=dict)
    """Values of other knobs without which this one does not exist."""

    def ends(self) -> tuple[Any, ...]:
        """Values to try, to see whether the range makes sense: every choice, or both ends; of real numbers a
        value between too."""
        if self.kind == "choice":
            return self.choices
        middle = () if self.kind == "int" else (self.low + (self.high - self.low) / math.pi,)
        return (self.low, self.high, *middle)

    def holds(self, value: Any) -> bool:
        """Whether a value is one of the choices, or lies in the range."""
        if self.kind == "choice":
            return any(alike(value, choice) for choice in self.choices)
        types = (int,) if self.kind == "int" else (int, float)
        return type(value) in types and self.low <= value <= self.high

    def applies(self, knobs: Mapping[str, Any]) -> bool:
        """Whether the knob exists beside these values of the others."""
        return all(knob in knobs and alike(knobs[knob], value) for knob, value in self.when.items())


def alike(a: Any, b: Any) -> bool:
    """Whether two values from a file are the same: true is not 1."""
    return type(a) is type(b) and a == b


def spell_out(document: Document) -> None:
    """Give short names of workload fields their full paths wherever a file names knobs: `lr` is `workload.lr`
    from then on.

    A short name beside its own full path is noted as a problem.
    """
    _spell_out(("ablate",), document)
    ablated, arms = document.value.get("ablate"), document.value.get("arms")
    for knob in ablated if isinstance(ablated, dict) else ():
        if isinstance(ablated[knob], dict):
            _spell_out(("ablate", knob, "when"), document)
    for name in arms if isinstance(arms, dict) else ():
        _spell_out(("arms", name), document)
    _spell_out(("against",), document)


def _spell_out(path: tuple[str, ...], document: Document) -> None:
    """Do so for the mapping at `path`, if there is one."""
    content = document.value
    for part in path:
        content = content.get(part)
    for knob in [knob for knob in content if knob in WORKLOAD_KNOBS] if isinstance(content, dict) else ():
        full = f"workload.{knob}"
        if full in content:
            document.problem((*path, knob), f"is short for {full}, which is given too; keep one of them")
        document.rename(path, knob, full)


def space(file: ExperimentFile, document: Document) -> dict[str, Dimension]:
    """The knobs of `ablate`, those that others depend on first; every mistake is noted."""
    if (file.ablate is None) == (file.arms is None):
        if file.ablate is None and any(document.value.get(key) is not None for key in ("ablate", "arms")):
            return {}  # what is wrong with it was noted
        document.problem((), "give either `ablate` (knobs and their values) or `arms` (arms by name)")
        return {}
    if file.search and file.arms is not None:
        document.problem(("search",), "a search turns the knobs of `ablate`; `arms` lists points one by one")
    if file.ablate is not None and not file.ablate:
        document.problem(("ablate",), "is empty: name at least one knob, such as rht: [true, false]")
    if file.arms is not None and not file.arms:
        document.problem(("arms",), "is empty: name at least one arm")
    found = {knob: _dimension(knob, values, file, document) for knob, values in (file.ablate or {}).items()}
    return _in_order({knob: _conditional(knob, found, document) for knob in found}, document)


def grid(knobs: Mapping[str, Dimension]) -> Iterator[dict[str, int]]:
    """Every point of a grid, as the index of each knob's choice. A knob that does not exist there is left
    out."""
    points: Iterator[dict[str, int]] = iter([{}])
    for knob in knobs:
        points = _extended(points, knob, knobs)
    return points


def _extended(
    points: Iterator[dict[str, int]], knob: str, knobs: Mapping[str, Dimension]
) -> Iterator[dict[str, int]]:
    for point in points:
        if knobs[knob].applies(values_at(point, knobs)):
            yield from (point | {knob: index} for index in range(len(knobs[knob].choices)))
        else:
            yield point


def size(knobs: Mapping[str, Dimension], most: int) -> int:
    """Count the points of a space, up to `most`; `most` too if a knob takes real numbers."""
    if any(dimension.kind == "uniform" for dimension in knobs.values()):
        return most
    whole = {knob: dimension for knob, dimension in knobs.items() if dimension.kind == "int"}
    listed = {
        knob: replace(one, choices=range(int(one.low), int(one.high) + 1)) for knob, one in whole.items()
    }
    return sum(1 for _ in itertools.islice(grid({**knobs, **listed}), most))


def values_at(point: Mapping[str, int], knobs: Mapping[str, Dimension]) -> dict[str, Any]:
    """The values of a grid's point."""
    return {knob: knobs[knob].choices[index] for knob, index in point.items()}


def conditions(knob: str, knobs: Mapping[str, Dimension]) -> dict[str, Any]:
    """What the other knobs must be for this one to exist: its own conditions and those of the knobs it
    depends on."""
    inherited = [conditions(other, knobs) for other in knobs[knob].when]
    return {other: value for each in inherited for other, value in each.items()} | dict(knobs[knob].when)


# One knob


def _dimension(knob: str, values: Any, file: ExperimentFile, document: Document) -> Dimension:
    path = ("ablate", knob)
    if isinstance(values, list):
        if not values:
            document.problem(path, "is an empty list: an empty grid; give the values to try", values)
        refuse_twins(path, values, document)
        return Dimension("choice", choices=tuple(values))
    if not isinstance(values, dict):
        document.problem(path, f"is a single value; give a list, [{values}], or a range", values)
        return Dimension("choice")
    if file.search is None and "choice" not in values:
        document.problem(
            path, "is a range, which needs `search: {trials: ...}`; a grid takes a list of values"
        )
    return replace(_range(path, values, document), when=_when(path, values, document))


def refuse_twins(path: tuple[str, ...], values: list[Any], document: Document) -> None:
    """Note every value of a list that stands in it already."""
    seen = set()
    for index, value in enumerate(values):
        key = (type(value), _hashable(value))
        if key in seen:
            document.problem((*path, index), "stands twice", value)
        seen.add(key)


def _hashable(value: Any) -> Any:
    """A value that is equal to another's where the two values are."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(part)) for key, part in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _range(path: tuple[str, ...], values: dict[str, Any], document: Document) -> Dimension:
    kinds = [kind for kind in _KINDS if kind in values]
    for key in values:
        if key not in (*_KINDS, "log", "when"):
            document.problem(
                (*path, key), f"no such key of a range; {nearest(key, (*_KINDS, 'log', 'when'))}"
            )
    if len(kinds) != 1:
        document.problem(
            path, "is not a range; write {uniform: [low, high]}, {int: [low, high]} or {choice: [...]}"
        )
        return Dimension("choice")
    kind, content, log = kinds[0], values[kinds[0]], values.get("log", False)
    if kind == "choice":
        if not isinstance(content, list) or not content:
            document.problem((*path, kind), "must be a list of at least one value", content)
            return Dimension("choice")
        refuse_twins((*path, kind), content, document)
        return Dimension("choice", choices=tuple(content))
    types = (int,) if kind == "int" else (int, float)
    numbers = isinstance(content, list) and len(content) == 2 and all(type(x) in types for x in content)
    if not numbers or not all(map(math.isfinite, content)) or content[0] >= content[1]:
        document.problem((*path, kind), "must be [low, high] with low < high", content)
        return Dimension("choice")
    if type(log) is not bool or (log and content[0] <= 0):
        document.problem((*path, "log"), "must be true or false, and true only where low > 0", log)
    return Dimension(kind, low=content[0], high=content[1], log=log is True)


def _when(path: tuple[str, ...], values: dict[str, Any], document: Document) -> dict[str, Any]:
    found = values.get("when", {})
    if isinstance(found, dict) and (found or "when" not in values):
        return found
    document.problem(
        (*path, "when"),
        "must name the other knobs' values that this one exists with, such as {rht: true}",
        found,
    )
    return {}


# How knobs depend on each other


def _conditional(knob: str, knobs: Mapping[str, Dimension], document: Document) -> Dimension:
    """The knob with those of its conditions that make sense; the others are noted."""
    kept = {}
    for other, value in knobs[knob].when.items():
        wrong = _wrong(knob, other, value, knobs)
        if wrong:
            document.problem(("ablate", knob, "when", other), wrong, value)
        else:
            kept[other] = value
    return replace(knobs[knob], when=kept)


def _wrong(knob: str, other: str, value: Any, knobs: Mapping[str, Dimension]) -> str | None:
    if other == knob:
        return "is the knob itself; name another"
    if other not in knobs:
        return f"no such knob under ablate; {nearest(other, [name for name in knobs if name != knob])}"
    if knobs[other].kind != "choice":
        return f"{other} is a range; a condition needs a knob with choices"
    if not knobs[other].holds(value):
        return f"is none of {other}'s choices: {', '.join(map(display, knobs[other].choices))}"
    return None


def _in_order(knobs: dict[str, Dimension], document: Document) -> dict[str, Dimension]:
    """The knobs in the file's order, but each behind those that it depends on."""
    ordered: dict[str, Dimension] = {}
    while len(ordered) < len(knobs):
        ready = next(
            (knob for knob in knobs if knob not in ordered and knobs[knob].when.keys() <= ordered.keys()),
            None,
        )
        if ready is None:
            circle = [knob for knob in knobs if knob not in ordered]
            document.problem(
                ("ablate", circle[0], "when"), f"is circular: {', '.join(circle)} wait for each other"
            )
            return ordered
        ordered[ready] = knobs[ready]
        if not _possible(ready, ordered):
            document.problem(
                ("ablate", ready, "when"),
                "can never hold: a knob that it names needs another value of the same knob",
            )
    return ordered


def _possible(knob: str, knobs: Mapping[str, Dimension]) -> bool:
    """Whether there is a point at which the knob exists."""
    wanted = conditions(knob, knobs)
    return all(knobs[other].applies(wanted) for other in wanted)
