"""Find where a key belongs that stands at a wrong place of an experiment file.

A key may be spelt right and stand one level too high or too deep: `keep_weights` at the top instead of
`telemetry.keep_weights`. The nearest of its siblings is then no help, so the full paths are looked up in the
models of the file (`schema`) and of its workload.
"""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import get_origin

from pydantic_core import ErrorDetails

from ablate.experiment.arms import below, models_of, reason, siblings
from ablate.experiment.schema import ExperimentFile, Metric
from ablate.files import Json
from ablate.recipes import KNOBS, Recipe
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

_MOST_PATHS = 3
"""Largest number of paths that a hint names."""
_SIMILAR = 0.75
"""Similarity from which a sibling is as likely to be meant as the same word elsewhere."""
_OF_A_SEARCH = ("pruner", "rungs")
_SEED_BY_SEED = "the arms of a grid are compared seed by seed, and none of them may end early"


def _depth(path: tuple[str, ...]) -> int:
    """Return the number of parts of a path, without the name of a workload."""
    return len(path) - (path[0] == "workload")


def misplaced(problem: ErrorDetails, workload: str | None) -> str:
    """Return one of pydantic's errors about a file, located from its top level, as a reason, with the paths
    of a misplaced key. `workload` None: the file names none."""
    usual = reason(problem, ExperimentFile)
    if problem["type"] != "extra_forbidden":
        return usual
    if len(problem["loc"]) == 1 and problem["loc"][0] in _OF_A_SEARCH:
        return f"belongs under search: {_SEED_BY_SEED}"
    return with_paths(usual, str(problem["loc"][-1]), workload, siblings(problem, ExperimentFile))


def without_alternatives(problems: Iterable[ErrorDetails], content: Json) -> list[ErrorDetails]:
    """Return pydantic's errors, located by keys and items alone. A value that fits none of several types has
    an error for each, whose location has the name of the type (`min_effect.constrained-float`). Kept are
    those of one type: for which the value is of the right kind, or that it fits furthest."""
    kept: list[ErrorDetails] = []
    of_types: dict[tuple[int | str, ...], dict[int | str, list[ErrorDetails]]] = {}
    for problem in problems:
        path, place = _located(problem, content)
        located = ErrorDetails({**problem, "loc": path})
        if place is None:
            kept.append(located)
        else:
            of_types.setdefault(place, {}).setdefault(problem["loc"][len(place)], []).append(located)
    for by_type in of_types.values():
        kept += max(by_type.values(), key=lambda each: max(map(_fit, each)))
    return kept


def _located(
    problem: ErrorDetails, content: Json
) -> tuple[tuple[int | str, ...], tuple[int | str, ...] | None]:
    """Return an error's location without names of types, and the place of the first of them, or None."""
    path: tuple[int | str, ...] = ()
    first: tuple[int | str, ...] | None = None
    for part in problem["loc"]:
        inside = part in content if isinstance(content, dict) else isinstance(part, int)
        if inside:
            path = (*path, part)
            content = _part(content, part)
        elif problem["type"] == "missing" and part == problem["loc"][-1]:
            path = (*path, part)
        elif first is None:
            first = path
    return path, first


def _part(content: Json, part: int | str) -> Json:
    if isinstance(content, dict):
        return content.get(str(part))
    return (
        content[part] if isinstance(content, list) and isinstance(part, int) and part < len(content) else None
    )


def _fit(problem: ErrorDetails) -> tuple[bool, int]:
    """Return a key that sorts errors by how near the value is to the type that it does not fit."""
    return not problem["type"].endswith(("_type", "_parsing")), len(problem["loc"])


def with_paths(usual: str, key: str, workload: str | None, valid: Sequence[str]) -> str:
    """Return the reason why a key is refused, with the paths at which the file takes it, if there are any.
    `usual` names the nearest of the keys that are `valid` at this place; it is kept if one of them is
    similar, or there is no path. `workload` None: the file names none."""
    # The least deep paths, and that of its knob under `ablate`; if the file names no workload, those of all.
    ending = [path for path in _every_path(workload) if path[-1] == key]
    least = min(map(_depth, ending), default=0)
    named = [".".join(path) for path in ending if _depth(path) == least]
    paths = [*named, *([f"ablate.{key}"] if key in KNOBS or key in WORKLOAD_KNOBS else [])][:_MOST_PATHS]
    if key in ExperimentFile.model_fields and key not in valid:
        return f"no such key here; write {key} at the top level"
    if not paths:
        return usual
    near = get_close_matches(key, valid, 1, _SIMILAR)
    return f"{usual if near else 'no such key here'}; write {' or '.join(paths)}"


@lru_cache(maxsize=16)
def _every_path(workload: str | None) -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(_paths(workload)))


def _paths(workload: str | None) -> Iterator[tuple[str, ...]]:
    for name in [workload] if workload in WORKLOADS else WORKLOADS:
        yield ("workload", name)
        yield from below(("workload", name), WORKLOADS[name])
    for name, field in ExperimentFile.model_fields.items():
        for model in models_of(field.annotation).values():
            item = ("<n>",) if get_origin(field.annotation) is tuple else ()
            yield from below((name, *item), model)
    yield from below(("metric",), Metric)
    yield from below(("recipe",), Recipe)
