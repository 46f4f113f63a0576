"""Forks of a warm process that run tests: with a changed module, or with a record of the functions that are called.

A process that has torch, pytest and the other large libraries loaded, but nothing of `ablate`, forks for each
job. The fork installs the import hook, runs pytest and writes what failed. It has folders of its own, so that a
mutant can leave nothing behind for others: cache, temporary files, results.

A job that takes more CPU time than its limit, or that hangs, is ended with everything that it started.
"""

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mutants import recorded_calls
from mutants.in_place import changed_import

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
WARM = (
    "_hypothesis_globals",
    "hypothesis",
    "numpy",
    "torch",
    "torch._dynamo",
    "pandas",
    "pyarrow",
    "scipy.stats",
    "pydantic",
    "jsonschema",
    "ruamel.yaml",
    "rich.console",
    "rich.markdown",
    "typer.testing",
    "psutil",
    "optuna",
    "jinja2",
    "PIL.Image",
    "pytest",
)
"""Libraries that are loaded before the forks. MLflow and transformers are not: tests check what loads them."""
POLL = 0.02
CPU_SECONDS = 10
"""CPU time that a job has beside four times what its tests take without a change: loading, and a bad day."""
KEPT = ("mlflow",)
"""Kinds of cache entries that depend on nothing of this package: each job begins with a copy."""


@dataclass(frozen=True)
class Job:
    """Tests to run: files or node ids, with or without a change.

    `path` is the file that is changed and `text` its changed content. `seconds` is the CPU time that the tests take without the
    change.
    """

    tests: tuple[str, ...]
    seconds: float
    path: str = ""
    text: str = ""
    whole: bool = False
    """Continue after a failure."""
    all_cases: bool = False
    """Run every case of each test that is not slow, not only those of the fast tier."""


@dataclass
class Ran:
    """Result of a job: pytest's exit status, None after a time-out, and what failed."""

    status: int | None
    seconds: float
    failed: list[str] = field(default_factory=list)
    called: list[tuple[str, str]] = field(default_factory=list)
    output: str = ""

    @property
    def ended(self) -> str:
        """Return "passed", "failed", "time-out" or "broken": no test was collected, or the process crashed."""
        if self.status is None:
            return "time-out"
        return {0: "passed", 1: "failed", 2: "failed", 3: "failed", 5: "broken", 4: "broken"}.get(
            self.status, "failed"
        )


def warm(own: Sequence[str] = ()) -> None:
    """Load the large libraries, and of this package only the modules `own`: a fork loads the others anew."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTEST_ADDOPTS", None)  # of the session that asks; a job's folder may not know them
    sys.path.insert(0, str(TESTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*WARM, *own):
            importlib.import_module(name)


class _Failures:
    """Plug-in of pytest that notes the ids of what failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _run(job: Job, folder: Path) -> int:
    """Run a job's tests in this process, which ends afterwards; return pytest's exit status."""
    import pytest

    limit = round(CPU_SECONDS + 4 * job.seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    (folder / "cache").mkdir()
    usual = Path(tempfile.gettempdir()) / f"ablate-tests-{os.getuid()}"
    for kind in KEPT:
        if (usual / kind).is_dir():
            shutil.copytree(usual / kind, folder / "cache" / kind)
    os.environ["ABLATE_CACHE"] = str(folder / "cache")
    if job.text:
        change = folder / "change.json"
        change.write_text(json.dumps({"path": job.path, "text": job.text}))
        os.environ[changed_import.VARIABLE] = str(change)
        hooks = str(Path(changed_import.__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([hooks, *filter(None, [os.environ.get("PYTHONPATH")])])
        changed_import.install()
    failures = _Failures()
    options = ["-q", "--durations=0", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += [] if job.whole else ["-x"]
    options += ["-m", "not (slow or services or browser or gpu)"] if job.all_cases else ["--fast"]
    # Pytest would import modules of this package itself, to rewrite their assertions, and past the hook.
    options += ["--assert=plain"]
    # The libraries that are loaded already, hypothesis among them, are not rewritten.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", f"--basetemp={folder / 'tmp'}"]
    recorded_calls.CALLED.clear()
    status = int(pytest.main([*options, *job.tests], plugins=[failures]))
    times = os.times()
    result = {"seconds": sum(times[:4]), "failed": failures.failed, "called": sorted(recorded_calls.CALLED)}
    (folder / "result.json").write_text(json.dumps(result))
    return status


def _begin(job: Job, folder: Path) -> int:
    """Fork a process for a job; return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if process := os.fork():
        return process
    status = 70
    try:
        os.setsid()
        os.chdir(ROOT)
        output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = _run(job, folder)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _end(process: int) -> None:
    """End a job's process and all that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def _result(folder: Path, waited: int | None, began: float) -> Ran:
    """Return the result of a job that ended with this status of `waitpid`, or that was ended (None)."""
    output = (folder / "output.txt").read_text(errors="replace") if (folder / "output.txt").exists() else ""
    if waited is None or (os.WIFSIGNALED(waited) and os.WTERMSIG(waited) in (signal.SIGXCPU, signal.SIGKILL)):
        return Ran(None, time.monotonic() - began, output=output)
    status = os.waitstatus_to_exitcode(waited)
    if not (folder / "result.json").exists():
        return Ran(status or 70, time.monotonic() - began, output=output)
    return Ran(status, **json.loads((folder / "result.json").read_text()), output=output)


def _patience(job: Job) -> float:
    """Return the seconds after which a job counts as hung, which it may do without CPU time: more under load."""
    return (30 + 4 * job.seconds) * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def run_all(jobs: Iterable[Job], workers: int) -> Iterator[tuple[int, Ran]]:
    """Run jobs, so many at a time, and yield the number and the result of each when it has ended."""
    pending, running = enumerate(jobs), {}
    try:
        while True:
            while len(running) < workers and (following := next(pending, None)):
                folder = Path(tempfile.mkdtemp(prefix="ablate-mutant-"))
                running[_begin(following[1], folder)] = (*following, folder, time.monotonic())
            if not running:
                return
            time.sleep(POLL)
            for process, (number, job, folder, began) in list(running.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                late = time.monotonic() - began > _patience(job)
                if not ended and not late:
                    continue
                _end(process)
                if not ended:
                    os.waitpid(process, 0)
                del running[process]
                result = _result(folder, status if ended else None, began)
                shutil.rmtree(folder, ignore_errors=True)
                yield number, result
    finally:
        for process, (*_, folder, _) in running.items():
            _end(process)
            os.waitpid(process, 0)
            shutil.rmtree(folder, ignore_errors=True)
