"""Models: the package's own transformer, and those of other libraries, built, described and trained alike."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from types import ModuleType

from ablate.engines.gpu_access import without_gpus


def library(name: str) -> ModuleType:
    """Import and return an optional library's module. ValueError, with the command to install it, if it is
    missing."""
    try:
        with quietly(), without_gpus():
            return import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this needs {error.name}, which is not installed: pip install 'ablate-fp4[hf]'"
        ) from None


@contextmanager
def quietly() -> Iterator[None]:
    """Inside this context, suppress log messages, such as hints at import time about other libraries."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def hidden_if_broken(package: str) -> Iterator[None]:
    """Inside this context, hide a package that is installed but cannot be imported. peft checks only that it
    is installed, and then fails to import it."""
    if package in sys.modules:
        yield
        return
    try:
        __import__(package)
    except (ImportError, RuntimeError, OSError):
        sys.modules[package] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            yield
        finally:
            sys.modules.pop(package, None)
    else:
        yield


@contextmanager
def drawn(moment: object, cuda: object = None) -> Iterator[None]:
    """Inside this context, seed torch's global generators from `str(moment)` alone, of a seed or a `Clock`.
    Restore them afterwards; of the GPUs' that of `cuda` alone. For libraries that draw initial weights or
    dropout from those generators."""
    import torch

    with torch.random.fork_rng(devices=[] if cuda is None else [cuda]):
        torch.manual_seed(int.from_bytes(blake2b(str(moment).encode(), digest_size=7).digest(), "little"))
        yield
