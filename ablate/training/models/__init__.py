"""Models of other libraries: here they are built, described, and made to be trained as the house trains its own."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib import import_module
from types import ModuleType


def library(name: str) -> ModuleType:
    """An optional library. ValueError, with the way out, where it is not installed."""
    try:
        with quietly():
            return import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this needs {error.name}, which is not installed: pip install 'ablate-fp4[hf]'"
        ) from None


@contextmanager
def quietly() -> Iterator[None]:
    """Say nothing, while they are imported, of other libraries that they would work with."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def drawn(moment: object, cuda: object = None) -> Iterator[None]:
    """Inside, whatever a library draws from torch's global generators (initial weights, dropout) is determined by `moment` alone;
    afterwards they are as they were. `cuda`: the GPU whose generator is drawn from as well."""
    import torch

    with torch.random.fork_rng(devices=[] if cuda is None else [cuda]):
        torch.manual_seed(int.from_bytes(blake2b(str(moment).encode(), digest_size=7).digest(), "little"))
        yield
