"""`ablate report X`: write the report of an experiment, and hand it to MLflow and to Optuna's dashboard."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ablate.cli.common import DONE, FAILED, console, print_starting
from ablate.cli.options import MlflowFlags, Sweeps, sweep_names
from ablate.errors import InputError, nearest
from ablate.execution.sweep_control import check
from ablate.execution.tracking.access import log_report
from ablate.judging.judged_ledger import changed_since
from ablate.reports.evidence import study_markdown
from ablate.reports.notebooks import NotebookError
from ablate.reports.report_files import (
    NOTEBOOKS,
    WALKTHROUGH,
    Heading,
    Report,
    default_notebooks,
    write_report,
)
from ablate.results.summary import summaries
from ablate.store.checked_ledger import absent, folders, open_checked, open_ledger
from ablate.store.databases import path_of
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.store.verify import verify

if TYPE_CHECKING:
    from ablate.reports.answer import Answer


def report(
    flags: MlflowFlags,
    experiments: Sweeps = None,
    notebook: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Notebooks to run instead of the default for the experiment: {', '.join(NOTEBOOKS)}."
        ),
    ] = None,
    out: Path | None = None,
    pdf: bool = True,
) -> None:
    """Write the report of one or more experiments; a report of unfinished experiments says so.

    It is written to reports/<experiment>/ in the state folder, and attached to the sweep's run in MLflow.

    Args:
        experiments: Experiments, by YAML file or by name.
        out: Folder for the reports; default: reports in the state folder.
        pdf: Also write a PDF, if a browser is installed.
    """
    settings = flags.settings()
    names = experiments or ([WALKTHROUGH] if notebook == [WALKTHROUGH] else [])
    if not names:
        choices = ", ".join(sweep_names(settings.state)) or "none, since no sweep has been run here"
        raise InputError(f"no experiment given; name a YAML file or one of: {choices}")
    if wrong := [word for word in notebook or () if word not in NOTEBOOKS]:
        raise InputError(f"--notebook {wrong[0]}: no such notebook; {nearest(wrong[0], NOTEBOOKS)}")
    names = [_known(settings.state, word) for word in names]
    screen, status = console(), DONE
    print_starting(f"the notebooks of {', '.join(names)}, a few seconds each")
    for name in names:
        try:
            made = make(settings.state, name, notebook, settings.mlflow, pdf=pdf, out=out)
        except NotebookError as error:
            screen.lines(f"{name}: {error}")
            status = FAILED
        else:
            screen.lines(*map(str, (*made.pages, *filter(None, [made.pdf, made.trouble]))))
    raise typer.Exit(status)


def _known(state: Path, word: str) -> str:
    """Return the name of a sweep with a ledger, or of the notebook without experiment; else InputError."""
    if word == WALKTHROUGH and not (state / "sweeps" / word).exists():
        return word
    (folder,) = folders(state, [word])
    if why := absent(folder / "ledger.db"):
        raise InputError(why)
    return folder.name


def make(
    state: Path,
    name: str,
    notebooks: Sequence[str] | None = None,
    mlflow: str | None = None,
    pdf: bool = False,
    out: Path | None = None,
    answer: "Answer | None" = None,
) -> Report:
    """Run the notebooks of a sweep and write its report. InputError if there is no such sweep, its records
    are damaged, or no report can be written; NotebookError if a notebook failed.

    `notebooks`: None for those that fit the question of the sweep; `mlflow`: address, to attach the report;
    `pdf`: also print the first page as PDF, if a browser is installed; `out`: folder for the reports; None:
    `reports` in the state folder; `answer`: that of the sweep, if it was printed already.
    """
    writable = os.access(state, os.W_OK) or not state.exists()
    if not (writable or out):
        raise InputError(f"{state}: is not writable; name a folder for the report with --out")
    folder = (out or state / "reports") / _known(state, name)
    if not (state / "sweeps" / name).exists():
        return write_report(folder, state, name, [name], Heading(NOTEBOOKS[name]), pdf)
    check(state / "sweeps" / name, name)
    with closing(open_checked(state / "sweeps" / name / "ledger.db")) as ledger:
        heading = Heading.of(ledger, name, _verified(ledger, state, name), answer)
        with ThreadPoolExecutor(1) as thread:
            # In parallel with the notebooks, since its imports take seconds. Judged runs have no study.
            studied = (state / "sweeps" / name / "optuna.log").exists()
            annotate = studied and writable
            note = thread.submit(_annotate_study, state, name, folder) if annotate else None
            made = write_report(
                folder, state, name, list(notebooks or default_notebooks(ledger)), heading, pdf
            )
        if note:
            note.result()
        # A database is usually in the same read-only folder.
        if mlflow and (writable or not path_of(mlflow)):
            try:
                log_report(mlflow, ledger, made.folder)
            except InputError as error:  # the report itself is complete
                return replace(made, trouble=f"The report is not in MLflow: {error}")
        return made


def _verified(ledger: Ledger, state: Path, name: str) -> str:
    """Compare a ledger with the records of its trials, and return the result in words; InputError if they
    differ."""
    if judged := Judged.alone(ledger):
        return changed_since(judged)
    verified = verify(ledger, Store(state))
    if verified.mismatches:
        why = f"{name}: no report was written, since its ledger differs from what the trials recorded"
        raise InputError(why, *map(str, verified.mismatches))
    return verified.sentence if verified.trials else ""


def _annotate_study(state: Path, name: str, folder: Path) -> None:
    """Write the answer into the study of the sweep, for Optuna's dashboard."""
    from ablate.execution.search.annotations import decorate

    ledger = open_ledger(state, name)
    note = f"{study_markdown(ledger)}\n\nThe report: `{folder / 'index.html'}`"
    decorate(ledger.path.parent / "optuna.log", name, note, summaries(ledger), ledger.facts.metric)
    ledger.close()
