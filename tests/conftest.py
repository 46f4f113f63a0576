"""Setting that all tests share: an order, one thread, and a small synthetic corpus that is the same on every machine."""

import gc
import hashlib
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import cpu_report
from support.cases import FAST_CASES, Tier, spread
from support.corpus import write_shards

from ablate.cache import root
from ablate.training.data import Shards

gc.disable()  # until all tests are imported: modules are no garbage, and each collection searches all of them
torch.set_num_threads(1)
# Commands under test as well: with all cores for each, two test processes wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import a thousand modules each, and each would compile this package again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Times of tests' trials belong to no estimate of the user's. Checks that passed and empty databases are kept here too.
os.environ.setdefault("ABLATE_CACHE", str(Path(tempfile.gettempdir()) / f"ablate-tests-{os.getuid()}"))
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job, which every command under test would inherit
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
SUPPORT = [
    ".".join(path.relative_to(TESTS).with_suffix("").parts).removesuffix(".__init__")
    for path in TESTS.glob("support/**/*.py")
]
"""Modules that tests share, by name: each test looks them up, and a search of all modules would take a millisecond."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help=f"leave out slow tests, servers and browsers, and all but {FAST_CASES} cases of each test",
    )
    parser.addoption(
        "--all", action="store_true", help="run all cases of wide products, of which the tests run a sample"
    )
    cpu_report.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Tell `support.cases.every` which tier runs, and count CPU-seconds."""
    Tier.fast, Tier.whole = config.getoption("--fast"), config.getoption("--all")
    cpu_report.install(config)


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
    return [item for several in cases.values() for item in spread(several)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take longest first: one that begins last would have a single worker busy at the end.

    A slow test with servers of its own takes about ten times as long as another slow test: 16 CPU-seconds each in test_cluster.py.
    Twenty quick ones take as long as a slow one.
    """
    if config.getoption("--fast"):
        items[:] = thinned(items)
    cost: Counter[Path] = Counter()
    for item in items:
        slow, services = map(item.get_closest_marker, ("slow", "services"))
        cost[item.path] += 200 if slow and services else 20 if slow or services else 1
    items.sort(key=lambda item: -cost[item.path])


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but search none of what is imported: a full collection would take half a second, in each fork too."""
    gc.freeze()
    gc.set_threshold(10_000)  # not every 700 objects: a parsed file has thousands, none of them garbage
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """End the process that tests keep for the next one, before the report counts it."""
    experiments = sys.modules.get("support.experiments")  # which the controller of xdist does not import
    if experiments is not None:
        experiments.Children.end_kept()


@pytest.fixture(autouse=True)
def one_support() -> Iterator[None]:
    """Support modules that are imported once: code of one's own that a test loads imports its modules anew, and would leave others here."""
    before = {name: sys.modules[name] for name in SUPPORT if name in sys.modules}
    yield
    sys.modules.update(before)


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Shards:
    """A corpus of 20,000 training and 4,000 validation tokens over 64 words."""
    return write_shards(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def generator() -> torch.Generator:
    """An explicit source of randomness, the same for every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def inductor(monkeypatch) -> None:
    """Code that torch.compile keeps, of these engines: torch itself does not see a change of their operators."""
    engines = sorted((Path(__file__).parents[1] / "ablate" / "engines").glob("*.py"))
    key = hashlib.sha256(b"".join(file.read_bytes() for file in engines)).hexdigest()[:16]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root() / "inductor" / key))


@pytest.fixture
def triton_cache(monkeypatch) -> None:
    """Kernels that Triton compiled, which it names by a hash of their source, options and its own version."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(root() / "triton"))


@pytest.fixture
def cache(tmp_path_factory, monkeypatch) -> Path:
    """An empty folder for what is made of data once and kept."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ABLATE_CACHE", str(folder))
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    return folder
