"""`ablate sweep X.yaml`: run an experiment, whatever of it is missing, and answer its question."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from ablate.cli.common import (
    BAD_INPUT,
    BUDGET,
    DONE,
    FAILED,
    INTERRUPTED,
    Device,
    Mlflow,
    Profile,
    State,
    console,
    duration,
    interruption,
    print_starting,
    program,
    raise_on_sigterm,
)
from ablate.cli.plan import remarks, show
from ablate.cli.settings import Settings, find_settings, writable
from ablate.errors import InputError, redact
from ablate.execution.controller import Controller
from ablate.execution.notify import Hook
from ablate.execution.progress import Outcome, Wishes
from ablate.execution.sweep_control import check, holder
from ablate.execution.tracking import knock
from ablate.experiment.load import Experiment, load
from ablate.experiment.schema import Resources
from ablate.files import Busy, lock
from ablate.results.databases import network_file_system
from ablate.results.unmet_phases import never_began

_EXIT = {"done": DONE, "failed": FAILED, "budget": BUDGET, "stopped": INTERRUPTED, "disk": FAILED}
_WHERE = "Where"
_FLOORS = {
    "data/unigram_entropy": "A model that ignores context reaches {:.2f}.",
    "data/blank_loss": "With the file's own masks, who guesses the mean of what is visible reaches {:.2f}.",
}
"""What a fact of the data says beside a table of losses."""


def sweep(
    file: Annotated[Path, typer.Argument(help="The experiment, a YAML file.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, and what it would cost; run nothing.")
    ] = False,
    fork: Annotated[bool, typer.Option(help="Run what trials have in common from the start once.")] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run everything again, what is finished too.")
    ] = False,
    accept_version: Annotated[
        bool,
        typer.Option(
            "--accept-version", help="Run all of a sweep anew that was begun with other versions of the code."
        ),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Go on after this terminal is closed; `ablate status` shows how it goes."
        ),
    ] = False,
    notify: Annotated[
        str | None,
        typer.Option(
            help="A command (JSON on its standard input) or a URL (POST) told of the first failure and the end. (ABLATE_NOTIFY)"
        ),
    ] = None,
    state: State = None,
    profile: Profile = None,
    executor: Annotated[
        Literal["ray", "inline"] | None,
        typer.Option(
            help="ray: parallel, the default; inline: one by one in this process.", rich_help_panel=_WHERE
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="An existing Ray cluster: auto, host:port, ray://...; local: started here, the default. (ABLATE_RAY_ADDRESS)",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Trials at once; default: one a core, or one a GPU.", rich_help_panel=_WHERE
        ),
    ] = None,
    device: Device = None,
    price: Annotated[
        float | None,
        typer.Option(
            min=0, help="Of an hour of one worker, for `budget: {cost: ...}`.", rich_help_panel=_WHERE
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            help="Among the sweeps on a Ray cluster: higher first, equals share.", rich_help_panel=_WHERE
        ),
    ] = None,
    mlflow: Mlflow = None,
    shared_state: Annotated[
        bool | None,
        typer.Option(
            "--shared-state",
            help="Let others read the state folder, as the umask allows; default: this user alone. (ABLATE_SHARED_STATE)",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            envvar="ABLATE_REPORT", show_envvar=False, help="Make the report at the end. (ABLATE_REPORT)"
        ),
    ] = True,
) -> None:
    """Run an experiment: do what is missing, reuse what is done, and answer its question.

    Ctrl-C ends it cleanly; the same command goes on. Exit status: 0 all done, 1 some trials failed, 2 bad
    input, 3 budget reached, 130 interrupted, 143 ended by SIGTERM.
    """
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
    print_starting(f"reading {file} and its data", quiet=not sys.stderr.isatty())
    experiment = load(file, settings.device)
    if dry_run:
        show(experiment, settings)
        return
    if experiment.budget.cost is not None and settings.price is None:
        raise InputError(
            [
                f"{file}: budget.cost: what an hour of a worker costs is not known; say it with --price, or in a profile"
            ]
        )
    notes = writable(settings.state, settings.shared_state)
    knock(settings.mlflow)
    folder = settings.state / "sweeps" / experiment.name
    hook = Hook(settings.notify) if settings.notify else None
    wishes = Wishes(fork, fresh, accept_version, settings.price)
    if detach:
        raise typer.Exit(_detach(file, folder, settings, wishes, report))
    try:
        with lock(folder / "lock", wait=False), raise_on_sigterm():
            check(folder, str(file))
            workers_too = "" if settings.executor == "inline" else ", Ray and its workers"
            print_starting(
                f"reading what is done; if trials are missing, torch, a check of the numerics{workers_too}"
            )
            raise typer.Exit(_Run(experiment, settings, hook, report).run(wishes, [notes] if notes else []))
    except Busy as busy:
        raise _busy(file, str(busy)) from None


def _busy(file: Path, who: str) -> InputError:
    return InputError(
        [f"{file}: another process ({who}) runs this sweep; wait for it, or use another --state"]
    )


# One run in this process


class _Run:
    """A sweep on the screen: its progress, its answer, and what its hook is told."""

    def __init__(self, experiment: Experiment, settings: Settings, hook: Hook | None, report: bool) -> None:
        self.experiment, self.settings, self.hook, self.report = experiment, settings, hook, report
        self.screen = console()
        self.started = time.time()
        self.failed = 0

    def run(self, wishes: Wishes, notes: Sequence[str] = ()) -> int:
        """Run it to its end, however that comes, and say so, after notes on the state folder; the exit
        status.
        """
        status = "failed"
        try:
            self.screen.print(Text(self.experiment.question, "bold"))
            kind = network_file_system(self.settings.state)
            safe = f"the state folder is on a network file system ({kind}): databases take the slower, safe journal (docs/cluster.md)"
            for remark in (*notes, *([safe] if kind else []), *remarks(self.experiment)):
                self.screen.print(f"Note: {remark}", soft_wrap=True, markup=False)
            status = self._steps(wishes)
            return _EXIT[status]
        except KeyboardInterrupt as error:
            status = "interrupted"
            code, what = interruption(error)
            self.screen.print(f"{what}. Nothing is lost: the same command goes on.")
            return code
        finally:
            self._tell("ended", status)
            for line in self.hook.close() if self.hook else ():
                self.screen.print(line, soft_wrap=True, markup=False)

    def _steps(self, wishes: Wishes) -> str:
        from ablate.cli.doctor import Checkup, Unfit
        from ablate.cli.live_view import View
        from ablate.execution.workers import ClusterError, ClusterLost

        checkup = Checkup()
        settings, outcome = self.settings, None
        controller = Controller(
            self.experiment,
            settings.state,
            settings.device,
            partial(_connect, settings, self.experiment.resources, checkup),
            settings.mlflow,
            wishes,
        )
        try:
            with View(self.screen).open() as view, closing(controller.run()) as steps, closing(checkup):
                for step in steps:
                    if isinstance(step, Outcome):
                        outcome = step
                    else:
                        if step.done < step.total:
                            checkup.start()  # beside the imports that come next, and Ray
                        view.show(step)
                        self._watch(step)
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
        reused = f", {outcome.reused} already done" if outcome.reused else ""
        failed = f", {outcome.failed} failed" if outcome.failed else ""
        self.screen.print(f"{outcome.ran} trials run{reused}{failed} in {duration(outcome.seconds)}")
        self.screen.print(
            outcome.why, "", soft_wrap=True, markup=False
        ) if outcome.why else self.screen.print()
        _answer(self.experiment, settings, self.screen)
        self._look_next()
        return outcome.status

    def _look_next(self) -> None:
        """Make the report, unless it shows all there is already, and say where everything is."""
        settings, name = self.settings, self.experiment.name
        index = settings.state / "reports" / name / "index.html"
        from ablate.cli.report import ReportError, is_current, make

        if self.report and not is_current(settings.state, name):
            try:
                with self.screen.status("Making the report"):
                    made = make(settings.state, name, mlflow=settings.mlflow)
                if made.trouble:
                    self.screen.print(made.trouble, soft_wrap=True, markup=False)
            except (ReportError, InputError) as error:
                said = f"The report was not made: {error}. The runs are safe; `ablate report {name}` tries again."
                self.screen.print(said, soft_wrap=True, markup=False)
        given = "" if settings.origins["state"] == "default" else f" --state {settings.state}"
        self.screen.print("Look next:", style="bold")
        for line in ([str(index)] if index.exists() else []) + [f"{program('ablate')} ui {name}{given}"]:
            self.screen.print(f"  {line}", soft_wrap=True, markup=False)

    def _watch(self, progress: Any) -> None:
        """Tell the hook of the first failure, and the screen what is wrong with the hook."""
        if progress.failed and not self.failed:
            self._tell("trial failed", "running")
        self.failed = progress.failed
        for line in self.hook.troubles() if self.hook else ():
            self.screen.print(line, soft_wrap=True, markup=False)

    def _tell(self, event: str, status: str) -> None:
        if self.hook:
            self.hook.tell(
                _message(self.experiment, self.settings, event, status, time.time() - self.started)
            )


def _connect(settings: Settings, resources: Resources, checkup: Any) -> Any:
    """The executor, started once a trial has to run, which it does on numerics that were found to be sound."""
    from ablate.execution.workers import Inline, Pool

    checkup.start()
    inline = settings.executor == "inline"
    gpus, ranks = resources.gpus_of(settings.device), resources.layout(settings.device).ranks
    if inline and ranks > 1:
        console().print(
            f"Executor inline computes each trial by one rank, not {ranks}: the same numbers, but for the order of additions."
        )
    pool = Inline() if inline else Pool(settings.ray, settings.workers, gpus, settings.priority, ranks)
    try:
        checkup.passed()
    except BaseException:
        pool.close()
        raise
    return pool


def _message(
    experiment: Experiment, settings: Settings, event: str, status: str, seconds: float
) -> dict[str, Any]:
    """What a hook is told; `text` is what a chat shows of it."""
    from ablate.results.markdown_summary import summary_markdown
    from ablate.results.summary import open_ledger

    told = {
        "event": event,
        "sweep": experiment.name,
        "question": experiment.question,
        "status": status,
        "seconds": round(seconds, 1),
    }
    try:
        ledger = open_ledger(settings.state, experiment.name)
    except FileNotFoundError:
        return told | {"counts": {}, "failures": [], "table": "", "text": f"{experiment.name}: {status}"}
    trials = {member["id"]: member for member in ledger.members()}
    counts = Counter(member["status"] for member in trials.values())
    failures = [
        f"{m['name']} seed={m['seed']}: {m['reason']}"
        for m in trials.values()
        if m["status"] in ("failed", "oom")
    ]
    table = summary_markdown(ledger)
    ledger.close()
    listed = ", ".join(f"{number} {name}" for name, number in counts.items())
    text = (
        f"{experiment.name}: {event if status == 'running' else status} after {duration(seconds)}: {listed}"
    )
    return told | {"counts": dict(counts), "failures": failures, "table": table, "text": text}


# One run in a process that outlives the terminal


def _detach(file: Path, folder: Path, settings: Settings, wishes: Wishes, report: bool) -> int:
    """Start the same sweep in a session of its own, and see it begin; the exit status of one that ended at
    once.
    """
    who = holder(folder)
    if who:
        raise _busy(file, str(who))
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "console.txt"
    with written.open("w") as output:
        process = subprocess.Popen(
            [*_words(file, settings, wishes), *([] if report else ["--no-report"])],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | settings.environment(),
        )
    while process.poll() is None and not ((who := holder(folder)) and who.pid == process.pid):
        time.sleep(0.05)
    if process.returncode is not None:
        print(written.read_text(), end="", file=sys.stderr if process.returncode == BAD_INPUT else sys.stdout)
        return process.returncode
    screen = console()
    goes_on = f" goes on without this terminal: pid {process.pid}, state folder {settings.state}."
    screen.print(Text.assemble((folder.name, "bold"), goes_on))
    screen.print("Follow it:", style="bold")
    given = "" if settings.origins["state"] == "default" else f" --state {settings.state}"
    for line in (
        f"ablate status {folder.name}{given} --watch",
        f"tail -f {written}",
        f"ablate stop {folder.name}{given}",
    ):
        screen.print(f"  {line}", soft_wrap=True, markup=False)
    return DONE


def _words(file: Path, settings: Settings, wishes: Wishes) -> list[str]:
    """The command of a detached sweep. Addresses come to it in its environment, since anyone may list the
    words of a process.
    """
    words = [
        sys.executable,
        "-m",
        "ablate.sweep",
        str(file),
        "--executor",
        settings.executor,
        "--device",
        settings.device,
    ]
    words += ["--workers", str(settings.workers)] if settings.workers else []
    words += ["--price", str(settings.price)] if settings.price else []
    words += ["--priority", str(settings.priority)] if settings.priority else []
    words += [] if wishes.fork else ["--no-fork"]
    words += ["--fresh"] if wishes.fresh else []
    return words + (["--accept-version"] if wishes.accept_version else [])


# What it found


def _answer(experiment: Experiment, settings: Settings, screen: Console) -> None:
    """The table, and what turning each knob did."""
    from ablate.cli.live_view import MOST_CONTRASTS, contrast_table, replication_table, summary_table
    from ablate.results.published import replications
    from ablate.results.summary import contrasts, emulated, open_ledger, summaries

    ledger = open_ledger(settings.state, experiment.name)
    for metric in experiment.metrics:
        arms = summaries(ledger, metric)
        if experiment.search:
            sign = 1 if metric.direction == "minimize" else -1
            arms.sort(key=lambda arm: (arm.baseline is not None, not arm.values, sign * arm.mean))
        screen.print(summary_table(arms, metric, screen.width), "")
        table = contrast_table(contrasts(arms, metric, MOST_CONTRASTS), screen.width)
        if table:
            screen.print(table, "")
    if experiment.published:
        screen.print(replication_table(replications(ledger, experiment.published)), "")
    screen.print(_reading(experiment, arms), emulated(ledger))
    for line in never_began(ledger):
        screen.print(Text(line.replace("**", "")))
    ledger.close()


def _reading(experiment: Experiment, arms: list) -> str:
    """How to read the table, in a few sentences."""
    from ablate.results.summary import reading

    facts = experiment.base.config.summary() if experiment.metric.name == "val/loss" else {}
    floors = [_FLOORS[name].format(value) for name, value in facts.items() if name in _FLOORS]
    return " ".join((reading(arms), *floors))
