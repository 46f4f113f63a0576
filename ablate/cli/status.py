"""`ablate status`: progress of every sweep, from its ledger and its lock. Read-only, without torch."""

import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ablate.cli.common import DONE, FAILED, console
from ablate.cli.options import Flags, JsonOption, Sweeps
from ablate.cli.settings import Settings
from ablate.errors import InputError, one_line
from ablate.execution.sweep_control import changed, damage, folders, holder
from ablate.execution.tracking import behind
from ablate.files import Holder
from ablate.reports.plain_text import duration
from ablate.reports.report_about import current
from ablate.store.checked_ledger import absent, refusal
from ablate.store.ledger import Ledger
from ablate.store.ledger_integrity import flaw
from ablate.store.ledger_progress import Attempt, last_attempt, pace, running_attempts
from ablate.store.ledger_rows import Member
from ablate.store.trial_store import Store
from ablate.store.verify import Mismatch, Verified, verify
from ablate.training.workloads import WORKLOADS

_REFRESH_SECONDS = 2.0
_LOG_LINES = 5
_MOST_FAILURES = 5
_MOST_RUNNING = 64


@dataclass(frozen=True)
class RunningTrialStatus:
    """A running trial and its progress."""

    arm: str
    seed: int
    trial: str
    attempt: int
    where: str
    step: int
    steps: int
    steps_per_s: float | None
    tokens_per_s: float | None
    silent_s: float
    """Seconds since the last record, or since the start."""
    seconds_left: float | None


@dataclass(frozen=True)
class Failure:
    """A trial that ended without a result, with the end of its log."""

    arm: str
    seed: int
    trial: str
    status: str
    reason: str
    log: list[str]


@dataclass(frozen=True)
class Status:
    """Progress of one sweep at one moment."""

    name: str
    question: str = ""
    controller: str | None = None
    """Process that runs the sweep; None: no process does."""
    trials: dict[str, int] = field(default_factory=dict)
    """Number of trials by status."""
    running: list[RunningTrialStatus] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds_left: float | None = None
    mlflow_behind: int | None = None
    """Records that MLflow does not have; None if the sweep is not sent to MLflow."""
    quiet_s: float | None = None
    """Seconds since the ledger last changed."""
    answer: str | None = None
    """Answer to its question, of a report that shows its present state; None without one."""
    trouble: str | None = None
    """Reason why the sweep cannot be read."""

    @property
    def total(self) -> int:
        """Number of trials that the sweep wants."""
        return sum(self.trials.values())

    @property
    def over(self) -> int:
        """Number of trials that neither run nor wait."""
        return self.total - self.trials.get("pending", 0) - self.trials.get("running", 0)


def status(
    flags: Flags,
    sweeps: Sweeps = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh the output until Ctrl-C.")] = False,
    verified: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare every record with the files of its trial instead; exit status 1 if one differs.",
        ),
    ] = False,
    as_json: JsonOption = False,
    show_settings: Annotated[
        bool, typer.Option("--settings", help="Print the settings in use instead, each with its origin.")
    ] = False,
) -> None:
    """Show the progress of every sweep: running trials, speed, time left, failures with their reasons.
    Changes nothing.
    """
    settings, screen = flags.settings(), console()
    if show_settings:
        screen.print(_table_of(settings))
        return
    selected = folders(settings.state, sweeps)
    if verified:
        raise typer.Exit(_verify(selected, settings.state, as_json))
    if as_json:
        documents = [
            asdict(sweep) | {"total": sweep.total, "over": sweep.over}
            for sweep in _all(selected, settings.state)
        ]
        print(json.dumps(documents, indent=1))
    elif watch:
        _watch(screen, settings.state, sweeps)
    else:
        screen.print(_page(_all(selected, settings.state), bool(sweeps), settings.state))


def _table_of(settings: Settings) -> Table:
    """Return the settings, each with its origin: a flag, the environment, a profile or the default."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for key, value in settings.shown().items():
        table.add_row(key, Text(value, overflow="fold"), Text(settings.origins[key], "dim"))
    return table


def _verify(sweeps: Iterable[Path], state: Path, as_json: bool) -> int:
    """Compare sweeps with the folders of their trials, print the result, and return the exit status."""
    results = {folder.name: _compare(folder, state) for folder in sweeps}
    if as_json:
        print(json.dumps([{"name": name, **asdict(result)} for name, result in results.items()], indent=1))
    else:
        for name, result in results.items():
            print(f"{name}: {result.sentence}")
            for mismatch in result.mismatches:
                print(f"  {mismatch}")
        if not results:
            print(f"No sweep has been run in {state}.")
    return FAILED if any(result.mismatches for result in results.values()) else DONE


def _compare(folder: Path, state: Path) -> Verified:
    """Compare one sweep with the folders of its trials. A ledger that cannot be read counts as a mismatch."""
    path, why = folder / "ledger.db", None
    try:
        if why := absent(path):
            raise InputError([why])
        why = damage(path)
        if not why:
            ledger = Ledger(path, readonly=True)
            try:
                return verify(ledger, Store(state))
            finally:
                ledger.close()
    except (sqlite3.DatabaseError, InputError) as error:
        why = str(error).removeprefix(f"{path}: ")
    remedy = f"`ablate rebuild {folder.name}.yaml` rebuilds it from the trial folders"
    return Verified(0, 0, 0, (Mismatch("", str(path), f"{path}: {why}", remedy),))


def _watch(screen: Console, state: Path, sweeps: list[str] | None) -> None:
    try:
        with Live(console=screen, auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                live.update(_page(_all(folders(state, sweeps), state), bool(sweeps), state), refresh=True)
                time.sleep(_REFRESH_SECONDS)
    except KeyboardInterrupt:
        return


def _all(sweeps: Iterable[Path], state: Path) -> list[Status]:
    """Return the status of every sweep: running ones first, then by the time of the last change."""
    statuses = [read(folder, Store(state)) for folder in sweeps]
    return sorted(statuses, key=lambda sweep: (sweep.controller is None, sweep.quiet_s or 0.0))


# Reading


def read(folder: Path, store: Store) -> Status:
    """Return the status of one sweep, from its ledger and its lock."""
    process, path = holder(folder), folder / "ledger.db"
    controller = str(process) if process else None
    if why := absent(path):
        return Status(folder.name, controller=controller, trouble="is starting" if process else why)
    try:
        ledger = Ledger(path, readonly=True)
        try:
            if why := flaw(ledger):
                raise sqlite3.DatabaseError(why)
            return _read(folder, ledger, store, controller)
        finally:
            ledger.close()
    except sqlite3.OperationalError as error:  # created but still empty, or unreadable
        trouble = f"{path}: cannot be read: {error}"
        if "no such table" in str(error):
            trouble = "is starting" if process else absent(path, empty=True) or trouble
        trouble = refusal(path, str(error)) if "decode" in str(error) else trouble
        return Status(folder.name, controller=controller, trouble=trouble)
    except InputError as error:
        return Status(folder.name, controller=controller, trouble=str(error))
    except (
        sqlite3.DatabaseError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ) as error:
        trouble = refusal(path, str(error))
        return Status(folder.name, controller=controller, trouble=trouble)


def _read(folder: Path, ledger: Ledger, store: Store, controller: str | None) -> Status:
    now = time.time()
    members = {member.trial: member for member in reversed(ledger.members())}
    attempts = running_attempts(ledger) if controller else {}
    running = [
        _running_trial(ledger, store, member, attempts[trial], now)
        for trial, member in members.items()
        if trial in attempts
    ]
    failed = [member for member in members.values() if member.status in ("failed", "oom", "stopped")]
    counts = Counter(member.status for member in members.values())
    return Status(
        name=folder.name,
        question=ledger.fact("question") or "",
        controller=controller,
        trials=dict(counts),
        running=sorted(running, key=lambda trial: (trial.seed, trial.arm)),
        failures=[_failure(ledger, store, member) for member in reversed(failed)],
        seconds_left=_seconds_left(ledger, now, running) if controller else None,
        mlflow_behind=behind(ledger) if ledger.fact("mlflow") else None,
        quiet_s=max(0.0, now - changed(folder)),
        answer=current(folder.parents[1] / "reports" / folder.name, ledger).get("answer"),
    )


def _running_trial(
    ledger: Ledger, store: Store, member: Member, attempt: Attempt, now: float
) -> RunningTrialStatus:
    ((workload, config),) = json.loads(member.spec)["workload"].items()
    steps = WORKLOADS[workload].model_validate_json(json.dumps(config)).steps
    speed = pace(ledger, member.trial, attempt.started)
    last = ledger.last_record(member.trial, "throughput/tokens_per_s")
    lock = store.folder(member.id) / "lock"
    process = Holder.parse(lock.read_bytes()) if lock.is_file() else None
    return RunningTrialStatus(
        arm=member.name,
        seed=member.seed,
        trial=member.id,
        attempt=attempt.attempt,
        where=process.process if process else "",
        step=speed.step,
        steps=steps,
        steps_per_s=speed.steps_per_s,
        tokens_per_s=None if last is None or math.isnan(last[1]) else last[1],
        silent_s=max(0.0, now - max(speed.moment, attempt.started)),
        seconds_left=(steps - speed.step) / speed.steps_per_s if speed.steps_per_s else None,
    )


def _failure(ledger: Ledger, store: Store, member: Member) -> Failure:
    attempt = last_attempt(ledger, member.trial)
    reason = member.reason or ""
    log = (
        store.log_tail(member.id, attempt or 1, _LOG_LINES + 1).splitlines()
        if member.status != "stopped"
        else []
    )
    # Most reasons repeat the last line of the log.
    shown = log[:-1] if log and log[-1] == reason else log[-_LOG_LINES:]
    return Failure(member.name, member.seed, member.id, member.status, reason, shown)


def _seconds_left(ledger: Ledger, now: float, running: Iterable[RunningTrialStatus]) -> float | None:
    """Return the controller's estimate less the time since then, and at least what a running trial needs.

    The controller learns from trials that ended; one that runs may be slower than they were. None while it
    has no estimate.
    """
    at, seconds = json.loads(ledger.fact("left") or "[0, null]")
    if seconds is None:
        return None
    return max(0.0, seconds - (now - at), *(trial.seconds_left or 0.0 for trial in running))


# Drawing

_COLOURS = {
    "done": "green",
    "diverged": "yellow",
    "failed": "red",
    "oom": "red",
    "running": "cyan",
    "pending": "dim",
}
_STATUS_TEXTS = {"pending": "waiting", "oom": "out of memory"}


def _page(sweeps: list[Status], named: bool, state: Path) -> Group:
    if not sweeps:
        return Group(Text(f"No sweep has been run in {state}."))
    detailed = [sweep for sweep in sweeps if named or sweep.controller or len(sweeps) == 1]
    rest = [sweep for sweep in sweeps if sweep not in detailed]
    parts: list[RenderableType] = [part for sweep in detailed for part in (*_sweep(sweep), "")]
    unreadable = [
        Text.assemble((f"{sweep.name}  ", "bold"), (sweep.trouble, "red")) for sweep in rest if sweep.trouble
    ]
    readable = [sweep for sweep in rest if not sweep.trouble]
    parts += [_others(readable), ""] if readable else []
    return Group(*([*parts, *unreadable] if unreadable else parts[:-1]))


def _sweep(sweep: Status) -> list[RenderableType]:
    """Return all lines and tables about one sweep."""
    head = Text.assemble((sweep.name, "bold"), "  ", (sweep.question, "dim"))
    if sweep.trouble:
        return [head, Text(sweep.trouble, "red")]
    bar = Table.grid(padding=(0, 2, 0, 0))
    bar.add_row(
        ProgressBar(total=max(1, sweep.total), completed=sweep.over, width=40),
        Text(f"{sweep.over} of {sweep.total} trials"),
        _counts(sweep),
    )
    parts: list[RenderableType] = [head, _state(sweep), bar]
    parts += [Text(sweep.answer)] if sweep.answer else []
    parts += ["", _running_table(sweep.running)] if sweep.running else []
    parts += ["", *_failure_lines(sweep.failures)] if sweep.failures else []
    return parts


def _state(sweep: Status) -> Text:
    """Return a line with the process that runs the sweep, the time left, and how far MLflow is behind."""
    if sweep.controller:
        text = Text.assemble(("● ", "green"), f"runs ({sweep.controller})")
        text.append(f", about {duration(sweep.seconds_left)} left" if sweep.seconds_left is not None else "")
    elif sweep.over < sweep.total:
        text = Text.assemble(
            ("○ ", "yellow"),
            f"not running; last change {duration(sweep.quiet_s or 0.0)} ago; the same command continues it",
        )
    else:
        text = Text.assemble(("○ ", "dim"), f"ended; last change {duration(sweep.quiet_s or 0.0)} ago")
    if sweep.mlflow_behind:
        hint = "" if sweep.controller else f"; `ablate sync {sweep.name}` sends them"
        text.append(f"; MLflow {sweep.mlflow_behind:,} records behind{hint}", "yellow")
    return text


def _counts(sweep: Status) -> Text:
    counts = dict(sweep.trials)
    if not sweep.controller:  # trials marked as running by a controller that died will run again
        counts["pending"] = counts.get("pending", 0) + counts.pop("running", 0)
    ordered = sorted(
        (name for name, number in counts.items() if number), key=lambda name: (*_COLOURS, name).index(name)
    )
    return Text(", ").join(
        Text(f"{counts[name]} {_STATUS_TEXTS.get(name, name)}", _COLOURS.get(name, "")) for name in ordered
    )


def _running_table(trials: list[RunningTrialStatus]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("running", "seed", "try", "step", "", "steps/s", "tokens/s", "left", "last record", "where"):
        table.add_column(
            name,
            justify="right"
            if name in ("seed", "try", "step", "steps/s", "tokens/s", "left", "last record")
            else "left",
        )
    for trial in trials[:_MOST_RUNNING]:
        table.add_row(
            Text(one_line(trial.arm)),
            str(trial.seed),
            str(trial.attempt),
            f"{trial.step}/{trial.steps}",
            ProgressBar(total=trial.steps, completed=trial.step, width=16),
            f"{trial.steps_per_s:.3g}" if trial.steps_per_s else "-",
            f"{trial.tokens_per_s:,.0f}" if trial.tokens_per_s else "-",
            "-" if trial.seconds_left is None else duration(trial.seconds_left),
            f"{duration(trial.silent_s)} ago" if trial.step else f"none for {duration(trial.silent_s)}",
            Text(trial.where, "dim"),
        )
    if len(trials) > _MOST_RUNNING:
        table.add_row(f"and {len(trials) - _MOST_RUNNING} more")
    return table


def _failure_lines(failures: list[Failure]) -> list[Text]:
    lines = []
    for failure in failures[:_MOST_FAILURES]:
        status_text = _STATUS_TEXTS.get(failure.status, failure.status)
        reason = failure.reason
        if not reason.startswith(status_text):
            reason = f"{status_text}: {reason}"
        lines.append(
            Text.assemble(
                (f"{one_line(failure.arm)} seed={failure.seed}  ", "bold"),
                (reason, "red"),
                (f"  {failure.trial}", "dim"),
            )
        )
        lines += [Text(f"    {line}", "dim") for line in failure.log]
    more = len(failures) - _MOST_FAILURES
    if more > 0:
        lines.append(Text(f"and {more} more; `ablate status --json` lists all", "dim"))
    return lines


def _others(rest: list[Status]) -> Table:
    """Return a table of the sweeps that are not running, one line each."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("not running", "trials", "", "MLflow", "last change"):
        table.add_column(name)
    for sweep in rest:
        mlflow = f"{sweep.mlflow_behind:,} behind" if sweep.mlflow_behind else "complete"
        if sweep.mlflow_behind is None:
            mlflow = "-"
        table.add_row(
            Text(sweep.name),
            f"{sweep.over}/{sweep.total}",
            _counts(sweep),
            mlflow,
            f"{duration(sweep.quiet_s or 0.0)} ago",
        )
    return table
