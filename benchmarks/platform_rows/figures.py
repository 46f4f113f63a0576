"""The rows of platform_costs.py: one function each, which yields figures with their goals.

Trials are idle or tiny, so that the time of a sweep is that of its bookkeeping.
"""

import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from sweeps import RECORDS, TINY, experiment, grid, ledger, rows, say, script, search, store, sweep

from ablate import provenance
from ablate.cli.common import console, run
from ablate.errors import InputError, nearest

WORKERS = 2
EVERY_STEP = {"log": 1, "every": 1000, "shadow": 1000}
"""Telemetry that records each step and measures nothing else."""


@dataclass(frozen=True)
class Figure:
    """One measured figure and its goal."""

    row: str
    what: str
    measured: float
    unit: str
    goal: str = ""
    met: bool | None = None
    """True if the figure reaches its goal; None for a figure without one, which is there for comparison."""


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROW]...", help="Rows to measure; default: all."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file, too.")
    ] = None,
    scale: Annotated[
        float,
        typer.Option(min=0.01, max=1, help="Share of the trials to run, for a quick try; goals are for 1."),
    ] = 1.0,
) -> None:
    """Measure the cost of the platform. Exit status 1 if a goal is missed."""
    for name in names or ():
        if name not in ROWS:
            raise InputError(f"{name}: no such row; {nearest(name, ROWS)}")
    figures: list[Figure] = []
    for name in names or ROWS:
        with tempfile.TemporaryDirectory(prefix="ablate-platform-") as folder:
            say(f"{name} ...")
            for figure in ROWS[name](Path(folder), scale):
                figures.append(figure)
                say(f"  {figure.what}: {figure.measured:,.4g} {figure.unit}")
    show(figures)
    if file:
        machine = {name: value for name, value in provenance.environment().items() if name != "host"}
        file.write_text(
            json.dumps(
                {"scale": scale, "machine": machine, "figures": [asdict(figure) for figure in figures]},
                indent=1,
            )
            + "\n"
        )
    if any(figure.met is False for figure in figures):
        raise typer.Exit(1)


def show(figures: list[Figure]) -> None:
    """Print the table of all figures."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("row", "figure", "measured", "goal", ""):
        table.add_column(name, justify="right" if name == "measured" else "left")
    for figure in figures:
        met = {True: "met", False: "MISSED", None: ""}[figure.met]
        table.add_row(figure.row, figure.what, f"{figure.measured:,.4g} {figure.unit}", figure.goal, met)
    console().print(table)


def at_most(row: str, what: str, measured: float, limit: float, unit: str) -> Figure:
    """Return a figure whose goal is an upper limit."""
    return Figure(row, what, measured, unit, f"at most {limit:g}", measured <= limit)


def least(row: str, what: str, measured: float, limit: float, unit: str) -> Figure:
    """Return a figure whose goal is a lower limit."""
    return Figure(row, what, measured, unit, f"at least {limit:g}", measured >= limit)


# The rows


def cost(folder: Path, scale: float) -> Iterator[Figure]:
    """Measure the share of the machine that one trial of 20 records takes: seconds x workers / trials.

    The clock begins with the first trial in its process, as Ray Tune's does: the callback that starts a run
    in MLflow is called once the first actor is up. Figures with the workers' start, and of whole commands,
    stand beside. Every MLflow database exists before, since making one takes seconds.
    """
    for trials in (max(8, round(60 * scale)), max(8, round(200 * scale))):
        ours = _ours(folder / f"ours-{trials}", trials)
        yield at_most(
            "cost",
            f"{trials} trials: a trial, from the first one's start until MLflow has all of them",
            ours["drawn"],
            50,
            "ms",
        )
        for what, name in (
            ("a trial, from the first one's start to the last one's end", "ran"),
            ("a trial, the start of the workers included, until MLflow has all of them", "staffed"),
            ("the whole command, a trial", "whole"),
        ):
            yield Figure("cost", f"{trials} trials: {what}", ours[name], "ms")
        theirs = []
        for how in ("reuse", "default"):
            answer = script("ray_tune", store(folder / f"tune-{how}-{trials}"), trials, WORKERS, how)
            theirs.append(1000 * answer["trials_s"] * WORKERS / trials)
            yield Figure(
                "cost",
                f"{trials} trials: Ray Tune ({how}), from its first trial's start to its last one's end",
                theirs[-1],
                "ms",
            )
            yield Figure(
                "cost",
                f"{trials} trials: Ray Tune ({how}), fit()",
                1000 * answer["fit_s"] * WORKERS / trials,
                "ms",
            )
            yield Figure("cost", f"{trials} trials: Ray Tune ({how}), starting Ray", answer["start_s"], "s")
        plain = 1000 * script("plain_optuna", store(folder / f"plain-{trials}"), trials)["trials_s"] / trials
        yield Figure("cost", f"{trials} trials: plain Optuna and MLflow in one process", plain, "ms")
        yield least(
            "cost",
            f"{trials} trials: Ray Tune's better setting over ours until drawn",
            min(theirs) / ours["drawn"],
            12,
            "times",
        )
        arms = _ours(folder / f"nvfp4-{trials}", trials, "nvfp4")
        yield Figure(
            "cost",
            f"{trials} trials of nvfp4, whose runs have 135 parameters: a trial, until drawn",
            arms["drawn"],
            "ms",
        )


def _ours(state: Path, trials: int, recipe: str = "bf16") -> dict[str, float]:
    """Return milliseconds per trial, from the first one's start: until MLflow's last write (`drawn`), until
    the last trial ends (`ran`); with the start of the workers (`staffed`); of the command (`whole`).
    """
    file = search(store(state), "cost", trials, recipe)
    seconds = sweep(file, "--state", state, "--workers", WORKERS)
    ((ran, attempted, last),) = ledger(
        state, "cost", "SELECT count(*), min(started), max(ended) FROM attempts WHERE outcome = 'done'"
    )
    ((drawn, end),) = rows(
        state / "mlflow.db", "SELECT count(*), max(end_time) FROM runs WHERE status = 'FINISHED'"
    )
    ((points,),) = rows(state / "mlflow.db", "SELECT count(*) FROM metrics WHERE key = 'val/loss'")
    assert ran == trials == drawn - 1  # the sweep has a run of its own
    assert points == RECORDS * trials
    results = [json.loads(path.read_text()) for path in state.glob("trials/*/result.json")]
    first = min(result["started"] for result in results)
    share = 1000 * WORKERS / trials
    return {
        "drawn": (end / 1000 - first) * share,
        "ran": (last - first) * share,
        "staffed": (end / 1000 - attempted) * share,
        "whole": seconds * share,
    }


def first_step(folder: Path, scale: float) -> Iterator[Figure]:
    """Measure from the command to the first training step of a tiny gpt, each time in a new state folder."""
    seconds = []
    for number in range(3):
        state = folder / str(number)
        keys = {"telemetry": {"log": 1}, "workload": {"gpt": TINY | {"steps": 4}}, "ablate": {"rht": [True]}}
        file = experiment(state, "start", **keys)
        started = time.time()
        sweep(file, "--state", state)
        seconds.append(
            min(
                json.loads(path.read_text().splitlines()[0])["time"]
                for path in state.glob("trials/*/events-1.jsonl")
            )
            - started
        )
    yield at_most(
        "first_step",
        "from the command to the first training step, median of 3",
        statistics.median(seconds),
        8,
        "s",
    )


def _first_records(state: Path) -> dict[str, float]:
    """Return the time of each trial's first record in seconds since the epoch, by the trial's id."""
    return {
        path.parent.name: json.loads(path.read_text().splitlines()[0])["time"]
        for path in state.glob("trials/*/events-1.jsonl")
    }


def next_trial(folder: Path, scale: float) -> Iterator[Figure]:
    """Measure from a trial's start on a warm worker to its first step, for trials with nothing to set up."""
    state = folder / "next"
    sweep(
        search(state, "next", max(12, round(60 * scale))),
        "--state",
        state,
        "--workers",
        WORKERS,
        "--mlflow",
        "none",
    )
    started = dict(
        ledger(
            state, "next", "SELECT id, min(started) FROM attempts JOIN trials USING (trial) GROUP BY trial"
        )
    )
    first = _first_records(state)
    waits = [
        1000 * (first[trial] - begun) for trial, begun in sorted(started.items(), key=lambda item: item[1])
    ][WORKERS:]
    yield at_most(
        "next_trial",
        "from a trial's start on a warm worker to its first step, median",
        statistics.median(waits),
        50,
        "ms",
    )
    yield Figure("next_trial", "the slowest twentieth takes", sorted(waits)[-max(1, len(waits) // 20)], "ms")


def resume(folder: Path, scale: float) -> Iterator[Figure]:
    """Measure the time to the table of a finished sweep of 1,000 trials that is run again."""
    arms = max(10, round(199 * scale))
    file = grid(folder, "finished", arms, 5)
    arguments = (file, "--state", folder, "--executor", "inline")
    say("  making the sweep ...")
    sweep(*arguments)
    trials, before = 5 * (arms + 1), _processor_seconds()
    seconds = statistics.median(sweep(*arguments) for _ in range(3))
    yield at_most(
        "resume", f"a finished sweep of {trials:,} trials to its table, median of 3", seconds, 5, "s"
    )
    yield Figure("resume", "of which processor time", (_processor_seconds() - before) / 3, "s")


def _processor_seconds() -> float:
    """Return the processor seconds of all commands run so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def many(folder: Path, scale: float) -> Iterator[Figure]:
    """Measure 10,000 trials over 64 logical slots, in process; then a few hundred on Ray."""
    arms = max(20, round(999 * scale))
    answer = script("many_trials", folder, arms, 10, 64, "yes", stderr=None)
    tenth = answer["trials"] // 10
    what = f"{answer['trials']:,} trials of {RECORDS} records, 64 slots in process"
    for clock, unit in ((1, "by the clock"), (2, "of processor time, MLflow's thread apart")):
        done = [(one[0], one[clock]) for one in answer["done"]]
        first, last = (
            _per_trial(done, *span) for span in ((0, tenth), (answer["trials"] - tenth, answer["trials"]))
        )
        yield Figure("many", f"{what}: a trial of the first tenth, {unit}", first, "ms")
        yield at_most("many", f"{what}: the last tenth over the first, {unit}", last / first, 1.2, "times")
    yield at_most(
        "many", f"{what}: controller's peak memory, with torch and MLflow", answer["peak_mb"], 1000, "MB"
    )
    yield Figure("many", f"{what}: of which before the first trial", answer["before_mb"], "MB")
    yield Figure("many", f"{what}: all, until MLflow has it too", answer["seconds"], "s")
    state, trials, slots = folder / "ray", max(32, round(300 * scale)), 16
    sweep(search(state, "ray", trials), "--state", state, "--workers", slots)
    ((ran, start, end),) = ledger(
        state, "ray", "SELECT count(*), min(started), max(ended) FROM attempts WHERE outcome = 'done'"
    )
    assert ran == trials
    yield Figure(
        "many", f"{trials} trials on Ray, {slots} logical CPUs: a trial", 1000 * (end - start) / trials, "ms"
    )


def _per_trial(done: list[tuple[int, float]], first: int, last: int) -> float:
    """Return milliseconds per trial between two counts of finished trials."""
    inside = [pair for pair in done if first <= pair[0] <= last]
    (a, begun), (b, ended) = inside[0], inside[-1]
    return 1000 * (ended - begun) / (b - a)


def dead_mlflow(folder: Path, scale: float) -> Iterator[Figure]:
    """Compare a server that is dead for the whole sweep with no server, in interleaved rounds of real trials.

    Then count the records that are missing once a server is back.
    """
    rounds, dead = max(2, round(7 * scale)), "http://127.0.0.1:9"
    answers: dict[str, list[dict]] = {dead: [], "none": []}
    for number in range(rounds):
        for address in (dead, "none") if number % 2 else ("none", dead):
            state = folder / f"{number}-{'dead' if address == dead else 'none'}"
            state.mkdir()
            answers[address].append(script("one_worker", state, address, 60, "leave"))
    ratios = [a["cpu_s"] / b["cpu_s"] for a, b in zip(answers[dead], answers["none"], strict=True)]
    noise = [b["cpu_s"] for b in answers["none"]]
    spread = (max(noise) - min(noise)) / statistics.median(noise)
    imports = sum(one["imports"] for each in answers.values() for one in each)
    yield at_most("dead_mlflow", "imports of MLflow in trial processes", imports, 0, "")
    what = f"trials' processor time, dead server over none, median of {rounds} rounds"
    yield Figure(
        "dead_mlflow",
        what,
        statistics.median(ratios),
        "times",
        f"1 within {spread:.3f}",
        abs(statistics.median(ratios) - 1) <= spread,
    )
    yield Figure(
        "dead_mlflow",
        "the spread of that without any MLflow, largest minus smallest over the median",
        spread,
        "",
    )
    yield at_most(
        "dead_mlflow",
        "records missing once the sweep was run again with a server",
        _missing(folder / "0-dead"),
        0,
        "",
    )


def _missing(state: Path) -> int:
    """Run the sweep again with a store; return the number of records that are missing there or doubled."""
    sweep(state / "one.yaml", "--state", state, "--executor", "inline")
    query = (
        "SELECT mlflow, text, step, value FROM records JOIN names USING (name) JOIN members USING (trial)"
        " WHERE text IN ('val/loss', 'train/loss', 'grad/norm', 'tokens')"
    )
    sent = "replace(key, 'watch/', '') AS text"
    ours = sorted(ledger(state, "one", query))
    theirs = sorted(
        rows(
            state / "mlflow.db",
            f"SELECT run_uuid, {sent}, step, value FROM metrics"
            " WHERE text IN ('val/loss', 'train/loss', 'grad/norm', 'tokens')",
        )
    )
    assert ours
    return len(set(ours) ^ set(theirs)) + abs(len(ours) - len(theirs))


def reading(folder: Path, scale: float) -> Iterator[Figure]:
    """Measure a frame of 1,000 runs with 100 metrics of 100 steps each, and the report over them."""
    answer = script("reading", folder, max(20, round(199 * scale)), 5)
    what = f"{answer['runs']:,} runs, {answer['rows']:,} records"
    yield at_most("reading", f"{what}: as a frame", answer["first_s"], 20, "s")
    yield Figure("reading", f"{what}: as a frame, once remembered", answer["again_s"], "s")
    yield at_most("reading", f"{what}: a report", answer["report_s"], 60, "s")


def cooldown(folder: Path, scale: float) -> Iterator[Figure]:
    """Compare the steps that six cooldown fractions run with those from scratch and with those planned."""
    steps, fractions = 200, [0, 0.05, 0.1, 0.15, 0.2, 0.25]
    model = {"gpt": TINY | {"steps": steps}}
    keys = {
        "workload": model,
        "ablate": {"cooldown": fractions},
        "against": {"cooldown": 0},
        "telemetry": EVERY_STEP,
    }
    states = {fork: folder / fork for fork in ("fork", "no-fork")}
    for fork, state in states.items():
        sweep(
            experiment(state, "cooldown", **keys),
            "--state",
            state,
            f"--{fork}",
            "--mlflow",
            "none",
            "--workers",
            1,
        )
    events = {fork: list(state.glob("trials/*/events-*.jsonl")) for fork, state in states.items()}
    ran = {fork: sum(len(path.read_text().splitlines()) for path in paths) for fork, paths in events.items()}
    planned = steps + sum(round(steps * fraction) for fraction in fractions)
    yield least(
        "cooldown",
        f"{len(fractions)} fractions: steps from scratch over steps run",
        ran["no-fork"] / ran["fork"],
        3,
        "times",
    )
    yield at_most("cooldown", "steps run over steps planned", ran["fork"] / planned, 1.05, "times")
    losses = "text IN ('train/loss', 'val/loss')"
    query = (
        "SELECT id, text, step, value FROM records JOIN names USING (name) "
        f"JOIN trials USING (trial) WHERE {losses}"
    )
    forked, alone = (sorted(ledger(state, "cooldown", query)) for state in states.values())
    assert alone
    yield at_most(
        "cooldown", f"of {len(alone):,} losses, other than from scratch", len(set(forked) ^ set(alone)), 0, ""
    )


def killed_worker(folder: Path, scale: float) -> Iterator[Figure]:
    """Measure the steps that are done again after a kill -9 of the worker in the middle of each trial.

    A trial writes a checkpoint every half second.
    """
    every = 0.5
    answer = script("one_worker", folder, "none", every, "kill")
    trials = [trial for trial in answer["repeated"] if trial["killed"]]
    assert answer["killed"] == len(trials) > 0
    worst = max(trials, key=lambda trial: trial["seconds"])
    kept = f"{worst['resumed']} of {worst['reached']} were kept"
    what = f"{len(trials)} workers killed: steps done again, at worst ({kept})"
    yield at_most("killed_worker", what, worst["seconds"] / every, 1.05, "intervals between checkpoints")


ROWS: dict[str, Callable[[Path, float], Iterator[Figure]]] = {
    "cost": cost,
    "first_step": first_step,
    "next_trial": next_trial,
    "resume": resume,
    "many": many,
    "dead_mlflow": dead_mlflow,
    "cooldown": cooldown,
    "reading": reading,
    "killed_worker": killed_worker,
}


def measure() -> None:
    """Run the command line."""
    run(lambda: typer.run(main))
