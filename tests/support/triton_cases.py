"""Cases of a Triton kernel in a process of their own: Triton decides while it is imported whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.cases import Tier

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_cases(cases: Path, **environment: str) -> None:
    """Run a file of cases by pytest in a process with this environment; fail with its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(cases)]
    command += ["--all"] if Tier.whole else []
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def patch_language_once() -> None:
    """Let the interpreter put its functions into `triton.language` once a launch for each module.

    Triton 3.7 does it at every call of a device function, which is over half of a launch's time, and writes
    its table of numpy's dtypes anew at every use. Nothing is done if this process does not interpret.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()
    look_up, dtypes = interpreter._get_np_dtype, {}

    def dtype_once(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(type.scalar)
        return dtypes[name]

    def patch_once(function: Any) -> Any:
        module = function.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            return patch(function)

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launched
    interpreter._get_np_dtype = dtype_once
