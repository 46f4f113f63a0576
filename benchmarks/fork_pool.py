"""Pool of runs in one file: a line for each finished run, resumable, on many processes; and one fork.

    run(path, jobs, work, workers=16, minutes=8)     # appends what the file lacks, in the order of the jobs
    rows(path)                                       # the lines so far
    fork(workload, recipe, seed, position, window, trunks)

The problem: an experiment of thousands of short forks must survive an interruption, use a machine that is
there for some minutes, and be usable wherever it was cut.

The idea: a job is a named tuple whose fields are the key of its line. Jobs start in their order, so the first
ones are the most important ones. Processes are forked from one that has imported everything, with one thread
each. A fork reads its trunk's state from a file that the first fork at that seed and position has left.
Everything is the library's own training: only where states are kept is decided here.
"""

import gzip
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

import ablate
from ablate.recipes.recipe import Recipe
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Forks
from ablate.training.loop import Telemetry
from ablate.training.metric_names import FORK
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

Job = Any
"""Named tuple whose fields, numbers and words, are the key of a run's line."""
Work = Callable[[Job], Mapping[str, object]]
"""Function that does one job and returns the rest of its line."""
SILENT = Telemetry(every=10**9, shadow=10**9, log=10**9)
"""Nothing is measured but the end of a window."""
_NEVER = 1e12
"""Seconds between a fork's own checkpoints."""


def rows(path: Path) -> list[dict]:
    """Return the lines of a pool so far, or of one that was compressed; a line that was cut off is not
    counted."""
    data, found = path.read_bytes() if path.exists() else b"", []
    for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def run(
    path: Path,
    jobs: Iterable[Job],
    work: Work,
    workers: int,
    minutes: float = inf,
    pool: Callable[[int], Executor] | None = None,
) -> int:
    """Do the jobs that the pool lacks, append a line for each, and return the number of those left.

    A line has the job's fields, what `work` returns, and `seconds`.

    Args:
        path: file of the pool; its folder exists.
        jobs: jobs in the order in which they start.
        work: function of one job, of a module, with arguments bound by `partial` if it needs any.
        workers: number of processes.
        minutes: no job starts later than that.
        pool: returns an executor of so many workers; None: processes that are forked from this one.
    """
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    jobs = list(jobs)
    names = jobs[0]._fields if jobs else ()
    have = {tuple(line[name] for name in names) for line in rows(path)}
    left = [job for job in jobs if tuple(job) not in have]
    begun, done = time.time(), 0
    once = partial(_timed, work, begun + 60 * minutes)
    with path.open("a+") as file, (pool or _processes)(workers) as executor:
        file.seek(0)
        if (content := file.read()) and not content.endswith("\n"):
            file.write("\n")  # after a line that was cut off
        for future in as_completed([executor.submit(once, job) for job in left]):
            if (line := future.result()) is None:
                continue
            file.write(json.dumps(line) + "\n")
            file.flush()
            done += 1
            if done % 50 == 0 or done == len(left):
                minutes = (time.time() - begun) / 60
                print(f"{done} of {len(left)} runs, {minutes:.1f} min", file=sys.stderr, flush=True)
    return len(left) - done


def _processes(workers: int) -> Executor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))


def _timed(work: Work, until: float, job: Job) -> dict[str, object] | None:
    """Return a job's line; None after the time until which jobs may start."""
    if time.time() > until:
        return None
    begun = time.perf_counter()
    values = work(job)
    return {**job._asdict(), **values, "seconds": round(time.perf_counter() - begun, 3)}


def fork(
    workload: Gpt,
    recipe: Recipe,
    seed: int,
    position: int,
    window: int,
    trunks: Path,
    telemetry: Telemetry = SILENT,
) -> dict[str, float]:
    """Train one annealed fork of the trunk in bf16 and return the metrics at its end.

    `loss` and `loss_bf16` are the losses of its weights in its own precision and in bf16. The trunk continues
    from the last earlier state that is there, and its state at the position stays in `trunks`, for any fork
    of the same workload, seed and position. Two processes that make it at once make the same one.

    Args:
        workload: model, data and schedule of the trunk.
        recipe: recipe of the fork.
        seed: seed of trunk and fork.
        position: step of the trunk after which the fork begins.
        window: steps of the fork.
        trunks: folder of states.
        telemetry: what else is measured within the fork.

    Raises:
        ArithmeticError: the guard stopped the trunk or the fork.
    """
    name = hashlib.sha256(json.dumps(workload.identity(), sort_keys=True).encode()).hexdigest()[:12]
    own = trunks / f"{name}-{seed}"
    shared = {int(path.stem): path for path in own.glob("*.pt")} | {position: own / f"{position}.pt"}
    shared = {step: path for step, path in shared.items() if step <= position}
    checkpoints = Checkpoints(own / "none", "fork", _NEVER, shared=shared)
    forks = Forks(trunk=ablate.recipe("bf16"), positions=(position,), windows=(window,))
    trial = TrialRun(recipe, seed, "emulated", "cpu", telemetry, checkpoints=checkpoints, forks=forks)
    *_, last = workload.records(trial)
    prefix, values = f"{FORK}/{forks.cells[0].key}/", last.metrics
    if prefix + "loss" not in values:
        raise ArithmeticError(f"seed {seed}, position {position}: stopped after step {last.step}")
    return values | {key.removeprefix(prefix): values[key] for key in values if key.startswith(prefix)}
