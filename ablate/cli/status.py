"""`ablate status`: progress of every sweep, from its ledger and its lock. Read-only, without torch."""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ablate.cli.common import DONE, FAILED, Screen, console, plain_table
from ablate.cli.options import Flags, JsonOption, Sweeps
from ablate.errors import one_line
from ablate.execution.sweep_control import compared
from ablate.execution.sweep_status import Failure, RunningTrialStatus, Status, read
from ablate.experiment.roles import CONFIRM, WINNER
from ablate.reports.plain_text import duration, time_left
from ablate.reports.report_about import current
from ablate.store.checked_ledger import folders, state_option
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

_REFRESH_SECONDS = 2.0
_MOST_FAILURES = 5
_MOST_RUNNING = 64


def status(
    flags: Flags,
    sweeps: Sweeps = None,
    watch: bool = False,
    verified: Annotated[bool, typer.Option("--verify")] = False,
    as_json: JsonOption = False,
    show_settings: Annotated[bool, typer.Option("--settings")] = False,
) -> None:
    """Show the answer of every sweep; of one that runs its trials, speed and time left; of one that is named
    its failures with their reasons, too. Changes nothing.

    Args:
        watch: Refresh the output until Ctrl-C.
        verified: Compare every record with the files of its trial instead; exit status 1 if one differs.
        show_settings: Print the settings in use instead, each with its origin.
    """
    settings, screen = flags.settings(), console(as_json)
    if show_settings:
        shown, origins = settings.shown(), settings.origins
        screen.document({key: {"value": value, "origin": origins[key]} for key, value in shown.items()})
        rows = ([key, Text(shown[key], overflow="fold"), Text(origins[key], "dim")] for key in shown)
        screen.print(plain_table(rows=rows))
        return
    state, selected = settings.state, folders(settings.state, sweeps)
    if verified:
        raise typer.Exit(_verify(selected, state, screen))
    if watch and not as_json:
        with (
            suppress(KeyboardInterrupt),
            Live(console=screen, auto_refresh=False, vertical_overflow="visible") as live,
        ):
            while True:
                found = _all(folders(state, sweeps), state)
                live.update(_page(found, bool(sweeps), state), refresh=True)
                time.sleep(_REFRESH_SECONDS)
        return
    found = _all(selected, state)
    screen.document([asdict(sweep) | {"total": sweep.total, "over": sweep.over} for sweep in found])
    screen.print(_page(found, bool(sweeps), state))


def _verify(sweeps: Iterable[Path], state: Path, screen: Screen) -> int:
    results = {folder.name: compared(folder, Store(state)) for folder in sweeps}
    screen.document([{"name": name, **asdict(result)} for name, result in results.items()])
    for name, result in results.items():
        screen.lines(f"{name}: {result.sentence}", *(f"  {mismatch}" for mismatch in result.mismatches))
    if not results:
        screen.lines(f"No sweep has been run in {state}.")
    return FAILED if any(result.mismatches for result in results.values()) else DONE


def _all(sweeps: Iterable[Path], state: Path) -> list[Status]:
    def said(folder: Path, ledger: Ledger) -> dict[str, str]:
        return current(state / "reports" / folder.name, ledger)

    statuses = [read(folder, Store(state), said) for folder in sweeps]
    return sorted(statuses, key=lambda sweep: (sweep.controller is None, sweep.quiet_s or 0.0))


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
    whole = named or len(sweeps) == 1
    detailed = [sweep for sweep in sweeps if whole or sweep.controller]
    parts: list[RenderableType] = [part for sweep in detailed for part in (*_sweep(sweep, state), "")]
    rest = [] if whole else sweeps
    if readable := [sweep for sweep in rest if not sweep.trouble]:
        parts += [_table(readable), ""]
    unreadable = [sweep for sweep in rest if sweep.trouble and sweep not in detailed]
    lines = [Text.assemble((f"{each.name}  ", "bold"), (each.trouble or "", "red")) for each in unreadable]
    return Group(*([*parts, *lines] if lines else parts[:-1]))


def _sweep(sweep: Status, state: Path) -> list[RenderableType]:
    head = Text.assemble((sweep.name, "bold"), "  ", (sweep.question, "dim"))
    if sweep.trouble:
        return [head, Text(sweep.trouble, "red")]
    bar = Table.grid(padding=(0, 2, 0, 0))
    bar.add_row(
        ProgressBar(total=max(1, sweep.total), completed=sweep.over, width=40),
        Text(f"{sweep.over} of {sweep.total} trials"),
        _counts(sweep),
    )
    parts: list[RenderableType] = [head]
    if sweep.answer:
        lead = len(sweep.lead or "")
        parts.append(Text.assemble((sweep.answer[:lead], "bold"), sweep.answer[lead:]))
    option = state_option(state / "sweeps" / sweep.name)
    parts += [_state(sweep, option), bar]
    parts += [Text(sweep.quantisers.capitalize(), "yellow")] if sweep.quantisers else []
    parts += ["", _running_table(sweep.running)] if sweep.running else []
    parts += ["", *_failure_lines(sweep.failures, option)] if sweep.failures else []
    return parts


def _state(sweep: Status, option: str) -> Text:
    """Return a line with the process that runs the sweep, the time left and that to the next result, and how
    far MLflow is behind."""
    last = f"last change {duration(sweep.quiet_s or 0.0)} ago"
    if sweep.controller:
        text = Text.assemble(("● ", "green"), f"runs ({sweep.controller})")
        text.append(f", {time_left(sweep.seconds_left)}" if sweep.seconds_left is not None else "")
        ends = [trial.seconds_left for trial in sweep.running if trial.seconds_left is not None]
        text.append(f", next result in about {duration(min(ends))}" if ends else "")
    elif sweep.over < sweep.total:
        text = Text.assemble(("○ ", "yellow"), f"not running; {last}; the same command continues it")
    else:
        text = Text.assemble(("○ ", "dim"), f"ended; {last}")
    if sweep.mlflow_behind:
        hint = "" if sweep.controller else f"; `ablate rebuild {quote(sweep.name)} --sync{option}` sends them"
        text.append(f"; MLflow {sweep.mlflow_behind:,} records behind{hint}", "yellow")
    return text


def _counts(sweep: Status) -> Text:
    counts = dict(sweep.trials)
    if not sweep.controller:  # trials marked as running by a controller that died will run again
        counts["pending"] = counts.get("pending", 0) + counts.pop("running", 0)
    return Text(", ").join(
        Text(f"{counts[name]} {_STATUS_TEXTS.get(name, name)}", _COLOURS.get(name, ""))
        for name in dict.fromkeys((*_COLOURS, *counts))
        if counts.get(name)
    )


def _running_table(trials: list[RunningTrialStatus]) -> Table:
    right = ("seed", "try", "step", "steps/s", "tokens/s", "left", "last record")
    table = plain_table("running", *right[:3], "", *right[3:], "where", right=right, style="dim")
    for trial in trials[:_MOST_RUNNING]:
        table.add_row(
            Text(one_line(trial.arm).replace(CONFIRM, WINNER)),
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


def _failure_lines(failures: list[Failure], option: str) -> list[Text]:
    lines = []
    for failure in failures[:_MOST_FAILURES]:
        status, reason = _STATUS_TEXTS.get(failure.status, failure.status), failure.reason
        reason = reason if reason.startswith(status) else f"{status}: {reason}"
        arm = one_line(failure.arm).replace(CONFIRM, WINNER)
        run = (f"{arm} seed={failure.seed}  ", "bold")
        lines.append(Text.assemble(run, (reason, "red"), (f"  {failure.trial}", "dim")))
        lines += [Text(f"    {line}", "dim") for line in failure.log]
    if (more := len(failures) - _MOST_FAILURES) > 0:
        lines.append(Text(f"and {more} more; `ablate status --json{option}` lists all", "dim"))
    return lines


def _table(sweeps: list[Status]) -> Table:
    behind, rows = any(sweep.mlflow_behind for sweep in sweeps), []
    for sweep in sweeps:
        mlflow = [f"{sweep.mlflow_behind:,} behind" if sweep.mlflow_behind else "-"] * behind
        age = f"{duration(sweep.quiet_s or 0.0)} ago"
        rows.append((Text(sweep.name), _standing(sweep), _counts(sweep), *mlflow, age))
    table = plain_table(
        "sweep", "answer", "runs", *["MLflow"] * behind, "last change", rows=rows, style="dim"
    )
    for column in table.columns:
        column.no_wrap = column.header != "answer"
    return table


def _standing(sweep: Status) -> Text:
    """Return the first words of a sweep's answer, else how far it is or that runs failed, in one line."""
    text = Text("no report", "dim", no_wrap=True, overflow="ellipsis")
    if sweep.controller:
        text.plain, text.style = f"running {sweep.over}/{sweep.total}", "cyan"
    elif sweep.over < sweep.total:
        text.plain, text.style = f"not finished, {sweep.over}/{sweep.total}", "yellow"
    elif words := sweep.lead or sweep.answer:  # a search's answer has no first words of its own
        text.plain, text.style = one_line(words).rstrip(".:"), ""
    elif count := sum(failure.status != "diverged" for failure in sweep.failures):
        text.plain, text.style = f"failed: {count} run{'s' * (count != 1)}", "red"
    return text
