"""Cache of files that are derived from other files, such as token shards from text.

Each entry is a folder named by a hash of its inputs. It exists completely or not at all, and only one process
at a time fills it.

The cache is in `$ABLATE_CACHE`, else in `ablate` below `$XDG_CACHE_HOME` or `~/.cache`. All of it can be
deleted: entries are rebuilt when they are needed.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ablate.files import Busy, lock, user_path, write

VARIABLE = "ABLATE_CACHE"
POLL_SECONDS = 1.0
SETTLED_SECONDS = 2.0
"""Age in seconds below which a file may change again without a change of its modification time."""


def root() -> Path:
    """Return the folder of the cache."""
    if folder := os.environ.get(VARIABLE):
        return user_path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ablate"


def kept(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """Return the cached folder of this kind and key; OSError if the cache cannot be written.

    If it does not exist, `make(folder)` fills it, while other processes that need it wait.
    """
    folder = root() / kind / key
    if folder.is_dir():
        return folder
    with lock(_writable_folder(kind) / f"{key}.lock"):
        if not folder.is_dir():
            with _atomic_folder(folder) as making:
                make(making)
    return folder


def growing(kind: str, key: str, make: Callable[[Path], Iterator[object]]) -> Iterator[None]:
    """Fill the folder that `kept` returns afterwards. Yield whenever `make(folder)` yields, and every second
    while another process fills the folder, so that a caller can report progress."""
    folder = root() / kind / key
    while not folder.is_dir():
        try:
            with lock(_writable_folder(kind) / f"{key}.lock", wait=False):
                if not folder.is_dir():
                    with _atomic_folder(folder) as making:
                        for _ in make(making):
                            yield
        except Busy:
            time.sleep(POLL_SECONDS)
            yield


def _writable_folder(kind: str) -> Path:
    """Return the folder of one kind of entries; OSError if it cannot be written."""
    folder = root() / kind
    why = "it belongs to another user"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = str(error.strerror)
    if not os.access(folder, os.W_OK):
        raise OSError(f"{folder}: the cache cannot be written ({why}); set {VARIABLE} to another folder")
    return folder


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Give an empty temporary folder, and rename it to `folder` if the block succeeds."""
    making = folder.with_name(f"{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)  # left behind by a process that was killed
    making.mkdir()
    try:
        yield making
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def remembered(key: str, find: Callable[[], str]) -> str:
    """Return the cached text of this key; if there is none, call `find` and store its result. A note has a
    hash of its key and its text, so that one that was edited, or moved to another key's place, does not
    count."""
    text = noted(key)
    if text is None:
        text = find()
        note(key, text)
    return text


def noted(key: str) -> str | None:
    """Return the cached text of this key; None if there is none."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((root() / "notes" / f"{key}.json").read_bytes())
        if found == _note(key, found["text"]):
            text: str = found["text"]
            return text
    return None


def note(key: str, text: str) -> None:
    """Keep the text of this key; OSError if the cache cannot be written."""
    write(_writable_folder("notes") / f"{key}.json", _note(key, text))


def _note(key: str, text: str) -> dict[str, str]:
    return {"text": text, "seal": key_of(key, text)}


def key_of(*values: object) -> str:
    """Return 32 hex digits of the SHA-256 hash of JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def digest(paths: Sequence[Path]) -> str:
    """Return 32 hex digits of the SHA-256 hash of the contents of these files, in this order. The hash is
    cached; files are read again if `stamp` differs."""
    key = stamp(paths)
    return hash_contents(paths) if key is None else remembered(key, lambda: hash_contents(paths))


def stamp(paths: Sequence[Path]) -> str | None:
    """Return a key that differs once a file's path, size, inode, or time of modification or of change (ctime,
    which programs cannot restore after an edit) differs; None if one was changed so recently that a further
    change might keep all of them."""
    stats = [path.stat() for path in paths]
    if time.time() - max((max(s.st_mtime, s.st_ctime) for s in stats), default=0) < SETTLED_SECONDS:
        return None
    return key_of(
        [
            (str(path.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
            for path, s in zip(paths, stats, strict=True)
        ]
    )


def hash_contents(paths: Iterable[Path]) -> str:
    hashed = hashlib.sha256()
    for path in paths:
        hashed.update(f"{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: hashed)  # adds its content
    return hashed.hexdigest()[:32]
