"""Files that are written whole or not at all, locks that name their holder, and folders of one user."""

import errno
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO


class Damaged(ValueError):
    """A file that is not what was written into it; the message is a sentence that names it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


def write(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one: temporary file, fsync, rename."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    with temporary.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file that `write` wrote. Damaged where it is none."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise Damaged(path, f"torn or damaged: {error}") from None
    if not isinstance(content, dict):
        raise Damaged(path, "damaged: it is no JSON object")
    return content


def synced(path: Path) -> None:
    """Have the disk keep what was written to a file, or into a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk is full, the user's quota is used up, a file would exceed the largest size allowed."""
_FULL_WORDS = ("disk is full", "PytorchStreamWriter failed writing")
"""Words of SQLite and torch for the same, whose errors have no number."""


def full(error: BaseException | None, folder: Path | None = None) -> bool:
    """Return True if an error, or one that it came from, says that nothing more can be written: in a file, in SQLite, in torch.

    SQLite does not tell a quota that is used up from a broken disk: with `folder`, a file that is written there decides.
    """
    if folder and getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR"):
        try:
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(1 << 20))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as refusal:
            error = refusal
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) or any(
            words in str(error) for words in _FULL_WORDS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock; of a trial's lock, the attempt that it computes."""

    pid: int
    host: str
    attempt: int | None = None

    @classmethod
    def this_process(cls, attempt: int | None = None) -> "Holder":
        """Return the process that calls."""
        return cls(os.getpid(), os.uname().nodename, attempt)

    @property
    def content(self) -> str:
        """Text of the lock file."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, content: str) -> "Holder | None":
        """Read a lock file; those of earlier versions say `pid 12 on host, attempt 3`. None if it is neither, or not yet written."""
        match content.replace(",", " ").split():
            case ["pid", pid, "on", host] if pid.isdecimal():
                return cls(int(pid), host)
            case ["pid", pid, "on", host, "attempt", attempt] if pid.isdecimal() and attempt.isdecimal():
                return cls(int(pid), host, int(attempt))
        try:
            holder = cls(**json.loads(content))
        except (ValueError, TypeError):
            return None
        return holder if isinstance(holder.pid, int) and isinstance(holder.host, str) else None

    @property
    def process(self) -> str:
        """The process in words."""
        return f"pid {self.pid} on {self.host}"

    def __str__(self) -> str:
        return self.process if self.attempt is None else f"{self.process}, attempt {self.attempt}"


class Busy(Exception):
    """Another process holds the lock; its text says which, as far as it is known."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "unknown"))


@contextmanager
def lock(path: Path, wait: bool = True, attempt: int | None = None) -> Iterator[Callable[[], bool]]:
    """Hold the lock file `path`, which names its holder; while another process does, wait, or raise Busy at once.

    Gives a function: whether the file still names this holder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if wait:
            fcntl.flock(file, fcntl.LOCK_EX)
        elif not _taken(file):
            file.seek(0)
            raise Busy(Holder.parse(file.read()))
        holder = Holder.this_process(attempt).content
        file.truncate(0)
        file.write(holder)
        file.flush()
        yield lambda: path.exists() and path.read_text() == holder


def _taken(file: TextIO) -> bool:
    """Whether the lock could be had without waiting for its holder; who only asks whether it is held has it for an instant."""
    for _ in range(5):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return True
    return False


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
