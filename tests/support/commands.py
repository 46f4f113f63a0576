"""The command line in this process: what a test asks of a verb's words and status, without a start of Python and its imports a call."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from typing import Any
from unittest import mock

from ablate.__main__ import main
from ablate.verification.checkup import Checkup
from support.experiments import environment

INLINE = ("--executor", "inline", "--mlflow", "none")


def here(*words: Any, checked: bool = False, **extra: str) -> subprocess.CompletedProcess:
    """Return the result of `ablate` as support.experiments does, of the same words and environment, called in this process. Without the
    quick check of the numerics, which has tests of its own, unless `checked`."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    command = ["ablate", *map(str, words)]
    unchecked = mock.patch.multiple(Checkup, start=lambda self: None, passed=lambda self: None)
    with (
        mock.patch.dict(os.environ, environment(**extra), clear=True),
        mock.patch.object(sys, "argv", command),
        contextlib.nullcontext() if checked else unchecked,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        terminated = signal.getsignal(signal.SIGTERM)  # some commands handle it until their process ends
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, terminated)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())
