"""Sentences for what Triton lacks on a user's machine, with the way out."""

import subprocess
import sysconfig
from pathlib import Path


def reason(error: Exception, headers: Path | None = None) -> str:
    """Return a sentence for an error of a launch, with the way out. `headers`: folder of Python.h; None: that
    of this Python."""
    text = str(error)
    headers = headers or Path(sysconfig.get_paths()["include"])
    if "C compiler" in text:
        return "Triton found no C compiler, which builds the launchers of kernels; install gcc, or set CC"
    if isinstance(error, subprocess.CalledProcessError) and not (headers / "Python.h").exists():
        return f"there is no Python.h in {headers}, which Triton compiles against; install python3-dev"
    if isinstance(error, subprocess.CalledProcessError):
        return f"the C compiler that Triton calls failed ({text}); set CC to one that works"
    if "ptxas" in text:
        return "Triton found no ptxas that works; install triton again, or set TRITON_PTXAS_PATH to CUDA's"
    first = (text.splitlines() or [""])[0]
    return f"Triton raised {type(error).__name__}: {first}; see Triton's issues"
