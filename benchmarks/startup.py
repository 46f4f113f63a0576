"""CPU-seconds and imported modules of commands: `python benchmarks/startup.py [--repeats 5] [--write]`.

Each command runs as a process of its own on a finished sweep of six short trials. CPU-seconds are user and
system time of the process and its children, the least of the repeats: load of other processes only adds.
Modules are those that Python imports. The row `sweep` ends at the first record of a trial, executor inline.

`--write` puts the table into benchmarks/startup.csv. `tests/cli/test_startup.py` holds the modules, which do
not depend on the machine, within 10 per cent of it; seconds are compared by hand.
"""

import argparse
import csv
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

TABLE = Path(__file__).with_name("startup.csv")
SWEEP = """schema: 1
question: Does the rotation matter?
workload: {gpt: {layers: 1, width: 32, steps: 4, lr: 1.0e-3}}
recipe: nvfp4
ablate: {rht: [true, false]}
against: bf16
seeds: 2
metric: {name: val/loss, direction: minimize, min_effect: 0.005}
"""
RUNS = "arm,seed,step,val_loss\n" + "".join(
    f"{arm},{seed},{step},{3 - step / 100 + gap + seed / 50 + (seed * seed * step) % 7 / 1000:.5f}\n"
    for arm, gap in (("bf16", 0), ("nvfp4", 0.02))
    for seed in range(5)
    for step in (10, 20, 30)
)
COMMANDS = {
    "help": ["--help"],
    "recipe": ["recipe", "show", "nvfp4"],
    "plan": ["plan", "tiny.yaml"],
    "status": ["status"],
    "show": ["show", "tiny"],
    "judge": ["judge", "runs.csv", "--against", "bf16"],
}
"""Command lines by row of the table."""


def prepare(folder: Path) -> None:
    """Write the files that the commands read."""
    (folder / "tiny.yaml").write_text(SWEEP)
    (folder / "runs.csv").write_text(RUNS)


def modules(words: list[str], folder: Path) -> int:
    """Return the number of modules that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ablate", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return (
        sum(line.startswith("import time:") for line in done.stderr.splitlines()) - 1
    )  # without the heading


def seconds(words: list[str], folder: Path) -> float:
    """Return the CPU-seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "ablate", *words], cwd=folder, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_to_first_record(folder: Path) -> float:
    """Return the CPU-seconds of a sweep and its children up to the first line of a trial's events."""
    with TemporaryDirectory(dir=folder) as state:
        words = ["sweep", str(folder / "tiny.yaml"), "--executor", "inline", "--state", state]
        process = subprocess.Popen(
            [sys.executable, "-m", "ablate", *words],
            cwd=state,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            tree = psutil.Process(process.pid)
            while not any(path.stat().st_size for path in Path(state).glob("trials/*/events-*.jsonl")):
                if process.poll() is not None:
                    raise SystemExit("the sweep ended without a record")
                time.sleep(0.02)
            times = [each.cpu_times() for each in (tree, *tree.children(recursive=True))]
            return sum(each.user + each.system for each in times)
        finally:
            process.kill()
            process.wait()


def least(measure: Callable[[], float], repeats: int) -> float:
    """Return the least of several measurements."""
    return min(measure() for _ in range(repeats))


def main() -> None:
    """Print the table, and write it if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", COLUMNS="100")
    rows = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        rows.append(("sweep", "", f"{least(lambda: seconds_to_first_record(folder), options.repeats):.2f}"))
        sweep = ["sweep", "tiny.yaml", "--executor", "inline"]
        subprocess.run([sys.executable, "-m", "ablate", *sweep], cwd=folder, capture_output=True, check=True)
        for row, words in COMMANDS.items():
            cpu = least(lambda words=words: seconds(words, folder), options.repeats)
            rows.append((row, str(modules(words, folder)), f"{cpu:.2f}"))
    table = [("command", "modules", "cpu_seconds"), *rows]
    for line in table:
        print("{:10} {:>8} {:>12}".format(*line))
    if options.write:
        with TABLE.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    main()
