"""`ablate sweep X.yaml`: run the trials of an experiment that are missing, and answer its question."""

import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from ablate.cli.common import (
    BAD_INPUT,
    BUDGET,
    DONE,
    FAILED,
    INTERRUPTED,
    WHERE,
    Device,
    Mlflow,
    Profile,
    Seeds,
    State,
    console,
    interruption,
    print_starting,
    program,
    raise_on_sigterm,
    summary_of,
)
from ablate.cli.plan import Capability, expected_width, machine_of, remarks, show
from ablate.cli.settings import Settings, find_settings, writable
from ablate.errors import InputError, redact
from ablate.execution.controller import Controller
from ablate.execution.machine_paces import MachinePaces
from ablate.execution.notify import Hook
from ablate.execution.progress import Outcome, Progress, RunOptions
from ablate.execution.sweep_control import check, holder
from ablate.execution.tracking import check_login
from ablate.experiment.load import Experiment, load
from ablate.files import Busy, Json, lock
from ablate.provenance import other_package, own_command
from ablate.reports.plain_text import duration
from ablate.results.unmet_phases import never_began
from ablate.store.databases import network_file_system
from ablate.store.ledger import Ledger

if TYPE_CHECKING:
    from ablate.results.headline import Headline
    from ablate.results.summary import ArmSummary

_EXIT = {"done": DONE, "failed": FAILED, "budget": BUDGET, "stopped": INTERRUPTED, "disk": FAILED}
_FLOORS = {
    "data/unigram_entropy": "A model that ignores context reaches {:.2f}.",
    "data/blank_loss": "With the masks of the data, predicting the mean of the visible values gives {:.2f}.",
}
"""Sentences below a table of losses, with the loss of a trivial model, by name of a fact about the data."""


def sweep(
    file: Annotated[Path, typer.Argument(help="Experiment file (YAML).")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and its estimated duration; run nothing.")
    ] = False,
    seeds: Seeds = None,
    fork: Annotated[bool, typer.Option(help="Compute a prefix that several trials share only once.")] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run all trials again, including finished ones.")
    ] = False,
    accept_version: Annotated[
        bool,
        typer.Option(
            "--accept-version", help="Restart a sweep that was started with other versions of the code."
        ),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Continue after this terminal is closed; `ablate status` shows the progress."
        ),
    ] = False,
    notify: Annotated[
        str | None,
        typer.Option(
            help="Command (JSON on standard input) or URL (POST) to notify of the first failure and the end. "
            "(ABLATE_NOTIFY)"
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print no progress, only the answer and how many trials failed."),
    ] = False,
    state: State = None,
    profile: Profile = None,
    executor: Annotated[
        Literal["ray", "inline"] | None,
        typer.Option(
            help="ray: parallel, the default; inline: one trial after another in this process.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ray cluster to use: auto, host:port, ray://...; local, the default, starts Ray here. "
            "(ABLATE_RAY_ADDRESS)",
            rich_help_panel=WHERE,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Trials to run at once; default: one for each core or GPU.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    device: Device = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Cost of one worker-hour, for `budget.cost`.", rich_help_panel=WHERE),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            help="Priority among sweeps on a Ray cluster: higher first, equal ones share.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    mlflow: Mlflow = None,
    shared_state: Annotated[
        bool | None,
        typer.Option(
            "--shared-state",
            help="Give a new state folder the permissions of the umask; default: access for this user only. "
            "(ABLATE_SHARED_STATE)",
            rich_help_panel=WHERE,
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            envvar="ABLATE_REPORT", show_envvar=False, help="Write the report at the end. (ABLATE_REPORT)"
        ),
    ] = True,
    export_jobs: Annotated[
        Path | None,
        typer.Option(
            "--export-jobs",
            help="Run nothing: write the missing trials into this folder as job arrays of SLURM.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of sbatch for these jobs, such as --partition=gpu; repeatable.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    capability: Capability = None,
    check_command: Annotated[
        str | None,
        typer.Option(
            "--check-command", hidden=True, help="Command that checks the numerics; default: `ablate doctor`."
        ),
    ] = None,
    ready: Annotated[
        int | None,
        typer.Option(
            "--ready", hidden=True, help="File descriptor to write a byte to when the sweep begins to run."
        ),
    ] = None,
) -> None:
    """Run an experiment: compute missing trials, reuse finished ones, and answer its question.

    Ctrl-C ends it cleanly; the same command continues it. Exit status: 0 all trials done or diverged, 1 some
    failed or the baseline diverged on every seed, 2 bad input, 3 budget reached, 130 interrupted, 143 ended
    by SIGTERM.
    """
    machine = machine_of(capability, device)
    if machine and export_jobs is None and not dry_run:
        raise InputError(
            ["--capability: describes another machine; add --export-jobs FOLDER, or use `ablate plan`"]
        )
    device = "cuda" if machine else device
    given = {
        "state": state,
        "ray": address,
        "mlflow": mlflow,
        "workers": workers,
        "executor": executor,
        "device": device,
    }
    settings = find_settings(
        profile, **given, notify=notify, price=price, priority=priority, shared_state=shared_state or None
    )
    settings = replace(settings, device_note="") if machine else settings
    print_starting(f"reading {file} and its data", quiet=quiet or not sys.stderr.isatty())
    experiment = load(file, settings.device, seeds, machine)
    if dry_run:
        show(experiment, settings)
        return
    if experiment.budget.cost is not None and settings.price is None:
        raise InputError(
            [f"{file}: budget.cost: no price of a worker-hour; set it with --price, or in a profile"]
        )
    if settings.executor != "inline" and (other := other_package(Path.cwd())):
        raise InputError(
            [f"{other}: Ray's workers would import this module `ablate`: start the sweep from another folder"]
        )
    notes = list(filter(None, (writable(settings.state, settings.shared_state), settings.device_note)))
    check_login(settings.mlflow)
    folder = settings.state / "sweeps" / experiment.name
    hook = Hook(settings.notify) if settings.notify else None
    paces = MachinePaces.of(experiment, settings.device, settings.ray is not None)
    options = RunOptions(fork, fresh, accept_version, settings.price, paces, summary_of)
    if sbatch and export_jobs is None:
        raise InputError(["--sbatch: its options are those of job arrays; add --export-jobs FOLDER"])
    if detach:
        raise typer.Exit(_detach(file, folder, settings, options, report, seeds))
    try:
        with lock(folder / "lock", wait=False), raise_on_sigterm():
            check(folder, str(file))
            if ready is not None:
                os.write(ready, b"1")
                os.close(ready)
            if export_jobs is not None:
                from ablate.cli import jobs

                jobs.export_jobs(
                    file, experiment, settings, options, seeds, export_jobs, sbatch or [], capability
                )
                raise typer.Exit(DONE)
            ray = "" if settings.executor == "inline" else ", Ray and its workers"
            print_starting(
                f"reading finished trials; if some are missing, torch, a check of the numerics{ray}",
                quiet=quiet,
            )
            raise typer.Exit(
                SweepRun(experiment, settings, hook, report, check_command, quiet).run(options, notes)
            )
    except Busy as busy:
        raise _sweep_busy(file, str(busy)) from None


def _sweep_busy(file: Path, holder: str) -> InputError:
    return InputError(
        [f"{file}: another process ({holder}) runs this sweep; wait for it, or use another --state"]
    )


# One run in this process


class SweepRun:
    """One run of a sweep in this process: prints progress and answer, and sends notifications."""

    def __init__(
        self,
        experiment: Experiment,
        settings: Settings,
        hook: Hook | None,
        report: bool,
        check_command: str | None,
        quiet: bool = False,
    ) -> None:
        self.experiment, self.settings, self.hook, self.report = experiment, settings, hook, report
        self.check_command, self.quiet = check_command, quiet
        self.screen = console()
        self.started = time.time()
        self.failed = 0

    def run(self, options: RunOptions, notes: Sequence[str] = ()) -> int:
        """Print `notes`, run the sweep until it ends, is stopped or fails, and return the exit status."""
        status = "failed"
        try:
            self.screen.print(Text(self.experiment.question, "bold"))
            kind = network_file_system(self.settings.state)
            network = (
                f"the state folder is on a network file system ({kind}): databases use the slower, "
                "safe journal (docs/cluster.md)"
            )
            for remark in (*notes, *([network] if kind else []), *remarks(self.experiment)):
                self.screen.print(f"Note: {remark}", soft_wrap=True, markup=False)
            status = self._steps(options)
            return _EXIT[status]
        except KeyboardInterrupt as error:
            status = "interrupted"
            code, description = interruption(error)
            self.screen.print(f"{description}. Nothing is lost: the same command goes on.")
            return code
        finally:
            self._notify("ended", status)
            for line in self.hook.close() if self.hook else ():
                self.screen.print(line, soft_wrap=True, markup=False)

    def _steps(self, options: RunOptions) -> str:
        from ablate.cli.doctor import COMMAND, Checkup, Unfit
        from ablate.cli.executor import StartingExecutor
        from ablate.cli.live_view import View
        from ablate.execution.workers import ClusterError, ClusterLost

        settings = self.settings
        command = shlex.split(self.check_command) if self.check_command else COMMAND
        checkup = Checkup(command, device=settings.device)
        executor = StartingExecutor(settings, self.experiment.resources, checkup)
        outcome: Outcome | None = None
        controller = Controller(
            self.experiment,
            settings.state,
            settings.device,
            executor,
            settings.mlflow,
            options,
        )
        try:
            with (
                View(self.screen, self.quiet).open() as view,
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
                        self._notify_failure(step)
        except ClusterLost as error:
            self.screen.print(
                f"{redact(str(error), settings.ray)}. Nothing is lost: the same command goes on.",
                soft_wrap=True,
                markup=False,
            )
            return "stopped"
        except ClusterError as error:
            raise InputError([redact(str(error), settings.ray)]) from None
        except Unfit as error:
            print(error, file=sys.stderr)
            return "failed"
        if outcome is None:
            raise RuntimeError("the controller ended without an outcome")
        reused = f", {outcome.reused} already done" if outcome.reused else ""
        failed = f", {outcome.failed} failed" if outcome.failed else ""
        self.screen.print(f"{outcome.ran} trials run{reused}{failed} in {duration(outcome.seconds)}")
        self.screen.print(*([outcome.why, ""] if outcome.why else []), soft_wrap=True, markup=False)
        if outcome.ran or outcome.reused or not outcome.cause:
            _print_answer(self.experiment, settings, self.screen)
            self._print_next_steps()
        for line in filter(None, (outcome.diverged, outcome.cause)):
            self.screen.print(Text(line, "red"), soft_wrap=True)
        return outcome.status

    def _print_next_steps(self) -> None:
        """Write the report unless it is up to date; print its path and the command that shows the sweep."""
        settings, name = self.settings, self.experiment.name
        index = settings.state / "reports" / name / "index.html"
        from ablate.cli.report import is_current, make
        from ablate.reports.notebooks import NotebookError

        if self.report and not is_current(settings.state, name):
            try:
                with self.screen.status("Writing the report"):
                    made = make(settings.state, name, mlflow=settings.mlflow)
                if made.trouble:
                    self.screen.print(made.trouble, soft_wrap=True, markup=False)
            except (NotebookError, InputError) as error:
                remedy = f"The results are safe; `ablate report {name}` tries again."
                message = f"The report was not written: {error}. {remedy}"
                self.screen.print(message, soft_wrap=True, markup=False)
        option = _state_option(settings)
        self.screen.print("Look next:", style="bold")
        for line in ([str(index)] if index.exists() else []) + [f"{program('ablate')} ui {name}{option}"]:
            self.screen.print(f"  {line}", soft_wrap=True, markup=False)

    def _notify_failure(self, progress: Progress) -> None:
        """Send a notification of the first failure, and print errors of the notification hook."""
        if progress.failed and not self.failed:
            self._notify("trial failed", "running")
        self.failed = progress.failed
        for line in self.hook.troubles() if self.hook else ():
            self.screen.print(line, soft_wrap=True, markup=False)

    def _notify(self, event: str, status: str) -> None:
        if self.hook:
            self.hook.tell(
                _message(self.experiment, self.settings, event, status, time.time() - self.started)
            )


def _message(
    experiment: Experiment, settings: Settings, event: str, status: str, seconds: float
) -> dict[str, Json]:
    """Return the content of a notification; `text` is the summary that a chat shows."""
    content: dict[str, Json] = {
        "event": event,
        "sweep": experiment.name,
        "question": experiment.question,
        "status": status,
        "seconds": round(seconds, 1),
    }
    path = settings.state / "sweeps" / experiment.name / "ledger.db"
    if not path.exists():
        return content | {"counts": {}, "failures": [], "table": "", "text": f"{experiment.name}: {status}"}
    ledger = Ledger(path, readonly=True)
    trials = {member.id: member for member in ledger.members()}
    counts = Counter(member.status for member in trials.values())
    failures = [
        f"{m.name} seed={m.seed}: {m.reason}" for m in trials.values() if m.status in ("failed", "oom")
    ]
    table = summary_of(ledger)
    ledger.close()
    listed = ", ".join(f"{number} {name}" for name, number in counts.items())
    text = (
        f"{experiment.name}: {event if status == 'running' else status} after {duration(seconds)}: {listed}"
    )
    return content | {"counts": dict(counts), "failures": [*failures], "table": table, "text": text}


# One run in a process that outlives the terminal


def _detach(
    file: Path, folder: Path, settings: Settings, options: RunOptions, report: bool, seeds: int | None
) -> int:
    """Start the same sweep in a new session, wait until it has its lock and a sound ledger, and return the
    exit status.

    If the process ends before that, print its output and return its exit status.
    """
    if running := holder(folder):
        raise _sweep_busy(file, str(running))
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "console.txt"
    begun, ready = os.pipe()
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *_command(file, settings, options),
                *([] if report else ["--no-report"]),
                *(["--seeds", str(seeds)] if seeds else []),
                *("--ready", str(ready)),
            ],
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
    option = _state_option(settings)
    for line in (
        f"ablate status {folder.name}{option} --watch",
        f"tail -f {log}",
        f"ablate stop {folder.name}{option}",
    ):
        screen.print(f"  {line}", soft_wrap=True, markup=False)
    return DONE


def _state_option(settings: Settings) -> str:
    """Return the option that names the state folder, or nothing if it is the default."""
    return "" if settings.origins["state"] == "default" else f" --state {settings.state}"


def _command(file: Path, settings: Settings, options: RunOptions) -> list[str]:
    """Return the command of a detached sweep.

    Addresses are passed in its environment, since every user of a machine can list the arguments of a
    process.
    """
    command = [
        *own_command("ablate.sweep", str(file)),
        "--executor",
        settings.executor,
        "--device",
        settings.device,
    ]
    command += ["--workers", str(settings.workers)] if settings.workers else []
    command += ["--price", str(settings.price)] if settings.price else []
    command += ["--priority", str(settings.priority)] if settings.priority else []
    command += [] if options.fork else ["--no-fork"]
    command += ["--fresh"] if options.fresh else []
    return command + (["--accept-version"] if options.accept_version else [])


# The answer


def _print_answer(experiment: Experiment, settings: Settings, screen: Console) -> None:
    """Print the answer and what to do next, the table of arms, the effect of each knob, and how to read
    them.
    """
    from ablate.cli.live_view import MOST_CONTRASTS, contrast_table, replication_table, summary_table
    from ablate.reports.table_notes import emulated
    from ablate.results.comparisons import Comparisons
    from ablate.results.contrasts import contrasts
    from ablate.results.headline import headline_of
    from ablate.results.published import replications
    from ablate.results.summary import summaries

    # Not compared with its seals: this process wrote it, and compared all that was there before.
    ledger = Ledger(settings.state / "sweeps" / experiment.name / "ledger.db", readonly=True)
    compared = Comparisons(ledger)
    for metric in experiment.metrics:
        main = metric == compared.metric
        arms = [*compared.arms] if main else summaries(ledger, metric)
        if experiment.search:
            sign = 1 if metric.direction == "minimize" else -1
            arms.sort(key=lambda arm: (arm.baseline is not None, not arm.values, sign * arm.mean))
        screen.print(summary_table(arms, metric, screen.width), "")
        found = compared.contrasts if main else contrasts(arms, metric, MOST_CONTRASTS)
        table = contrast_table(found, screen.width)
        if table and len(found) <= MOST_CONTRASTS:
            screen.print(table, "")
    if experiment.published:
        screen.print(replication_table(replications(ledger, experiment.published)), "")
    if came := _width_that_came(experiment, settings, arms):
        screen.print(Text(came))
    screen.print(how_to_read(experiment, arms), emulated(ledger))
    for line in never_began(ledger):
        screen.print(Text(line.replace("**", "")))
    screen.print("")
    print_headline(headline_of(compared), screen, _state_option(settings))
    ledger.close()


def print_headline(answer: "Headline", screen: Console, state_option: str = "") -> None:
    """Print question, answer, checks that did not pass, and the command that settles it.

    Args:
        answer: the sweep's answer.
        screen: the terminal.
        state_option: option that the command needs for this state folder.
    """
    style = "green" if answer.answered else "red" if not answer.valid else "yellow"
    screen.print(Text(answer.question, "bold"))
    screen.print(Text.assemble((answer.lead, f"bold {style}"), " " if answer.lead else "", answer.text))
    for remark in answer.checks:
        if remark.kind in ("warning", "failed"):
            screen.print(Text(f"{'Failed' if remark.kind == 'failed' else 'Mind'}: {remark.text}.", "yellow"))
    if answer.simplest:
        screen.print(Text(answer.simplest))
    if answer.command:
        screen.print(Text(f"{answer.cost[0].upper()}{answer.cost[1:]}:"))
        screen.print(f"  {answer.command}{state_option}", soft_wrap=True, markup=False)
    elif answer.settling:
        screen.print(Text(answer.settling.text))


def _width_that_came(experiment: Experiment, settings: Settings, arms: "list[ArmSummary]") -> str:
    """Return the half-width that a calibration expected beside the one that came; empty without a
    calibration.
    """
    if not (expected := expected_width(experiment, settings.state)):
        return ""
    widths = [
        arm.gap.high - arm.gap.mean for arm in arms if arm.gap and arm.gap.has_interval and arm.role != "null"
    ]
    return (
        f"Half-width: {median(widths):.2g} came (median of the arms), expected was {expected}."
        if widths
        else ""
    )


def how_to_read(experiment: Experiment, arms: "list[ArmSummary]") -> str:
    """Return a few sentences that explain the table."""
    from ablate.reports.table_notes import reading
    from ablate.results.forked import estimand

    facts = experiment.base.config.summary() if experiment.metric.name == "val/loss" else {}
    floors = [_FLOORS[name].format(value) for name, value in facts.items() if name in _FLOORS]
    meaning = [estimand(experiment.design, arms)] if experiment.design else []
    return " ".join((*meaning, reading(arms), *floors))
