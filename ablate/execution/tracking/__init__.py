"""The ledger in MLflow: drawn there by a thread, and read back where MLflow is all there is. The only folder that knows MLflow.

`runs` says what a run is called, tagged and counts; `projector` draws; `reader` reads back; `database` makes a SQLite database;
`attach` adds a report's files; `door` asks whether a server lets us in.
"""

from ablate.execution.tracking.attach import log_report
from ablate.execution.tracking.database import unusable
from ablate.execution.tracking.login import check_login
from ablate.execution.tracking.projector import Projector, Shipped, behind
from ablate.execution.tracking.reader import fetch
from ablate.execution.tracking.runs import VIEW, page, shown

__all__ = [
    "VIEW",
    "Projector",
    "Shipped",
    "behind",
    "check_login",
    "fetch",
    "log_report",
    "page",
    "shown",
    "unusable",
]
