"""Declared differences of a subject, `Subject.variants`: their words, and what they excuse.

    variants={"*": "elements S/s, zero block 1", "nan_visible": "zero"}

A word of a cast is a computation (`cast_faults.VARIANTS`) that replaces a step of the recipe's, in all casts
of the subject, whichever property it is declared by; `*` stands for no property in particular. A few
properties have forms of their own, declared by their names. Nothing is excused: what the subject returns
has to be what the declared computation gives.
"""

from collections.abc import Iterable, Mapping

from ablate.errors import InputError, nearest
from ablate.verification.conformance.cast_faults import VARIANTS

ALL = "*"
FORMS = {
    "nan_visible": ("tensor", "block", "element", "saturated", "zero"),
    "infinity_visible": ("saturated",),
    "infinite_neighbours": ("nan",),
    "random_gradients": ("nearest",),
}
"""Forms in which a property may be declared to hold, by its name."""


def check(variants: Mapping[str, str], properties: Iterable[str]) -> None:
    """Refuse what declares nothing.

    Raises:
        InputError: a key is no property, or a word is unknown.
    """
    known, problems = {*properties}, []
    for key, value in variants.items():
        if key != ALL and key not in known:
            problems.append(
                f"variants: {key}: no such property; {nearest(key, known)}, and * is the whole subject"
            )
        elif not isinstance(value, str):
            problems.append(f"variants: {key} is a {type(value).__name__}; declare a text of words")
        elif key not in FORMS:
            unknown = [word for word in split(value) if word not in VARIANTS]
            if unknown or not split(value):
                words = ", ".join(f"'{word}'" for word in VARIANTS)
                problems.append(f"variants: {key}: '{', '.join(unknown)}' is no word; the words are {words}")
        elif value not in FORMS[key]:
            words = ", ".join(f"'{word}'" for word in FORMS[key])
            problems.append(f"variants: {key}: '{value}' is no word of this property; it takes {words}")
    if problems:
        raise InputError(*problems)


def split(value: str) -> list[str]:
    """Return the words of one entry of `Subject.variants`."""
    return [word for part in value.split(",") if (word := part.strip())]


def words_of(variants: Mapping[str, str]) -> tuple[str, ...]:
    """Return the declared words of casts, each once, in the order in which they are made."""
    declared = {word for key, value in variants.items() if key not in FORMS for word in split(value)}
    return tuple(word for word in VARIANTS if word in declared)


def entry(words: Iterable[str]) -> str:
    """Return the declaration of words of casts, as a user writes it."""
    wanted = {*words}
    return f'variants={{"{ALL}": "{", ".join(word for word in VARIANTS if word in wanted)}"}}'
