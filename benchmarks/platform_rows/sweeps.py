"""Tools of the rows: experiments to measure with, commands run to their end, and queries of ledgers."""

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORDS = 20
TINY = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 2, "eval_tokens": 64, "eval_every": 20}
"""A model that trains a step in milliseconds, on the default corpus."""


def experiment(folder: Path, name: str, **keys: Any) -> Path:
    """Write an experiment file, of idle trials unless `keys` names another workload. JSON is YAML 1.2."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(
        json.dumps(
            {
                "schema": 1,
                "question": "What does it cost?",
                "workload": {"idle": {"steps": RECORDS}},
                "seeds": 1,
            }
            | keys
        )
    )
    return path


def search(folder: Path, name: str, trials: int, recipe: str = "bf16") -> Path:
    """Write an experiment of arms that TPE proposes, with one trial each."""
    space = {"workload.x": {"uniform": [-1.0, 1.0]}, "workload.y": {"uniform": [-1.0, 1.0]}}
    return experiment(
        folder, name, recipe=recipe, against=recipe, ablate=space, search={"sampler": "tpe", "trials": trials}
    )


def grid(folder: Path, name: str, arms: int, seeds: int) -> Path:
    """Write an experiment of arms x seeds trials, and one baseline trial per seed."""
    points = [(n + 1) / arms for n in range(arms)]
    return experiment(folder, name, ablate={"workload.x": points}, against={"workload.x": 0}, seeds=seeds)


def command(*arguments: object, stderr: int | None = subprocess.PIPE) -> float:
    """Run a command to its end and return its seconds; if it fails, exit with its output.

    Args:
        arguments: the command.
        stderr: None to show its standard error, which is progress; by default it is captured.
    """
    started = time.perf_counter()
    line = [str(argument) for argument in arguments]
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    if done.returncode:
        output = f"{done.stdout[-3000:]}\n{(done.stderr or '')[-3000:]}"
        sys.exit(f"{' '.join(line)}: exit status {done.returncode}\n{output}")
    return time.perf_counter() - started


def sweep(*arguments: object) -> float:
    """Run `ablate sweep ...` to its end and return its seconds."""
    return command(sys.executable, "-m", "ablate", "sweep", "--no-report", *arguments)


def script(
    name: str, folder: Path, *arguments: object, stderr: int | None = subprocess.PIPE
) -> dict[str, Any]:
    """Run a script beside this file in its own process, and return the figures that it wrote to a file.

    Args:
        name: name of the script, without `.py`.
        folder: the script's first argument, the folder that it works in; the figures' file is written there.
        arguments: its other arguments, before the path of that file.
        stderr: as for `command`.
    """
    answer = folder / f"{name}.json"
    command(sys.executable, HERE / f"{name}.py", folder, *arguments, answer, stderr=stderr)
    return json.loads(answer.read_text())


def store(folder: Path) -> Path:
    """Return the folder after making a new MLflow database in it, which takes seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    code = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
    command(sys.executable, "-c", code, f"sqlite:///{folder / 'mlflow.db'}")
    return folder


def rows(path: Path, query: str) -> list[tuple]:
    """Return the rows that an SQLite database has for a query."""
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def ledger(state: Path, name: str, query: str) -> list[tuple]:
    """Return the rows that a sweep's ledger has for a query."""
    return rows(state / "sweeps" / name / "ledger.db", query)


def say(line: str) -> None:
    """Print a line of progress on standard error; the table is on standard output."""
    print(line, file=sys.stderr, flush=True)
