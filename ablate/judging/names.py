"""Arm and seed in the name of a run, or in the path of its file, by a pattern: `logs/{arm}/seed{seed}.log`.

A word in braces stands for at least one character other than a slash, and `{seed}` for a whole number. Words
other than `arm` and `seed` become settings of the run. A name that a pattern fits in two ways is refused.
"""

import glob
import re
import string
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from ablate.errors import InputError, brief
from ablate.files import user_path
from ablate.judging import cells
from ablate.judging.columns import USUAL, Columns

_WORDS = {"seed": r"-?\d+"}
_ANY = r"[^/]+"
_NUMBERED = r".+?([-_. ](?:s|seed)?|seed)\d+"
"""Name that ends in a number, which is likely the seed, with what stands before it."""
_LONGEST = 256
"""Most characters between slashes of a name that is of a pattern: a file system allows 255, and time grows
with a power of their number."""


def fields_of(pattern: str | None) -> frozenset[str]:
    """Return the words in braces of a pattern, if any. InputError if it has none, or cannot be read."""
    return frozenset(name for _, name in _parts(pattern) if name) if pattern else frozenset()


def read_name(pattern: str, name: str, where: str, removable: bool = True) -> dict[str, str]:
    """Return what a name says by a pattern: `{"arm": "bf16", "seed": "3"}`.

    InputError if it is not of the pattern, or in two ways; `--without` leaves a run out if it is `removable`.
    """
    lazy, greedy = _match(pattern, name, "?"), _match(pattern, name, "")
    if lazy is None:
        way = f"; --without {quote(brief(name))} leaves it out" * removable
        raise InputError(
            f"{where}: {brief(name)!r} is not of the pattern {pattern!r}, where {{seed}} is digits{way}"
        )
    if lazy != greedy:
        raise InputError(
            f"{where}: {brief(name)!r} fits {pattern!r} in two ways, {lazy} and {greedy}; write more of it"
        )
    return lazy


def suggested(name: str) -> str:
    """Return a pattern that a name such as `bf16_s0` is likely of, `{arm}_s{seed}`; `{arm}` without a number
    at its end."""
    numbered = re.fullmatch(_NUMBERED, name)
    return f"{{arm}}{numbered[1]}{{seed}}" if numbered else "{arm}"


def is_of(pattern: str, name: str) -> bool:
    """Return True for a name that is of a pattern, in one way or several."""
    return _match(pattern, name, "") is not None


def is_misfit(columns: Columns, name: str) -> bool:
    """Return True for a run that is to be left out, and whose name is not of the pattern."""
    return bool(columns.name) and name in columns.without and not is_of(columns.name or "", name)


def seed_of(text: str | None, where: str) -> int | None:
    """Return a seed; None for no text. InputError if it is not a whole number."""
    try:
        return None if text is None else cells.whole(text)
    except ValueError:
        raise InputError(f"{where}: the seed {brief(text or '')[:60]!r} is not a whole number") from None


def places_of(place: str) -> list[tuple[Path, dict[str, str]]]:
    """Return the files or folders of a path with words in braces or a shell's `*` and `**`, and what it says.

    InputError if nothing is there.
    """
    path = user_path(place)
    if path.exists():
        return [(path, {})]
    parts = list(_parts(place)) if "{" in place else [(place, None)]
    if "*{seed}" in place:
        raise InputError(f"{place}: where the seed begins is not clear; write what stands before it")
    wild = "".join(literal + "*" * bool(name) for literal, name in parts)
    paths = sorted(Path(name) for name in glob.glob(str(user_path(wild)), recursive=True))
    if not paths:
        way = f"; --column {quote(place)} names a column" * (place.partition("=")[0] in USUAL)
        raise InputError(f"{place}: no such file" + " is of this pattern" * (wild != place) + way)
    if wild == place:
        return [(path, {}) for path in paths]
    whole = str(user_path(place))
    return [(path, read_name(whole, str(path), "the path", False)) for path in paths]


def _parts(pattern: str) -> Iterator[tuple[str, str | None]]:
    """Yield the literal texts of a pattern, each with the word in braces behind it."""
    try:
        parts = [(literal, name) for literal, name, _, _ in string.Formatter().parse(pattern)]
    except ValueError as error:
        raise InputError(f"{pattern!r}: {error}; write a pattern such as '{{arm}}-s{{seed}}'") from None
    names = [name for _, name in parts if name is not None]
    if not names or not all(name.isidentifier() for name in names):
        raise InputError(f"{pattern!r}: write words in braces, such as '{{arm}}-s{{seed}}'")
    if len({*names}) < len(names):
        raise InputError(f"{pattern!r}: a word in braces stands there twice")
    yield from parts


def _match(pattern: str, name: str, lazy: str) -> dict[str, str] | None:
    """Return the words of a name, each as short as it can be with `?`, else as long; None without a match."""
    if max(map(len, name.split("/"))) > _LONGEST:
        return None
    expression = ""
    for literal, word in _parts(pattern):
        expression += r"[^/]*".join(re.escape(part) for part in literal.split("*"))
        if word:
            expression += f"(?P<{word}>{_WORDS.get(word, _ANY)}{lazy})"
    found = re.fullmatch(expression, name, re.DOTALL)
    return found and found.groupdict()
