"""Thread that keeps a tracker up to date with a sweep's ledger.

A tracker may be slow, unreachable or deleted, and a sweep must not depend on it. The thread therefore reads
the ledger, which the controller alone writes, and lets the tracker write what it lacks, every second. An
exception is shown as the reason for the tracker's delay, and the operation is tried again without limit.
"""

import threading
from contextlib import closing
from pathlib import Path

from ablate.execution.tracking.tracker import Tracker
from ablate.store.ledger import Ledger

_INTERVAL = 1.0
RETRY_SECONDS = 5.0


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
        """Follow the ledger; open it again if it could not be read."""
        while not self._stop.is_set() and not self._complete:
            try:
                with closing(Ledger(self._ledger, readonly=True)) as ledger:
                    self._follow(ledger)
            except Exception as error:  # must not end the sweep: shown in the status line, tried again
                self.trouble = f"{self._ledger}: {error}"
                self._stop.wait(RETRY_SECONDS)

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
                self.trouble, pause = self._tracker.trouble(ledger, error), RETRY_SECONDS
            self._wake.wait(pause)  # until the sweep asks to finish, at most
            self._wake.clear()
        self._tracker.trouble(ledger, TimeoutError("the sweep ended before everything was sent"))
