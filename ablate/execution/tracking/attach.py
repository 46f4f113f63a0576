"""Upload of a report's files to its sweep's run in MLflow."""

from pathlib import Path
from typing import TYPE_CHECKING

from ablate.execution.tracking.reader import errors_explained, look
from ablate.results.ledger import Ledger

if TYPE_CHECKING:
    from mlflow import MlflowClient

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
    with errors_explained(uri):
        look(uri)
        from mlflow import MlflowClient

        _attach(MlflowClient(uri), run, folder)


def _attach(client: "MlflowClient", run: str, folder: Path) -> None:
    client.log_artifacts(run, str(folder), _FOLDER)
    tracked = client.get_run(run)
    name = _FIRST if (folder / _FIRST).exists() else ""
    line = f"[The report](#/experiments/{tracked.info.experiment_id}/runs/{run}/artifacts/{_FOLDER}/{name})"
    note = tracked.data.tags.get("mlflow.note.content", "")
    if line not in note:
        client.set_tag(run, "mlflow.note.content", f"{note}\n\n{line}")
