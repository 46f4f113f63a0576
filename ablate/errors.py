"""Errors in a user's input: position, message, nearest valid word; and text that is safe to print."""

import difflib
import re
import unicodedata
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar
from urllib.parse import unquote

_WORD = 100
"""Characters of a word that are compared with others; the time grows with the square of their number."""
_MOST_COMPARED = 1000
"""Valid words that are compared with a mistyped one. There may be thousands, such as names of arms."""
_MOST_QUOTED = 200
"""Most characters of a stranger's file that a sentence quotes."""
_JOINERS = "\u200c\u200d"
"""Zero-width characters that Persian, Indian scripts and emoji need: ZWNJ and ZWJ."""
_HIDDEN = ("Cc", "Cs", "Cf", "Cn", "Co", "Zl", "Zp")
"""Unicode categories that a terminal interprets or hides: controls, surrogates, formats (which can reverse
the order of text), characters without a meaning (unassigned, private), line and paragraph separators.
"""
_PASSWORDS = (
    re.compile(r"(?<=://)([^:/@\s]*:)(\S*)(?=@)"),
    re.compile(r"(?i)([?&][\w.-]*(?:passw(?:or)?d|token|secret|key|signature|credential)=)([^&\s]*)"),
)
_MOST_READ = 1000
"""Problems after which reading stops: a file with more is no experiment, and each may need a search for the
nearest word."""
_MOST_PRINTED = 50
"""Largest number of problems that are printed."""
_SHORTEST = 3
"""Shortest password that is replaced outside addresses. A shorter one would match parts of many words."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a file, with its position. `line` and `column` count from 1."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.message}"


class InputError(Exception):
    """User input that cannot be used, with all its problems at once. Ends a command with exit status 2."""

    def __init__(self, *problems: Problem | str) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


@contextmanager
def as_input_error(*kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Turn errors of these classes within the block into an InputError with the same text, after `before`."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{before}{error}") from None


class OwnFunctionError(InputError):
    """A function of the user's in a quantiser breaks its contract, as it will at every attempt.

    Attributes:
        file: file of the function.
        line: its line; 0 if the file cannot be read.
        unrepeatable: True if two calls with the same arguments gave different numbers.
    """

    def __init__(self, sentence: str, file: str, line: int, unrepeatable: bool = False) -> None:
        super().__init__(sentence)
        self.file, self.line, self.unrepeatable = file, line, unrepeatable

    def within(self, place: str) -> "OwnFunctionError":
        """Return the error with the place of the call: an operand and its layer."""
        return OwnFunctionError(f"{self.problems[0]}, in {place}", self.file, self.line, self.unrepeatable)


T = TypeVar("T")
Key = TypeVar("Key")
Reading = Generator[Problem, None, T]
"""A reader of a file: yields the problems in their order, and returns what was read."""


def settled(reading: Reading[T]) -> T:
    """Return what a reader returns. InputError if it yields problems: with the first of them in the order of
    the file, each once, and the number of the others."""
    problems: dict[Problem, None] = {}
    while len(problems) < _MOST_READ:
        try:
            problems[next(reading)] = None
        except StopIteration as end:
            if not problems:
                return end.value
            break
    in_order: list[Problem] = sorted(problems, key=lambda problem: (problem.line, problem.column))
    shown = in_order[:_MOST_PRINTED]
    if more := len(in_order) - len(shown):
        stopped = len(in_order) >= _MOST_READ
        count = f"at least {more}" if stopped else f"{more}"
        last = f"and {count} more problems" + ": reading stopped there" * stopped
        shown.append(replace(shown[-1], message=last))
    raise InputError(*shown)


class OutsideStepError(RuntimeError):
    """A converted model was called outside a training step. At fault is the line that called the model."""


def nearest(word: str, valid: Iterable[str], count: int = 6) -> str:
    """Return a hint for a mistyped word: `'clip' is the nearest of clip, element, ...`."""
    return _nearest(word, tuple(valid), count)


@lru_cache(maxsize=256)
def _nearest(word: str, valid: tuple[str, ...], count: int) -> str:
    near = difflib.get_close_matches(word[:_WORD], valid[:_MOST_COMPARED], n=count, cutoff=0.0)
    near = [name if len(name) <= _MOST_QUOTED else f"{name[:_MOST_QUOTED]}..." for name in near]
    listed = ", ".join(near + ([f"... ({len(valid)} in all)"] if len(valid) > len(near) else []))
    return f"{near[0]!r} is the nearest of {listed}" if near else "there is nothing to choose from"


def by_key(pairs: Iterable[tuple[Key, T]]) -> dict[Key, list[T]]:
    """Return the values of each key together, keys and values in their order, so that what holds for several
    is said once."""
    groups: dict[Key, list[T]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def some_of(names: Sequence[str], most: int) -> str:
    """Return the first of many names, and the number of the others: `a, b and 3 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def printable(text: str) -> str:
    """Return the text with hidden characters shown as Python escapes (`\\x1b`). Line breaks stay."""
    if text.isprintable():
        return text
    return "".join(_escaped(character) if _hidden(character) else character for character in text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty; its class's name if there is none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def one_line(text: str) -> str:
    """Return the text as `printable` does, with line breaks as escapes: for a name in a line or a table."""
    return printable(text).replace("\n", r"\n")


def brief(text: str) -> str:
    """Return the text as `one_line` does, cut after 200 characters: for words of strangers' files."""
    return one_line(text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}...")


def _hidden(character: str) -> bool:
    return character != "\n" and character not in _JOINERS and unicodedata.category(character) in _HIDDEN


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def passwords(address: str) -> Iterator[str]:
    """Yield the passwords in an address, or in a text with addresses: `user:password@`, `?password=`."""
    for pattern in _PASSWORDS:
        yield from (match[2] for match in pattern.finditer(address) if match[2])


def redact(text: str, *addresses: str | None) -> str:
    """Return the text without passwords: those in addresses within it, and those of `addresses` anywhere."""
    for address in filter(None, addresses):
        for password in passwords(address):
            for spelling in sorted({password, unquote(password)}, key=len, reverse=True):
                text = text.replace(spelling, "***") if len(spelling) >= _SHORTEST else text
    for pattern in _PASSWORDS:
        text = pattern.sub(lambda match: f"{match[1]}***", text)
    return text
