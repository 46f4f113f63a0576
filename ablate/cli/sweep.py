"""`ablate sweep X.yaml`: run the trials of an experiment that are missing, and answer its question."""

import math
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ablate.cli.common import (
    BAD_INPUT,
    BUDGET,
    DONE,
    FAILED,
    INTERRUPTED,
    console,
    interruption,
    print_starting,
    program,
    raise_on_sigterm,
)
from ablate.cli.jobs import JobOptions, export_jobs
from ablate.cli.options import CheckCommand, ExperimentFile, Seeds, SweepFlags
from ablate.cli.plan import read, show
from ablate.cli.report import make
from ablate.cli.settings import Settings, writable
from ablate.errors import InputError, one_line, redact
from ablate.execution.controller import Controller
from ablate.execution.notify import Hook
from ablate.execution.progress import Outcome, RunOptions
from ablate.execution.sweep_control import check, exclusive, holder
from ablate.execution.time_model import MachinePaces
from ablate.execution.tracking.access import check_login
from ablate.execution.tracking.tracker import open_trackers
from ablate.experiment.load import Experiment
from ablate.experiment.plan_notes import remarks
from ablate.experiment.roles import CONFIRM, WINNER
from ablate.provenance import other_package, own_command
from ablate.reports.notebooks import NotebookError
from ablate.reports.plain_text import duration, wrapped
from ablate.reports.report_files import is_current
from ablate.store.checked_ledger import open_checked
from ablate.store.databases import network_file_system
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member

_EXIT = {"done": DONE, "failed": FAILED, "budget": BUDGET, "stopped": INTERRUPTED, "disk": FAILED}
_ADVICE = "; wait for it, or use another --state"


@dataclass(frozen=True)
class SweepOptions:
    """Options on what is run and what is printed.

    Args:
        dry_run: Print the plan and its estimated duration; run nothing.
        fork: Compute a prefix that several trials share only once.
        fresh: Run all trials again, including finished ones.
        accept_version: Restart a sweep that was started with other versions of the code.
        same_code: Keep finished trials after an edit of your code that changes no number.
        detach: Continue after this terminal is closed; `ablate status` shows the progress.
        notify: Command (JSON on standard input) or URL (POST) to notify of the first failure and the end.
          (ABLATE_NOTIFY)
        quiet: Print no progress, only the answer and how many trials failed.
        everything: Print a line for each run, and all tables below the answer.
        report: Write the report at the end. (ABLATE_REPORT)
        ready: File descriptor to write a byte to when the sweep begins to run.
    """

    dry_run: bool = False
    seeds: Seeds = None
    fork: bool = True
    fresh: bool = False
    accept_version: bool = False
    same_code: bool = False
    detach: bool = False
    notify: str | None = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False
    everything: Annotated[bool, typer.Option("--all")] = False
    report: Annotated[bool, typer.Option(envvar="ABLATE_REPORT", show_envvar=False)] = True
    check_command: CheckCommand = None
    ready: Annotated[int | None, typer.Option(hidden=True)] = None


@dataclass
class SweepRun:
    """One run of a sweep in this process: prints progress and answer, and sends notifications."""

    experiment: Experiment
    settings: Settings
    run_options: RunOptions
    options: SweepOptions

    def __post_init__(self) -> None:
        self.hook = Hook(self.settings.notify) if self.settings.notify else None
        self.screen, self.started, self.failed = console(), time.time(), 0

    def run(self, notes: Sequence[str] = ()) -> int:
        """Print `notes`, run the sweep until it ends, is stopped or fails, and return the exit status."""
        status = "failed"
        try:
            self.screen.print(Text(self.experiment.keys.question, "bold"))
            kind = network_file_system(self.settings.state)
            network = (
                f"the state folder is on a network file system ({kind}): databases use the slower, "
                "safe journal (docs/run/cluster.md)"
            )
            # With inline, this process computes, and prints itself that it has no compiled quantisers.
            device = "" if self.settings.executor == "inline" else self.settings.device
            noted = (*notes, *([network] if kind else []), *remarks(self.experiment, device))
            self.screen.lines(*(f"Note: {remark}" for remark in noted))
            status = self._steps()
            return _EXIT[status]
        except KeyboardInterrupt as error:
            status = "interrupted"
            code, description = interruption(error)
            self.screen.print(f"{description}. Nothing is lost: the same command goes on.")
            return code
        finally:
            self._notify("ended", status)
            self.screen.lines(*(self.hook.close() if self.hook else ()))

    def _steps(self) -> str:
        from ablate.cli.executor import StartingExecutor, View
        from ablate.execution.workers import ClusterError, ClusterLost
        from ablate.verification.checkup import COMMAND, Checkup, Unfit

        settings = self.settings
        command = shlex.split(self.options.check_command) if self.options.check_command else COMMAND
        checkup = Checkup(command, device=settings.device)
        executor = StartingExecutor(settings, self.experiment.keys.resources, checkup)
        outcome: Outcome | None = None
        controller = Controller(
            self.experiment, settings.state, settings.device, executor, settings.mlflow, self.run_options
        )
        try:
            with (
                View(self.screen, self.options.quiet, self.options.everything).open() as view,
                closing(controller.run()) as steps,
                closing(checkup),
                closing(executor),
            ):
                for step in steps:
                    if isinstance(step, Outcome):
                        outcome = step
                    else:
                        if step.done < step.total:
                            executor.begin()  # in parallel with the imports that follow
                        view.show(step)
                        if step.failed and not self.failed:
                            self._notify("trial failed", "running")
                        self.failed = step.failed
                        self.screen.lines(*(self.hook.troubles() if self.hook else ()))
        except ClusterLost as error:
            self.screen.lines(
                f"{redact(str(error), settings.ray)}. Nothing is lost: the same command goes on."
            )
            return "stopped"
        except ClusterError as error:
            raise InputError(redact(str(error), settings.ray)) from None
        except Unfit as error:
            print(error, file=sys.stderr)
            return "failed"
        if outcome is None:
            raise RuntimeError("the controller ended without an outcome")
        self._print_outcome(outcome)
        return outcome.status

    def _print_outcome(self, outcome: Outcome) -> None:
        reused = f", {outcome.reused} already done" if outcome.reused else ""
        failed = f", {outcome.failed} failed" if outcome.failed else ""
        counts = f"{outcome.ran} trials run{reused}{failed} in {duration(outcome.seconds)}"
        why = wrapped(Text(one_line(outcome.why)), self.screen, 3) if outcome.why else []
        last = [Text(one_line(text), "red") for text in (outcome.diverged, outcome.cause) if text]
        answers = outcome.ran or outcome.reused or not outcome.cause
        if answers:
            from ablate.cli.answer_view import print_answer

            below = len(why) + 2 + sum(math.ceil(text.cell_len / self.screen.width) for text in last)
            print_answer(self.experiment, self.settings, self.screen, below, self.options.everything)
        self.screen.print(*why, counts, sep="\n")
        if answers:
            self._print_report()
        self.screen.lines(*last)  # whole: it ends with the line of the user's code

    def _print_report(self) -> None:
        settings, name = self.settings, self.experiment.name
        named = f"{shlex.quote(name)}{settings.state_option}"
        index = settings.state / "reports" / name / "index.html"
        if self.options.report and not is_current(settings.state, name):
            try:
                with self.screen.status("Writing the report"):
                    made = make(settings.state, name, mlflow=settings.mlflow)
                self.screen.lines(*filter(None, [made.trouble]))
            except (NotebookError, InputError) as error:
                remedy = f"The results are safe; `ablate report {named}` tries again."
                self.screen.lines(f"The report was not written: {error}. {remedy}")
        command = f"{program('ablate')} ui {named}"
        line = f"Report: {index}" if index.exists() else f"To see the runs: {command}"
        more = f"{line}; with MLflow: {command}" if index.exists() and settings.mlflow else line
        self.screen.lines(more if len(more) <= self.screen.width else line)

    def _notify(self, event: str, status: str) -> None:
        """Send a notification, whose `text` is the summary that a chat shows."""
        if self.hook is None:
            return
        seconds = time.time() - self.started
        name, trials, table, text = self.experiment.name, list[Member](), "", status
        path = self.settings.state / "sweeps" / name / "ledger.db"
        try:
            if path.exists():
                with closing(open_checked(path)) as ledger:
                    trials = list({member.id: member for member in ledger.members()}.values())
                    table = summary_of(ledger)
                text = f"{event if status == 'running' else status} after {duration(seconds)}: "
        except InputError as error:
            trials, text = [], str(error)
        counts = Counter(trial.status for trial in trials)
        failed = [trial for trial in trials if trial.status in ("failed", "oom")]
        self.hook.tell(
            {
                "event": event,
                "sweep": name,
                "question": self.experiment.keys.question,
                "status": status,
                "seconds": round(seconds, 1),
                "counts": dict(counts),
                "failures": [
                    f"{each.name} seed={each.seed}: {each.reason}".replace(CONFIRM, WINNER) for each in failed
                ],
                "table": table,
                "text": f"{name}: {text}" + ", ".join(f"{number} {word}" for word, number in counts.items()),
            }
        )


def summary_of(ledger: Ledger) -> str:
    """Return the answer of a sweep as Markdown. It imports pandas: call it at a sweep's end only."""
    from ablate.reports.evidence import summary_markdown

    return summary_markdown(ledger)


def sweep(file: ExperimentFile, options: SweepOptions, flags: SweepFlags, jobs: JobOptions) -> None:
    """Run an experiment: compute missing trials, reuse finished ones, and answer its question.

    Ctrl-C ends it cleanly; the same command continues it. Exit status: 0 all trials done or diverged, 1 some
    failed or the baseline diverged on every seed, 2 bad input, 3 budget reached, 130 interrupted, 143 ended
    by SIGTERM.
    """
    if jobs.capability and jobs.export_jobs is None and not options.dry_run:
        raise InputError(
            "--capability: describes another machine; add --export-jobs FOLDER, or use `ablate plan`"
        )
    if jobs.sbatch and jobs.export_jobs is None:
        raise InputError("--sbatch: its options are those of job arrays; add --export-jobs FOLDER")
    if options.detach and jobs.export_jobs is not None:
        raise InputError("--detach: --export-jobs runs nothing; leave one of the two out")
    print_starting(f"reading {file} and its data", quiet=options.quiet or not sys.stderr.isatty())
    settings, experiment = read(file, flags, options.seeds, jobs.capability, notify=options.notify)
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
    with exclusive(folder, file, _ADVICE), raise_on_sigterm():
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


# One run in a process that outlives the terminal


def _detach(file: Path, folder: Path, settings: Settings, options: SweepOptions) -> int:
    """Start the same sweep in a new session, wait until it has its lock and a sound ledger, and return the
    exit status. If the process ends before that, print its output and return its exit status."""
    if running := holder(folder):
        raise InputError(f"{file}: another process ({running}) runs this sweep{_ADVICE}")
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
            print(
                log.read_text(errors="replace"),
                end="",
                file=sys.stderr if status == BAD_INPUT else sys.stdout,
            )
            return status
    screen = console()
    message = f" continues without this terminal: pid {process.pid}, state folder {settings.state}."
    screen.print(Text.assemble((folder.name, "bold"), message))
    screen.print("Follow it:", style="bold")
    named = f"{shlex.quote(folder.name)}{settings.state_option}"
    screen.lines(
        f"  ablate status {named} --watch",
        f"  tail -f {shlex.quote(str(log))}",
        f"  ablate stop {named}",
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
