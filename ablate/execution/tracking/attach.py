"""Upload of a report's files to its sweep's run in MLflow."""

from pathlib import Path

from ablate.errors import InputError, redact
from ablate.execution.tracking.access import errors_explained, is_active, look, open_client
from ablate.execution.tracking.runs import NOTE
from ablate.store.ledger import Ledger

_FOLDER = "report"
_FIRST = "index.html"


def log_report(uri: str, ledger: Ledger, folder: Path) -> None:
    """Upload all files of a folder to the sweep's run, below `report/`, and link them in its description;
    replace older files. Do nothing if the sweep is not in MLflow. InputError, in one sentence, if MLflow
    cannot store the files."""
    run = ledger.facts.mlflow_parent
    if not run or not folder.is_dir():
        return
    with errors_explained(uri):
        look(uri)
        client = open_client(uri)
        if not is_active(client, run):
            raise InputError(f"{redact(uri)}: the sweep's run {run} was deleted in MLflow")
        client.log_artifacts(run, str(folder), _FOLDER)
        name = _FIRST if (folder / _FIRST).exists() else ""
        kept = client.get_run(run)
        place = f"#/experiments/{kept.info.experiment_id}/runs/{run}/artifacts/{_FOLDER}/{name}"
        note, line = kept.data.tags.get(NOTE, ""), f"[The report]({place})"
        if line not in note:
            client.set_tag(run, NOTE, f"{note}\n\n{line}")
