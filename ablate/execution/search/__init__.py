"""Optuna studies that propose and show a sweep's arms. The only folder that imports Optuna and its dashboard.

`study` proposes points and records results; `journal` is the study's file; `annotations` adds notes and
figures; `combined_storage` shows the journals of all sweeps in one dashboard.
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
