"""What is made of other files once and kept: folders named by what they were made of, whole or not there, never made twice at once.

They lie in `$ABLATE_CACHE`, else in `ablate` below `$XDG_CACHE_HOME` or `~/.cache`. All of it can be deleted: it is made again.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ablate.files import Busy, lock, write

VARIABLE = "ABLATE_CACHE"
_BLOCK = 1 << 20
_POLL_SECONDS = 1.0
_SETTLED_SECONDS = 2.0
"""A file that changed this recently may change again without its time showing it."""


def root() -> Path:
    """The cache's folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ablate"


def kept(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make(folder)` fills, made where it is not there yet; another process that wants it too waits.

    OSError in a sentence where nothing can be written there.
    """
    folder = root() / kind / key
    if folder.is_dir():
        return folder
    with lock(_shelf(kind) / f"{key}.lock"):
        if not folder.is_dir():
            with _making(folder) as making:
                make(making)
    return folder


def growing(kind: str, key: str, make: Callable[[Path], Iterator[Any]]) -> Iterator[None]:
    """Fill the folder that `kept` then gives, for what takes so long that whoever waits must hear that it goes on.

    Yields whenever `make(folder)` does, and every second while another process fills it.
    """
    folder = root() / kind / key
    while not folder.is_dir():
        try:
            with lock(_shelf(kind) / f"{key}.lock", wait=False):
                if not folder.is_dir():
                    with _making(folder) as making:
                        for _ in make(making):
                            yield
        except Busy:
            time.sleep(_POLL_SECONDS)
            yield


def _shelf(kind: str) -> Path:
    """A folder of the cache, where something can be written."""
    folder = root() / kind
    why = "it is not this user's"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = str(error.strerror)
    if not os.access(folder, os.W_OK):
        raise OSError(
            f"{folder}: what is made of data cannot be kept there ({why}); {VARIABLE} names another folder"
        )
    return folder


@contextmanager
def _making(folder: Path) -> Iterator[Path]:
    """An empty folder beside, which takes the folder's place where all goes well."""
    making = folder.with_name(f"{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)  # of a process that was killed
    making.mkdir()
    try:
        yield making
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def remembered(key: str, find: Callable[[], str]) -> str:
    """The text that `find` found for this key the first time, here."""
    path = root() / "notes" / f"{key}.json"
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        found = find()
        write(_shelf("notes") / path.name, found)
        return found


def key_of(*words: object) -> str:
    """32 hex digits of the hash of plain values."""
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:32]


def digest(paths: Sequence[Path]) -> str:
    """32 hex digits of what stands in these files, in this order. They are read once, and again when a size or a time has changed."""
    stats = [path.stat() for path in paths]
    key = key_of(
        [
            (str(path.resolve()), s.st_size, s.st_mtime_ns, s.st_ino)
            for path, s in zip(paths, stats, strict=True)
        ]
    )
    if time.time() - max((s.st_mtime for s in stats), default=0) < _SETTLED_SECONDS:
        return _digest(paths)
    return remembered(key, lambda: _digest(paths))


def _digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
    return found.hexdigest()[:32]
