"""What the rows share: experiments to measure with, commands run to their end, and what their ledgers say of them."""

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
    """An experiment file: of idle trials, where nothing else is said. JSON is YAML 1.2."""
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
    """An experiment of so many arms that TPE proposes, of one trial each."""
    space = {"workload.x": {"uniform": [-1.0, 1.0]}, "workload.y": {"uniform": [-1.0, 1.0]}}
    return experiment(
        folder, name, recipe=recipe, against=recipe, ablate=space, search={"sampler": "tpe", "trials": trials}
    )


def grid(folder: Path, name: str, arms: int, seeds: int) -> Path:
    """An experiment of arms x seeds trials, and a baseline a seed."""
    return experiment(
        folder, name, ablate={"cooldown": [n / (arms + arms // 3) for n in range(arms)]}, seeds=seeds
    )


def command(*words: Any, told: int | None = subprocess.PIPE) -> float:
    """Run a command to its end; returns its seconds, or ends with what it said. `told` None: its standard error is progress."""
    started = time.perf_counter()
    done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, stderr=told, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"{' '.join(map(str, words))}: exit status {done.returncode}\n{done.stdout[-3000:]}\n{(done.stderr or '')[-3000:]}"
        )
    return time.perf_counter() - started


def sweep(*words: Any) -> float:
    """Run `ablate sweep ...` to its end; returns its seconds."""
    return command(sys.executable, "-m", "ablate", "sweep", "--no-report", *words)


def script(name: str, *words: Any, told: int | None = subprocess.PIPE) -> dict[str, Any]:
    """Run a script beside this file, in a process of its own; returns what it wrote to the file that it is given last."""
    answer = Path(words[0]) / f"{name}.json"
    command(sys.executable, HERE / f"{name}.py", *words, answer, told=told)
    return json.loads(answer.read_text())


def store(folder: Path) -> Path:
    """The folder, with a new MLflow database in it: to make one takes seconds, whoever does."""
    folder.mkdir(parents=True, exist_ok=True)
    code = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
    command(sys.executable, "-c", code, f"sqlite:///{folder / 'mlflow.db'}")
    return folder


def rows(path: Path, query: str) -> list[tuple]:
    """What a database answers."""
    db = sqlite3.connect(path)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def ledger(state: Path, name: str, query: str) -> list[tuple]:
    """What a sweep's ledger answers."""
    return rows(state / "sweeps" / name / "ledger.db", query)


def say(line: str) -> None:
    """Progress, on standard error: the table is on standard output."""
    print(line, file=sys.stderr, flush=True)
