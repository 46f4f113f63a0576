"""`ablate sweep X.yaml`: run an experiment, whatever of it is missing, and answer its question."""

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from ablate.cli import BUDGET, DONE, FAILED, INTERRUPTED, console, duration, program, run
from ablate.experiment import Experiment, load
from ablate.place import device_class, mlflow_uri, writable
from ablate.store import Busy, lock
from ablate.yamlfile import InputError

_EXIT = {"done": DONE, "failed": FAILED, "budget": BUDGET}

State = Annotated[Path, typer.Option(envvar="ABLATE_STATE", help="State folder: trials, ledgers, MLflow store.")]


def sweep(
    file: Annotated[Path, typer.Argument(help="The experiment, a YAML file.")],
    state: State = Path("runs"),
    executor: Annotated[Literal["ray", "inline"], typer.Option(help="ray: parallel; inline: one by one in this process.")] = "ray",
    address: Annotated[
        str | None, typer.Option(envvar="ABLATE_RAY_ADDRESS", help="An existing Ray cluster: auto, host:port, ray://...")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Trials at once; default: one a core, or one a GPU.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where a trial computes.")] = "auto",
    mlflow: Annotated[
        str | None, typer.Option(envvar="ABLATE_MLFLOW", help="MLflow address; default: a store in the state folder; none: no MLflow.")
    ] = None,
    fork: Annotated[bool, typer.Option(help="Run what trials have in common from the start once.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and what it would cost; run nothing.")] = False,
) -> None:
    """Run an experiment: do what is missing, reuse what is done, and answer its question.

    Ctrl-C ends it cleanly; the same command goes on. Exit status: 0 all done, 1 some trials failed, 2 bad input, 3 budget reached,
    130 interrupted.
    """
    if dry_run:
        from ablate.plan import plan

        plan(file, state, device)
        return
    experiment = load(file)
    writable(state)
    try:
        with lock(state / "sweeps" / experiment.name / "lock", wait=False):
            raise typer.Exit(_run(experiment, state, executor, address, workers, device_class(device), mlflow_uri(mlflow, state), fork))
    except Busy as busy:
        raise InputError([f"{file}: another process ({busy.holder}) runs this sweep; wait for it, or use another --state"]) from None


def _run(
    experiment: Experiment,
    state: Path,
    executor: str,
    address: str | None,
    workers: int | None,
    device: str,
    mlflow: str | None,
    fork: bool,
) -> int:
    from ablate.controller import Controller, Outcome
    from ablate.doctor import Checkup, Unfit
    from ablate.terminal import View
    from ablate.workers import ClusterError, Inline, Pool

    screen = console()
    screen.print(f"[bold]{experiment.question}[/]")

    checkup = Checkup()

    def connect() -> Inline | Pool:
        """Called once a trial has to run, which it does on numerics that were found to be sound."""
        checkup.start()
        pool = Inline() if executor == "inline" else Pool(address, workers, gpus_per_trial=int(device == "cuda"))
        try:
            checkup.passed()
        except BaseException:
            pool.close()
            raise
        return pool

    controller = Controller(experiment, state, device, connect, mlflow, fork)
    outcome = None
    try:
        with View(screen).open() as view, closing(controller.run()) as steps, closing(checkup):
            for step in steps:
                if isinstance(step, Outcome):
                    outcome = step
                else:
                    if step.done < step.total:
                        checkup.start()  # beside the imports that come next, and Ray
                    view.show(step)
    except KeyboardInterrupt:
        screen.print("Interrupted. Nothing is lost: the same command goes on.")
        return INTERRUPTED
    except ClusterError as error:
        raise InputError([str(error)]) from None
    except Unfit as error:
        print(error, file=sys.stderr)
        return FAILED
    reused = f", {outcome.reused} already done" if outcome.reused else ""
    screen.print(
        f"{outcome.ran} trials run{reused}{f', {outcome.failed} failed' if outcome.failed else ''} in {duration(outcome.seconds)}\n"
    )
    _answer(experiment, state, mlflow, screen)
    return _EXIT[outcome.status]


def _answer(experiment: Experiment, state: Path, mlflow: str | None, screen) -> None:
    """The table, what turning each knob did, and where to look next."""
    from ablate.figures import draw
    from ablate.results import contrasts, open_ledger, replications, summaries
    from ablate.terminal import contrast_table, replication_table, summary_table

    ledger = open_ledger(state, experiment.name)
    for metric in experiment.metrics:
        arms = summaries(ledger, metric)
        if experiment.search:
            arms.sort(key=lambda arm: (arm.baseline is not None, arm.mean if metric.direction == "minimize" else -arm.mean))
        screen.print(summary_table(arms, metric), "")
        table = contrast_table(contrasts(arms, metric))
        if table:
            screen.print(table, "")
    if experiment.published:
        screen.print(replication_table(replications(ledger, experiment.published)), "")
    screen.print(_reading(experiment), "")
    screen.print("Look next:", style="bold")
    for picture in draw(ledger, experiment.metrics, experiment.published, state / "reports" / experiment.name):
        screen.print(f"  {picture}", soft_wrap=True)
    if mlflow:
        screen.print(f"  {program('mlflow')} ui --workers 1 --backend-store-uri {mlflow}", soft_wrap=True)
    screen.print(f"  {program('optuna-dashboard')} {state / 'sweeps' / experiment.name / 'optuna.log'}", soft_wrap=True)
    ledger.close()


def _reading(experiment: Experiment) -> str:
    """How to read the table, in one or two sentences."""
    entropy = experiment.base.config.summary().get("data/unigram_entropy")
    floor = f" A model that ignores context reaches {entropy:.2f}." if entropy and experiment.metric.name == "val/loss" else ""
    pairs = f"Gaps and effects are paired over {len(experiment.seeds)} seeds; ± is a 95 % t interval, each on its own."
    searched = " The arm that won a search was chosen by these numbers: run it again on new seeds before believing its gap."
    return pairs + floor + (searched if experiment.search else "")


if __name__ == "__main__":
    run(lambda: typer.run(sweep))
