"""Files of a report: notebooks that are run, as self-contained HTML, Markdown, figures, CSV and PDF.

The notebooks run in this process (`notebooks.py`), independently of the kernels and profiles that the user
has installed. The pages load nothing from a network.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.files import Json
from ablate.reports.notebooks import markdown, page, run
from ablate.reports.report_about import current, stamp, write_about
from ablate.results.number_text import counted
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger
from ablate.training.workloads import abilities
from ablate.version import __version__

if TYPE_CHECKING:
    from ablate.reports.answer import Answer

WALKTHROUGH = "numerics_walkthrough"
"""Name of the notebook that shows a recipe at work, without a sweep."""
NOTEBOOKS = {
    "ablation": "Does it matter, and by how much?",
    "search": "What did the search find?",
    "tensors": "What do the quantisers do to which tensors?",
    "training_health": "Did training go well?",
    WALKTHROUGH: "How does the recipe compute, step by step?",
}
"""Question that each notebook answers, by name; the files are in `analysis/`."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "microsoft-edge")
"""Programs that print a report as PDF, the first that is installed."""


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


@dataclass(frozen=True)
class Heading:
    """Head of a report, and the state of the sweep that it shows."""

    title: str
    about: str = ""
    stamp: str = ""
    answer: "Answer | None" = None
    """The answer of the sweep, which its notebooks share."""

    @classmethod
    def of(cls, ledger: Ledger, name: str, verified: str, answer: "Answer | None" = None) -> "Heading":
        """Return the head of a sweep's report. `verified`: text that says with what its records were
        compared; `answer`: the sweep's, if it was printed already."""
        from ablate.reports.answer import Answer  # pandas

        question, line = ledger.facts.question or name, _about(ledger, name, verified)
        return cls(question, line, stamp(ledger), answer or Answer(ledger))


def is_current(state: Path, name: str) -> bool:
    """Return True if a report exists and shows the present state of the ledger."""
    with closing(Ledger(state / "sweeps" / name / "ledger.db", readonly=True)) as ledger:
        return bool(current(state / "reports" / name, ledger))


def default_notebooks(ledger: Ledger) -> list[str]:
    """Return the notebooks that fit the question of a sweep."""
    if any(not abilities(member.resolved.workload).trains for member in ledger.members()[:1]):
        return ["tensors"]
    return ["search" if ledger.facts.search else "ablation", "training_health"]


def _about(ledger: Ledger, name: str, verified: str) -> str:
    """Return the line above the title: experiment, number of runs, commit, verification and date."""
    members = ledger.members()
    unfinished = sum(member.status not in ("done", "diverged") for member in members)
    partial = f", {unfinished} of them not finished" if unfinished else ""
    commit = ledger.facts.provenance.get("commit")
    facts = [
        f"ablate, {'runs judged as' if Judged.alone(ledger) else 'experiment'} {name}",
        f"{counted(len(members), 'run')}{partial}",
        f"commit {commit[:8]}" if commit else "",
        verified,
        f"Report of {time.strftime('%Y-%m-%d %H:%M')}",
    ]
    return " · ".join(filter(None, facts))


def write_report(
    folder: Path, state: Path, name: str, notebooks: Sequence[str], heading: Heading, pdf: bool
) -> Report:
    """Run notebooks and write their pages to a temporary folder, then move it to `folder`, so that a reader
    never sees half a report; NotebookError if a notebook failed.

    The first notebook is the first page, which has the heading. `pdf`: also print it as PDF, if a browser is
    installed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as making:
        made = Path(making)
        parameters = {"state": str(state.resolve()), "sweep": heading.answer or name}
        parameters["out"] = str((made / "figures").resolve())
        ran = [run(analysis() / f"{word}.ipynb", parameters) for word in notebooks]
        names = ["index.html", *(f"{word}.html" for word in notebooks[1:])]
        for word, file, cells in zip(notebooks, names, ran, strict=True):
            pairs = zip(notebooks, names, strict=True)
            others = [(NOTEBOOKS[other], target) for other, target in pairs if other != word]
            title = heading.title if file == names[0] else f"{NOTEBOOKS[word]} {heading.title}"
            head, template = replace(heading, title=title), Path(__file__).parent / "page.html.j2"
            html = page(cells, template, heading=head, links=others, version=__version__)
            line = f"*{head.about}*\n\n" if head.about else ""
            text = f"# {title}\n\n{line}{markdown(cells)}"
            (made / file).write_text(html, encoding="utf-8")
            (made / file).with_suffix(".md").write_text(text, encoding="utf-8")
        answer = heading.answer and heading.answer.answer
        about: dict[str, Json] = {
            "question": heading.title,
            "lead": answer.lead if answer else "",
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
    return Report(folder, tuple(folder / file for file in names), printed if printed.exists() else None)


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


def analysis() -> Path:
    """Return the folder of the notebooks: inside an installed package, next to the package in a checkout."""
    package = Path(__file__).parents[1]
    return package / "analysis" if (package / "analysis").exists() else package.parent / "analysis"


def _print(page: Path) -> None:
    """Print a page as PDF with an installed browser; without one, do nothing: the HTML is the report."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
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
