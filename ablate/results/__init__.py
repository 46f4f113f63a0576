"""Results of a sweep: storage, statistics, and the parts of reports.

`open` gives them as pandas frames. `trial_store` and `ledger` store results, and `records` reads them back
as one frame. `summary`, `paired_stats` and `attribution` compare arms. `answer`, `page` and `figures` make
the parts of a report.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.results.frames import Results, open

__all__ = ["Results", "open"]


def __getattr__(name: str) -> object:
    """Import `open` and `Results`, and pandas with them, at their first use."""
    if name in __all__:
        return getattr(import_module("ablate.results.frames"), name)
    raise AttributeError(f"module 'ablate.results' has no attribute {name!r}")
