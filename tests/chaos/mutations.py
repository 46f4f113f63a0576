"""Mutations of a file's bytes, each drawn by a generator. Corruptions of state folders and mutants of files share them."""

import re
from random import Random

NUMBERS = [
    "nan",
    "inf",
    "-inf",
    "abc",
    "1e999",
    "-1",
    "3,5",
    "1_0",
    "0x1",
    "7",
    "2.5",
    "1e-3",
    "null",
    "0",
    "1",
    "3",
    "1.5",
    "2147483648",
    "9223372036854775807",
    "1e308",
    "1e-320",
    ".5",
    "0x10",
]
NUMBERS += ["", '"x"', "1" + "0" * 30]
"""Texts in the place of a number."""
ODD_LINES = (b"", b"oops", b"\xff\xfe", b"{}", b",,,", b"step: 5")
ODD_STARTS = (
    "\ufeff",
    "\t",
    "---\n",
    "...\n",
    "%YAML 1.1\n---\n",
    "%YAML 9.9\n---\n",
    "? ",
    "- ",
    " ",
    "  ",
    "   ",
)
"""Beginnings of a line."""
ENCODINGS = ("utf-16", "utf-16-le", "utf-32", "utf-8-sig")
LINE_ENDS = (b"\r\n", b"\r", b"\n\n", b"\x85", b"\xe2\x80\xa8")
_DIGIT = re.compile(rb"(?<=[\s:\[.0-9])[0-9](?=[0-9.,\s}\]e])")
"""Digit of a number in a text."""
_NUMBER = re.compile(rb"(?<![\w.])-?\d+\.?\d*(?:e-?\d+)?(?![\w.])")


def bit(content: bytes, draw: Random, low: int = 0, high: int | None = None) -> bytes:
    """Flip one bit, in the bytes from `low` up to `high`."""
    at = draw.randrange(low, min(len(content), high or len(content)))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


def flip(content: bytes, draw: Random) -> bytes:
    """Flip one bit or a few."""
    for _ in range(draw.choice((1, 1, 2, 4, 8)) if content else 0):
        content = bit(content, draw)
    return content


def cut(content: bytes, draw: Random) -> bytes:
    """Cut off the end."""
    return content[: draw.randrange(len(content))] if content else content


def splice(content: bytes, draw: Random) -> bytes:
    """Remove a piece, or write it twice."""
    one, other = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    return content[:one] + content[other:] if draw.random() < 0.5 else content[:other] + content[one:]


def again(content: bytes, draw: Random) -> bytes:
    """Write one line again at the end."""
    lines = content.splitlines(keepends=True)
    return content + draw.choice(lines) if lines else content


def lines(content: bytes, draw: Random) -> bytes:
    """Drop, repeat, swap, cut or spoil a line, or add one."""
    parts = content.split(b"\n")
    one, other = draw.randrange(len(parts)), draw.randrange(len(parts))
    change = draw.randrange(7)
    if change == 0:
        del parts[one]
    elif change == 1:
        parts.insert(other, parts[one])
    elif change == 2:
        parts[one], parts[other] = parts[other], parts[one]
    elif change == 3:
        parts[one] = parts[one][: draw.randrange(len(parts[one]) + 1)]
    elif change == 4:
        parts[one] = draw.choice(ODD_STARTS).encode() + parts[one]
    elif change == 5:
        parts[one] = parts[one].lstrip(b" ")
    else:
        parts.insert(one, draw.choice(ODD_LINES))
    return b"\n".join(parts)


def digit(content: bytes, draw: Random) -> bytes:
    """Change one digit of a number."""
    if not (digits := [match.start() for match in _DIGIT.finditer(content)]):
        return content
    at = draw.choice(digits)
    return content[:at] + b"%d" % ((content[at] - 48 + draw.randrange(1, 10)) % 10) + content[at + 1 :]


def number(content: bytes, draw: Random) -> bytes:
    """Write another text in the place of a number."""
    if not (spots := list(_NUMBER.finditer(content))):
        return content
    spot = draw.choice(spots)
    return content[: spot.start()] + draw.choice(NUMBERS).encode() + content[spot.end() :]


def misspelt(word: str, draw: Random) -> str:
    """Return a word with a letter less or more, or otherwise almost right."""
    at = draw.randrange(len(word) + 1)
    less, more = word[:at] + word[at + 1 :], word[:at] + "x" + word[at:]
    return draw.choice((less, more, word.upper(), "loss", f"{word}.{word}", word.replace(".", "")))


def header(content: bytes, draw: Random) -> bytes:
    """Rename a column, or swap the names of two."""
    first, end, rest = content.partition(b"\n")
    names = first.split(b",")
    one, other = draw.randrange(len(names)), draw.randrange(len(names))
    if draw.random() < 0.5:
        names[one], names[other] = names[other], names[one]
    else:
        names[one] = misspelt(names[one].decode("latin-1"), draw).encode()
    return b",".join(names) + end + rest


def encoding(content: bytes, draw: Random) -> bytes:
    """Write another encoding, or other ends of lines."""
    if draw.random() < 0.5:
        return content.replace(b"\n", draw.choice(LINE_ENDS))
    text = content.decode("utf-8", "surrogateescape")
    return text.encode(draw.choice(ENCODINGS), "surrogatepass")
