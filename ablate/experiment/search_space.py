"""Search space of an experiment: the knobs under `ablate`, each with its values or range and the condition
under which it exists. Nothing here depends on the meaning of a knob."""

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ablate.errors import Problem, Reading, nearest
from ablate.experiment.schema import ExperimentFile
from ablate.experiment.yaml_document import Document, Path_, display
from ablate.files import Json
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

Kind = Literal["uniform", "int", "choice"]
_KINDS: tuple[Kind, ...] = ("uniform", "int", "choice")


@dataclass(frozen=True)
class Dimension:
    """Range or choices of one knob."""

    kind: Kind
    choices: Sequence[Json] = ()
    low: float = 0
    high: float = 0
    log: bool = False
    when: Mapping[str, Json] = field(default_factory=dict)
    """Values of other knobs without which this knob does not exist."""

    @property
    def middle(self) -> Json:
        """Middle value: of the choices, or of the range on its scale."""
        if self.kind == "choice":
            return self.choices[len(self.choices) // 2]
        middle = math.sqrt(self.low * self.high) if self.log else (self.low + self.high) / 2
        return round(middle) if self.kind == "int" else middle

    def ends(self) -> Sequence[Json]:
        """Return the values with which a range is checked: every choice, or both ends; for real numbers also
        a value between them."""
        if self.kind == "choice":
            return self.choices
        middle = () if self.kind == "int" else (self.low + (self.high - self.low) / math.pi,)
        return (self.low, self.high, *middle)

    def holds(self, value: Json) -> bool:
        """Return True if a value is one of the choices, or lies in the range."""
        if self.kind == "choice":
            return any(alike(value, choice) for choice in self.choices)
        types = (int,) if self.kind == "int" else (int, float)
        return isinstance(value, int | float) and type(value) in types and self.low <= value <= self.high

    def applies(self, knobs: Mapping[str, Json]) -> bool:
        """Return True if the knob exists beside these values of the others."""
        return all(knob in knobs and alike(knobs[knob], value) for knob, value in self.when.items())


def alike(a: Json, b: Json) -> bool:
    """Return True if two values from a file are the same: true is not 1."""
    return type(a) is type(b) and a == b


def spelled_out(document: Document) -> Reading[Document]:
    """Return the document with full paths in place of short names of workload fields, wherever a file names
    knobs: `workload.lr` for `lr`. A short name beside its own full path is a problem."""
    written: dict[Path_, str] = {}
    given_twice: list[tuple[Path_, str]] = []

    def spelled(content: Json, *path: str) -> Json:
        if not isinstance(content, dict):
            return content
        parts: dict[str, Json] = {}
        for key, part in content.items():
            full = f"workload.{key}" if key in WORKLOAD_KNOBS and _names_knobs(*path) else key
            if full != key:
                written[*path, full] = key
                if full in content:
                    given_twice.append(((*path, key), full))
            parts[full] = spelled(part, *path, full)
        return parts

    value = {key: spelled(part, key) for key, part in document.value.items()}
    answer = value.get("answer")
    if isinstance(answer, dict) and isinstance(asked := answer.get("knob"), str) and asked in WORKLOAD_KNOBS:
        value["answer"] = answer | {"knob": f"workload.{asked}"}
    full = replace(document, value=value, written=written)
    for path, name in given_twice:
        yield full.problem(path, f"is short for {name}, which is given too; keep one of them")
    return full


def _names_knobs(top: str, *below: str) -> bool:
    """Return True if the keys of the mapping at this path are knobs."""
    return (
        (top in ("ablate", "against") and not below)
        or (top == "arms" and len(below) == 1)
        or (top == "ablate" and below[1:] == ("when",))
        or (top, *below) == ("answer", "given")
    )


def space(file: ExperimentFile, document: Document) -> Reading[dict[str, Dimension]]:
    """Return the knobs of `ablate`, each after the knobs that it depends on."""
    if file.blame:
        for key in ("ablate", "arms", "map", "search", "answer", "published"):
            if getattr(file, key):
                yield document.problem((key,), "does not go with blame, whose arms are parts of one recipe")
        return {}
    given = [key for key in ("ablate", "arms", "map") if getattr(file, key) is not None]
    if len(given) != 1:
        if given or not any(document.value.get(key) is not None for key in ("ablate", "arms", "map")):
            # else a problem of theirs is known
            yield document.problem(
                (), "give one of `ablate` (knobs and their values), `arms` (arms by name) and `map` (cells)"
            )
        return {}
    if file.search and file.ablate is None:
        yield document.problem(
            ("search",), "a search turns the knobs of `ablate`; `arms` and `map` list points one by one"
        )
    if file.ablate is not None and not file.ablate:
        yield document.problem(("ablate",), "is empty: name at least one knob, such as rht: [true, false]")
    if file.arms is not None and not file.arms:
        yield document.problem(("arms",), "is empty: name at least one arm")
    read: dict[str, Dimension] = {}
    for knob, values in (file.ablate or {}).items():
        read[knob] = yield from _dimension(knob, values, file, document)
    knobs: dict[str, Dimension] = {}
    for knob, dimension in read.items():
        when = {}
        for other, value in dimension.when.items():
            if wrong := _wrong(knob, other, value, read):
                yield document.problem(("ablate", knob, "when", other), wrong, value)
            else:
                when[other] = value
        knobs[knob] = replace(dimension, when=when)
    return (yield from _in_order(knobs, document))


def grid(knobs: Mapping[str, Dimension]) -> Iterator[dict[str, int]]:
    """Yield every point of a grid, as the index of each knob's choice. A knob that does not exist there is
    left out."""
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
        knob: replace(one, choices=range(int(one.low), int(one.high) + 1))  # not listed: it may be billions
        for knob, one in whole.items()
    }
    return sum(1 for _ in itertools.islice(grid({**knobs, **listed}), most))


def values_at(point: Mapping[str, int], knobs: Mapping[str, Dimension]) -> dict[str, Json]:
    """Return the values of a grid's point."""
    return {knob: knobs[knob].choices[index] for knob, index in point.items()}


def conditions(knob: str, knobs: Mapping[str, Dimension]) -> dict[str, Json]:
    """Return the values of other knobs that this knob needs: its own conditions and those of the knobs that
    it depends on."""
    inherited = [conditions(other, knobs) for other in knobs[knob].when]
    return {other: value for each in inherited for other, value in each.items()} | dict(knobs[knob].when)


# One knob


def _dimension(knob: str, values: Json, file: ExperimentFile, document: Document) -> Reading[Dimension]:
    path = ("ablate", knob)
    if isinstance(values, list):
        if not values:
            yield document.problem(path, "is an empty list: an empty grid; give the values to try", values)
        yield from twins(path, values, document)
        return Dimension("choice", choices=tuple(values))
    if not isinstance(values, dict):
        why = f"is a single value; give a list, [{display(values)}], or a range"
        yield document.problem(path, why, values)
        return Dimension("choice")
    if file.search is None and "choice" not in values:
        yield document.problem(
            path, "is a range, which needs `search: {trials: ...}`; a grid takes a list of values"
        )
    dimension = yield from _range(path, values, document)
    when = values.get("when", {})
    if isinstance(when, dict) and (when or "when" not in values):
        return replace(dimension, when=when)
    yield document.problem(
        (*path, "when"),
        "must name the other knobs' values that this one exists with, such as {rht: true}",
        when,
    )
    return dimension


def twins(path: tuple[str, ...], values: Sequence[Json], document: Document) -> Iterator[Problem]:
    """Yield every repeated value of a list."""
    seen = set()
    for index, value in enumerate(values):
        key = (type(value), _hashable(value))
        if key in seen:
            yield document.problem((*path, index), "is given twice", value)
        seen.add(key)


def _hashable(value: Json) -> Hashable:
    """Return a hashable copy of a value. Copies are equal if and only if the values are."""
    if isinstance(value, dict):
        return frozenset((key, _hashable(part)) for key, part in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _range(path: tuple[str, ...], values: dict[str, Json], document: Document) -> Reading[Dimension]:
    kinds = [kind for kind in _KINDS if kind in values]
    for key in values:
        if key not in (*_KINDS, "log", "when"):
            yield document.problem(
                (*path, key), f"no such key of a range; {nearest(key, (*_KINDS, 'log', 'when'))}"
            )
    if len(kinds) != 1:
        yield document.problem(
            path, "is not a range; write {uniform: [low, high]}, {int: [low, high]} or {choice: [...]}"
        )
        return Dimension("choice")
    kind, content, log = kinds[0], values[kinds[0]], values.get("log", False)
    if kind == "choice":
        if not isinstance(content, list) or not content:
            yield document.problem((*path, kind), "must be a list of at least one value", content)
            return Dimension("choice")
        yield from twins((*path, kind), content, document)
        return Dimension("choice", choices=tuple(content))
    low, high = _bounds(content, (int,) if kind == "int" else (int, float))
    if not low < high:
        yield document.problem((*path, kind), "must be [low, high] with low < high", content)
        return Dimension("choice")
    if type(log) is not bool or (log and low <= 0):
        yield document.problem((*path, "log"), "must be true or false, and true only if low > 0", log)
    return Dimension(kind, low=low, high=high, log=log is True)


def _bounds(content: Json, types: tuple[type, ...]) -> tuple[float, float]:
    """Return the two finite numbers of a range, of one of the types; (0, 0) if there are no such numbers."""
    numbers = [
        number
        for number in (content if isinstance(content, list) else ())
        if isinstance(number, int | float) and type(number) in types and math.isfinite(number)
    ]
    if not isinstance(content, list) or len(content) != 2 or len(numbers) != 2:
        return 0, 0
    return numbers[0], numbers[1]


# How knobs depend on each other


def _wrong(knob: str, other: str, value: Json, knobs: Mapping[str, Dimension]) -> str | None:
    if other == knob:
        return "is the knob itself; name another"
    if other not in knobs:
        return f"no such knob under ablate; {nearest(other, [name for name in knobs if name != knob])}"
    if knobs[other].kind != "choice":
        return f"{other} is a range; a condition needs a knob with choices"
    if not knobs[other].holds(value):
        return f"is none of {other}'s choices: {', '.join(map(display, knobs[other].choices))}"
    return None


def _in_order(knobs: dict[str, Dimension], document: Document) -> Reading[dict[str, Dimension]]:
    """Return the knobs in the file's order, but each after those that it depends on."""
    ordered: dict[str, Dimension] = {}
    while len(ordered) < len(knobs):
        ready = next(
            (knob for knob in knobs if knob not in ordered and knobs[knob].when.keys() <= ordered.keys()),
            None,
        )
        if ready is None:
            circle = [knob for knob in knobs if knob not in ordered]
            yield document.problem(
                ("ablate", circle[0], "when"), f"is circular: {', '.join(circle)} depend on each other"
            )
            return ordered
        ordered[ready] = knobs[ready]
        needed = conditions(ready, ordered)
        if not all(ordered[other].applies(needed) for other in needed):
            yield document.problem(
                ("ablate", ready, "when"),
                "can never hold: a knob that it names needs another value of the same knob",
            )
    return ordered
