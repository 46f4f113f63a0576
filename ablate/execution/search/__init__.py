"""Which arms to run next, and the studies that show it. The only folder that knows Optuna and its dashboard.

`study` asks and tells; `journal` is its file; `dress` puts the answer into it; `shelf` shows the journals of all sweeps at once.
"""

from ablate.execution.search.annotations import decorate, importances
from ablate.execution.search.combined_storage import CombinedStorage, dashboard
from ablate.execution.search.journal import REPEATS, given_up, points, shown
from ablate.execution.search.study import ENDED, PRUNERS, SAMPLERS, Study

__all__ = [
    "ENDED",
    "PRUNERS",
    "REPEATS",
    "SAMPLERS",
    "CombinedStorage",
    "Study",
    "dashboard",
    "decorate",
    "given_up",
    "importances",
    "points",
    "shown",
]
