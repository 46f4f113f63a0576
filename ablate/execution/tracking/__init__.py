"""Projections of the ledger into MLflow and other trackers. The only folder that imports MLflow or
TensorBoard.

`tracker` has the operations of a tracker and finds those of other packages; `follower` is the thread that
calls them; `tensorboard` writes event files, and `event_files` reads those of others. The other files are
MLflow's: `runs` names and tags runs; `mlflow_tracker` writes them by MLflow's client; `access` opens that
client and explains its errors; `database` makes a SQLite database; `attach` adds a report's files;
`stored_runs` reads runs of others.
"""

from ablate.execution.tracking.access import check_login, import_client
from ablate.execution.tracking.attach import log_report
from ablate.execution.tracking.database import unusable
from ablate.execution.tracking.follower import Follower
from ablate.execution.tracking.mlflow_tracker import MlflowTracker, Shipped, behind
from ablate.execution.tracking.runs import VIEW, page, shown
from ablate.execution.tracking.tracker import Tracker, open_trackers

__all__ = [
    "VIEW",
    "Follower",
    "MlflowTracker",
    "Shipped",
    "Tracker",
    "behind",
    "check_login",
    "import_client",
    "log_report",
    "open_trackers",
    "page",
    "shown",
    "unusable",
]
