"""Addresses without the passwords in them. Whatever prints an address, or an error that may quote one, goes through here."""

import re
from collections.abc import Iterator
from urllib.parse import unquote

_PASSWORDS = (re.compile(r"(?<=://)([^:/@\s]*:)(\S*)(?=@)"), re.compile(r"([?&](?:password|passwd|token|secret)=)([^&\s]*)"))
_SHORTEST = 3
"""A password of fewer characters is not looked for outside an address: it would be found everywhere."""


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
