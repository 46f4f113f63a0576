"""Comparison of two revisions' numbers, for changes that must not move any.

    python benchmarks/same_numbers.py 64fa873 HEAD experiments/rht_sr.yaml experiments/factorial.yaml

Each revision is checked out, runs the files from an empty state, and writes its tables as CSV: arms,
effects, damage, windows, trials, and every recorded number. A cell is compared as text. Left out
are trial ids, which hold a version, and what a clock or the machine's memory decides. The golden files with
losses are compared too. The exit status is 1 if a cell differs.

The compiled kernels are copied, so both revisions must have the same sources of them. A package that only the
older revision needs is found through PYTHONPATH.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "ablate/numerics/kernels"
CLOCKED = ("throughput/", "memory", "time", "second", "tokens_per")
"""Beginnings of columns and metrics that differ from run to run."""
IDS = {"trial", "id", "spec", "sweep_id", "fork", "against", "checkpoint"}
"""Columns that hold a trial's id, or a text with it."""


def git(*words: str) -> str:
    """Return the output of a git command in this checkout."""
    return subprocess.run(("git", "-C", ROOT, *words), check=True, capture_output=True, text=True).stdout


def check_out(revision: str, folder: Path) -> Path:
    """Return a checkout of a revision with this checkout's compiled kernels. SystemExit if those are of other
    sources.
    """
    if changed := git("diff", "--stat", revision, "--", f"{KERNELS}/*.c", f"{KERNELS}/*.h", "hatch_build.py"):
        sys.exit(f"{revision}: other kernels, which have to be built:\n{changed}")
    git("worktree", "add", "--detach", "--force", str(folder), revision)
    for library in (ROOT / KERNELS).glob("*.so"):
        shutil.copy(library, folder / KERNELS)
    return folder


def tables(checkout: Path, files: list[str], state: Path) -> dict[str, pandas.DataFrame]:
    """Run experiment files by a checkout's code and return their tables, by file and table."""
    paths = (str(checkout), *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "ABLATE_CACHE": str(state / "cache"),
    }
    show = "show" if (checkout / "ablate/cli/show.py").exists() else "export-tables"
    found = {}
    for file in files:
        name = Path(file).stem
        for words in (
            ("ablate.sweep", file, "--mlflow", "none", "--no-report", "--state", state),
            ("ablate", show, name, "--to", "csv", "--out", state / name, "--state", state),
        ):
            command = [sys.executable, "-m", *map(str, words)]
            done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{checkout}: {' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
        for path in sorted((state / name).glob("*.csv")):
            found[f"{name}/{path.stem}"] = pandas.read_csv(path, dtype=str, keep_default_na=False)
    return found


def clocked(name: str) -> bool:
    """Return True for a column or a metric that a clock or the machine decides."""
    return name in IDS or any(part in name for part in CLOCKED)


def differences(old: pandas.DataFrame, new: pandas.DataFrame) -> tuple[int, list[str]]:
    """Return the number of cells compared and a line for each column that differs."""
    if "metric" in old and "value" in old:
        old, new = (frame[~frame["metric"].map(clocked)].reset_index(drop=True) for frame in (old, new))
    lines = [f"only in one: {name}" for name in sorted(set(old) ^ set(new)) if not clocked(name)]
    shared = [name for name in old if name in set(new) and not clocked(name)]
    if len(old) != len(new):
        return 0, [*lines, f"{len(old)} rows and {len(new)}"]
    for name in shared:
        other = old[name] != new[name]
        if other.any():
            row = int(other.idxmax())
            example = f"{old[name][row]!r} and {new[name][row]!r}"
            lines.append(f"{name}: {int(other.sum())} of {len(old)} differ; row {row}: {example}")
    return len(old) * len(shared), lines


def golden_differences(old: Path, new: Path) -> list[str]:
    """Return the golden files with losses that differ, ids apart."""
    shared = {path.name for path in (old / "tests/golden").glob("*.json")}
    shared &= {path.name for path in (new / "tests/golden").glob("*.json")}
    texts = {
        name: [json.loads((side / "tests/golden" / name).read_text()) for side in (old, new)]
        for name in sorted(shared - {"ids.json"})
    }
    print(f"goldens: {', '.join(texts)}")
    return [name for name, (one, other) in texts.items() if one != other]


def main() -> None:
    """Compare, print a line a table, and exit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("files", nargs="*", default=["experiments/rht_sr.yaml"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, sides = Path(name), []
        try:
            for number, revision in enumerate((asked.old, asked.new)):
                sides.append(check_out(revision, folder / str(number)))
            different = golden_differences(*sides)
            for line in different:
                print(f"  {line} differs")
            old, new = (tables(side, asked.files, folder / f"state{n}") for n, side in enumerate(sides))
        finally:
            for side in sides:
                git("worktree", "remove", "--force", str(side))
    for table in sorted(old | new):
        if table not in old or table not in new:
            count, lines = 0, ["one revision lacks it"]
        else:
            count, lines = differences(old[table], new[table])
        print(f"{table}: {count:,} cells, {'equal' if not lines else 'not equal'}")
        for line in lines:
            print(f"  {line}")
        different += lines
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
