"""`ablate report X`: an experiment's notebooks run from top to bottom, as one HTML file that can be sent,
Markdown, pictures and CSV.

The only file that knows papermill and nbconvert. A notebook is run by this interpreter in a process of its
own, whatever kernels and profiles its user has; its page needs nothing from any network.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ablate import __version__
from ablate.cli.common import DONE, FAILED, Mlflow, Profile, State, console, print_starting
from ablate.cli.settings import find_settings
from ablate.errors import InputError, nearest
from ablate.execution.sweep_control import check
from ablate.files import short_for_sockets
from ablate.results.databases import path_of
from ablate.results.ledger import Ledger
from ablate.results.trial_store import Store
from ablate.results.verify import verify

NOTEBOOKS = {
    "ablation": "Does it matter, and by how much?",
    "search": "What did the search find?",
    "tensors": "What do the quantisers do to which tensors?",
    "training_health": "Did training go well?",
    "numerics_walkthrough": "How does the recipe compute, step by step?",
}
"""By name, what each answers; files in `analysis/`."""
ABOUT = "index.json"
"""File of a report that has its question, its first sentence and what it shows as data, for `ablate ui`."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "microsoft-edge")
_SECONDS = 600
"""Longer than any of them takes by far: a kernel that hangs is ended."""


class ReportError(Exception):
    """A notebook that did not run to its end, and where it stopped."""


@dataclass(frozen=True)
class Report:
    """What was made."""

    folder: Path
    pages: tuple[Path, ...]
    pdf: Path | None
    trouble: str | None = None
    """Why MLflow does not have it, where it should."""

    @property
    def index(self) -> Path:
        """The page to look at first, and to send."""
        return self.pages[0]


def report(
    experiments: Annotated[
        list[str] | None, typer.Argument(metavar="[X]...", help="Experiments, by YAML file or name.")
    ] = None,
    notebook: Annotated[
        list[str] | None,
        typer.Option(help=f"Which notebooks, in place of those that fit: {', '.join(NOTEBOOKS)}."),
    ] = None,
    from_mlflow: Annotated[
        bool,
        typer.Option("--from-mlflow", help="Read the runs from MLflow: where the ledger is not at hand."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder that reports are written to; default: reports in the state folder."),
    ] = None,
    pdf: Annotated[bool, typer.Option(help="A PDF beside the HTML, where a browser is installed.")] = True,
    state: State = None,
    profile: Profile = None,
    mlflow: Mlflow = None,
) -> None:
    """Make the report of one experiment or several: what is there of it, marked so where that is not all.

    Written to reports/<experiment>/ in the state folder, and attached to the sweep's run in MLflow.
    """
    settings = find_settings(profile, state=state, mlflow=mlflow)
    names = [Path(word).stem if word.endswith((".yaml", ".yml")) else word for word in experiments or ()]
    if notebook == ["numerics_walkthrough"] and not names:
        names = ["numerics_walkthrough"]
    elif not names:
        raise InputError(
            [
                f"name an experiment, by its file or as one of: {', '.join(_known(settings.state)) or 'none was run here'}"
            ]
        )
    wrong = [word for word in notebook or () if word not in NOTEBOOKS]
    if wrong:
        raise InputError([f"--notebook {wrong[0]}: no such notebook; {nearest(wrong[0], NOTEBOOKS)}"])
    if not from_mlflow:
        for name in names:
            _refuse_unknown(settings.state, name)
    screen, status = console(), DONE
    print_starting(f"the notebooks of {', '.join(names)}, half a minute each")
    for name in names:
        try:
            found = make(settings.state, name, notebook, settings.mlflow, fetch=from_mlflow, pdf=pdf, out=out)
        except ReportError as error:
            screen.print(f"{name}: {error}", soft_wrap=True, markup=False)
            status = FAILED
        else:
            for line in (*found.pages, *filter(None, [found.pdf, found.trouble])):
                screen.print(str(line), soft_wrap=True, markup=False)
    raise typer.Exit(status)


def _known(state: Path) -> list[str]:
    return sorted(path.parent.name for path in state.glob("sweeps/*/ledger.db"))


def _refuse_unknown(state: Path, name: str) -> None:
    """Raise InputError for an experiment that was not run, unless it is the notebook that needs none."""
    if name == "numerics_walkthrough" or (state / "sweeps" / name / "ledger.db").exists():
        return
    known = _known(state)
    hint = nearest(name, known) if known else f"nothing was run in {state} yet"
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
    """Run the notebooks of a sweep and write its report; InputError where there is no such sweep, ReportError
    where one fails.
    """
    from ablate.results.answer import Answer  # pandas

    ours = os.access(state, os.W_OK) or not state.exists()
    if not (ours or out):
        raise InputError([f"{state}: nothing can be written there; name a folder for the report with --out"])
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
                    f"{name}: no report is made of numbers that are not what was recorded",
                    *map(str, verified.mismatches),
                ]
            )
        chosen = list(notebooks or _fitting(ledger))
        said = verified.sentence if verified else "read from MLflow: not verified against the trials' records"
        heading = _Heading(
            ledger.fact("question") or name,
            _about(ledger, name, said),
            _stamp(ledger),
            Answer(ledger).verdict(),
        )
        with ThreadPoolExecutor(1) as thread:
            dressed = (
                None if fetch or not ours else thread.submit(_dress, state, name, folder)
            )  # beside the notebooks: its imports take seconds
            found = _write(folder, state, name, chosen, heading, pdf)
        if dressed:
            dressed.result()
        if not ours and path_of(mlflow):  # a database in a folder that cannot be written, as a rule
            return found
        return found if fetch or not mlflow else replace(found, trouble=_attach(mlflow, ledger, found))
    finally:
        ledger.close()


def is_current(state: Path, name: str) -> bool:
    """Whether the report that is there shows all that the sweep's ledger holds."""
    about = state / "reports" / name / ABOUT
    if not about.exists():
        return False
    ledger = Ledger(state / "sweeps" / name / "ledger.db", readonly=True)
    stamp = _stamp(ledger)
    ledger.close()
    return json.loads(about.read_text(encoding="utf-8"))["stamp"] == stamp


def _stamp(ledger: Ledger) -> str:
    """What tells one state of a sweep from another: its file, and how each run stands."""
    runs = [(member["name"], member["seed"], member["id"], member["status"]) for member in ledger.members()]
    told = [ledger.fact("experiment.yaml"), runs]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _fitting(ledger: Ledger) -> list[str]:
    """The notebooks for the question that a sweep asks."""
    specs = [json.loads(member["spec"]) for member in ledger.members()[:1]]
    if any("tensors" in spec.get("workload", {}) for spec in specs):
        return ["tensors"]
    return ["search" if ledger.fact("search") else "ablation", "training_health"]


def _about(ledger: Ledger, name: str, verified: str) -> str:
    """The line above the title, with what of the numbers was verified."""
    statuses = [member["status"] for member in ledger.members()]
    left = sum(status not in ("done", "diverged") for status in statuses)
    half = f", {left} of them not finished" if left else ""
    return f"ablate, experiment {name}: {len(statuses)} runs{half}; {verified}. Report of {time.strftime('%Y-%m-%d %H:%M')}"


@dataclass(frozen=True)
class _Heading:
    """What stands above a report, and which state of the sweep it shows."""

    title: str
    about: str = ""
    stamp: str = ""
    answer: str = ""
    """First sentence of the report."""


def _write(
    folder: Path, state: Path, name: str, notebooks: Sequence[str], heading: _Heading, pdf: bool
) -> Report:
    """Made in a folder beside and put in place whole, so that a reader never meets half a report."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as making:
        made = Path(making)
        with _kernel() as kernel, ThreadPoolExecutor(len(notebooks)) as threads:
            ran = list(threads.map(lambda word: _run(word, state, name, made, kernel), notebooks))
        names = ["index.html", *(f"{word}.html" for word in notebooks[1:])]
        for number, (word, notebook) in enumerate(zip(notebooks, ran, strict=True)):
            others = [
                (NOTEBOOKS[other], page)
                for other, page in zip(notebooks, names, strict=True)
                if other != word
            ]
            its = heading if number == 0 else replace(heading, title=f"{NOTEBOOKS[word]} {heading.title}")
            (made / names[number]).write_text(_html(notebook, its, others), encoding="utf-8")
            (made / names[number]).with_suffix(".md").write_text(_markdown(notebook, its), encoding="utf-8")
        about = {
            "question": heading.title,
            "answer": heading.answer,
            "about": heading.about,
            "stamp": heading.stamp,
        }
        (made / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        if pdf:
            _print(made / "index.html")
        _replace(folder, made)
    printed = folder / "index.pdf"
    return Report(folder, tuple(folder / page for page in names), printed if printed.exists() else None)


def _replace(folder: Path, made: Path) -> None:
    new = {path.name for path in made.iterdir()}
    for stem in (
        "index",
        *NOTEBOOKS,
    ):  # a page of an earlier report that this one does not have would tell of other runs
        for path in folder.glob(f"{stem}.*"):
            if path.name not in new:
                path.unlink()
    for path in sorted(made.iterdir()):
        target = folder / path.name
        folder.mkdir(exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)


def _dress(state: Path, name: str, folder: Path) -> None:
    """Put the answer into the sweep's study, for Optuna's dashboard."""
    from ablate.execution.search import decorate
    from ablate.results.markdown_summary import summary_markdown
    from ablate.results.summary import metric_of, open_ledger, summaries

    ledger = open_ledger(state, name)
    note = f"{summary_markdown(ledger)}\n\nThe report: `{folder / 'index.html'}`"
    decorate(ledger.path.parent / "optuna.log", name, note, summaries(ledger), metric_of(ledger))
    ledger.close()


def _attach(mlflow: str, ledger: Ledger, found: Report) -> str | None:
    """Attach it to the sweep's run in MLflow; why that failed, in words: the report is made, and is what
    counts.
    """
    from ablate.execution.tracking import log_report

    try:
        log_report(mlflow, ledger, found.folder)
    except InputError as error:
        return f"The report is not in MLflow: {error}"
    return None


def _fetched(state: Path, name: str, mlflow: str | None) -> Path:
    """A state folder with what MLflow knows of the sweep."""
    from ablate.execution.tracking import fetch

    if not mlflow:
        raise InputError(
            ["--from-mlflow: no MLflow is named; say where it is with --mlflow, or in a profile"]
        )
    folder = state / "fetched"
    path = folder / "sweeps" / name / "ledger.db"
    path.unlink(missing_ok=True)
    fetch(mlflow, name, path).close()
    return folder


# Running


@contextmanager
def _kernel() -> Iterator[str]:
    """The name of a kernel that is this interpreter; its folder is the only one that Jupyter looks at, so
    that no other takes its place.
    """
    from ipykernel.kernelspec import write_kernel_spec

    with tempfile.TemporaryDirectory(
        prefix="ablate-kernel-", dir=short_for_sockets(tempfile.gettempdir())
    ) as folder:
        extra = ["--IPKernelApp.log_level=CRITICAL"]  # how it ends is nothing to tell
        write_kernel_spec(Path(folder) / "kernels" / "ablate", extra_arguments=extra)
        own = {
            "JUPYTER_PATH": folder,
            "IPYTHONDIR": f"{folder}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{folder}/run",
            "MPLBACKEND": "agg",
        }
        # tqdm.auto, which Optuna imports, warns in every kernel that has no ipywidgets; the reports draw no progress bar.
        own["PYTHONWARNINGS"] = ",".join(
            filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:IProgress not found"])
        )
        before = {key: os.environ.get(key) for key in own}
        os.environ |= own
        try:
            yield "ablate"
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


def _run(notebook: str, state: Path, name: str, out: Path, kernel: str) -> Any:
    """The notebook with its outputs; ReportError with the cell and the last words where it stops."""
    import papermill
    from jupyter_core.utils import ensure_event_loop
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    path = str(analysis() / f"{notebook}.ipynb")
    given = {"state": str(state.resolve()), "sweep": name, "out": str((out / "figures").resolve())}
    parameters = {key: given[key] for key in papermill.inspect_notebook(path)}
    how = {"kernel_name": kernel, "progress_bar": False, "log_output": False, "execution_timeout": _SECONDS}
    connection = Config(
        KernelManager={"transport": "ipc", "ip": str(Path(os.environ["JUPYTER_PATH"]) / notebook)}
    )  # this user's files, no port
    try:
        return _without_warnings(papermill.execute_notebook(path, None, parameters, config=connection, **how))
    except PapermillExecutionError as error:
        raise ReportError(
            f"notebook {notebook} stopped in cell {error.exec_count}: {error.ename}: {error.evalue}; run it in Jupyter to see more: {path}"
        ) from None
    finally:
        ensure_event_loop().close()  # this thread's, which Jupyter leaves open


def _without_warnings(notebook: Any) -> Any:
    """The notebook without what libraries wrote to standard error: warnings name files of this machine, and
    the page is sent.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def analysis() -> Path:
    """Where the notebooks are: in the package where it was installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    return package / "analysis" if (package / "analysis").exists() else package.parent / "analysis"


# Writing


def _html(notebook: Any, heading: _Heading, links: Sequence[tuple[str, str]]) -> str:
    from nbconvert import HTMLExporter

    template = Path(__file__).parent / "report_page" / "page.html.j2"
    exporter = HTMLExporter(
        template_file=str(template), mathjax_url="", require_js_url="", exclude_anchor_links=True
    )
    page = {"heading": heading, "links": links, "version": __version__}
    return exporter.from_notebook_node(notebook, resources={"page": page})[0]


def _markdown(notebook: Any, heading: _Heading) -> str:
    """The same in Markdown: no code, pictures as links to their files."""
    parts = [f"# {heading.title}", f"*{heading.about}*" if heading.about else ""]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            plain = data.get("text/plain") or output.get("text", "")
            parts.append(data.get("text/markdown", plain))  # an empty section has an empty one
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _print(page: Path) -> None:
    """A PDF by the browser that is installed, or none: the HTML is the report."""
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        return
    with tempfile.TemporaryDirectory(prefix="ablate-browser-") as profile:
        words = ["--headless", "--disable-gpu", "--no-pdf-header-footer", f"--user-data-dir={profile}"]
        words += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
        command = [browser, *words, f"--print-to-pdf={page.with_suffix('.pdf')}", page.resolve().as_uri()]
        try:
            subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False
            )
        except subprocess.TimeoutExpired:
            page.with_suffix(".pdf").unlink(missing_ok=True)
