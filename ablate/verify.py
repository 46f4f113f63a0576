"""Comparison of a sweep's ledger with its trial folders: each finished trial's records by number and digest, its result, its arm.

A trial whose result was committed by an earlier version has no digest. Its last step and, where one attempt ran it, its records are
compared, and it counts as unverified. Nothing is written.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ablate.ledger import FINISHED, Ledger
from ablate.ledger_integrity import flaw, strays, tally
from ablate.store import Damaged, Store


@dataclass(frozen=True)
class Mismatch:
    """A trial, or where `trial` is empty something of the sweep itself, that is not what was written, and the file that says so."""

    trial: str
    path: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{f'trial {self.trial}: ' if self.trial else ''}{self.why}; {self.remedy}"


@dataclass(frozen=True)
class Verified:
    """How many finished trials were compared, and what was found."""

    trials: int
    verified: int
    unverified: int
    """Of an earlier version, without a digest."""
    absent: int
    """Without a folder to compare with."""
    mismatches: tuple[Mismatch, ...]

    @property
    def sentence(self) -> str:
        """What was verified, for a reader."""
        told = f"{self.verified} of {self.trials} trials verified against their records"
        told += f"; {self.unverified} from an earlier version unverified" if self.unverified else ""
        return told + (f"; {self.absent} without a folder unverified" if self.absent else "")


def verify(ledger: Ledger, store: Store) -> Verified:
    """Compare all finished trials that the sweep wants."""
    members: dict[int, Mapping[str, Any]] = {}
    again = f"`ablate rebuild {ledger.name}.yaml` makes it again from the trial folders"
    mismatches = [Mismatch("", str(ledger.path), f"{ledger.path}: {why}", again) for why in (flaw(ledger),) if why]
    if not mismatches:
        members = {row["trial"]: row for row in ledger.wanted_trials() if row["status"] in FINISHED}
    counts = {"verified": 0, "unverified": 0, "absent": 0}
    for row in members.values():
        kind, found = _compare(ledger, store, row, again)
        mismatches += found
        if not found:
            counts[kind] += 1
    return Verified(len(members), **counts, mismatches=tuple(mismatches))


def _compare(ledger: Ledger, store: Store, row: Mapping[str, Any], again: str) -> tuple[str, list[Mismatch]]:
    trial = row["id"]
    try:
        result = store.result(trial)
        if result is None:
            return "absent", []
        events = store.proven(trial, result)
        doubted(ledger, store, row, result, events)
    except Damaged as error:
        rerun = f"`ablate rebuild {ledger.name}.yaml` puts its folder aside, and the next run of the sweep runs it again"
        return "", [Mismatch(trial, str(error.path), str(error), rerun)]
    kind = "verified" if "records" in result else "unverified"
    return kind, [Mismatch(trial, str(ledger.path), f"{ledger.path}: {why}", again) for why in _differs(ledger, store, row, result)]


def doubted(ledger: Ledger, store: Store, row: Mapping[str, Any], result: Mapping[str, Any], events: list[dict[str, Any]]) -> None:
    """Damaged where a trial of an earlier version, which one attempt ran, is in the ledger with other records than in its folder."""
    if "records" not in result and store.attempts(row["id"]) == 1 and strays(ledger, row["trial"], events):
        why = f"its records are not those in {ledger.path}, and its result, of an earlier version, does not say which are right"
        raise Damaged(store.folder(row["id"]), why)


def _differs(ledger: Ledger, store: Store, row: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[str]:
    """What the ledger says otherwise than the trial's folder."""
    for key in ("status", "reason", "seconds"):
        if row[key] != result[key]:
            yield f"its {key} is {row[key]!r}, and {result[key]!r} in {store.folder(row['id']) / 'result.json'}"
    try:
        found = tally(ledger, row["trial"]).sealed()
    except ValueError as error:
        yield str(error)
        return
    if found != result.get("records", found):
        yield f"its records are not those in {store.folder(row['id'])}"
