"""Words of a quantiser that name a function of the user's: `rounding: roundings.py:mine`. Torch-free.

The problem: a researcher's new rounding is not in our registries, and copying the package to add it would
detach every comparison from it. The idea: a field that takes one of our words also takes the place of a
function, `FILE.py:FUNCTION`, `package.module:FUNCTION`, or the name of an entry point of the group
`ablate.numerics`. Which arguments a function gets depends on the field (`KINDS`); it takes those that it
names, in any order:

    def mine(y, grid, bits, width):
        lower, upper = grid.neighbours(y.abs())
        ...

A word is read once, relative to the file that has it, and becomes an `Own`: a string with the folder, the
digest of the source (own_source.py), and what planning has to know of it, so that nothing is imported to
plan:

    /home/me/roundings.py:mine#3fa2b1c0d9e8f7a6+bits

A trial's id has all but the folder. The process that computes refuses a source of another digest.
Not taken: functions of more than these arguments, and an element grid that is computed instead of written.
"""

import ast
import os
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import PlainSerializer, ValidationInfo, ValidatorFunctionWrapHandler, WrapValidator

from ablate import own_source
from ablate.errors import nearest
from ablate.files import user_path
from ablate.own_source import Code

GROUP = "ablate.numerics"
"""Group of entry points by which installed packages offer functions for quantisers."""
FOLDER = "folder"
"""Key of a validation's context: folder to which the files of users' functions are relative."""
_WORD = re.compile(
    r"(?P<place>.*/)?(?P<what>[^/:#]+):(?P<function>[A-Za-z_]\w*)"
    r"(?:#(?P<digest>[0-9a-f]{16})(?:\+(?P<facts>[^/#]+))?)?"
)
_SHOWN = 8
"""Digits of a digest that tables show."""


@dataclass(frozen=True)
class Kind:
    """Arguments that a function of a field may take: `key`, which it must take, and `more`."""

    key: str
    more: tuple[str, ...] = ()

    @property
    def offered(self) -> dict[str, None]:
        """Names of all arguments, in order."""
        return dict.fromkeys((self.key, *self.more))


ELEMENT = "element"
KINDS = {
    "rounding": Kind("y", ("grid", "bits", "width")),
    "scale.rounding": Kind("scale", ("grid", "bits", "width", "tiles", "element")),
    "range.statistic": Kind("tiles", ("amaxes",)),
    "outer.statistic": Kind("tensor", ("amaxes",)),
    "own": Kind("x", ("bits", "width")),
}
"""Arguments by field, as `own_calls` documents them. `element` is a tuple of numbers and takes none."""
_MOST_VALUES, _HUGE = 128, 1e30
"""Largest number of values of an element grid, which are seven bits and the sign, and a bound on them."""


class Own(str):
    """Place of a function of the user's, with the digest of its source. In a sentence it is its `label`."""

    def __format__(self, form: str) -> str:
        return format(self.label, form)

    @property
    def _parts(self) -> re.Match[str]:
        found = _WORD.fullmatch(self)
        assert found is not None
        return found

    @property
    def label(self) -> str:
        """File or module, and function: `roundings.py:mine`."""
        return f"{self._parts['what']}:{self._parts['function']}"

    @property
    def identity(self) -> str:
        """The word without the folder, for ids."""
        return self.removeprefix(self._parts["place"] or "")

    def seen_from(self, folder: Path) -> str:
        """Return the word with its folder relative to another, for a file in that one."""
        place = self._parts["place"]
        if not place or os.path.commonpath([place, folder.absolute()]) == os.sep:
            return str(self)
        return f"{os.path.relpath(place, folder)}/{self.identity}"

    @property
    def digest(self) -> str:
        """16 hex digits of the content of the source: the file, and what it imports beside it."""
        return self._parts["digest"]

    @property
    def draws(self) -> bool:
        """True if the function takes random bits."""
        return self._parts["facts"] == "bits"

    @property
    def values(self) -> tuple[float, ...]:
        """Values of an element grid, fp32, ascending from 0; () for a function."""
        facts = self._parts["facts"] or ""
        return tuple(map(_fp32, facts.split(","))) if facts[:1].isdigit() else ()

    @property
    def code(self) -> Code:
        """Source of the function; ValueError if there is no such module."""
        place, what, function = (self._parts[part] for part in ("place", "what", "function"))
        return _code(place or "", what, function)

    def fingerprint(self) -> str:
        """Return the digest of the source as it is now; OSError, SyntaxError, ValueError if there is none."""
        return own_source.digest(self.code)

    def files(self) -> Iterator[Path]:
        """Yield the files of the source; errors as of `fingerprint`."""
        yield from own_source.closure(self.code)

    @property
    def unchanged(self) -> bool:
        """True if the source is still the one that the word was made of."""
        try:
            return self.fingerprint() == self.digest
        except (OSError, SyntaxError, ValueError):
            return False


def resolved(field: str, value: object, known: Collection[str], folder: Path | None) -> Own | None:
    """Return the function that a field's value names; None if the value is one of our words, or none at all.

    `field` is a key of `KINDS`, or `element`; `known` are our words, before their colon; a path is relative
    to `folder`, or else to the working directory. ValueError if there is no such file, module or function, or
    it takes other arguments.
    """
    if not isinstance(value, str) or value.partition(":")[0] in known:
        return None
    if value.endswith(".py"):
        raise ValueError(f"name the function as well: {Path(value).name}:FUNCTION")
    text = value if ":" in value else _offered(value)
    found = _WORD.fullmatch(text)
    if found is None:
        return None
    place, what, function = found["place"] or "", found["what"], found["function"]
    base = os.path.abspath((folder or Path()) / user_path(place)).rstrip("/")
    if found["digest"]:
        beside = folder is not None and (place or what.endswith(".py"))
        own = Own(f"{base}/{text.removeprefix(place)}" if beside else text)
        if field == ELEMENT and not own.values:
            raise ValueError(f"{own} has a digest without the grid's values; leave out # and what follows")
        return own
    code = _code(f"{base}/", what, function)
    if not code.package:
        place = f"{base}/"
    try:
        facts = _values(code) if field == ELEMENT else _bits(field, code)
        digest = own_source.digest(code)
        unfit = [*own_source.late_imports(code), *own_source.hidden_files(code)]
    except SyntaxError as error:
        raise ValueError(f"{error.filename or code.path}:{error.lineno}: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{code.path} is not a Python file") from None
    except OSError as error:
        raise ValueError(f"{error.filename or code.path}: {(error.strerror or str(error)).lower()}") from None
    if unfit:
        raise ValueError(f"{unfit[0]}: import it at the top")
    return Own(f"{place}{what}:{function}#{digest}{facts}")


def or_own(field: str, words: Collection[str], ours: object) -> object:
    """Return the type of a field that takes one of our words, of type `ours`, or a function of the user's
    (`Own`). `field` is a key of `KINDS`, or `element`; `words` are ours, without numbers behind a colon."""

    def either(value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> object:
        return resolved(field, value, words, (info.context or {}).get(FOLDER)) or handler(value)

    as_text = PlainSerializer(lambda value: value, return_type=str)
    return Annotated[ours, WrapValidator(either), as_text]


def shown(text: str) -> str:
    """Return a short form of a word for tables, with the first digits of its digest; other text as it is."""
    found = _WORD.fullmatch(text)
    if found is None or not found["digest"]:
        return text
    return f"{found['what']}:{found['function']} ({found['digest'][:_SHOWN]})"


def identified(value: object) -> object:
    """Return the identity of a function's word, without its folder; any other value as it is."""
    own = isinstance(value, str) and (found := _WORD.fullmatch(value)) and found["digest"]
    return Own(value).identity if own else value


@lru_cache
def _offered(name: str) -> str:
    """Return the function that an installed package offers under a name; empty if none does."""
    return next((entry.value for entry in entry_points(group=GROUP) if entry.name == name), "")


def _code(place: str, what: str, function: str) -> Code:
    """Return the source of a file's or module's function. `place`: its folder; empty: installed."""
    if what.endswith(".py"):
        path = Path(place, what)
        return Code(path, function, path.parent)
    return own_source.find(Path(place) if place else None, f"{what}:{function}")


def _bits(field: str, code: Code) -> str:
    """Return `+bits` for a function that draws; ValueError for one that does not fit the field."""
    functions = own_source.functions(code.path)
    if code.function not in functions:
        assigned = code.function in own_source.constants(code.path)
        hint = "it is assigned there: write a def" if assigned else nearest(code.function, functions)
        raise ValueError(f"{code.path} has no function {code.function!r} at its top level; {hint}")
    taken, kind = functions[code.function].args, KINDS[field]
    where = f"{code.path}:{functions[code.function].lineno}: {code.function}"
    if taken.posonlyargs or taken.vararg or taken.kwarg:
        raise ValueError(f"{where} must take its arguments by name: {', '.join(kind.offered)}")
    names, required = _arguments(taken)
    strange = [name for name in required if name not in kind.offered]
    if strange or kind.key not in names:
        others = _fitting(names, len(kind.offered.keys() & names))
        why = f"takes {strange[0]}" if strange else f"does not take {kind.key}"
        hint = f"; it is a function for {' or '.join(others)}" if others else ""
        raise ValueError(f"{where} {why}; a function for {field} takes {', '.join(kind.offered)}{hint}")
    return "+bits" if "bits" in names else ""


def _arguments(taken: ast.arguments) -> tuple[dict[str, None], list[str]]:
    """Return the names of a function's arguments, and those without a default."""
    by_place = [*taken.posonlyargs, *taken.args]
    optional = {argument.arg for argument in by_place[len(by_place) - len(taken.defaults) :]}
    optional |= {
        argument.arg
        for argument, usual in zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
        if usual is not None
    }
    names = {argument.arg: None for argument in (*by_place, *taken.kwonlyargs)}
    return names, [name for name in names if name not in optional]


def _fitting(names: Collection[str], beyond: int) -> list[str]:
    """Return the field whose functions take just these arguments; else those that give most, if more than
    `beyond`."""
    exact = [f for f, kind in KINDS.items() if kind.key in names and kind.offered.keys() >= set(names)]
    if exact:
        return exact
    given = {field: sum(name in kind.offered for name in names) for field, kind in KINDS.items()}
    most = max(given.values())
    return [field for field, count in given.items() if count == most > beyond]


def _values(code: Code) -> str:
    """Return the values of an element grid. ValueError if they are not written out, or are no grid."""
    known = own_source.constants(code.path)
    if code.function not in known:
        hint = nearest(code.function, known)
        raise ValueError(f"{code.path} assigns no tuple to {code.function!r} at its top level; {hint}")
    where = f"{code.path}:{known[code.function].lineno}: {code.function}"
    try:
        written = ast.literal_eval(known[code.function])
    except ValueError:
        written = None
    numbers = written if isinstance(written, tuple | list) else ()
    if line := own_source.changed_elsewhere(code.path, code.function):
        why = "is bound or used again there, and what it holds then is not read: write it out in one tuple"
        raise ValueError(f"{code.path}:{line}: {code.function} {why}")
    if not numbers or not all(type(value) in (int, float) for value in numbers):
        raise ValueError(f"{where} must be a tuple of numbers that are written out, such as (0, 0.5, 1, 2)")
    values = [_fp32(value) + 0.0 for value in numbers if abs(value) < _HUGE]  # -0 is written as 0
    rising = all(low < high for low, high in pairwise(values))
    if len(values) < len(numbers) or values[0] != 0 or not rising or not 2 <= len(values) <= _MOST_VALUES:
        raise ValueError(
            f"{where} must rise from 0 through the grid's magnitudes, 2 to {_MOST_VALUES} of them; the"
            " negative values are the same"
        )
    return "+" + ",".join(f"{value:.9g}" for value in values)


def _fp32(value: float | str) -> float:
    """Return the fp32 number that is nearest; nine digits name each of them."""
    number: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    return number


def kind_of(path: Path, name: str) -> str:
    """Return the field that a function or a tuple of a file is for, by the arguments that it takes;
    ValueError if it is for none, or there is none; SyntaxError, OSError if the file cannot be read."""
    functions, constants = own_source.functions(path), own_source.constants(path)
    if name in constants and name not in functions:
        if not isinstance(constants[name], ast.Tuple | ast.List):
            why = "must be a def at the top level, or a tuple of numbers that are written out"
            raise ValueError(f"{path}:{constants[name].lineno}: {name} {why}")
        return ELEMENT
    if name not in functions:
        hint = nearest(name, [*functions, *constants])
        raise ValueError(f"{path} has no function {name!r} at its top level; {hint}")
    names, required = _arguments(functions[name].args)
    for field, kind in KINDS.items():
        if kind.key in names and kind.offered.keys() >= set(required):
            return field
    if fitting := _fitting(names, 0):
        taken = "; ".join(f"for {field}: {', '.join(KINDS[field].offered)}" for field in fitting)
        raise ValueError(f"{path}:{functions[name].lineno}: {name} takes {', '.join(names)}; write {taken}")
    keys = ", ".join(f"{kind.key} ({field})" for field, kind in KINDS.items())
    raise ValueError(f"{path}:{functions[name].lineno}: {name} takes none of {keys}")


def is_for_quantisers(path: Path, name: str) -> bool:
    """Return True if a function of a file takes the arguments of a field; errors as of `kind_of` pass."""
    try:
        kind_of(path, name)
    except ValueError:
        return False
    return True
