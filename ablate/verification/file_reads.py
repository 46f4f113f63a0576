"""Files that a training function reads while it runs, of which a trial's identity does not know the content.

A trial's identity has the content of the code that import statements name, and of the files under `data`,
`sources` and `start`. A function that opens `settings.json` by itself, or imports a module by a computed
name, would have its old result reused after an edit of that file. Python raises an audit event for each file
that it opens, and that of the user's code is told by the frames above it.

Not seen: files that a library opens without Python (safetensors, Arrow), those of other processes (a
DataLoader's workers, a command), and the content of folders that are listed. Left out: installed packages,
the system's files, and files that the run itself writes.
"""

import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from ablate import cache
from ablate.training.own_code.user_errors import is_called_by_user

_watching: list[set[str]] = []
"""Sets of the paths that are being collected; empty while nobody asks."""
_hooked: list[bool] = []
"""Not empty once the hook is in place: Python cannot remove it."""


@contextmanager
def opened() -> Iterator[set[str]]:
    """Collect the absolute paths of files that the user's code opens to read inside this context."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_note)
    paths: set[str] = set()
    _watching.append(paths)
    try:
        yield paths
    finally:
        # By identity: the set of a context around this one may be equal, and must stay.
        _watching[:] = [other for other in _watching if other is not paths]


def unseen(paths: set[str], known: set[Path], since: float) -> list[Path]:
    """Return those of the opened files whose content is not in the identity; sorted. `known`: files whose
    content it has; `since`: seconds of the epoch at which the first run began; files that changed later are
    its own."""
    left_out = tuple(f"{folder}{os.sep}" for folder in _folders())
    found = set()
    for path in map(Path, paths):
        if path.suffix == ".pyc":
            with suppress(ValueError):
                path = Path(importlib.util.source_from_cache(str(path)))
        real = path.resolve()
        if real.is_file() and real not in known and not str(real).startswith(left_out):
            found |= {path} if real.stat().st_ctime < since else set()
    return sorted(found)


def _note(event: str, arguments: tuple[object, ...]) -> None:
    """Keep the path of a file that the user's code opens to read: the hook of the process."""
    if not _watching or event != "open":
        return
    path, _, flags = arguments[:3]
    writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    if writes or not isinstance(path, str | bytes | os.PathLike):
        return
    frame: FrameType | None = sys._getframe(1)
    if is_called_by_user(frame):
        absolute = os.path.abspath(os.fsdecode(path))
        for paths in _watching:
            paths.add(absolute)


def _folders() -> list[Path]:
    packages = {*sysconfig.get_paths().values(), *site.getsitepackages(), sys.prefix, sys.base_prefix}
    names = [*packages, "/proc", "/sys", "/dev", "/etc", "/usr", str(cache.root())]
    return [Path(name).resolve() for name in names] + [Path(__file__).parents[1].resolve()]
