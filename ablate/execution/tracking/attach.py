"""Upload of a report's files to its sweep's run in MLflow."""

from contextlib import closing
from pathlib import Path

from ablate.errors import InputError, redact
from ablate.execution.tracking.local_database import LocalDatabase
from ablate.execution.tracking.reader import errors_explained, look
from ablate.execution.tracking.writer import NOTE, ClientWriter, Entries, Writer
from ablate.store.ledger import Ledger

_FOLDER = "report"
_FIRST = "index.html"


def log_report(uri: str, ledger: Ledger, folder: Path) -> None:
    """Upload all files of a folder to the sweep's run, below `report/`, and link them in its description;
    replace older files.

    Do nothing if the sweep is not in MLflow. InputError, in one sentence, if MLflow cannot store the files.
    """
    run = ledger.facts.mlflow_parent
    if not run or not folder.is_dir():
        return
    with errors_explained(uri):
        look(uri)
        local = LocalDatabase.open(uri, own=False)
        if local is None:
            _attach(ClientWriter(uri), uri, run, folder)
            return
        with closing(local):  # importing MLflow takes a third of a report's time
            _attach(local, uri, run, folder)


def _attach(writer: Writer, uri: str, run: str, folder: Path) -> None:
    if not writer.has(run):
        raise InputError(f"{redact(uri)}: the sweep's run {run} was deleted in MLflow")
    kept = writer.run(run)
    writer.tree(kept, folder, _FOLDER)
    name = _FIRST if (folder / _FIRST).exists() else ""
    line = f"[The report](#/experiments/{kept.experiment}/runs/{run}/artifacts/{_FOLDER}/{name})"
    note = writer.note(run)
    if line not in note:
        writer.log(run, Entries(tags={NOTE: f"{note}\n\n{line}"}))
