"""A tracker outside the package: a table of a sweep's members as a text file, and its answer."""

from pathlib import Path

from ablate.execution.tracking.tracker import Tracker
from ablate.store.ledger import Ledger


class Toy(Tracker):
    """Writes `<sweep>.txt` in the state folder: one line per member with its status and last val/loss."""

    def __init__(self, state: Path, sweep: str) -> None:
        self._path = state / f"{sweep}.txt"

    def refresh(self, ledger: Ledger) -> None:
        """Write the members again."""
        self._path.write_text("".join(self._lines(ledger)))

    def finish(self, ledger: Ledger, status: str, note: str) -> None:
        """Add the sweep's status and answer."""
        self._path.write_text("".join((*self._lines(ledger), f"{status}\n\n{note}\n")))

    @staticmethod
    def _lines(ledger: Ledger) -> list[str]:
        members = ledger.members()
        losses = [ledger.last_value(member.trial, "val/loss") for member in members]
        return [
            f"{member.name} seed={member.seed}: {member.status} {loss!r}\n"
            for member, loss in zip(members, losses, strict=True)
        ]
