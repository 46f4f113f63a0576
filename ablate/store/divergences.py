"""Runs of a sweep that diverged, each with what became of its baseline at the same seed."""

from dataclasses import dataclass

from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member


@dataclass(frozen=True)
class Divergence:
    """Run that diverged, and the status of its baseline's run: None if it has none, or is one itself. A run
    from elsewhere has none: it is compared unpaired, so an equal seed means nothing."""

    member: Member
    baseline: str | None

    @property
    def reason(self) -> str:
        """Return why it diverged: the step, and the first value that was not finite, if it is known."""
        return self.member.reason or "diverged"

    @property
    def of_baseline(self) -> str:
        if self.member.baseline is None:
            return "it is the baseline"
        if self.member.role == "foreign":
            return "is not paired with it"
        words = {"diverged": "diverged too", "done": "did not diverge", None: "has no run of this seed"}
        return words.get(self.baseline, f"is {self.baseline}")

    def __str__(self) -> str:
        is_baseline = self.member.baseline is None
        return f"{self.reason}; {self.of_baseline if is_baseline else f'the baseline {self.of_baseline}'}"


def divergences(ledger: Ledger) -> list[Divergence]:
    """Return the runs that diverged, in the order of arms and seeds."""
    members = ledger.members()
    statuses: dict[tuple[int | None, int], str] = {(one.arm, one.seed): one.status for one in members}
    lost = [member for member in members if member.status == "diverged"]
    return [
        Divergence(member, None if member.role == "foreign" else statuses.get((member.baseline, member.seed)))
        for member in lost
    ]
