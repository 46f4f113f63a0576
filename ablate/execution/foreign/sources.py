"""Reading of runs that were not started here: one function for every kind of source.

    found = read(["runs/{arm}/seed{seed}.csv"], Columns(metrics={"val/loss": "eval_loss"}))
    found.runs    # one ForeignRun a run
    found.said    # "runs/bf16/seed0.csv: step: column 'iter'", to be printed

A place is a file, a folder, a pattern of a path, or the address of a server. Which source reads it follows
from what is there, except for logs, whose format the user names. Nothing is read in part: each place is read
whole, or refused in one sentence. Identical copies of a run count once; two runs of one arm and seed that
differ are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ablate.errors import InputError
from ablate.execution.foreign import csv_tables, tables
from ablate.execution.foreign.cells import same
from ablate.execution.foreign.columns import GUESS, Columns
from ablate.execution.foreign.names import places_of
from ablate.execution.foreign.run import ForeignRun


@dataclass(frozen=True)
class Found:
    """Runs of all places."""

    runs: list[ForeignRun]
    """Runs in the order of the places; no two have the same arm and seed, unless they have no seed."""
    said: list[str]
    """Sentences on what was guessed, merged or left out, for the user."""


@dataclass(frozen=True)
class Place:
    """One file, folder or address to read."""

    address: str
    """Path or address, as a person finds it."""
    fields: Mapping[str, str]
    """Arm, seed and settings that a pattern of the path says."""
    columns: Columns
    """Columns that the user named."""

    @property
    def path(self) -> Path:
        """The address as a path."""
        return Path(self.address)


@dataclass(frozen=True)
class Source:
    """One kind of source."""

    title: str
    """Name in sentences."""
    claims: Callable[[Path], bool]
    """True for a path that this source reads; sources are asked in their order."""
    read: Callable[[Place, list[str]], list[ForeignRun]]
    """Runs of a place; sentences are added to the list."""


def read(places: Sequence[str], columns: Columns = GUESS, *, logs: str | None = None) -> Found:
    """Return the runs of all places.

    Args:
        places: files, folders, patterns of paths (`logs/{arm}/seed{seed}.log`), or addresses.
        columns: columns that the user named.
        logs: name of the format of log files; None if the places are not logs.

    Raises:
        InputError: in one sentence, for the first thing that cannot be read without doubt.
    """
    said: list[str] = []
    runs: list[ForeignRun] = []
    for place in places:
        for path, fields in places_of(place):
            source = next((source for source in SOURCES.values() if source.claims(path)), None)
            if source is None:
                raise InputError([f"{path}: not of a known kind: {', '.join(SOURCES)}"])
            runs += source.read(Place(str(path), fields, columns), said)
    return Found(_each_once(runs, said), [*dict.fromkeys(said)])


def _each_once(runs: Sequence[ForeignRun], said: list[str]) -> list[ForeignRun]:
    """Return the runs without identical copies. InputError for two that differ in more than their name."""
    kept: list[ForeignRun] = []
    for run in runs:
        twins = [other for other in kept if (other.arm, other.seed) == (run.arm, run.seed)]
        copy = next((other for other in twins if _equal(run, other)), None)
        if copy is not None:
            said.append(f"{run.name} is a copy of {copy.name}; one of them counts")
        elif twins and run.seed is not None:
            raise InputError(
                [
                    f"{twins[0].name} and {run.name} are both seed {run.seed} of {run.arm}, with other"
                    " values; leave one out"
                ]
            )
        else:
            kept.append(run)
    return kept


def _equal(run: ForeignRun, other: ForeignRun) -> bool:
    """Return True if two runs have the same values at the same steps."""
    return run.records.keys() == other.records.keys() and all(
        series.keys() == other.records[name].keys()
        and all(same(value, other.records[name][step]) for step, value in series.items())
        for name, series in run.records.items()
    )


def _csv(place: Place, said: list[str]) -> list[ForeignRun]:
    return tables.runs_of(csv_tables.read_table(place.path, place.fields), place.columns, said)


SOURCES: dict[str, Source] = {
    "csv": Source("CSV table", lambda path: path.suffix.lower() in (".csv", ".tsv") and path.is_file(), _csv),
}
"""Every kind of source, by its name, in the order in which they are asked."""
