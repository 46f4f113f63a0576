"""Notification hook of a sweep: a command gets JSON on its standard input, a URL gets it by POST.

Messages are sent from threads of their own, so that no trial waits. A failure never ends the sweep; it
becomes one line.
"""

import json
import shlex
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException

from ablate.errors import InputError, as_input_error, passwords, redact
from ablate.files import Json

_POST_SECONDS = 10.0
_COMMAND_SECONDS = 60.0


class Hook:
    """Command or http(s) URL that receives messages. InputError if the address can be neither."""

    def __init__(self, address: str, seconds: float | None = None) -> None:
        """`seconds`: time for a message, by default 10 s for a URL and 60 s for a command."""
        self._address = address
        self._url = address.startswith(("http://", "https://"))
        self._seconds = seconds or (_POST_SECONDS if self._url else _COMMAND_SECONDS)
        self._threads: list[threading.Thread] = []
        self._troubles: list[str] = []
        if not self._url:
            self._words = _words(address)
        elif any(passwords(address.partition("?")[0])):
            raise InputError(
                "--notify: a URL with user:password@ cannot be called;"
                " use a command, which may hold its own password"
            )
        elif not address.partition("://")[2].strip("/"):
            raise InputError(f"--notify {address}: no host")

    def tell(self, message: Mapping[str, Json]) -> None:
        """Send the message without waiting for the result."""
        thread = threading.Thread(
            target=self._send, args=(json.dumps(message).encode(),), name="notify", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def troubles(self) -> list[str]:
        """Return the failures since the last call, a line each."""
        found, self._troubles = self._troubles, []
        return found

    def close(self) -> list[str]:
        """Wait until all messages were sent or failed; return the failures, a line each."""
        deadline = time.monotonic() + (2 * self._seconds if self._url else self._seconds + 1)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return self.troubles()

    def _send(self, message: bytes) -> None:
        try:
            why = self._post(message) if self._url else self._call(message)
        # no network, no host, no answer in time, no HTTP
        except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            self._troubles.append(f"notify: {redact(why.splitlines()[0], self._address)}")

    def _post(self, message: bytes) -> str | None:
        request = urllib.request.Request(self._address, message, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._seconds):
                return None
        except urllib.error.HTTPError as error:
            with error:
                return f"the server answered {error.code} {error.reason}"

    def _call(self, message: bytes) -> str | None:
        done = subprocess.run(
            self._words, input=message, capture_output=True, timeout=self._seconds, check=False
        )
        if not done.returncode:
            return None
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
        return f"{self._words[0]} ended with status {done.returncode}{last and f': {last}'}"


def _words(command: str) -> list[str]:
    with as_input_error(ValueError, before="--notify: not a command: "):
        words = shlex.split(command)
    if not words or shutil.which(words[0]) is None:
        raise InputError(
            f"--notify {words[0] if words else ''}: no such command; name one, or an http(s) URL"
        )
    return words
