"""Trackers: projections of one sweep's ledger into programs that show runs, such as MLflow or TensorBoard.

A tracker has three operations. `refresh` brings it up to date with the ledger, `finish` closes the sweep, and
`trouble` says why one of these failed. The thread of a `Follower` calls them every second: a tracker may be
slow, unreachable or deleted, and no trial waits for it. An exception is shown as the reason for the tracker's
delay, and the operation is tried again without limit. The ledger is the truth and has no room for a tracker's
state: what a tracker needs to know it finds in what it has written, and whatever it wrote can be deleted and
is made again. For example:

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

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
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
_INTERVAL = 1.0


class Tracker(ABC):
    """Projection of one sweep's ledger. One thread calls all operations, which may take their time. An
    installed or own tracker is constructed with the state folder and the sweep's name."""

    retry = 5.0
    """Seconds after which an operation that raised is tried again."""

    @abstractmethod
    def refresh(self, ledger: Ledger) -> None:
        """Bring the tracker up to date with the ledger, which is open for reading. It is called every second
        or so from the first record on, and again some seconds after an exception. A call that repeats an
        earlier one must change nothing."""

    @abstractmethod
    def finish(self, ledger: Ledger, status: str, note: str) -> None:
        """Close the sweep, after a last `refresh`. `status`: `FINISHED`, `FAILED`, or `KILLED` for one that
        was interrupted; `note`: answer of the sweep, Markdown."""

    def trouble(self, ledger: Ledger, error: Exception) -> str:
        """Return why an operation failed, as part of a sentence. Release what must not be used again."""
        # `shorten` cuts words, and `redact` does not find a password without the `@` behind it.
        first = redact((str(error).splitlines() or [""])[0])
        return f"{type(error).__name__}: {shorten(first, 120, placeholder=' ...')}"


class Follower:
    """One tracker and its thread, which starts at once and waits for the first record."""

    def __init__(
        self, tracker: Tracker, ledger: Path, name: str, stop: threading.Event | None = None
    ) -> None:
        """Start the thread, which has this name and alone uses the tracker from now on. `stop` is set by the
        tracker if it cannot continue, or here if its time is over."""
        self.trouble: str | None = None
        """Reason for the tracker's delay; None while there is none."""
        self._tracker, self._ledger = tracker, ledger
        self._last: tuple[str, str] | None = None
        self._complete = False
        self._stop, self._wake = stop or threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask_to_finish(self, status: str, note: str) -> None:
        """Have the tracker close the sweep once it has everything; arguments as for `Tracker.finish`."""
        self._last = status, note
        self._wake.set()

    def finish(self, status: str, note: str, seconds: float) -> bool:
        """Close the sweep and end the thread, within `seconds`; return True if the tracker has everything.
        Other arguments as for `Tracker.finish`."""
        self.ask_to_finish(status, note)
        self._thread.join(seconds)
        self._stop.set()
        self._wake.set()
        return self._complete

    def _run(self) -> None:
        while not self._stop.is_set() and not self._complete:
            try:
                with closing(Ledger(self._ledger, readonly=True)) as ledger:
                    self._follow(ledger)
            except Exception as error:  # must not end the sweep: shown in the status line, tried again
                self.trouble = f"{self._ledger}: {error}"
                self._stop.wait(self._tracker.retry)

    def _follow(self, ledger: Ledger) -> None:
        # Importing a tracker's library would delay the first trial.
        while not (self._last or self._stop.is_set() or ledger.recorded()):
            self._wake.wait(_INTERVAL)
        while not self._stop.is_set():
            last, pause = self._last, _INTERVAL
            try:
                self._tracker.refresh(ledger)
                self.trouble = None
                if last:
                    self._tracker.finish(ledger, *last)
                    self._complete = True
                    return
            except Exception as error:
                self.trouble, pause = self._tracker.trouble(ledger, error), self._tracker.retry
            self._wake.wait(pause)  # until the sweep asks to finish, at most
            self._wake.clear()
        self._tracker.trouble(ledger, TimeoutError("the sweep ended before everything was sent"))


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
