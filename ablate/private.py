"""What only this user may read: folders made with mode 0700, files with 0600, and a short temporary folder for sockets.

The path of a Unix socket has at most 107 bytes. Ray's sockets lie 70 bytes below its temporary folder, and batch systems set TMPDIR to
a folder of the job with a long name.
"""

import os
import stat
import tempfile
from pathlib import Path

_LONGEST_FOR_SOCKETS = 36
_SHARED_BITS = 0o077


def make_folder(path: Path, shared: bool) -> str | None:
    """Make a folder that only this user may enter, or with `shared` one with the rights that the umask leaves.

    A folder that is there keeps its rights. Return them, as `drwxr-xr-x`, if others may enter it and that was not asked for, else None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o777 if shared else 0o700)
    except FileExistsError:
        mode = path.stat().st_mode
        return stat.filemode(mode) if mode & _SHARED_BITS and not shared else None
    return None


def keep_file(path: Path) -> None:
    """Take the rights of others to a file of this user's away; nothing if there is no such file."""
    try:
        found = path.stat()
        if found.st_uid == os.getuid() and found.st_mode & _SHARED_BITS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_SHARED_BITS)
    except OSError:  # missing, or on a file system without rights
        return


def temporary_folder(base: Path = Path("/tmp")) -> Path:
    """Return a short folder of this user's alone for temporary files; another user's under that name is not used."""
    path = base / f"ablate-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="ab-"))
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _SHARED_BITS:
        return path
    return Path(tempfile.mkdtemp(prefix="ab-", dir=base))


def ensure_home() -> str | None:
    """Give this process a home if it has none: no HOME, and no entry in the user database, as in containers. Return what to tell.

    Ray, matplotlib, Jupyter and the caches of this package all keep files there.
    """
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(temporary_folder())
        return f"HOME is not set, and user {os.getuid()} is not in the user database: {os.environ['HOME']} is used as home"
    return None


def short_for_sockets(folder: str) -> Path | None:
    """Return a folder in which the paths of Ray's sockets fit, or None if they fit in the given one."""
    return temporary_folder() if len(os.fsencode(folder)) > _LONGEST_FOR_SOCKETS else None
