"""Loss of a model that ignores its input, which a run has to beat before arms are compared."""

from collections.abc import Iterable, Mapping

from ablate.store.ledger_rows import Member
from ablate.training.workloads import abilities


def floor(members: Iterable[Member], recorded: Mapping[int, float | None]) -> tuple[float | None, bool]:
    """Return the loss for an arm's first finished run, and True if it should be known and is not. `recorded`:
    losses by number of the trial, as `Ledger.context_free` has them."""
    first = next((member for member in members if member.status == "done"), None)
    if first is None:
        return None, False
    if first.trial in recorded:
        return recorded[first.trial], False
    return None, abilities(first.resolved.workload).context_free
