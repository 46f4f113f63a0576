"""Atomic writes, lock files that name their holder, and folders that only one user can enter."""

import errno
import fcntl
import json
import math
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""Type of any value that `json.loads` returns."""


_LONGEST_NAME = 200
"""Largest length of a sweep's name in bytes: file systems allow 255, and files named after a sweep have
suffixes."""


class Damaged(ValueError):
    """A file whose content is not what was written to it. The message names the file."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path


def no_folder_name(name: str) -> str | None:
    """Return why the folder of a sweep cannot have this name, as a clause; None if it can."""
    if not name.strip(" .") or name.startswith("."):
        return f"a folder named {name!r} is hidden or impossible"
    if "/" in name or "\\" in name or not name.isprintable():
        return f"{name!r} contains a separator or an unprintable character"
    return f"this name has more than {_LONGEST_NAME} bytes" * (len(name.encode()) > _LONGEST_NAME) or None


def finite(content: Any, spelled: Callable[[float], object] = lambda number: None) -> Any:
    """Return JSON data with None, or what `spelled` gives, in place of numbers that are not finite, which
    JSON does not have."""
    if isinstance(content, Mapping):
        return {key: finite(value, spelled) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value, spelled) for value in content]
    return spelled(content) if isinstance(content, float) and not math.isfinite(content) else content


def flat(content: Mapping[str, Any], between: str, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested mappings, with `between` between the keys; an empty mapping in them is an
    item. A key may come twice: `a/b` and `b` in `a`."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from flat(value, between, f"{above}{key}{between}")
        else:
            yield f"{above}{key}", value


def temporary_of(path: Path) -> Path:
    """Return a path beside a file for its next content, which no other process uses: containers that share a
    folder have processes of one id."""
    return path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(8)}")


def write(path: Path, content: object) -> None:
    """Write JSON atomically, as `write_text` does."""
    write_text(path, json.dumps(content, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, by a temporary file, fsync and rename: readers see the old file or the new
    one."""
    temporary = temporary_of(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that `write` wrote; Damaged if the file does not contain one."""
    try:
        content = json.loads(path.read_bytes())
    except IsADirectoryError:
        raise Damaged(path, "a folder, not a file") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"torn or damaged: {error}") from None
    if not isinstance(content, dict):
        raise Damaged(path, "damaged: it is not a JSON object")
    return content


def user_path(text: str | Path) -> Path:
    """Return a path with a leading `~` as the user's folder. `~nobody` stays and is refused as any path that
    does not exist; Path.expanduser would raise a RuntimeError."""
    return Path(os.path.expanduser(text))


def below(folder: Path) -> list[Path]:
    """Return all files in a folder and in its folders, links to folders included, sorted by path; OSError if
    one cannot be read. A link to a folder that contains it is not followed, since there would be no end.
    Links that lead nowhere are left out."""
    return sorted(_below(folder, ()))


def _below(folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in above:
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _below(path, (*above, real))
        elif path.is_file():
            yield path


def synced(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exhausted quota, and a file above the largest size allowed."""
_FULL_MESSAGES = ("disk is full", "PytorchStreamWriter failed writing")
"""Messages of SQLite and torch for the same, since their errors have no number."""


def full(error: BaseException | None, folder: Path | None = None) -> bool:
    """Return True if an error, or one that caused it, means a full disk: from a file, SQLite or torch.

    SQLite reports an exhausted quota and a broken disk alike. With `folder`, a test file written there
    decides.
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
            message in str(error) for message in _FULL_MESSAGES
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def first_error() -> Iterator[None]:
    """Raise what interrupted `torch.save`, such as Ctrl-C or a full disk, in place of the error of its own
    that torch 2.13.0 raises when it closes a torn archive."""
    try:
        yield
    except RuntimeError as error:
        if error.__context__ is None:
            raise
        raise error.__context__ from None


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock and, for the lock of a trial, the attempt that it computes."""

    pid: int
    host: str
    attempt: int | None = None

    @classmethod
    def this_process(cls, attempt: int | None = None) -> "Holder":
        """Return the calling process."""
        return cls(os.getpid(), os.uname().nodename, attempt)

    @property
    def content(self) -> str:
        """Content of the lock file."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, content: str | bytes) -> "Holder | None":
        """Parse the content of a lock file; None if it is damaged, not text, or not yet written."""
        try:
            holder = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        fits = isinstance(holder.pid, int) and 0 < holder.pid < 1 << 31 and isinstance(holder.host, str)
        return holder if fits else None

    @property
    def process(self) -> str:
        """Description of the process: `pid 12 on host`."""
        return f"pid {self.pid} on {self.host}"

    def __str__(self) -> str:
        return self.process if self.attempt is None else f"{self.process}, attempt {self.attempt}"


class Busy(Exception):
    """Another process holds the lock. The message names it if the lock file does."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "unknown"))


@contextmanager
def lock(path: Path, wait: bool = True, attempt: int | None = None) -> Iterator[Callable[[], bool]]:
    """Hold the lock file `path`, whose folder is created, within the block; its content names the holder and
    the number of the trial's attempt.

    Yield a function that returns True while the file still names this holder. If another process holds the
    lock, wait, or without `wait` raise Busy at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", errors="replace") as file:
        if wait:
            fcntl.flock(file, fcntl.LOCK_EX)
        elif not _acquire(file):
            file.seek(0)
            raise Busy(Holder.parse(file.read()))
        holder = Holder.this_process(attempt).content
        file.truncate(0)
        file.write(holder)
        file.flush()
        yield lambda: path.exists() and path.read_bytes() == holder.encode()


def holder_of(path: Path) -> Holder | None:
    """Return the process that holds the lock file `path`; None if none does. It never blocks another one: a
    lock that names a dead process of this machine is not tried, so that a process that starts now finds it
    free."""
    try:
        with path.open("rb") as file:
            found = Holder.parse(file.read())
            if found is None or _dead(found):
                return None
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except BlockingIOError:
        return found
    return None


def _dead(holder: Holder) -> bool:
    if holder.host != os.uname().nodename:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's
        return False
    return False


def _acquire(file: TextIO) -> bool:
    """Lock the file without waiting for its holder; return False if that fails. It is tried several times,
    because a process that only tests the lock holds it for an instant."""
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
    """Create a folder that only this user can enter, or with `shared` one with the permissions that the umask
    leaves.

    An existing folder keeps its permissions. Return them, as `drwxr-xr-x`, if others can enter it although
    `shared` is False, else None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o777 if shared else 0o700)
    except FileExistsError:
        mode = path.stat().st_mode
        return stat.filemode(mode) if mode & _SHARED_BITS and not shared else None
    return None


def keep_file(path: Path) -> None:
    """Remove the permissions of other users from a file of this user; do nothing if there is no such file."""
    try:
        status = path.stat()
        if status.st_uid == os.getuid() and status.st_mode & _SHARED_BITS:
            path.chmod(stat.S_IMODE(status.st_mode) & ~_SHARED_BITS)
    except OSError:  # missing, or on a file system without permissions
        return


def temporary_folder(base: Path = Path("/tmp")) -> Path:
    """Return a folder with a short path for temporary files that only this user can enter. One of that name
    that belongs to another user is not used."""
    path = base / f"ablate-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="ab-"))
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & _SHARED_BITS:
        return path
    return Path(tempfile.mkdtemp(prefix="ab-", dir=base))


def ensure_home() -> str | None:
    """Set HOME to a temporary folder if this process has no home folder, and return a note for the user, else
    None.

    In containers HOME may be unset and the user missing from the user database. Ray, matplotlib, Jupyter and
    the cache of this package all store files in the home folder.
    """
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = str(temporary_folder())
        return (
            f"HOME is not set, and user {os.getuid()} is not in the user database: "
            f"{os.environ['HOME']} is used as home folder"
        )
    return None


def short_for_sockets(folder: str) -> Path | None:
    """Return a folder whose path is short enough for Ray's sockets, or None if the given one is."""
    return temporary_folder() if len(os.fsencode(folder)) > _LONGEST_FOR_SOCKETS else None
