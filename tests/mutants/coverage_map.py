"""Map from each function of the package to the test files that call it, cheapest first. `make coverage-map`.

Each test file of the fast tier runs once, in a fork of its own, with a record of the calls. A file that fails is
named and left out. What only other processes of a test call is not seen.

`python tests/mutants/coverage_map.py FILE` keeps the calls of each test file there, and continues with those it has.

The map names test files without their folder, so that one that moves is found. A function that moved to another
module is looked up by its qualified name.
"""

import json
import re
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants import recorded_calls
from mutants.changes import Source
from mutants.draw import PACKAGE
from mutants.processes import TESTS, Job, run_all, warm

OWN = (
    "ablate.training.workloads",
    "ablate.training.checkpoints",
    "ablate.training.forked_training",
    "ablate.experiment.load",
    "ablate.store.ledger",
    "ablate.results.summary",
)
"""Modules of this package that each test file would load. What is called while they load is not in the map."""
FILE = Path(__file__).with_suffix(".json")
FILE_SECONDS = 8.0
"""Seconds of a test file, of which four times as many may pass while calls are recorded; else it is left out."""
MOST_FILES = 6
"""Most test files that are kept of a function."""
RUN_FILES = 3
"""Most test files that a mutant runs."""
RUN_SECONDS = 12.0
"""CPU time that a mutant's second and third test file may bring its tests to."""
MOST_SECONDS = 45.0
"""CPU time of a test file above which no mutant runs it."""


@dataclass(frozen=True)
class CoverageMap:
    """CPU seconds by test file, functions that each calls, and numbers of those files by module and function."""

    seconds: dict[str, float]
    called: dict[str, int]
    functions: dict[str, dict[str, list[int]]]

    @classmethod
    def read(cls, path: Path = FILE) -> "CoverageMap":
        """Return the map that is committed."""
        return cls(**json.loads(path.read_text()))

    def tests_of(self, file: str, function: str) -> list[str]:
        """Return the names of the test files that call a function, cheapest first."""
        names = list(self.seconds)
        numbers = self.functions.get(file, {}).get(function)
        if numbers is None:
            numbers = {n for named in self.functions.values() for n in named.get(function, ())}
        return sorted((names[number] for number in numbers), key=lambda name: (self.seconds[name], name))

    def chosen(self, file: str, function: str, there: dict[str, Path]) -> list[str]:
        """Return the test files that a mutant of a function runs, of those that are there.

        First come those with the name of the module or with the function's name in their text; then those that
        call the fewest functions, since a test of a whole sweep calls many and compares few of their results;
        then the cheapest.
        """
        known = [name for name in self.tests_of(file, function) if name in there]
        dear = [name for name in known if self.seconds[name] <= MOST_SECONDS]
        cheap = [name for name in dear if self.seconds[name] <= RUN_SECONDS] or dear[:1]
        special = sorted(
            cheap, key=lambda name: (not names_it(there[name], file, function), self.called[name])
        )
        chosen: list[str] = []
        for name in (*special[:2], *cheap):
            together = sum(map(self.seconds.__getitem__, [*chosen, name]))
            fits = not chosen or (len(chosen) < RUN_FILES and together <= RUN_SECONDS)
            if name not in chosen and fits:
                chosen.append(name)
        return chosen


def run_again(before: Sequence[str], chosen: Sequence[str], there: Collection[str]) -> list[str]:
    """Return the test files that a mutant runs again: those that it ran before, and for each that is gone another."""
    kept = [name for name in before if name in there]
    return [*kept, *(name for name in chosen if name not in kept)][: len(before)]


def names_it(test: Path, file: str, function: str) -> bool:
    """Return True if a test file is the module's own, or has the function's name in its text."""
    word = function.rpartition(".")[2]
    # Short words, such as at, of and run, are in every text.
    return test.name == f"test_{Path(file).stem}.py" or (len(word) > 4 and word in _words(test))


@cache
def _words(test: Path) -> set[str]:
    return {*re.findall(r"\w+", test.read_text())} if test.is_file() else set()


def paths_of_tests() -> dict[str, Path]:
    """Return the path of each test file by its name."""
    return {path.name: path for path in sorted(TESTS.rglob("test_*.py"))}


def functions_of(root: Path) -> set[tuple[str, str]]:
    """Return file and qualified name of each function of the package."""
    return {
        (str(path.relative_to(root)), name)
        for path in root.rglob("*.py")
        for name, _ in Source(path.read_text()).functions()
    }


def make(names: list[str], raw: Path, workers: int) -> CoverageMap:
    """Run test files and return the map. Those whose calls `raw` has, a line a file, do not run again."""
    there = paths_of_tests()
    lines = raw.read_text().splitlines() if raw.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    missing = [name for name in names if name not in rows]
    missing.sort(key=lambda name: there[name].stat().st_size)
    recorded_calls.install()
    warm(OWN)
    jobs = [Job((str(there[name]),), FILE_SECONDS, whole=True) for name in missing]
    for done, (number, ran) in enumerate(run_all(jobs, workers), start=1):
        name = missing[number]
        print(f"{done}/{len(missing)} {name}: {ran.ended}, {ran.seconds:.1f} s", *ran.failed, flush=True)
        if ran.ended not in ("passed", "broken"):
            print(ran.output[-2000:])
        if ran.ended == "time-out" and sys.argv[1:]:
            continue
        rows[name] = {
            "name": name,
            "seconds": ran.seconds,
            "called": ran.called if ran.ended == "passed" else [],
        }
        with raw.open("a") as file:
            file.write(json.dumps(rows[name]) + "\n")
    calls: dict[tuple[str, str], list[str]] = {}
    seconds: dict[str, float] = {}
    names = [name for name in names if name in rows]
    for name in names:
        if rows[name]["called"]:
            seconds[name] = round(rows[name]["seconds"], 1)
        for file, function in rows[name]["called"]:
            calls.setdefault((file, function), []).append(name)
    ordered = sorted(seconds)
    functions: dict[str, dict[str, list[int]]] = {}
    for file, function in sorted(calls.keys() & functions_of(PACKAGE)):
        names = sorted(calls[file, function], key=lambda name: (seconds[name], name))
        special = sorted(
            names,
            key=lambda name: (not names_it(there[name], file, function), len(rows[name]["called"])),
        )[: MOST_FILES // 2]
        names = [*dict.fromkeys([*special, *names])][:MOST_FILES]
        functions.setdefault(file, {})[function] = sorted(map(ordered.index, names))
    called = {name: len(rows[name]["called"]) for name in ordered}
    return CoverageMap({name: seconds[name] for name in ordered}, called, functions)


def text_of(made: CoverageMap) -> str:
    """Return the map as JSON, a module a line."""
    lines = ",\n".join(
        f"{json.dumps(file)}:{json.dumps(named, separators=(',', ':'))}"
        for file, named in made.functions.items()
    )
    return f'{{"seconds":{json.dumps(made.seconds)},\n"called":{json.dumps(made.called)},\n"functions":{{\n{lines}}}}}\n'


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(sys.argv[1] if sys.argv[1:] else f"{folder}/calls.jsonl")
        made = make(sorted(paths_of_tests()), raw, workers=4)
    FILE.write_text(text_of(made))
    print(f"{sum(map(len, made.functions.values()))} functions, {len(made.seconds)} test files: {FILE}")
