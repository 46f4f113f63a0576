"""Loss of a model that ignores its input, which a run has to beat before arms are compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.training.workloads import abilities


@dataclass(frozen=True)
class Floors:
    """Sources of the loss of a model that ignores its input, in the order in which they are asked."""

    recorded: Mapping[int, float | None]
    """The ledger's, by number of the trial."""
    by_arm: Mapping[str, float]
    """Those that MLflow had, by name of the arm."""

    @classmethod
    def of_ledger(cls, ledger: Ledger) -> Self:
        """Return the sources for the trials of a ledger."""
        return cls(ledger.context_free(), ledger.facts.context_free)

    def of(self, members: Iterable[Member]) -> tuple[float | None, bool]:
        """Return the loss for an arm's first finished run, and True if it should be known and is not."""
        first = next((member for member in members if member.status == "done"), None)
        if first is None:
            return None, False
        if first.trial in self.recorded:
            return self.recorded[first.trial], False
        loss = self.by_arm.get(first.name)
        return loss, loss is None and abilities(first.resolved.workload).context_free
