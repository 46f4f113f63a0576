"""CPU-seconds of the test suite: a line at its end, and a file that ranks the test files by them.

A worker of xdist sums its own user and system time and that of all ended descendants that some process waited for. Not
counted: a process that outlives its parent, which init waits for, such as Ray's workers after a node is killed, and
what a worker of xdist that died had used.
"""

import json
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAME = "cpu_report"
IMPORTS = "(imports and collection)"
"""Key of what a process uses outside tests: each worker imports all test files."""
LOOP = 5_000_000


def seconds() -> float:
    """Return CPU-seconds, user and system, of this process and of its descendants that ended and were waited for."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def pace() -> float:
    """Return CPU-seconds of a loop in Python: by it a run here is compared with a run on another machine."""
    began = time.process_time()
    sum(n * n % 7 for n in range(LOOP))
    return time.process_time() - began


def install(config: pytest.Config) -> None:
    """Count CPU-seconds in this session of pytest; its conftest calls `add_option` and this."""
    config.pluginmanager.register(CpuReport(config))


def add_option(parser: pytest.Parser) -> None:
    """Add `--cpu-report FILE`."""
    parser.addoption(
        "--cpu-report", metavar="FILE", help="write the CPU-seconds of each test file to this file, as JSON"
    )


class CpuReport:
    """CPU-seconds by test file, of this process and of the workers that have sent theirs."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.began = config, time.monotonic()
        self.files: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count a test with its fixtures; a fixture of the file belongs to the test that first asks for it."""
        before = seconds()
        try:
            return (yield)
        finally:
            self.files[item.nodeid.partition("::")[0]] += seconds() - before

    def pytest_sessionfinish(self) -> None:
        """Send the sums of a worker to the controller."""
        if hasattr(self.config, "workeroutput"):
            rest = seconds() - self.files.total()
            self.config.workeroutput[NAME] = {**self.files, IMPORTS: rest}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the sums of a worker."""
        self.files.update(getattr(node, "workeroutput", {}).get(NAME, {}))

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the total, and write the file of `--cpu-report`."""
        if self.config.getoption(
            "numprocesses", None
        ):  # the sums of the workers; not again as this process's descendants
            self.files[IMPORTS] += time.process_time()
        else:
            self.files[IMPORTS] += seconds() - self.files.total()
        found, wall = self.files, time.monotonic() - self.began
        load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
        terminalreporter.write_line(
            f"CPU {found.total():.0f} s ({found[IMPORTS]:.0f} s of it imports and collection), wall {wall:.0f} s, load average {load}, "
            f"{pace():.2f} s for {LOOP:,} turns of a loop"
        )
        if file := self.config.getoption("--cpu-report"):
            ranked = {name: round(value, 2) for name, value in found.most_common()}
            Path(file).write_text(json.dumps(ranked, indent=1) + "\n")
