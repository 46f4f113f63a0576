"""Shipped experiments as full runs and as forks of equal computation: width and verdict of every comparison.

    python benchmarks/equal_compute.py run --state DIR      # goes on where it was stopped
    python benchmarks/equal_compute.py table --state DIR

Each experiment keeps its model, arms and seeds. In the forked sweep every arm trains windows of .15, .3 and
.6 of the run from one position, 1.05 runs in all; the trunk, a known-bad arm and a twin are added. Compared
are all arms with their baseline, and the pairs that the file has a published figure for.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML

from ablate.experiment.load import load
from ablate.results.forked import sharpened, views
from ablate.results.intervals import ALPHA
from ablate.results.paired_stats import Difference, p_value, paired_difference
from ablate.results.summary import ArmSummary, judge_learned, summaries
from ablate.results.verdict_text import verdict_text
from ablate.store.checked_ledger import open_ledger

SHIPPED = Path(__file__).parent.parent / "experiments"
FILES = (
    "rht_sr_full",
    "precision_ladder",
    "amax_percentile",
    *sorted(f"reproductions/{p.stem}" for p in SHIPPED.glob("reproductions/*")),
)
DESIGN = {"trunk": "bf16", "positions": 1, "window": 0.15, "horizons": [1, 2, 4], "bad": "mxfp4"}


def forked(source: Path, folder: Path) -> Path:
    """Write the experiment as forks; return its path."""
    content: dict[str, Any] = YAML(typ="safe").load(source)
    content.pop("published", None)
    content["metric"] = {"name": "val/loss", "direction": "minimize"}
    content |= {"design": DESIGN, "null": True}
    path = folder / f"{source.stem}_forks.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML 1.2
    return path


def run(state: Path, full: bool) -> int:
    """Run every sweep, the forks and with `full` the full runs too; print what cannot be forked."""
    state.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        source = SHIPPED / f"{name}.yaml"
        for path in (*((source,) if full else ()), forked(source, state)):
            command = [sys.executable, "-m", "ablate.sweep", str(path), "--state", str(state), "--quiet"]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            print(f"{path.stem}: exit status {done.returncode}", flush=True)
            if done.returncode:
                print(done.stderr, flush=True)
    return 0


class Compared(NamedTuple):
    """One comparison in one design."""

    difference: Difference
    verdict: str


def compared(state: Path, sweep: str, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Compared]:
    """Return the comparisons of a finished sweep: the arms with their baselines, and other pairs."""
    with closing(open_ledger(state, sweep)) as ledger:
        arms, metric = summaries(ledger), ledger.facts.metric
    by_name = {arm.name: arm for arm in arms}
    listed = [(arm.name, arm.baseline) for arm in arms if arm.baseline and arm.role not in ("null", "bad")]
    listed += [pair for pair in pairs if set(pair) <= by_name.keys() and pair not in listed]

    def differences(those: Sequence[ArmSummary]) -> list[Difference]:
        values = {arm.name: arm.values for arm in those}
        return [paired_difference(values[one], values[other]) for one, other in listed]

    seen = views(arms, differences, len(listed))
    found = [sharpened(one, view) for one, view in zip(differences(arms), seen, strict=True)]
    margins = [by_name[pair[0]].margin for pair in listed]
    verdicts = judge_learned(
        [
            (difference, margin, [by_name[name] for name in pair])
            for difference, margin, pair in zip(found, margins, listed, strict=True)
        ],
        metric,
        seen=seen,
    )
    return {
        pair: Compared(difference, verdict_text(verdict, short=True))
        for pair, difference, verdict in zip(listed, found, verdicts, strict=True)
    }


def rows(state: Path) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| experiment | comparison | full runs | verdict | forks | verdict |"
    yield "|---|---|---|---|---|---|"
    for name in FILES:
        stem = Path(name).stem
        experiment = load(SHIPPED / f"{name}.yaml")
        pairs = [(each.arm, each.against) for each in experiment.keys.published]
        if not (state / "sweeps" / f"{stem}_forks" / "ledger.db").exists():
            yield f"| {stem} | cannot be forked, or not run | | | | |"
            continue
        forks = compared(state, f"{stem}_forks", pairs)
        ran = (state / "sweeps" / stem / "ledger.db").exists()
        full = compared(state, stem, pairs) if ran else {}
        for pair, after in forks.items():
            cells = [
                f"{one.difference.mean:+.4f} ±{half(one.difference):.4f} | {one.verdict}" if one else " | "
                for one in (full.get(pair), after)
            ]
            yield f"| {stem} | {pair[0]} - {pair[1]} | {' | '.join(cells)} |"
    yield ""
    yield (
        "| experiment | comparisons | half-width, full runs | forks | told from zero by their own interval:"
        " full runs | forks | hours of one worker: full runs | forks |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name in FILES:
        stem = Path(name).stem
        sweeps = (stem, f"{stem}_forks")
        if not all((state / "sweeps" / sweep / "ledger.db").exists() for sweep in sweeps):
            continue
        pairs = [(each.arm, each.against) for each in load(SHIPPED / f"{name}.yaml").keys.published]
        both = [list(compared(state, sweep, pairs).values()) for sweep in sweeps]
        cells = [median(half(one.difference) for one in each) for each in both]
        told = [sum(p_value(one.difference) < ALPHA for one in each) for each in both]
        hours = [f"{spent(state, sweep):.2f}" for sweep in sweeps]
        yield (
            f"| {stem} | {len(both[0])} | {cells[0]:.4f} | {cells[1]:.4f} | {told[0]} | {told[1]} |"
            f" {' | '.join(hours)} |"
        )


def half(difference: Difference) -> float:
    """Return half the width of the interval."""
    return (difference.high - difference.low) / 2


def median(values: Iterator[float]) -> float:
    """Return the median."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def spent(state: Path, sweep: str) -> float:
    """Return the hours of all trials of a sweep."""
    with closing(open_ledger(state, sweep)) as ledger:
        return math.fsum(member.seconds or 0.0 for member in ledger.members()) / 3600


def main() -> int:
    """Run the sweeps or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--full", action=argparse.BooleanOptionalAction, default=True, help="Full runs too.")
    given = parser.parse_args()
    if given.what == "run":
        return run(given.state, given.full)
    print("\n".join(rows(given.state)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
