"""Recipes with one field changed, for every field of the schema; and recipes with a field that nobody knows."""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ValidationError, create_model

from ablate.numerics.spec import Spec
from ablate.recipes import Recipe

WORDS = ("percentile:0.9", "hold:50", "static:3.0", "rms:3.0", "step:5", "last:2", "*.down")
"""Values to try where the schema says no more than text."""


def changed(spec: Spec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, data) with one field of a description set to another value; the data may be invalid."""
    data = spec.model_dump(mode="json")
    for path, value in _changes(type(spec), spec, ()):
        yield ".".join(map(str, path)), _with(data, path, value)


def valid(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield (path, recipe) for each valid recipe with one field changed."""
    for path, data in changed(recipe):
        try:
            made = Recipe.model_validate(data)
        except ValidationError:
            continue
        if made != recipe:
            yield path, made


def _changes(kind: type[Spec], spec: Spec | None, path: tuple) -> Iterator[tuple[tuple, Any]]:
    for name, field in kind.model_fields.items():
        value, here = getattr(spec, name, None), (*path, name)
        kinds = _kinds(field.annotation)
        parts = [each for each in kinds if isinstance(each, type) and issubclass(each, Spec)]
        if isinstance(value, tuple):
            yield here, [] if value else [_least(name)]
        elif isinstance(value, Spec):
            yield from _changes(type(value), value, here)
            if type(None) in kinds:
                yield here, None
        elif parts and value is None:
            yield from ((here, _least(part.__name__)) for part in parts)
        elif isinstance(value, bool):
            yield here, not value
        elif isinstance(value, int | float):
            yield from (
                (here, other) for other in (value * 2, value / 2, value + 1, value * 0 + 0.5, 8, 16, 24, 32)
            )
        for literal in kinds:
            if isinstance(literal, str | int) and literal != value:
                yield here, literal
        if isinstance(value, str):
            yield from ((here, other) for other in WORDS if other != value)
        if value is None and {int, float} & {*kinds}:
            yield from ((here, other) for other in (1, 2, 4.0, 0.5))


def _kinds(annotation: Any) -> list[Any]:
    """All members of a union, and all values of literals in it."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return [*typing.get_args(annotation)]
    if origin in (typing.Union, types.UnionType):
        return [kind for each in typing.get_args(annotation) for kind in _kinds(each)]
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    return [annotation]


def _least(name: str) -> dict[str, Any]:
    """The smallest valid data of a part that is off by default."""
    return {
        "Quant": {},
        "Hadamard": {},
        "Select": {"among": "scales"},
        "Transform": {"mean": True},
        "rules": {"match": {"blocks": "last:2"}, "use": None},
        "schedule": {"start": "step:5"},
    }.get(name, {})


def _with(data: dict[str, Any], path: tuple, value: Any) -> dict[str, Any]:
    key, *rest = path
    return data | {key: _with(data[key], tuple(rest), value) if rest else value}


def with_unknown_fields(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield (path, recipe): at each part of a recipe in turn, a subclass with a field that was added later."""
    yield "novelty", _novel(recipe)
    for path, part in _parts(recipe, ()):
        changed: Any = _novel(part)
        for depth in range(len(path) - 1, -1, -1):
            owner: Any = recipe
            for key in path[:depth]:
                owner = owner[key] if isinstance(key, int) else getattr(owner, key)
            key = path[depth]
            if isinstance(key, int):
                changed = tuple(changed if number == key else each for number, each in enumerate(owner))
            else:
                changed = owner.model_copy(update={key: changed})
        yield ".".join(map(str, (*path, "novelty"))), changed


def _parts(spec: Spec, path: tuple) -> Iterator[tuple[tuple, Spec]]:
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        inner = [(name,)] if isinstance(value, Spec) else []
        pairs = [((*path, name), value)] if inner else []
        if isinstance(value, tuple):
            pairs = [((*path, name, number), each) for number, each in enumerate(value)]
        for here, part in pairs:
            if isinstance(part, Spec):
                yield here, part
                yield from _parts(part, here)


def _novel(part: Spec) -> Spec:
    """The same description in a class with one field more, which is not at its default."""
    wider = create_model(f"Wider{type(part).__name__}", __base__=type(part), novelty=(bool, False))
    values = {name: getattr(part, name) for name in type(part).model_fields}
    return wider.model_construct(**values, novelty=True)
