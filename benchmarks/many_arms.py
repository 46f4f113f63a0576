"""Seconds and memory that a grid of many arms takes, command by command.

    python benchmarks/many_arms.py 1000 10000

Each arm is one idle trial of 20 records, and one more is the baseline of all; there is no MLflow. Commands
are processes of their own: the sweep, the same again with all trials done, and those that read. A line of the
printed table has a command's seconds of processor, its seconds by the clock, and its peak memory.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent / "platform_rows"))

from sweeps import grid


def measured(*words: object) -> str:
    """Run an `ablate` command to its end; return seconds and peak memory in MB. SystemExit if it fails."""
    command = [sys.executable, "-m", "ablate", *map(str, words)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    lasted = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit status {process.returncode}")
    return f"{used.ru_utime + used.ru_stime:.1f} ({lasted:.1f}), {used.ru_maxrss / 1024:.0f} MB"


def main() -> None:
    """Print one table for each number of arms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("arms", type=int, nargs="+", help="number of arms; 10,000 is the largest grid")
    for arms in parser.parse_args().arms:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file, where = grid(folder, "many", arms, 1), ("--state", folder / "state")
            run = ("sweep", file, "--executor", "inline", "--mlflow", "none", "--no-report", *where)
            print(f"\n| {arms:,} arms | processor (clock), memory |\n|---|---|")
            for label, words in (
                ("plan", ("plan", file, *where)),
                ("sweep", run),
                ("the same again", run),
                ("status", ("status", *where)),
                ("show", ("show", *where)),
                ("report", ("report", "many", "--no-pdf", "--mlflow", "none", *where)),
            ):
                print(f"| {label} | {measured(*words)} |", flush=True)


if __name__ == "__main__":
    main()
