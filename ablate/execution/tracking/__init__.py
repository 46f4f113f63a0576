"""Projections of the ledger into MLflow and other trackers, and import of a sweep from MLflow. The only
folder that imports MLflow or TensorBoard.

`tracker` has the operations of a tracker and finds those of other packages; `follower` is the thread that
calls them; `tensorboard` writes event files. The other files are MLflow's: `runs` names and tags runs;
`mlflow_tracker` decides what is written; `writer` writes it by MLflow's client, and `local_database` without
it into a database of this machine; `reader` reads back; `database` makes a SQLite database; `attach` adds a
report's files; `login` checks the access to a server.
"""

from ablate.execution.tracking.attach import log_report
from ablate.execution.tracking.database import unusable
from ablate.execution.tracking.follower import Follower
from ablate.execution.tracking.login import check_login
from ablate.execution.tracking.mlflow_tracker import MlflowTracker, Shipped, behind
from ablate.execution.tracking.reader import fetch
from ablate.execution.tracking.runs import VIEW, page, shown
from ablate.execution.tracking.tracker import Tracker, open_trackers
from ablate.execution.tracking.writer import import_client

__all__ = [
    "VIEW",
    "Follower",
    "MlflowTracker",
    "Shipped",
    "Tracker",
    "behind",
    "check_login",
    "fetch",
    "import_client",
    "log_report",
    "open_trackers",
    "page",
    "shown",
    "unusable",
]
