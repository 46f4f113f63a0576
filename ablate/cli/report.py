"""`ablate report X`: run the notebooks of an experiment, and write them as self-contained HTML, Markdown,
figures and CSV.

The notebooks run in this process (`ablate/reports/notebooks.py`), independently of the kernels and profiles
that the user has installed. The pages load nothing from a network.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ablate import __version__
from ablate.cli.common import DONE, FAILED, console, print_starting
from ablate.cli.options import MlflowFlags, complete_sweeps
from ablate.errors import InputError, nearest
from ablate.execution.sweep_control import check
from ablate.files import Json
from ablate.reports.notebooks import Cell, NotebookError, markdown, page, run
from ablate.reports.report_about import current, stamp, write_about
from ablate.results.subject import title
from ablate.store.checked_ledger import absent
from ablate.store.databases import path_of
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.store.verify import verify

if TYPE_CHECKING:
    from ablate.results.headline import Headline

NOTEBOOKS = {
    "ablation": "Does it matter, and by how much?",
    "search": "What did the search find?",
    "tensors": "What do the quantisers do to which tensors?",
    "training_health": "Did training go well?",
    "numerics_walkthrough": "How does the recipe compute, step by step?",
}
"""Question that each notebook answers, by name; the files are in `analysis/`."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "microsoft-edge")


@dataclass(frozen=True)
class Report:
    """Files of a report."""

    folder: Path
    pages: tuple[Path, ...]
    pdf: Path | None
    trouble: str | None = None
    """Reason why the report could not be attached in MLflow."""

    @property
    def index(self) -> Path:
        """First page of the report."""
        return self.pages[0]


def report(
    flags: MlflowFlags,
    experiments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[X]...", help="Experiments, by YAML file or by name.", autocompletion=complete_sweeps
        ),
    ] = None,
    notebook: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Notebooks to run instead of the default for the experiment: {', '.join(NOTEBOOKS)}."
        ),
    ] = None,
    from_mlflow: Annotated[
        bool,
        typer.Option("--from-mlflow", help="Read the runs from MLflow instead of the ledger."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the reports; default: reports in the state folder."),
    ] = None,
    pdf: Annotated[bool, typer.Option(help="Also write a PDF, if a browser is installed.")] = True,
) -> None:
    """Write the report of one or more experiments; a report of unfinished experiments says so.

    It is written to reports/<experiment>/ in the state folder, and attached to the sweep's run in MLflow.
    """
    settings = flags.settings()
    names = [Path(word).stem if word.endswith((".yaml", ".yml")) else word for word in experiments or ()]
    if notebook == ["numerics_walkthrough"] and not names:
        names = ["numerics_walkthrough"]
    elif not names:
        choices = ", ".join(_sweep_names(settings.state)) or "none, since no sweep has been run here"
        raise InputError([f"no experiment given; name a YAML file or one of: {choices}"])
    wrong = [word for word in notebook or () if word not in NOTEBOOKS]
    if wrong:
        raise InputError([f"--notebook {wrong[0]}: no such notebook; {nearest(wrong[0], NOTEBOOKS)}"])
    if not from_mlflow:
        for name in names:
            _refuse_unknown(settings.state, name)
    screen, status = console(), DONE
    print_starting(f"the notebooks of {', '.join(names)}, about half a minute each")
    for name in names:
        try:
            made = make(settings.state, name, notebook, settings.mlflow, fetch=from_mlflow, pdf=pdf, out=out)
        except NotebookError as error:
            screen.print(f"{name}: {error}", soft_wrap=True, markup=False)
            status = FAILED
        else:
            for line in (*made.pages, *filter(None, [made.pdf, made.trouble])):
                screen.print(str(line), soft_wrap=True, markup=False)
    raise typer.Exit(status)


def _sweep_names(state: Path) -> list[str]:
    return sorted(path.parent.name for path in state.glob("sweeps/*/ledger.db"))


def _refuse_unknown(state: Path, name: str) -> None:
    """Raise InputError if the experiment was never run, unless the name is that of the notebook without
    experiment.
    """
    folder = state / "sweeps" / name
    if folder.is_dir():
        if why := absent(folder / "ledger.db"):
            raise InputError([why])
        return
    if name == "numerics_walkthrough":
        return
    sweeps = _sweep_names(state)
    hint = nearest(name, sweeps) if sweeps else f"no sweep has been run in {state} yet"
    raise InputError([f"{name}: no such experiment has been run; {hint}"])


def make(
    state: Path,
    name: str,
    notebooks: Sequence[str] | None = None,
    mlflow: str | None = None,
    fetch: bool = False,
    pdf: bool = False,
    out: Path | None = None,
) -> Report:
    """Run the notebooks of a sweep and write its report.

    Args:
        state: State folder.
        name: Name of the sweep.
        notebooks: Names of the notebooks; None: those that fit the question of the sweep.
        mlflow: Address of MLflow, to attach the report or, with `fetch`, to read the runs.
        fetch: Read the runs from MLflow instead of the ledger.
        pdf: Also print the first page as PDF, if a browser is installed.
        out: Folder for the reports; None: `reports` in the state folder.

    Raises:
        InputError: There is no such sweep, its records are damaged, or no report can be written.
        NotebookError: A notebook failed.
    """
    from ablate.reports.answer import Answer  # pandas

    writable = os.access(state, os.W_OK) or not state.exists()
    if not (writable or out):
        raise InputError([f"{state}: is not writable; name a folder for the report with --out"])
    folder = (out or state / "reports") / name
    if name == "numerics_walkthrough" and not (state / "sweeps" / name).exists():
        return _write(
            folder, state, name, ["numerics_walkthrough"], _Heading(NOTEBOOKS["numerics_walkthrough"]), pdf
        )
    if fetch:
        state = _fetched(out or state, name, mlflow)
    else:
        _refuse_unknown(state, name)
    check(state / "sweeps" / name, name)
    ledger = Ledger(state / "sweeps" / name / "ledger.db", readonly=True)
    try:
        verified = None if fetch else verify(ledger, Store(state))
        if verified and verified.mismatches:
            raise InputError(
                [
                    f"{name}: no report was written, since its ledger differs from what the trials recorded",
                    *map(str, verified.mismatches),
                ]
            )
        chosen = list(notebooks or _default_notebooks(ledger))
        checked = (
            verified.sentence
            if verified
            else "read from MLflow: not verified against the records of the trials"
        )
        heading = _Heading(
            ledger.fact("question") or name,
            _about(ledger, name, checked),
            stamp(ledger),
            Answer(ledger).answer,
        )
        with ThreadPoolExecutor(1) as thread:
            # In parallel with the notebooks, since its imports take seconds.
            note = None if fetch or not writable else thread.submit(_annotate_study, state, name, folder)
            made = _write(folder, state, name, chosen, heading, pdf)
        if note:
            note.result()
        if not writable and path_of(mlflow):  # the database is usually in the same read-only folder
            return made
        return made if fetch or not mlflow else replace(made, trouble=_attach(mlflow, ledger, made))
    finally:
        ledger.close()


def is_current(state: Path, name: str) -> bool:
    """Return True if a report exists and shows the present state of the ledger."""
    ledger = Ledger(state / "sweeps" / name / "ledger.db", readonly=True)
    found = current(state / "reports" / name, ledger)
    ledger.close()
    return bool(found)


def _default_notebooks(ledger: Ledger) -> list[str]:
    """Return the notebooks that fit the question of a sweep."""
    specs = [json.loads(member.spec) for member in ledger.members()[:1]]
    if any("tensors" in spec.get("workload", {}) for spec in specs):
        return ["tensors"]
    return ["search" if ledger.fact("search") else "ablation", "training_health"]


def _about(ledger: Ledger, name: str, verified: str) -> str:
    """Return the line above the title: experiment, model, number of runs, commit, verification and date."""
    members = ledger.members()
    unfinished = sum(member.status not in ("done", "diverged") for member in members)
    partial = f", {unfinished} of them not finished" if unfinished else ""
    commit = json.loads(ledger.fact("provenance.json") or "{}").get("commit")
    facts = [
        f"ablate, experiment {name}",
        title(json.loads(members[0].spec)) if members else "",
        f"{len(members)} runs{partial}",
        f"commit {commit[:8]}" if commit else "",
    ]
    shown = " · ".join(filter(None, facts))
    return f"{shown} · {verified} · Report of {time.strftime('%Y-%m-%d %H:%M')}"


@dataclass(frozen=True)
class _Heading:
    """Head of a report, and the state of the sweep that it shows."""

    title: str
    about: str = ""
    stamp: str = ""
    answer: "Headline | None" = None
    """The answer of the sweep."""


def _write(
    folder: Path, state: Path, name: str, notebooks: Sequence[str], heading: _Heading, pdf: bool
) -> Report:
    """Write the report to a temporary folder, then move it to `folder`, so that a reader never sees half a
    report.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as making:
        made = Path(making)
        ran = [_run(word, state, name, made) for word in notebooks]
        names = ["index.html", *(f"{word}.html" for word in notebooks[1:])]
        for number, (word, cells) in enumerate(zip(notebooks, ran, strict=True)):
            others = [
                (NOTEBOOKS[other], page)
                for other, page in zip(notebooks, names, strict=True)
                if other != word
            ]
            page_heading = (
                heading if number == 0 else replace(heading, title=f"{NOTEBOOKS[word]} {heading.title}")
            )
            (made / names[number]).write_text(_html(cells, page_heading, others), encoding="utf-8")
            (made / names[number]).with_suffix(".md").write_text(
                _markdown(cells, page_heading), encoding="utf-8"
            )
        answer = heading.answer
        about: dict[str, Json] = {
            "question": heading.title,
            "answer": answer.sentence if answer else "",
            "answered": bool(answer and answer.answered),
            "valid": bool(answer and answer.valid),
            "about": heading.about,
            "stamp": heading.stamp,
        }
        write_about(made, about)
        if pdf:
            _print(made / "index.html")
        _replace(folder, made)
    printed = folder / "index.pdf"
    return Report(folder, tuple(folder / page for page in names), printed if printed.exists() else None)


def _replace(folder: Path, made: Path) -> None:
    new = {path.name for path in made.iterdir()}
    # Pages of an earlier report that this one does not have would show other runs.
    for stem in ("index", *NOTEBOOKS):
        for path in folder.glob(f"{stem}.*"):
            if path.name not in new:
                path.unlink()
    for path in sorted(made.iterdir()):
        target = folder / path.name
        folder.mkdir(exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)


def _annotate_study(state: Path, name: str, folder: Path) -> None:
    """Write the answer into the study of the sweep, for Optuna's dashboard."""
    from ablate.execution.search import decorate
    from ablate.reports.markdown_summary import summary_markdown
    from ablate.results.summary import metric_of, summaries
    from ablate.store.checked_ledger import open_ledger

    ledger = open_ledger(state, name)
    note = f"{summary_markdown(ledger)}\n\nThe report: `{folder / 'index.html'}`"
    decorate(ledger.path.parent / "optuna.log", name, note, summaries(ledger), metric_of(ledger))
    ledger.close()


def _attach(mlflow: str, ledger: Ledger, made: Report) -> str | None:
    """Attach the report to the sweep's run in MLflow. Return a sentence if that fails, since the report
    itself is complete.
    """
    from ablate.execution.tracking import log_report

    try:
        log_report(mlflow, ledger, made.folder)
    except InputError as error:
        return f"The report is not in MLflow: {error}"
    return None


def _fetched(state: Path, name: str, mlflow: str | None) -> Path:
    """Return a state folder with a ledger of the sweep's runs in MLflow."""
    from ablate.execution.tracking import fetch

    if not mlflow:
        raise InputError(["--from-mlflow: no MLflow is set; set its address with --mlflow, or in a profile"])
    folder = state / "fetched"
    path = folder / "sweeps" / name / "ledger.db"
    path.unlink(missing_ok=True)
    fetch(mlflow, name, path).close()
    return folder


# Running


def _run(notebook: str, state: Path, name: str, out: Path) -> list[Cell]:
    parameters = {"state": str(state.resolve()), "sweep": name, "out": str((out / "figures").resolve())}
    return run(analysis() / f"{notebook}.ipynb", parameters)


def analysis() -> Path:
    """Return the folder of the notebooks: inside an installed package, next to the package in a checkout."""
    package = Path(__file__).parents[1]
    return package / "analysis" if (package / "analysis").exists() else package.parent / "analysis"


# Writing


def _html(cells: list[Cell], heading: _Heading, links: Sequence[tuple[str, str]]) -> str:
    template = Path(__file__).parent / "report_page" / "page.html.j2"
    return page(cells, template, heading=heading, links=links, version=__version__)


def _markdown(cells: list[Cell], heading: _Heading) -> str:
    about = f"*{heading.about}*\n\n" if heading.about else ""
    return f"# {heading.title}\n\n{about}{markdown(cells)}"


def _print(page: Path) -> None:
    """Print a page as PDF with an installed browser; without one, do nothing: the HTML is the report."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        return
    with tempfile.TemporaryDirectory(prefix="ablate-browser-") as profile:
        options = ["--headless", "--disable-gpu", "--no-pdf-header-footer", f"--user-data-dir={profile}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
        command = [browser, *options, f"--print-to-pdf={page.with_suffix('.pdf')}", page.resolve().as_uri()]
        try:
            subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False
            )
        except subprocess.TimeoutExpired:
            page.with_suffix(".pdf").unlink(missing_ok=True)
