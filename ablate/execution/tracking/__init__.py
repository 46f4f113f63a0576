"""Projection of the ledger into MLflow by a thread, and import of a sweep from MLflow. The only folder that
imports MLflow.

`runs` names and tags runs; `projector` decides what is written; `tracker` writes it by MLflow's client, and
`local_database` without it into a database of this machine; `reader` reads back; `database` makes a SQLite
database; `attach` adds a report's files; `login` checks the access to a server.
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
