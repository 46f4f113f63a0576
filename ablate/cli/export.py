"""`ablate evidence X` and `ablate export-tables X`: results to paste, and to open elsewhere."""

from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from ablate.cli.common import Profile, State, complete_sweeps, console
from ablate.cli.settings import find_settings
from ablate.errors import InputError

_Sweep = Annotated[
    str, typer.Argument(metavar="X", help="Sweep, by name or by YAML file.", autocompletion=complete_sweeps)
]
_TABLES = ("arms", "effects", "damage", "windows", "trials")


def evidence(
    sweep: _Sweep,
    form: Annotated[
        Literal["md", "html"], typer.Option("--to", help="Markdown, or HTML with drawn intervals.")
    ] = "md",
    state: State = None,
    profile: Profile = None,
) -> None:
    """Print one block with claim, design, interval, checks, command and commit, to paste into a pull request
    or a paper's appendix.
    """
    from ablate.reports.evidence import markdown, page
    from ablate.results.comparisons import Comparisons
    from ablate.store.checked_ledger import open_ledger

    name, folder = Path(sweep).stem, find_settings(profile, state=state).state
    try:
        ledger = open_ledger(folder, name)
    except FileNotFoundError as error:
        raise InputError([str(error)]) from None
    with closing(ledger):
        print((markdown if form == "md" else page)(Comparisons(ledger)), end="")


def export_tables(
    sweep: _Sweep,
    form: Annotated[Literal["csv", "parquet"], typer.Option("--to", help="Format of the files.")] = "csv",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files; default: X_tables in this folder.")
    ] = None,
    records: Annotated[bool, typer.Option(help="Every recorded number too.")] = True,
    state: State = None,
    profile: Profile = None,
) -> None:
    """Write a sweep's arms, effects, damage, trials and records as files for pandas, R or a spreadsheet."""
    from ablate.reports import frames
    from ablate.reports.plain_text import csv_cell

    folder = find_settings(profile, state=state).state
    try:
        found = frames.open(sweep, state=folder)
    except (FileNotFoundError, ValueError) as error:
        raise InputError([str(error)]) from None
    target, screen = out or Path(f"{Path(sweep).stem}_tables"), console()
    target.mkdir(parents=True, exist_ok=True)
    with found as results:
        unsealed = results.unverified
        tables = {name: getattr(results, name) for name in _TABLES}
        if records:
            tables["records"] = results.records()
    for name, table in tables.items():
        if not len(table):
            continue
        path = target / f"{name}.{form}"
        if form == "parquet":
            mixed = [column for column in table if table[column].map(type).nunique() > 1]
            table.astype(dict.fromkeys(mixed, str)).to_parquet(path, index=False)
        else:
            table.rename(columns=csv_cell).map(csv_cell).to_csv(path, index=False, lineterminator="\n")
        screen.print(f"{path}: {len(table):,} rows", soft_wrap=True, markup=False)
    if unsealed:
        screen.print(unsealed, soft_wrap=True, markup=False)
