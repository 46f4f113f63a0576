"""The quick checks of the numerics, in a child process, before a sweep starts trials."""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from typing import ClassVar

from ablate.engines.gpu_access import hidden
from ablate.provenance import own_command
from ablate.reports.plain_text import duration
from ablate.verification import passed_checks

COMMAND = own_command("ablate.doctor", "--fast", "--json", "--lifeline")
_TIMEOUT_SECONDS = 300.0


class Unfit(Exception):
    """The numerics on this machine are wrong. The message lists the checks that are off, and a command to
    look closer."""


class Checkup:
    """The quick checks, in a child process, in parallel with the start of a sweep. It ends with this process,
    or at `close`. Checks that passed here within a day are not repeated.

    `timeout`, in seconds: the checks are slow on a busy machine, but one that hangs must not stop a sweep.
    `device`: class of device of the trials, `cpu` or `cuda`. For `cpu` the checks see no GPU: neither its
    faults nor its memory matter to such a sweep.
    """

    remembered: ClassVar[Sequence[str]] = COMMAND
    """Command whose success is recorded."""

    def __init__(
        self, command: Sequence[str] = COMMAND, timeout: float = _TIMEOUT_SECONDS, device: str = "cpu"
    ) -> None:
        self._command, self._timeout = command, timeout
        self._environment = hidden(os.environ) if device == "cpu" else dict(os.environ)
        self._process: subprocess.Popen[str] | None = None
        self._subject = passed_checks.subject(self._environment) if command == self.remembered else None
        self._known = self._subject is not None and passed_checks.known(self._subject)

    def start(self) -> None:
        if self._process is None and not self._known:
            self._output, self._errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes them
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._errors,
                text=True,
                start_new_session=True,
                env=self._environment,
            )

    def passed(self) -> None:
        """Wait until the checks end; Unfit if one is off or they exceed the time limit."""
        if self._known:
            return
        if self._process is None:
            raise RuntimeError("the checks have not been started")
        try:
            status = self._process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            raise _unfit([f"the quick checks did not end within {duration(self._timeout)}"]) from None
        if status != 0:
            self._output.seek(0)
            self._errors.seek(0)
            raise _unfit(_problems(status, self._output.read(), self._errors.read()))
        self._known = True
        if self._subject is not None:
            passed_checks.keep(self._subject)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin:
                self._process.stdin.close()
            self._output.close()
            self._errors.close()


def _problems(status: int, output: str, errors: str) -> list[str]:
    """Return a line for each row that is off; if the output is incomplete, one on the end of the process."""
    try:
        off = [row for row in json.loads(output)["rows"] if row["ok"] is False]
    except ValueError:
        off = []
    last = "".join(f": {line}" for line in errors.strip().splitlines()[-1:])
    return [f"{row['what']}: {row['measured']}; expected {row['expected']}" for row in off] or [
        f"the quick checks ended with status {status}{last}"
    ]


def _unfit(problems: list[str]) -> Unfit:
    first = "The numerics on this machine are wrong, so no trial was started:"
    last = "See `python -m ablate.doctor`. Nothing is lost: once it agrees, the same command goes on."
    return Unfit("\n".join([first, *(f"  {problem}" for problem in problems), last]))
