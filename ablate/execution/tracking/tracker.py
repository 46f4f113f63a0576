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
"""

from abc import ABC, abstractmethod
from textwrap import shorten

from ablate.store.ledger import Ledger


class Tracker(ABC):
    """Projection of one sweep's ledger. One thread calls all operations, which may take their time."""

    @abstractmethod
    def refresh(self, ledger: Ledger) -> None:
        """Bring the tracker up to date with the ledger, which is open for reading.

        It is called every second or so from the first record on, and again some seconds after an exception.
        A call that repeats an earlier one must change nothing.
        """

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
        first = (str(error).splitlines() or [""])[0]
        return f"{type(error).__name__}: {shorten(first, 120, placeholder=' ...')}"
