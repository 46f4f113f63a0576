"""Sweeps as job arrays of SLURM: `ablate sweep X.yaml --export-jobs FOLDER`, `run-task` and `collect`."""

import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import typer

from ablate.cli.common import DONE, FAILED, console, nothing_runs
from ablate.cli.options import LOCATIONS, Capability, CheckCommand, Flags
from ablate.cli.plan import machine_of
from ablate.cli.settings import Settings, writable
from ablate.engines.gpu_access import device_class
from ablate.errors import InputError
from ablate.execution.controller import Controller
from ablate.execution.job_array import REQUEUE, Jobs, Need, Task, export, request_of
from ablate.execution.job_array import collect as copy_trials
from ablate.execution.messages import Ended, Events, Waiting
from ablate.execution.progress import RunOptions
from ablate.execution.sweep_control import exclusive
from ablate.experiment.load import Experiment, load
from ablate.results.number_text import counted
from ablate.store.trial_store import Store

_REPORT_SECONDS = 30.0


@dataclass(frozen=True)
class JobOptions:
    """Options on job arrays of SLURM, which run the trials in place of this process.

    Args:
        export_jobs: Run nothing: write the missing trials into this folder as job arrays of SLURM.
        sbatch: Option of sbatch for these jobs, such as --partition=gpu; repeatable.
    """

    panel: ClassVar = LOCATIONS
    export_jobs: Path | None = None
    sbatch: list[str] | None = None
    capability: Capability = None


def export_jobs(
    file: Path,
    experiment: Experiment,
    settings: Settings,
    run: RunOptions,
    seeds: int | None,
    folder: Path,
    options: JobOptions,
) -> None:
    """Write the missing trials of a sweep as job arrays into a folder, and print what to type next.
    InputError if the sweep is a search, nothing is missing, or the folder cannot be written."""
    if experiment.keys.search:
        raise InputError(
            f"{file}: search: a search chooses trials by the results of earlier ones, which a job array"
            " cannot; run it with --address, or name its arms"
        )
    controller = Controller(experiment, settings.state, settings.device, nothing_runs, None, run)
    stages = controller.stages()
    if not stages:
        command = f"ablate sweep {shlex.quote(str(file))}{settings.state_option}"
        raise InputError(f"{file}: all trials are finished; `{command}` shows the answer")
    need = Need.of(file, experiment.keys.resources, settings.device)
    ids = tuple(tuple(request.id for request in stage) for stage in stages)
    jobs = Jobs(experiment.name, str(file.resolve()), seeds, settings.device, ids, options.capability)
    export(folder, jobs, stages, need, options.sbatch or [])
    screen = console()
    for number, trials in enumerate(ids, 1):
        after = f", after stage {number - 1}: they start from its states" if number > 1 else ""
        screen.lines(f"stage {number}: {counted(len(trials), 'trial')}{after}")
    screen.lines(
        f"Each task: {need}; device {settings.device}, engine {experiment.engine}."
        + " For GPUs elsewhere: --capability, such as 10.0 for a B200." * (settings.device == "cpu")
    )
    command = f"ablate collect {shlex.quote(str(folder))}{settings.state_option}"
    if experiment.keys.growth:
        screen.lines(f"Seeds are added by results: after `{command}`, export the next ones.")
    screen.print(f"{folder}/submit.sh --time=4:00:00   submits them, with options of sbatch")
    screen.lines(f"{command}   adopts what is finished, at any time")


def collect(folder: Path, flags: Flags) -> None:
    """Adopt the finished trials of a job array, and say what is missing.

    The results are the same files as those of any sweep; the last line names the command that gives the
    answer. Exit status: 0 all trials are there, 1 some are not.

    Args:
        folder: Folder that `ablate sweep X.yaml --export-jobs` wrote.
    """
    jobs = Jobs.read(folder)
    settings = flags.settings(device=jobs.device)
    writable(settings.state, settings.shared_state)
    machine = machine_of(jobs.capability, jobs.device)
    experiment = load(Path(jobs.file), jobs.device, jobs.seeds, machine)
    with exclusive(settings.state / "sweeps" / experiment.name, jobs.file):
        found = list(copy_trials(folder, jobs, Store(settings.state)))
        controller = Controller(experiment, settings.state, jobs.device, nothing_runs, None)
        with closing(controller.ledger):
            news = controller.adopt()
    screen, counts = console(), Counter(each.status for each in found)
    screen.print(", ".join(f"{number} {status}" for status, number in counts.items()), markup=False)
    for each in found:
        if each.status in ("not finished", "damaged"):
            why = f": {each.detail}" if each.detail else ", and its log is empty: it was killed, or runs"
            screen.lines(f"  {each.trial} {each.status}{why}")
    missing = {each.trial for each in found if each.status not in ("copied", "there already")}
    screen.lines(*_queue_again(folder, jobs, missing))
    screen.lines(*news)
    own_device = device_class().device
    option = f" --device {jobs.device}" * (jobs.device != own_device) + settings.state_option
    advice = (
        f"`ablate sweep {shlex.quote(jobs.file)}{option}` prints the answer, and runs here what is missing."
    )
    if own_device == "cpu" != jobs.device:
        name, why = shlex.quote(experiment.name), f"trials of device {jobs.device} cannot be run here."
        advice = f"`ablate report {name}{settings.state_option}` writes the answer; {why}"
    screen.lines(advice)
    raise typer.Exit(FAILED if missing else DONE)


def _queue_again(folder: Path, jobs: Jobs, missing: Collection[str]) -> Iterator[str]:
    for stage, trials in enumerate(jobs.stages, 1):
        tasks = [task for task, trial in enumerate(trials) if trial in missing]
        if tasks:
            yield (
                f"`cd {shlex.quote(str(folder))} && sbatch --array={_spans(tasks)} stage-{stage}.sbatch`"
                f" queues {len(tasks)} of stage {stage} that squeue does not list; options such as --time"
                " follow sbatch"
            )


def _spans(tasks: Sequence[int]) -> str:
    """Return ascending numbers as SLURM's arrays write them: `0,3-5`."""
    one_less, one_more = ({task + step for task in tasks} for step in (-1, 1))
    firsts = (task for task in tasks if task not in one_more)
    spans = zip(firsts, (task for task in tasks if task not in one_less), strict=True)
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def run_task(folder: Path, stage: int, task: int, check_command: CheckCommand = None) -> None:
    """Run one task of an exported sweep; the scripts in the folder call this.

    Exit status: 0 the trial is over, 1 it failed, 2 there is no such task, 75 the task was told to end
    (SIGTERM) and is to be queued again; its trial then goes on from its last checkpoint.

    Args:
        folder: Folder that `ablate sweep X.yaml --export-jobs` wrote.
        stage: Number of the stage, from 1 on.
        task: Index of the task in the stage's array, from 0 on.
    """
    from ablate.verification.checkup import COMMAND, Checkup, Unfit

    request = request_of(folder, stage, task)
    command = shlex.split(check_command) if check_command else COMMAND
    with closing(Checkup(command, device=request.device)) as checkup:
        checkup.start()
        job = Task(request)
        signal.signal(signal.SIGTERM, lambda number, frame: job.end())
        try:
            checkup.passed()
        except Unfit as error:
            print(error, file=sys.stderr)
            raise typer.Exit(FAILED) from None
    print(f"trial {job.request.id}, attempt {job.request.attempt}", flush=True)
    reported = 0.0
    with closing(job.run()) as messages:
        for message in messages:
            if isinstance(message, Events) and time.monotonic() - reported >= _REPORT_SECONDS:
                reported, last = time.monotonic(), message.events[-1]
                loss = last["metrics"].get("train/loss")
                print(f"step {last['step']}" + ("" if loss is None else f", loss {loss:.4f}"), flush=True)
            elif isinstance(message, Waiting):
                print(f"waits for {message.holder}, which runs the same trial", flush=True)
            elif isinstance(message, Ended) and (message.result or not job.told):
                print(message.reason or message.status, *filter(None, [message.log]), sep="\n", flush=True)
                raise typer.Exit(DONE if message.result else FAILED)
    print("told to end; the trial goes on when the task is queued again", flush=True)
    raise typer.Exit(REQUEUE)
