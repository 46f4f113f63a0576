"""Which kind of source a value of a YAML file is: told by the key that names its place, so that what is wrong with it is told once."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import Discriminator

from ablate.numerics.spec import Spec


def _kind_of(words: Collection[str], kinds: Mapping[str, type[Spec]]) -> Callable[[Any], str | None]:
    """A function for a pydantic discriminator: `word` for one of the words, else the first key of `kinds` that the value has."""

    def kind(value: Any) -> str | None:
        if isinstance(value, str):
            return "word" if value in words else None
        if isinstance(value, dict):
            return next((key for key in kinds if key in value), None)
        return next((key for key, spec in kinds.items() if isinstance(value, spec)), None)

    return kind


def either(words: Sequence[str], kinds: Mapping[str, type[Spec]]) -> Discriminator:
    """Of a union whose members are tagged `word`, or by a key of `kinds`: it takes the one that is meant, and says what there is."""
    there = f"must be {' or '.join(words)}, or have one of the keys {', '.join(kinds)}"
    return Discriminator(_kind_of(words, kinds), custom_error_type="source", custom_error_message=there)


def places(source: Any) -> frozenset[str]:
    """The fields of a source that only say where its data lie: its fingerprint stands for them in a trial's identity."""
    return getattr(source, "places", frozenset())
