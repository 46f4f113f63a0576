"""Pre-registration: which question and design were recorded before which results existed.

A design that was chosen, or a `min_effect` that was set, after a look at results makes its own p-values too
small, and nothing in a table shows it. So before anything runs, the hash of question, design and metrics is
recorded with the number of the design's trials that are finished by then, in whatever sweep. A later run with
another hash adds an entry. The report prints all entries, so that a change half-way is visible.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from ablate.store.ledger import Ledger


@dataclass(frozen=True)
class Registration:
    """A question and design, as they were recorded."""

    digest: str
    """32 hex digits."""
    time: float
    """Unix time."""
    trials: int
    """Number of trials of the design that were known then; a search proposes more."""
    finished: int
    """Those of them that were finished then."""
    question: str = ""
    """Hash of the question and of the comparison that answers it."""
    metrics: str = ""
    """Hash of the metrics with their `min_effect`."""

    @property
    def text(self) -> str:
        """The registration in words."""
        when = datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d %H:%M UTC")
        count = f"after {self.finished}" if self.finished else "before any"
        return f"{self.digest[:12]} on {when}, {count} of its {self.trials} trials had finished"


def registrations(ledger: Ledger) -> list[Registration]:
    """Return the registrations of a sweep, the first one first."""
    return [Registration(**entry) for entry in ledger.facts.registered]


def register(
    ledger: Ledger,
    digest: str,
    time: float,
    trials: int,
    finished: Callable[[], int],
    parts: Mapping[str, str] | None = None,
) -> None:
    """Record a question and design, unless they are those of the last registration.

    `digest` is the hash of question, design and metrics; `time` is Unix time; `trials` counts the trials of
    the design that are known now. `finished` counts those of them that are finished, and is called only if
    there is something to record. `parts` has hashes of parts of the design, as keywords of `Registration`.
    """
    known = registrations(ledger)
    if not known or known[-1].digest != digest:
        entry = Registration(digest, time, trials, finished(), **(parts or {}))
        ledger.facts.registered = [asdict(each) for each in (*known, entry)]


def late_changes(ledger: Ledger) -> Iterator[tuple[str, Registration]]:
    """Yield each part of a design (`question`, `metrics`) that was fixed after results existed, with its last
    such registration. That is a part that a later run changed while results were there; or all of a design
    whose trials had all finished before it was first recorded, unless a search proposes more of them."""
    entries, search = registrations(ledger), bool(ledger.facts.search)
    for part in ("question", "metrics"):
        late = None
        for before, entry in zip((None, *entries), entries, strict=False):
            changed = before and getattr(before, part) not in ("", getattr(entry, part))
            whole = not before and entry.finished == entry.trials and not search
            if getattr(entry, part) and entry.finished and (changed or whole):
                late = entry
        if late:
            yield part, late


def registered_text(ledger: Ledger) -> str:
    """Return the registrations in words, each later one behind "changed to"; "" if there are none."""
    first, *later = [each.text for each in registrations(ledger)] or [""]
    return "; changed to ".join((first, *later))
