"""Comparison of a sweep's ledger with its own seals and with its trial folders: rows, records, results.
Nothing is written."""

from collections.abc import Iterator
from dataclasses import dataclass

from ablate.files import Damaged
from ablate.store.checked_ledger import rebuild_command, remedy
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import TrialRow
from ablate.store.trial_store import Result, Store


@dataclass(frozen=True)
class Mismatch:
    """Difference between what was written and what is there now."""

    trial: str
    """Id of the trial; empty if the difference is in the sweep's own data."""
    path: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{f'trial {self.trial}: ' if self.trial else ''}{self.why}; {self.remedy}"


@dataclass(frozen=True)
class Verified:
    """Result of a comparison."""

    trials: int
    """Number of finished trials."""
    verified: int
    """Number of trials whose records agree with their digests."""
    absent: int
    """Number of trials without a folder to compare with."""
    mismatches: tuple[Mismatch, ...]

    @property
    def sentence(self) -> str:
        """Numbers of trials that were and were not verified, as a sentence."""
        text = f"{self.verified} of {self.trials} trials verified against their records"
        if self.absent:
            text += f"; {self.absent} without a folder unverified"
        return text


def verify(ledger: Ledger, store: Store) -> Verified:
    """Compare a ledger with its seals, and all finished trials with their folders."""
    why = ledger.flaw() or ledger.lost()
    again = remedy(ledger.path, ledger=ledger)
    mismatches = [Mismatch("", str(ledger.path), f"{ledger.path}: {why}", again)] if why else []
    trials = [] if why else ledger.wanted_trials()
    counts = dict.fromkeys(("verified", "absent"), 0)
    for row in trials:
        kind, differences = _compare(ledger, store, row, again)
        mismatches += differences
        if kind and not differences:
            counts[kind] += 1
    finished = sum(row.finished for row in trials)
    return Verified(finished, **counts, mismatches=tuple(mismatches))


def _compare(ledger: Ledger, store: Store, row: TrialRow, again: str) -> tuple[str, list[Mismatch]]:
    """Return how far a trial was compared ("" for one that is not finished), and its mismatches."""
    trial, kind = row.id, ""
    wrong: list[str] = []
    result: Result | None = None
    try:
        if row.finished:
            result = store.result(trial)
            kind = "absent" if result is None else "verified"
            if result is not None:
                store.proven(trial, result)
                wrong += _differs(store, row, result)
    except Damaged as error:
        rerun = "puts its folder aside, and the next run of the sweep runs it again"
        repair = f"`{rebuild_command(ledger.path)}` {rerun}"
        return kind, [Mismatch(trial, str(error.path), str(error), repair)]
    try:
        digest = ledger.tally(row.trial).sealed()["sha256"]
        if digest != (ledger.records_seal(row.trial) or digest):
            wrong.append("table records: its records are not what was written")
        elif result is not None and digest != result["records"]["sha256"]:
            wrong.append(f"its records are not those in {store.folder(trial)}")
    except ValueError as error:
        wrong.append(str(error))
    return kind, [Mismatch(trial, str(ledger.path), f"{ledger.path}: {why}", again) for why in wrong]


def _differs(store: Store, row: TrialRow, result: Result) -> Iterator[str]:
    for key in ("status", "reason", "seconds"):
        if getattr(row, key) != result[key]:
            path = store.folder(row.id) / "result.json"
            yield f"its {key} is {getattr(row, key)!r}, and {result[key]!r} in {path}"
