"""Trackers: projections of one sweep's ledger into programs that show runs, such as MLflow or TensorBoard.

A tracker has three operations. `refresh` brings it up to date with the ledger, `finish` closes the sweep, and
`trouble` says why one of these failed. The thread of a `Follower` calls them, so that no trial waits for a
tracker. The ledger is the truth and has no room for a tracker's state: what a tracker needs to know it finds
in what it has written, and whatever it wrote can be deleted and is made again. For example:

    class Log(Tracker):
        def __init__(self, state: Path, sweep: str) -> None:
            self._path = state / f"{sweep}.log"

        def refresh(self, ledger: Ledger) -> None:
            lines = [f"{member.name} {member.seed} {member.status}" for member in ledger.members()]
            self._path.write_text("\\n".join(lines))

        def finish(self, ledger: Ledger, status: str, note: str) -> None:
            self.refresh(ledger)

`--tracker package.module:Log` uses it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from textwrap import shorten
from typing import cast

from ablate import own_source
from ablate.errors import InputError, nearest, redact
from ablate.store.ledger import Ledger

GROUP = "ablate.trackers"
"""Group of entry points by which installed packages offer trackers."""


class Tracker(ABC):
    """Projection of one sweep's ledger. One thread calls all operations, which may take their time. An
    installed or own tracker is constructed with the state folder and the sweep's name."""

    @abstractmethod
    def refresh(self, ledger: Ledger) -> None:
        """Bring the tracker up to date with the ledger, which is open for reading. It is called every second
        or so from the first record on, and again some seconds after an exception. A call that repeats an
        earlier one must change nothing."""

    @abstractmethod
    def finish(self, ledger: Ledger, status: str, note: str) -> None:
        """Close the sweep, after a last `refresh`.

        Args:
            ledger: The ledger.
            status: `FINISHED`, `FAILED`, or `KILLED` for a sweep that was interrupted.
            note: Answer of the sweep, Markdown.
        """

    def trouble(self, ledger: Ledger, error: Exception) -> str:
        """Return why an operation failed, as part of a sentence. Release what must not be used again."""
        # `shorten` cuts words, and `redact` does not find a password without the `@` behind it.
        first = redact((str(error).splitlines() or [""])[0])
        return f"{type(error).__name__}: {shorten(first, 120, placeholder=' ...')}"


def open_trackers(names: str | None, state: Path, sweep: str) -> dict[str, Tracker]:
    """Return the trackers of a sweep by name. `names`: those of `TRACKERS`, of entry points, or
    `module:class`, separated by commas; None or `none`: no tracker. Modules are looked for in the current
    folder first. InputError if there is no such tracker, or it cannot be imported."""
    wanted = [name.strip() for name in (names or "").split(",") if name.strip() not in ("", "none")]
    return {name: _find(name)(state, sweep) for name in wanted}


def _find(name: str) -> Callable[[Path, str], Tracker]:
    offered = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    path = TRACKERS.get(name) or offered.get(name, name)
    if ":" not in path:
        hint = nearest(name, [*TRACKERS, *offered])
        raise InputError(f"tracker {name!r}: no such tracker; {hint}, or give `module:class`")
    try:
        own = name in TRACKERS
        made = resolve_name(path) if own else own_source.load(own_source.find(Path.cwd(), path))
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        raise InputError(f"tracker {name!r}: {error}") from error
    return cast("Callable[[Path, str], Tracker]", made)


TRACKERS = {"tensorboard": "ablate.execution.tracking.tensorboard:TensorBoard"}
"""Trackers of this package, beside MLflow, by name."""
