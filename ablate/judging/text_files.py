"""Text of a foreign file: UTF-8, or UTF-16 with its mark; anything else is refused with the line."""

import codecs
from pathlib import Path

from ablate.errors import InputError

_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def require_regular(path: Path) -> None:
    """Raise InputError for a device, a pipe or a socket, or a link to one: reading it may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: is a device, a pipe or a socket; write its content to a file")


def content(path: Path) -> bytes:
    """Return the bytes of a file. InputError if it cannot be read, or is empty."""
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name its files, such as '{path}/*.log'")
    require_regular(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if not data.strip():
        raise InputError(f"{path}: the file is empty")
    return data


def text(path: Path) -> str:
    """Return the text of a file, without a byte-order mark.

    Raises:
        InputError: the file cannot be read, is empty, or is not text in UTF-8 or marked UTF-16.
    """
    data = content(path)
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        decoded = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line} is not {encoding.removesuffix('-sig').upper()}"
            f" (byte {data[error.start]:#04x}); convert the file to UTF-8: `iconv -t utf-8`"
        ) from None
    if "\0" in decoded:
        line = decoded.count("\n", 0, decoded.index("\0")) + 1
        raise InputError(f"{path}: line {line} has a zero byte; the file is damaged, or not text")
    return decoded
