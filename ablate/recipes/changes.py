"""Differences of two recipes by path, fields included that only one of them has.

A target that translates a recipe compares it with the recipe that its own output stands for. The comparison
must also find a field that was added to recipes after the target was written, so it looks at the objects' own
fields, not at those of the declared class.
"""

from collections.abc import Iterator, Mapping

from ablate.files import Json
from ablate.numerics.own import shown
from ablate.numerics.spec import Spec


def as_data(spec: Spec) -> dict[str, Json]:
    """Return a description as JSON data, with the fields of subclasses."""
    return spec.model_dump(mode="json", serialize_as_any=True)


def changes(
    ours: Mapping[str, Json], theirs: Mapping[str, Json], path: str = ""
) -> Iterator[tuple[str, Json, Json]]:
    """Yield (path, our value, their value) for each difference; a part that one side lacks is one line."""
    for key in dict.fromkeys((*ours, *theirs)):
        value, other = ours.get(key), theirs.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from changes(value, other, f"{path}{key}.")
        elif value != other or (key in ours) != (key in theirs):
            yield f"{path}{key}", value, other


def differences(ours: Mapping[str, Json], theirs: Mapping[str, Json]) -> dict[str, tuple[object, object]]:
    """Return both values by path (`wgrad.g.rounding`); a part that is null, or lacking, on one side is a
    whole: `wgrad.hadamard`, (None, {...}).
    """
    return {path: (value, other) for path, value, other in changes(ours, theirs) if value != other}


def as_word(value: Json) -> str:
    """Return a short text for a value: `null`, `true`, `stochastic`; of a quantiser, its element."""
    if isinstance(value, dict):
        return str(value.get("element", "set"))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else shown(str(value))
