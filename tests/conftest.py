"""What every test shares: an order, one thread, and a small synthetic corpus that is the same on every machine."""

import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from ablate.training.data import Shards

torch.set_num_threads(1)
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job, which every command under test would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)


FAST_CASES = 3
"""Cases of a parametrised test that `--fast` keeps."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help=f"leave out slow tests, servers and browsers, and all but {FAST_CASES} cases of each test",
    )


def thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the fast tier: of each function the first case, the last and those evenly between."""
    quick = [
        item
        for item in items
        if not any(map(item.get_closest_marker, ("slow", "services", "browser", "gpu")))
    ]
    cases: dict[str, list[pytest.Item]] = {}
    for item in quick:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = []
    for several in cases.values():
        last, most = len(several) - 1, min(FAST_CASES, len(several))
        kept += [several[round(last * n / max(1, most - 1))] for n in range(most)]
    return kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with the most slow tests first: one that begins last would have a single worker busy at the end."""
    if config.getoption("--fast"):
        items[:] = thinned(items)
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def write_shards(folder: Path, train: int = 20_000, val: int = 4_000, vocab: int = 64) -> Shards:
    """Two raw uint16 shards from a small integer generator: x -> 1103515245 x + 12345 mod 2^31, thinned so that tokens repeat."""
    state, tokens = 1, np.empty(train + val, dtype=np.uint16)
    for i in range(train + val):
        state = (1103515245 * state + 12345) % 2**31
        draw = (state >> 16) % vocab
        tokens[i] = (
            (tokens[i - 1] + 1) % vocab if i and draw < vocab // 2 else draw
        )  # half the text is predictable
    tokens[:train].tofile(folder / "train.bin")
    tokens[train:].tofile(folder / "val.bin")
    return Shards(train=str(folder / "train.bin"), val=str(folder / "val.bin"), vocab=vocab)


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Shards:
    """A corpus of 20,000 training and 4,000 validation tokens over 64 words."""
    return write_shards(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def generator() -> torch.Generator:
    """An explicit source of randomness, the same for every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def cache(tmp_path_factory, monkeypatch) -> Path:
    """An empty folder for what is made of data once and kept."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ABLATE_CACHE", str(folder))
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    return folder
