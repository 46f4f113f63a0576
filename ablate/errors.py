"""What a user's mistake is told with: its place, the nearest right word, and text that is safe to print."""

import difflib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

_WORD = 100
"""Characters of a word that are compared with others, which takes the square of their number."""
_MOST_COMPARED = 1000
"""Right words that are compared with a mistyped one, which may be thousands of arms."""
_JOINERS = "\u200c\u200d"
"""Characters of Persian, of Indian scripts and of emoji, without a shape of their own."""
_HIDDEN = ("Cc", "Cs", "Cf", "Zl", "Zp")
"""Unicode categories that a terminal obeys or leaves out: controls, half pairs, formats (which turn the order of text), line breaks."""
_PASSWORDS = (
    re.compile(r"(?<=://)([^:/@\s]*:)(\S*)(?=@)"),
    re.compile(r"([?&](?:password|passwd|token|secret)=)([^&\s]*)"),
)
_SHORTEST = 3
"""A password of fewer characters is not looked for outside an address: it would be found everywhere."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file, and where: `line` and `column` count from 1."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.message}"


class InputError(Exception):
    """What a user gave cannot be run: all problems at once. Ends a command with status 2."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = list(problems)


def nearest(word: str, known: Iterable[str], count: int = 6) -> str:
    """`'clip' is the nearest of clip, element, ...`: what a mistyped word may have meant."""
    return _nearest(word, tuple(known), count)


@lru_cache(maxsize=256)
def _nearest(word: str, known: tuple[str, ...], count: int) -> str:
    near = difflib.get_close_matches(word[:_WORD], known[:_MOST_COMPARED], n=count, cutoff=0.0)
    listed = ", ".join(near + ([f"... ({len(known)} in all)"] if len(known) > len(near) else []))
    return f"{near[0]!r} is the nearest of {listed}" if near else "nothing can be set here"


def printable(text: str) -> str:
    """Return the text with hidden characters shown as Python escapes (`\\x1b`). Line breaks stay."""
    if text.isprintable():
        return text
    return "".join(_escaped(character) if _hidden(character) else character for character in text)


def one_line(text: str) -> str:
    """Return the text as `printable` does, line breaks shown as escapes, too: for a name within a line or a table."""
    return printable(text).replace("\n", r"\n")


def _hidden(character: str) -> bool:
    return character != "\n" and character not in _JOINERS and unicodedata.category(character) in _HIDDEN


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def passwords(address: str) -> Iterator[str]:
    """The passwords in an address: `user:password@`, `?password=`; also in a text that quotes addresses."""
    for pattern in _PASSWORDS:
        yield from (found[2] for found in pattern.finditer(address) if found[2])


def redact(text: str, *addresses: str | None) -> str:
    """The text without passwords: those in addresses that it quotes, and those of `addresses` wherever they stand."""
    for address in filter(None, addresses):
        for password in passwords(address):
            for known in sorted({password, unquote(password)}, key=len, reverse=True):
                text = text.replace(known, "***") if len(known) >= _SHORTEST else text
    for pattern in _PASSWORDS:
        text = pattern.sub(lambda found: f"{found[1]}***", text)
    return text
