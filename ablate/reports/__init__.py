"""Pages, tables, figures, notebooks and frames: from answers to what people look at.

`open` gives a sweep's results as pandas frames. `answer` makes the parts of a report, `page` and
`table` draw them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.reports.frames import Results, open

__all__ = ["Results", "open"]


def __getattr__(name: str) -> object:
    """Import `open` and `Results`, and pandas with them, at their first use."""
    if name in __all__:
        return getattr(import_module("ablate.reports.frames"), name)
    raise AttributeError(f"module 'ablate.reports' has no attribute {name!r}")
