"""Comparison of two recipes, field by field. Torch-free."""

from collections.abc import Iterator

from ablate.recipes.recipe import Recipe


def differences(first: Recipe, second: Recipe) -> dict[str, tuple[object, object]]:
    """Return the fields in which two recipes differ: the values of both, JSON data, by path
    (`wgrad.g.rounding`). A part that one of them lacks is a whole: `wgrad.hadamard`, (None, {...})."""
    return parts_that_differ(first.model_dump(mode="json"), second.model_dump(mode="json"))


def parts_that_differ(first: object, second: object) -> dict[str, tuple[object, object]]:
    """Return the same of any two JSON values: both values by path."""
    return dict(_differences(first, second, ""))


def _differences(one: object, other: object, path: str) -> Iterator[tuple[str, tuple[object, object]]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*one, *other)):
            yield from _differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))
    elif one != other:
        yield path, (one, other)
