"""Random tables of runs from elsewhere, with plants that change what may be compared, and right answers.

    python -m support.planted_tables --count 200 --seed 1          # from tests/

Each table has arms of runs with known final values. Plants of some kinds (`KINDS`) are put into it: statuses
that do not mean done, hyperparameters that differ in every run, ids that do, and, for `copies` and `lengths`,
curves that are there twice and runs that end early. A plant changes the oracle by the written rules alone: no
name list or function of the package is used here. A silent wrong answer is a difference over other runs than
those that count, an answer where the table must be refused, or a plant that no sentence names.
"""

import argparse
import csv
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ablate.errors import InputError
from ablate.judging.answer import judge

STATUS_COLUMNS = (
    "State",
    "status",
    "state",
    "Status",
    "run_status",
    "Job state",
    "job.state",
    "config/status",
)
DONE = (
    "finished",
    "FINISHED",
    "COMPLETED",
    "done",
    "Success",
    "succeeded",
    "ok",
    "complete",
    "RunStatus.FINISHED",
)
NOT_DONE = (
    *("preempted", "PREEMPTED", "crashed", "TIMEOUT", "NODE_FAIL", "CANCELLED+", "OUT_OF_MEMORY", "killed"),
    *("running", "PENDING", "stopped", "TERMINATED", "error", "interrupted", "0", "1", "True", "almost done"),
)
SETTINGS: dict[str, Callable[[int], str]] = {
    "lr": lambda n: f"{(n + 1) * 1e-3:g}",
    "batch size": lambda n: str(8 * (n + 1)),
    "warmup": lambda n: str(100 + 10 * n),
    "optimizer.eps": lambda n: f"1e-{n + 3}",
    "cmd": lambda n: f"train.py --lr {n + 1}e-4",
    "my flags": lambda n: f"wd=0.{n + 1}",
    "loss_scale": lambda n: str(2 ** (n + 4)),
    "mystery": lambda n: f"{n / 8 + 0.0625}",
    "launch": lambda n: f"node{n}",
    "size": lambda n: ("tiny", "small", "medium", "large", "huge")[n % 5] + "-model" * (1 + n // 5),
}
"""Fields that differ in every run and are, or may be, settings; the value by the run's number."""
IDS: dict[str, Callable[[int], str]] = {
    "name": lambda n: f"run-lr{n + 1}e-4",
    "run id": lambda n: f"{n:x}k2j9x1a",
    "hostname": lambda n: f"node{n + 17}",
    "Created": lambda n: f"2026-05-{n + 1:02}T08:53:32Z",
    "output_dir": lambda n: f"runs/bf16_s{n}",
    "slurm_job_id": lambda n: str(31_000 + n),
    "Runtime": lambda n: f"{300.5 + n}",
    "data_seed": lambda n: str(7 + n),
    "codename": lambda n: "swift-fox-" + "abcdefghijklmnopqrstuvwxyz"[n],
}
"""Fields that differ in every run and are none."""


@dataclass
class Planted:
    """A table, and what is right about it."""

    rows: list[dict[str, str]]
    """One a run, or one a step of a run."""
    counted: dict[str, dict[int, float]]
    """Final value by seed, of the runs that count, by arm."""
    refused: bool = False
    """True if no comparison is right without a further option."""
    no_verdict: bool = False
    """True if a refusal and an answer without a verdict are right, too."""
    named: list[str] = field(default_factory=list)
    """Texts that a sentence has to hold each, whether the table is judged or refused."""
    plants: list[str] = field(default_factory=list)


def table(number: int, seed: int, kinds: Sequence[str]) -> Planted:
    """Return a random table with plants of some kinds; each is there with a chance of one half."""
    draw = np.random.default_rng([seed, number])
    arms, seeds = ("bf16", "nvfp4", "mxfp4")[: draw.integers(2, 4)], int(draw.integers(5, 8))
    steps = (10, 20, 30) if draw.random() < 0.5 or "lengths" in kinds else ()
    runs = []
    for arm in arms:
        for number_of_seed in range(seeds):
            last = round(3 + draw.normal(0, 0.1), 6)
            curve = {step: round(last + 1 / step + draw.normal(0, 0.01), 6) for step in steps[:-1]}
            curve[steps[-1] if steps else 0] = last
            runs.append((arm, number_of_seed, curve))
    rows = [
        {"arm": arm, "seed": str(each), **({"step": str(step)} if steps else {}), "val/loss": repr(value)}
        for arm, each, curve in runs
        for step, value in curve.items()
    ]
    counted = {arm: {each: curve[max(curve)] for a, each, curve in runs if a == arm} for arm in arms}
    made = Planted(rows, counted)
    for kind in (kind for kind in KINDS if kind in kinds):
        if draw.random() < 0.5:
            KINDS[kind](made, draw)
    made.rows = [made.rows[place] for place in draw.permutation(len(made.rows))]
    return made


def _statuses(made: Planted, draw: np.random.Generator) -> None:
    """Some runs, or all of an arm, are not done; a run is never left out without a sentence."""
    column = str(draw.choice(STATUS_COLUMNS))
    texts = {(row["arm"], row["seed"]): str(draw.choice(DONE)) for row in made.rows}
    arm, bad = str(draw.choice([*made.counted])), str(draw.choice(NOT_DONE))
    whole = draw.random() < 0.3
    for each in [*made.counted[arm]][: None if whole else int(draw.integers(1, 3))]:
        texts[arm, str(each)] = bad
        del made.counted[arm][each]
        made.named.append(f"seed {each} of {arm}")
    made.named.append(bad)
    made.refused |= not made.counted[arm] and (arm == "bf16" or len(made.counted) == 2)
    made.plants.append(f"{column}={bad}{' in a whole arm' * whole}")
    for row in made.rows:
        row[column] = texts[row["arm"], row["seed"]]


def _settings(made: Planted, draw: np.random.Generator) -> None:
    """A setting, or what may be one, differs in every run."""
    _field(made, str(draw.choice([*SETTINGS])), SETTINGS)
    made.refused |= sum(map(bool, made.counted.values())) >= 1


def _ids(made: Planted, draw: np.random.Generator) -> None:
    """One or two ids differ in every run."""
    for name in draw.choice([*IDS], int(draw.integers(1, 3)), replace=False):
        _field(made, str(name), IDS)


def _field(made: Planted, name: str, values: dict[str, Callable[[int], str]]) -> None:
    runs = {(row["arm"], row["seed"]): n for n, row in reversed([*enumerate(made.rows)])}
    numbers = {run: n for n, run in enumerate(sorted(runs))}
    for row in made.rows:
        row[name] = values[name](numbers[row["arm"], row["seed"]])
    if name != "name":  # a column that says the run is said as such
        made.named.append(name)
    made.plants.append(name)


def _copies(made: Planted, draw: np.random.Generator) -> None:
    """Two seeds of an arm have the same curve: they are one run."""
    arm = str(draw.choice([*made.counted]))
    first, second = [*made.counted[arm]][:2] if len(made.counted[arm]) > 2 else (0, 0)
    if first == second:
        return
    own = {row.get("step"): row for row in made.rows if (row["arm"], row["seed"]) == (arm, str(first))}
    for row in made.rows:
        if (row["arm"], row["seed"]) == (arm, str(second)):
            row["val/loss"] = own[row.get("step")]["val/loss"]
    del made.counted[arm][second]
    made.no_verdict = True
    made.plants.append(f"seed {second} of {arm} is seed {first}")


def _lengths(made: Planted, draw: np.random.Generator) -> None:
    """A run ends early: its arm has no verdict."""
    arm = str(draw.choice([*made.counted]))
    if not made.counted[arm]:
        return
    short = next(iter(made.counted[arm]))
    made.rows = [
        row for row in made.rows if (row["arm"], row["seed"], row["step"]) != (arm, str(short), "30")
    ]
    made.counted[arm] = {}
    made.no_verdict = True
    made.plants.append(f"seed {short} of {arm} is short")


KINDS: dict[str, Callable[[Planted, np.random.Generator], None]] = {
    "statuses": _statuses,
    "ids": _ids,
    "settings": _settings,
    "copies": _copies,
    "lengths": _lengths,
}
"""Kinds of plants, in the order in which they are put into a table."""


def outcome(made: Planted, folder: Path) -> str:
    """Return `right`, `right: refused`, `lost: ...` or `wrong: ...` of what the package says of a table."""
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*made.rows[0]])
        writer.writeheader()
        writer.writerows(made.rows)
    try:
        found = judge(path, "bf16")
    except InputError as error:
        if not made.refused and not made.no_verdict:
            return f"lost: {error}"
        named = made.no_verdict or any(text in str(error) for text in made.named)
        return "right: refused" if named else f"lost: refused for another reason: {error}"
    if made.refused:
        return f"wrong: {found.answer}"
    said = "\n".join(found.said)
    if missing := [text for text in made.named if text not in said]:
        return f"wrong: nothing is said of {missing}"
    base = made.counted["bf16"]
    expected = {arm: values for arm, values in made.counted.items() if values and arm != "bf16"}
    for arm in found.arms:
        undecided = arm.verdict["kind"] == "unjudged"
        if undecided and made.no_verdict:
            continue
        if arm.arm not in expected or not base:
            return f"wrong: {arm.arm} has a verdict"
        values = expected[arm.arm]
        pairs = base.keys() & values.keys()
        paired = np.mean([values[each] - base[each] for each in pairs]) if pairs else math.nan
        difference = paired if arm.paired else np.mean([*values.values()]) - np.mean([*base.values()])
        if arm.runs != len(values) or not math.isclose(
            arm.difference, difference, rel_tol=1e-9, abs_tol=1e-9
        ):
            return f"wrong: {arm.arm} has {arm.runs} runs, {arm.difference}, not {len(values)}, {difference}"
    if expected.keys() - {arm.arm for arm in found.arms} and not made.no_verdict:
        return f"lost: no verdict on {sorted(expected)}"
    return "right"


def run(count: int, seed: int, kinds: Sequence[str] = (*KINDS,)) -> tuple[Counter[str], list[str]]:
    """Return how many tables had each outcome, and a line on each that was wrong or lost."""
    tally: Counter[str] = Counter()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            made = table(number, seed, kinds)
            found = outcome(made, Path(folder))
            word = found.partition(":")[0]
            tally[found if word == "right" else word] += 1
            if word != "right":
                lines.append(
                    f"table {number} of seed {seed}, {', '.join(made.plants) or 'no plant'}: {found}"
                )
    return tally, lines


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--count", type=int, default=200)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS])
    asked = options.parse_args()
    outcomes, problems = run(asked.count, asked.seed, asked.kinds)
    print(*problems, sep="\n")
    print(f"{asked.count} tables: {dict(outcomes)}")
    print(f"silent wrong answers: {outcomes['wrong']}, right answers lost: {outcomes['lost']}")
