"""Run faults of every kind, print a line for each and a table at the end: `make chaos KILLS=50 CORRUPTIONS=50 SEED=1`.

    python tests/chaos/run.py --kills 5 --corruptions 6 --mutants 200 --seed 7

A third of the corruptions happens in the sweeps that are killed, the others in copies, one at a time. `--first` is the number of the first
corruption of a copy and of the first mutant: `--kills 0 --mutants 0 --corruptions 1 --first 17 --seed 7` makes one of them again.
The exit status is 1 if anything was lost, done twice, silently changed, or otherwise wrong.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos import mutants_runs, mutants_yaml
from chaos.audit import Finding
from chaos.copies import COMMANDS, Copies, kill_commands
from chaos.kills import LiveSweeps, deck
from chaos.report import Report


def run(kills: int, corruptions: int, mutants: int, seed: int, first: int, out: Path) -> Report:
    """Inject all faults, with their evidence in a folder, and return the report."""
    live = corruptions // 3 if kills else 0
    planned = {"kills": kills, "corruptions": corruptions, mutants_yaml.FAMILY: mutants}
    report = Report(planned | {mutants_runs.FAMILY: mutants}, out)
    for fault in mutants_yaml.outcomes(first, mutants, out) if mutants else ():
        report.add(fault)
    for number in range(first, first + mutants):
        report.add(mutants_runs.outcome(number, out))
    copies = Copies(out / "copies", seed)
    for number in range(first, first + corruptions - live):
        report.add(copies.corrupt(number))
    kinds = list(islice(deck(Random(seed)), kills))
    kill_commands(out / "commands", seed, Counter(kind for kind in kinds if kind in COMMANDS), report)
    sweeps = LiveSweeps(out, kinds, live, seed, report)
    try:
        sweeps.run()
    except TimeoutError as error:
        report.broken("kills", Finding("wrong", str(error)))
    report.table(Console(width=140))
    if steps := sorted(sweeps.again):
        print(f"steps done again: {len(steps)} times, median {steps[len(steps) // 2]}, most {steps[-1]}")
    return report


def main() -> None:
    """Run what the command line asks for; keep the evidence if there are findings, or a folder is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="kills of processes and servers")
    parser.add_argument("--corruptions", type=int, default=50, help="corruptions of files, rows and folders")
    parser.add_argument(
        "--mutants", type=int, default=1000, help="mutants of experiments, and of files of runs"
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed of kills and corruptions")
    parser.add_argument("--first", type=int, default=0, help="number of the first corruption and mutant")
    parser.add_argument("--out", type=Path, help="new folder for the evidence; default: a temporary one")
    asked = parser.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    out = (asked.out or Path(tempfile.mkdtemp(prefix="ablate-chaos-"))).resolve()
    if any(out.glob("*")):
        parser.error(f"--out {out}: the folder is not empty; name a new one")
    out.mkdir(parents=True, exist_ok=True)
    os.environ["ABLATE_CACHE"] = str(out / "cache")  # not the user's: times of these trials are no estimate
    report = run(asked.kills, asked.corruptions, asked.mutants, asked.seed, asked.first, out)
    print(f"seed {asked.seed}, {report.total()}")
    if report.findings:
        print(f"The evidence is in {out}.")
    elif not asked.out:
        shutil.rmtree(out)
    sys.exit(bool(report.findings))


if __name__ == "__main__":
    main()
