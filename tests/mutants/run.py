"""Run mutants against the tests that cover them: `make mutants SEED=1`, `make mutants-by-hand`.

    python tests/mutants/run.py --seed 1 --out before.jsonl          # draw 120 mutants
    python tests/mutants/run.py --again before.jsonl --out after.jsonl   # those of them that still exist
    python tests/mutants/run.py --by-hand                            # the mistakes of by_hand.py

A mutant is killed if a test fails, or runs out of time. One that survives the fast tier's cases of its tests runs
again with all of their cases that are not slow. At the end, every test that killed runs once without a
mutant: a kill by a test that fails then, too, is "unsure", since it says nothing.

The exit status is 1 if a mutant by hand survives or a kill is unsure; survivors of a draw do not change it.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutants.by_hand import MUTANTS, Mistake
from mutants.coverage_map import CoverageMap, paths_of_tests, run_again
from mutants.draw import DRAWN, PACKAGE, PACKAGES, Mutant, draw, mutants_of
from mutants.processes import Job, Ran, run_all, warm

CONTROL_SECONDS = 150.0
ALL_CASES = 4.0
"""Time that all quick cases of tests may take, as a multiple of those of the fast tier."""


@dataclass(frozen=True)
class Outcome:
    """Line of a file of results."""

    key: str
    file: str
    function: str
    line: int
    change: str
    outcome: str
    """`killed`, `survived` or `unsure`."""
    seconds: float
    tests: tuple[str, ...]
    by: str
    """The test that failed, `time-out`, or nothing."""


@dataclass(frozen=True)
class Planned:
    """Mutant with the text of its file and the test files to run."""

    key: str
    file: str
    function: str
    line: int
    change: str
    text: str
    tests: tuple[str, ...]


def planned_draw(seed: int, again: Mapping[str, Sequence[str]] | None = None) -> list[Planned]:
    """Return the mutants that a seed draws, or those with the keys of `again`, wherever their functions stand.

    Args:
        seed: the seed.
        again: test files that each mutant ran before, by its key.
    """
    covered, there = CoverageMap.read(), paths_of_tests()

    def tested(folder: str) -> Iterable[Mutant]:
        chosen: dict[tuple[str, str], list[str]] = {}
        for mutant in mutants_of(PACKAGE, folder):
            function = mutant.file, mutant.function
            if function not in chosen:
                chosen[function] = covered.chosen(*function, there)
            if chosen[function] or mutant.key in (again or ()):
                yield mutant

    def tests_of(mutant: Mutant) -> list[str]:
        chosen = covered.chosen(mutant.file, mutant.function, there)
        return run_again(again[mutant.key], chosen, there) if again else chosen

    if again is None:
        drawn = [
            mutant for folder in PACKAGES for mutant in draw(seed, tested(folder), DRAWN // len(PACKAGES))
        ]
    else:
        drawn = [one for one in draw(seed, tested(""), sys.maxsize) if one.key in again]
    return [
        Planned(
            mutant.key,
            mutant.file,
            mutant.function,
            mutant.site.line,
            f"{mutant.site.kind}: {mutant.site.before} -> {mutant.site.after}",
            mutant.text(),
            tuple(tests_of(mutant)),
        )
        for mutant in drawn
    ]


def planned_by_hand(mistakes: Sequence[Mistake]) -> list[Planned]:
    """Return the mistakes of by_hand.py; ValueError if one is no longer in the source."""
    return [
        Planned(f"by hand {number}", one.file, one.function, one.line(), one.promise, one.text(), (one.test,))
        for number, one in enumerate(mistakes)
    ]


def _controlled(outcomes: list[Outcome], workers: int) -> list[Outcome]:
    """Return the outcomes, those killed by a test that fails without a mutant as unsure."""
    tests: defaultdict[str, set[str]] = defaultdict(set)
    for outcome in outcomes:
        if outcome.outcome == "killed" and outcome.by != "time-out":
            tests[outcome.by.partition("::")[0]].add(outcome.by)
    jobs = [Job(tuple(sorted(ids)), CONTROL_SECONDS, whole=True, all_cases=True) for ids in tests.values()]
    failing: set[str] = set()
    for number, ran in run_all(jobs, workers):
        if ran.ended != "passed":
            failing |= {*ran.failed} or {*jobs[number].tests}
            print(ran.output[-3000:])
    return [replace(one, outcome="unsure") if one.by in failing else one for one in outcomes]


def run(planned: Sequence[Planned], workers: int, rounds: Sequence[bool]) -> list[Outcome]:
    """Run mutants and return their outcomes, in the same order.

    Args:
        planned: the mutants.
        workers: processes at a time.
        rounds: of each round, True for all cases of the tests, False for those of the fast tier. What survives
            one runs in the next.
    """
    warm()
    covered, there = CoverageMap.read(), paths_of_tests()

    def job(one: Planned, all_cases: bool) -> Job:
        seconds = sum(covered.seconds.get(name, CONTROL_SECONDS) for name in one.tests)
        paths = tuple(str(there[name]) for name in one.tests)
        more = ALL_CASES if all_cases else 1.0
        return Job(paths, more * seconds, str(PACKAGE / one.file), one.text, all_cases=all_cases)

    # Without a test that is still there, none sees a mutant.
    outcomes = {n: _outcome(one, Ran(0, 0.0), 0.0) for n, one in enumerate(planned) if not one.tests}
    for whole in rounds:
        open_ones = [
            number for number in range(len(planned)) if number not in outcomes or not outcomes[number].by
        ]
        numbers = [number for number in open_ones if planned[number].tests]
        for place, ran in run_all((job(planned[number], whole) for number in numbers), workers):
            number = numbers[place]
            before = outcomes[number].seconds if number in outcomes else 0.0
            outcomes[number] = _outcome(planned[number], ran, before)
            print(f"{len(outcomes)}/{len(planned)} {_line(outcomes[number])}", flush=True)
    return _controlled([outcomes[number] for number in range(len(planned))], workers)


def _outcome(one: Planned, ran: Ran, before: float) -> Outcome:
    by = {"passed": "", "time-out": "time-out"}.get(ran.ended, (ran.failed or list(one.tests))[0])
    facts = {name: value for name, value in asdict(one).items() if name != "text"}
    return Outcome(
        **facts, outcome="killed" if by else "survived", seconds=round(before + ran.seconds, 1), by=by
    )


def _line(outcome: Outcome) -> str:
    by = f" by {outcome.by}" if outcome.by else f" {', '.join(outcome.tests)}"
    return (
        f"{outcome.outcome} ablate/{outcome.file}:{outcome.line} {outcome.function}: {outcome.change}"
        f" ({outcome.seconds} s){by}"
    )


def main() -> int:
    """Run what the command line asks for and print what survived; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, help="results of an earlier run, whose mutants run again")
    parser.add_argument("--fast", action="store_true", help="leave out the round with all cases of tests")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument(
        "--only", default="", help="of the mutants by hand, those whose function has this text"
    )
    parser.add_argument("--out", type=Path, help="file of results, a JSON object a line")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    began = time.monotonic()
    if given.by_hand:
        planned = planned_by_hand([one for one in MUTANTS if given.only in one.function])
    else:
        lines = given.again.read_text().splitlines() if given.again else None
        rows = map(json.loads, lines or ())
        planned = planned_draw(given.seed, {row["key"]: row["tests"] for row in rows} or None)
    rounds = [True] if given.by_hand else [False] if given.fast else [False, True]
    outcomes = run(planned, given.workers, rounds)
    if given.out:
        given.out.write_text("".join(json.dumps(asdict(one)) + "\n" for one in outcomes))
    count = Counter(one.outcome for one in outcomes)
    print()
    for one in outcomes:
        if one.outcome != "killed":
            print(_line(one))
    print(
        f"{len(outcomes)} mutants: {count['killed']} killed, {count['survived']} survived,"
        f" {count['unsure']} unsure, in {(time.monotonic() - began) / 60:.1f} minutes and"
        f" {sum(one.seconds for one in outcomes):.0f} CPU-seconds"
    )
    return int(bool(count["unsure"] or (given.by_hand and count["survived"])))


if __name__ == "__main__":
    sys.exit(main())
