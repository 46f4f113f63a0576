"""Upload of a report's files to its sweep's run in MLflow."""

from pathlib import Path
from typing import Any

from ablate.execution.tracking.reader import look, told
from ablate.results.ledger import Ledger

_FOLDER = "report"
_FIRST = "index.html"


def log_report(uri: str, ledger: Ledger, folder: Path) -> None:
    """Upload all files of a folder to the sweep's run, below `report/`, and link them in its description;
    replace older files.

    Do nothing if the sweep is not in MLflow. InputError, in one sentence, if MLflow cannot store the files.
    """
    run = ledger.fact("mlflow_parent")
    if not run or not folder.is_dir():
        return
    with told(uri):
        look(uri)
        from mlflow import MlflowClient

        _attach(MlflowClient(uri), run, folder)


def _attach(client: Any, run: str, folder: Path) -> None:
    client.log_artifacts(run, str(folder), _FOLDER)
    found = client.get_run(run)
    name = _FIRST if (folder / _FIRST).exists() else ""
    line = f"[The report](#/experiments/{found.info.experiment_id}/runs/{run}/artifacts/{_FOLDER}/{name})"
    note = found.data.tags.get("mlflow.note.content", "")
    if line not in note:
        client.set_tag(run, "mlflow.note.content", f"{note}\n\n{line}")
