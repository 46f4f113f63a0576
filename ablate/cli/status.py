"""`ablate status`: what every sweep is doing, read from its ledger and its lock. Changes nothing, blocks
nothing, imports no torch.
"""

import json
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ablate.cli.common import DONE, FAILED, Json, Profile, State, Sweeps, console, duration
from ablate.cli.settings import find_settings
from ablate.errors import InputError, one_line
from ablate.execution.sweep_control import changed, damage, folders, holder, refusal
from ablate.execution.tracking import behind
from ablate.files import Holder
from ablate.results.ledger import Ledger
from ablate.results.ledger_progress import Attempt, last_attempt, pace, running_attempts
from ablate.results.trial_store import Store
from ablate.results.verify import Mismatch, Verified, verify
from ablate.training.workloads import WORKLOADS

_REFRESH_SECONDS = 2.0
_LOG_LINES = 5
_MOST_FAILURES = 5
_MOST_RUNNING = 64


@dataclass(frozen=True)
class Flight:
    """A trial that runs."""

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
    """Seconds since its last record, or since it started."""
    seconds_left: float | None


@dataclass(frozen=True)
class Failure:
    """A trial that ended without a result."""

    arm: str
    seed: int
    trial: str
    status: str
    reason: str
    log: list[str]


@dataclass(frozen=True)
class Status:
    """One sweep at one moment. `controller` None: nobody runs it; `trouble`: why nothing more can be said."""

    name: str
    question: str = ""
    controller: str | None = None
    trials: dict[str, int] = field(default_factory=dict)
    """How many are in which status."""
    running: list[Flight] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds_left: float | None = None
    mlflow_behind: int | None = None
    """Records that MLflow does not have; None where this sweep is not drawn there."""
    quiet_s: float | None = None
    """Seconds since the ledger last changed."""
    trouble: str | None = None

    @property
    def total(self) -> int:
        """Trials wanted."""
        return sum(self.trials.values())

    @property
    def over(self) -> int:
        """Trials that need not run any more, for now."""
        return self.total - self.trials.get("pending", 0) - self.trials.get("running", 0)


def status(
    sweeps: Sweeps = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep it up to date until Ctrl-C.")] = False,
    verified: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compare every record with the trials' own files instead; status 1 where one differs.",
        ),
    ] = False,
    as_json: Json = False,
    state: State = None,
    profile: Profile = None,
) -> None:
    """Say what every sweep is doing: what runs where, how fast, how long still, what failed and why. Changes
    nothing.
    """
    settings, screen = find_settings(profile, state=state), console()
    known = folders(settings.state, sweeps)
    if verified:
        raise typer.Exit(_verify(known, settings.state, as_json))
    if as_json:
        print(json.dumps([_document(found) for found in _all(known, settings.state)], indent=1))
    elif watch:
        _watch(screen, settings.state, sweeps)
    else:
        screen.print(_page(_all(known, settings.state), bool(sweeps), settings.state))


def _verify(known: Iterable[Path], state: Path, as_json: bool) -> int:
    """Compare sweeps with their trials' folders and print what was found; returns the exit status."""
    found = {folder.name: _compared(folder, state) for folder in known}
    if as_json:
        print(json.dumps([{"name": name, **asdict(one)} for name, one in found.items()], indent=1))
    else:
        for name, one in found.items():
            print(f"{name}: {one.sentence}")
            for mismatch in one.mismatches:
                print(f"  {mismatch}")
        if not found:
            print(f"No sweep has been run in {state}.")
    return FAILED if any(one.mismatches for one in found.values()) else DONE


def _compared(folder: Path, state: Path) -> Verified:
    """One sweep compared with its trials' folders. What cannot even be read is a mismatch of the ledger."""
    path, why = folder / "ledger.db", None
    try:
        why = damage(path)
        if not why:
            ledger = Ledger(path, readonly=True)
            try:
                return verify(ledger, Store(state))
            finally:
                ledger.close()
    except (sqlite3.DatabaseError, InputError) as error:
        why = str(error).removeprefix(f"{path}: ")
    remedy = f"`ablate rebuild {folder.name}.yaml` makes it again from the trial folders"
    return Verified(0, 0, 0, 0, False, (Mismatch("", str(path), f"{path}: {why}", remedy),))


def _watch(screen: Console, state: Path, sweeps: list[str] | None) -> None:
    try:
        with Live(console=screen, auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                live.update(_page(_all(folders(state, sweeps), state), bool(sweeps), state), refresh=True)
                time.sleep(_REFRESH_SECONDS)
    except KeyboardInterrupt:
        return


def _document(found: Status) -> dict[str, Any]:
    return asdict(found) | {"total": found.total, "over": found.over}


def _all(known: Iterable[Path], state: Path) -> list[Status]:
    """Every sweep's status: those that run first, then those that changed last."""
    found = [read(folder, Store(state)) for folder in known]
    return sorted(found, key=lambda one: (one.controller is None, one.quiet_s or 0.0))


# Reading


def read(folder: Path, store: Store) -> Status:
    """One sweep's status, from its ledger and its lock."""
    found = holder(folder)
    who = found and str(found)
    try:
        ledger = Ledger(folder / "ledger.db", readonly=True)
        try:
            return _read(folder, ledger, store, who)
        finally:
            ledger.close()
    except sqlite3.OperationalError as error:  # made, but not yet filled; or not to be read
        return Status(
            folder.name, controller=who, trouble="begins" if "no such table" in str(error) else str(error)
        )
    except (
        sqlite3.DatabaseError,
        ValueError,
        TypeError,
        KeyError,
    ) as error:  # a page, or a cell that does not hold what it is for
        return Status(folder.name, controller=who, trouble=refusal(folder, str(error), f"{folder.name}.yaml"))


def _read(folder: Path, ledger: Ledger, store: Store, who: str | None) -> Status:
    now = time.time()
    members = {member["trial"]: member for member in reversed(ledger.members())}
    attempts = running_attempts(ledger) if who else {}
    flights = [
        _flight(ledger, store, member, attempts[trial], now)
        for trial, member in members.items()
        if trial in attempts
    ]
    failed = [member for member in members.values() if member["status"] in ("failed", "oom", "stopped")]
    counts = Counter(member["status"] for member in members.values())
    return Status(
        name=folder.name,
        question=ledger.fact("question") or "",
        controller=who,
        trials=dict(counts),
        running=sorted(flights, key=lambda flight: (flight.seed, flight.arm)),
        failures=[_failure(ledger, store, member) for member in reversed(failed)],
        seconds_left=_seconds_left(ledger, now) if who else None,
        mlflow_behind=behind(ledger) if ledger.fact("mlflow") else None,
        quiet_s=max(0.0, now - changed(folder)),
    )


def _flight(ledger: Ledger, store: Store, member: Any, attempt: Attempt, now: float) -> Flight:
    ((workload, config),) = json.loads(member["spec"])["workload"].items()
    steps = WORKLOADS[workload].model_validate_json(json.dumps(config)).steps
    its = pace(ledger, member["trial"], attempt.started)
    last = ledger.last_record(member["trial"], "throughput/tokens_per_s")
    tokens = None if last is None or math.isnan(last[1]) else last[1]
    left = (steps - its.step) / its.steps_per_s if its.steps_per_s else None
    silent = max(0.0, now - max(its.moment, attempt.started))
    where = _where(store.folder(member["id"]) / "lock")
    names = member["name"], member["seed"], member["id"]
    return Flight(*names, attempt.attempt, where, its.step, steps, its.steps_per_s, tokens, silent, left)


def _where(lock: Path) -> str:
    """Return the process that holds the trial, as its lock says."""
    found = Holder.parse(lock.read_text()) if lock.exists() else None
    return found.process if found else ""


def _failure(ledger: Ledger, store: Store, member: Any) -> Failure:
    attempt = last_attempt(ledger, member["trial"])
    reason = member["reason"] or ""
    log = (
        store.log_tail(member["id"], attempt or 1, _LOG_LINES + 1).splitlines()
        if member["status"] != "stopped"
        else []
    )
    kept = log[:-1] if log and log[-1] == reason else log[-_LOG_LINES:]  # most reasons are the last line
    return Failure(member["name"], member["seed"], member["id"], member["status"], reason, kept)


def _seconds_left(ledger: Ledger, now: float) -> float | None:
    """The controller's own estimate, less the time since; None while it has none, or is of an earlier
    version.
    """
    at, seconds = json.loads(ledger.fact("left") or "[0, null]")
    return None if seconds is None else max(0.0, seconds - (now - at))


# Drawing

_COLOURS = {
    "done": "green",
    "diverged": "yellow",
    "failed": "red",
    "oom": "red",
    "running": "cyan",
    "pending": "dim",
}
_WORDS = {"pending": "waiting", "oom": "out of memory"}


def _page(found: list[Status], named: bool, state: Path) -> Group:
    if not found:
        return Group(Text(f"No sweep has been run in {state}."))
    whole = [one for one in found if named or one.controller or len(found) == 1]
    rest = [one for one in found if one not in whole]
    parts: list[Any] = [part for one in whole for part in (*_sweep(one), "")]
    troubled = [Text.assemble((f"{one.name}  ", "bold"), (one.trouble, "red")) for one in rest if one.trouble]
    sound = [one for one in rest if not one.trouble]
    parts += [_others(sound), ""] if sound else []
    return Group(*(parts + troubled if troubled else parts[:-1]))


def _sweep(one: Status) -> list[Any]:
    """Everything about one sweep."""
    head = Text.assemble((one.name, "bold"), "  ", (one.question, "dim"))
    if one.trouble:
        return [head, Text(one.trouble, "red")]
    bar = Table.grid(padding=(0, 2, 0, 0))
    bar.add_row(
        ProgressBar(total=max(1, one.total), completed=one.over, width=40),
        Text(f"{one.over} of {one.total} trials"),
        _counts(one),
    )
    parts = [head, _state(one), bar]
    parts += ["", _flights(one.running)] if one.running else []
    parts += ["", *_failures(one.failures)] if one.failures else []
    return parts


def _state(one: Status) -> Text:
    """Who runs it, how long still, and whether MLflow keeps up."""
    if one.controller:
        text = Text.assemble(("● ", "green"), f"runs ({one.controller})")
        text.append(f", about {duration(one.seconds_left)} left" if one.seconds_left is not None else "")
    elif one.over < one.total:
        text = Text.assemble(
            ("○ ", "yellow"),
            f"nobody runs it; last change {duration(one.quiet_s)} ago; the same command goes on",
        )
    else:
        text = Text.assemble(("○ ", "dim"), f"over; last change {duration(one.quiet_s)} ago")
    if one.mlflow_behind:
        hint = "" if one.controller else f"; `ablate sync {one.name}` ships them"
        text.append(f"; MLflow {one.mlflow_behind:,} records behind{hint}", "yellow")
    return text


def _counts(one: Status) -> Text:
    counts = dict(one.trials)
    if not one.controller:  # what its controller left behind waits
        counts["pending"] = counts.get("pending", 0) + counts.pop("running", 0)
    ordered = sorted(
        (name for name, number in counts.items() if number), key=lambda name: (*_COLOURS, name).index(name)
    )
    return Text(", ").join(
        Text(f"{counts[name]} {_WORDS.get(name, name)}", _COLOURS.get(name, "")) for name in ordered
    )


def _flights(flights: list[Flight]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("running", "seed", "try", "step", "", "steps/s", "tokens/s", "left", "last record", "where"):
        table.add_column(
            name,
            justify="right"
            if name in ("seed", "try", "step", "steps/s", "tokens/s", "left", "last record")
            else "left",
        )
    for one in flights[:_MOST_RUNNING]:
        table.add_row(
            Text(one_line(one.arm)),
            str(one.seed),
            str(one.attempt),
            f"{one.step}/{one.steps}",
            ProgressBar(total=one.steps, completed=one.step, width=16),
            f"{one.steps_per_s:.3g}" if one.steps_per_s else "-",
            f"{one.tokens_per_s:,.0f}" if one.tokens_per_s else "-",
            "-" if one.seconds_left is None else duration(one.seconds_left),
            f"{duration(one.silent_s)} ago" if one.step else f"none for {duration(one.silent_s)}",
            Text(one.where, "dim"),
        )
    if len(flights) > _MOST_RUNNING:
        table.add_row(f"and {len(flights) - _MOST_RUNNING} more")
    return table


def _failures(failures: list[Failure]) -> list[Text]:
    lines = []
    for one in failures[:_MOST_FAILURES]:
        word = _WORDS.get(one.status, one.status)
        reason = one.reason if one.reason.startswith(word) else f"{word}: {one.reason}"
        lines.append(
            Text.assemble(
                (f"{one_line(one.arm)} seed={one.seed}  ", "bold"), (reason, "red"), (f"  {one.trial}", "dim")
            )
        )
        lines += [Text(f"    {line}", "dim") for line in one.log]
    more = len(failures) - _MOST_FAILURES
    return lines + (
        [Text(f"and {more} more; `ablate status --json` has them all", "dim")] if more > 0 else []
    )


def _others(rest: list[Status]) -> Table:
    """The sweeps that nobody runs, a line each."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("not running", "trials", "", "MLflow", "last change"):
        table.add_column(name)
    for one in rest:
        behind_ = (
            "-"
            if one.mlflow_behind is None
            else f"{one.mlflow_behind:,} behind"
            if one.mlflow_behind
            else "complete"
        )
        table.add_row(
            Text(one.name), f"{one.over}/{one.total}", _counts(one), behind_, f"{duration(one.quiet_s)} ago"
        )
    return table
