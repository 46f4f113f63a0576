"""Data files that scikit-learn brings, found without importing it, which takes seconds."""

import importlib.util
from pathlib import Path


def scikit_datasets() -> Path:
    """Return scikit-learn's folder of data files. OSError if scikit-learn is not installed."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise OSError("scikit-learn is not installed, which brings this data: `pip install scikit-learn`")
    return Path(package.submodule_search_locations[0], "datasets")
