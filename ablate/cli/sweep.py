"""`ablate sweep X.yaml`: run the trials of an experiment that are missing, and answer its question."""

import os
import subprocess
import sys
from pathlib import Path

import typer
from rich.text import Text

from ablate.cli.common import BAD_INPUT, DONE, console, print_starting, raise_on_sigterm, summary_of
from ablate.cli.jobs import JobOptions, export_jobs
from ablate.cli.options import ExperimentFile, SweepFlags
from ablate.cli.plan import machine_of, require_contracts, settings_for, show
from ablate.cli.settings import Settings, writable
from ablate.cli.sweep_run import SweepOptions, SweepRun
from ablate.errors import InputError
from ablate.execution.progress import RunOptions
from ablate.execution.sweep_control import check, holder
from ablate.execution.time_model import MachinePaces
from ablate.execution.tracking.access import check_login
from ablate.execution.tracking.tracker import open_trackers
from ablate.experiment.load import Experiment, load
from ablate.files import Busy, lock
from ablate.provenance import other_package, own_command


def sweep(file: ExperimentFile, options: SweepOptions, flags: SweepFlags, jobs: JobOptions) -> None:
    """Run an experiment: compute missing trials, reuse finished ones, and answer its question.

    Ctrl-C ends it cleanly; the same command continues it. Exit status: 0 all trials done or diverged, 1 some
    failed or the baseline diverged on every seed, 2 bad input, 3 budget reached, 130 interrupted, 143 ended
    by SIGTERM.
    """
    machine = machine_of(jobs.capability, flags.device)
    if machine and jobs.export_jobs is None and not options.dry_run:
        raise InputError(
            "--capability: describes another machine; add --export-jobs FOLDER, or use `ablate plan`"
        )
    if jobs.sbatch and jobs.export_jobs is None:
        raise InputError("--sbatch: its options are those of job arrays; add --export-jobs FOLDER")
    if options.detach and jobs.export_jobs is not None:
        raise InputError("--detach: --export-jobs runs nothing; leave one of the two out")
    settings = settings_for(machine, flags, notify=options.notify)
    print_starting(f"reading {file} and its data", quiet=options.quiet or not sys.stderr.isatty())
    experiment = load(file, settings.device, options.seeds, machine)
    if machine is None:
        require_contracts(file, experiment, settings.device)
    if options.dry_run:
        show(experiment, settings)
        return
    notes = _require_runnable(file, experiment, settings)
    paces = MachinePaces.of(experiment, settings.device, settings.ray is not None)
    trackers = open_trackers(settings.tracker, settings.state, experiment.name)
    given = options.fork, options.fresh, options.accept_version, options.same_code
    kept = RunOptions(*given, settings.price, paces, summary_of, trackers)
    run = SweepRun(experiment, settings, kept, options)
    folder = settings.state / "sweeps" / experiment.name
    if options.detach:
        raise typer.Exit(_detach(file, folder, settings, options))
    try:
        with lock(folder / "lock", wait=False), raise_on_sigterm():
            check(folder, str(file))
            if options.ready is not None:
                os.write(options.ready, b"1")
                os.close(options.ready)
            if jobs.export_jobs is not None:
                export_jobs(file, experiment, settings, kept, options.seeds, jobs.export_jobs, jobs)
                raise typer.Exit(DONE)
            ray = "" if settings.executor == "inline" else ", Ray"
            task = f"reading finished trials; for missing ones torch, a check{ray}"
            print_starting(task, quiet=options.quiet)
            raise typer.Exit(run.run(notes))
    except Busy as busy:
        raise _sweep_busy(file, str(busy)) from None


def _require_runnable(file: Path, experiment: Experiment, settings: Settings) -> list[str]:
    if experiment.keys.budget.cost is not None and settings.price is None:
        raise InputError(
            f"{file}: budget.cost: no price of a worker-hour; set it with --price, or in a profile"
        )
    if settings.executor != "inline" and (other := other_package(Path.cwd())):
        raise InputError(
            f"{other}: Ray's workers would import this module `ablate`: start the sweep from another folder"
        )
    notes = list(filter(None, (writable(settings.state, settings.shared_state), settings.device_note)))
    check_login(settings.mlflow)
    return notes


def _sweep_busy(file: Path, holder: str) -> InputError:
    return InputError(
        f"{file}: another process ({holder}) runs this sweep; wait for it, or use another --state"
    )


# One run in a process that outlives the terminal


def _detach(file: Path, folder: Path, settings: Settings, options: SweepOptions) -> int:
    """Start the same sweep in a new session, wait until it has its lock and a sound ledger, and return the
    exit status. If the process ends before that, print its output and return its exit status."""
    if running := holder(folder):
        raise _sweep_busy(file, str(running))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "console.txt"
    begun, ready = os.pipe()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*detached_command(file, settings, options), "--ready", str(ready)],
            pass_fds=[ready],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | settings.environment(),
        )
    os.close(ready)
    with os.fdopen(begun, "rb") as pipe:
        if not pipe.read(1):  # its end without a byte: the process has ended
            status = process.wait()
            print(log.read_text(), end="", file=sys.stderr if status == BAD_INPUT else sys.stdout)
            return status
    screen = console()
    message = f" continues without this terminal: pid {process.pid}, state folder {settings.state}."
    screen.print(Text.assemble((folder.name, "bold"), message))
    screen.print("Follow it:", style="bold")
    option = settings.state_option
    screen.lines(
        f"  ablate status {folder.name}{option} --watch",
        f"  tail -f {log}",
        f"  ablate stop {folder.name}{option}",
    )
    return DONE


def detached_command(file: Path, settings: Settings, options: SweepOptions) -> list[str]:
    """Return the command of a detached sweep. Addresses are passed in its environment, since every user of a
    machine can list the arguments of a process."""
    values = {
        "--executor": settings.executor,
        "--device": settings.device,
        "--workers": settings.workers,
        "--price": settings.price,
        "--seeds": options.seeds,
    }
    given = [word for option, value in values.items() if value is not None for word in (option, str(value))]
    switches = ["--no-fork"] * (not options.fork) + ["--no-report"] * (not options.report)
    switches += ["--all"] * options.everything
    for switch in ("quiet", "fresh", "same_code", "accept_version"):
        switches += [f"--{switch.replace('_', '-')}"] * getattr(options, switch)
    return own_command("ablate.sweep", str(file), *given, *switches)
