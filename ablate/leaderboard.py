"""`ablate leaderboard`: every arm of every sweep of a state folder, by what was measured on what, the best gap first. Reads only."""

import json
import math
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ablate.cli import Json, Profile, State, alone, console, duration
from ablate.control import folders, refusal
from ablate.ledger import Ledger
from ablate.place import find
from ablate.yamlfile import InputError

_DIGITS = 8
_SIZES = ("layers", "width", "steps")
"""What tells a workload from a larger one of its kind, in a word each."""


@dataclass(frozen=True)
class Entry:
    """An arm of a sweep, beside its baseline."""

    workload: str
    metric: str
    minimize: bool
    arm: str
    against: str
    mean: float | None
    gap: float | None
    low: float | None
    high: float | None
    verdict: str
    seeds: int
    seconds: float
    """What its trials took a worker, those too that another sweep had run."""
    commit: str
    sweep: str
    shown: str
    """The gap with its interval, in words."""

    @property
    def place(self) -> tuple[Any, ...]:
        """Where it stands: among those of its workload and metric, by its gap; last where there is none."""
        sign = 1 if self.minimize else -1
        return self.workload, self.metric, self.gap is None, sign * (self.gap or 0.0), self.arm, self.sweep


def leaderboard(
    workload: Annotated[str | None, typer.Option(help="Only workloads whose name contains this: gpt, 4x128, ...")] = None,
    metric: Annotated[str | None, typer.Option(help="Only sweeps that compare by this metric.")] = None,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print it as a Markdown table.")] = False,
    state: State = None,
    profile: Profile = None,
) -> None:
    """List every arm of every sweep with its gap to its baseline: by workload and metric, the best first. Baselines are not listed."""
    place = find(profile, state=state)
    known = folders(place.state, None)
    if not known:
        raise InputError([f"{place.state}: nothing has been run there yet; `ablate sweep X.yaml` runs an experiment"])
    found, unreadable = collect(known)
    for line in unreadable:
        print(line, file=sys.stderr)
    chosen = [entry for entry in found if (workload or "") in entry.workload and metric in (None, entry.metric)]
    if as_json:
        print(json.dumps([asdict(entry) for entry in chosen], indent=1))
    elif not chosen:
        raise InputError([_nothing(found, workload, metric)])
    elif markdown:
        print("\n".join(_markdown(chosen)))
    else:
        _print(chosen)


def collect(known: list[Path]) -> tuple[list[Entry], list[str]]:
    """Every arm that is compared with another, in order; and of each ledger that cannot be read why, in a line."""
    found, unreadable = [], []
    for folder in known:
        try:
            with closing(Ledger(folder / "ledger.db", readonly=True)) as ledger:
                found += _entries(ledger)
        except sqlite3.OperationalError as error:
            unreadable.append(f"{folder / 'ledger.db'}: left out: no ledger of a sweep ({error})")
        except sqlite3.DatabaseError as error:
            unreadable.append(f"left out: {refusal(folder, str(error), f'{folder.name}.yaml')}")
        except (KeyError, ValueError) as error:  # tables like ours, with something else in them
            unreadable.append(f"{folder / 'ledger.db'}: left out: no ledger of a sweep ({type(error).__name__}: {_line(error)})")
    return sorted(found, key=lambda entry: entry.place), unreadable


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _entries(ledger: Ledger) -> Iterator[Entry]:
    from ablate.results import interval, metric_of, summaries  # SciPy: `ablate plan` does without

    metric, commit, name = metric_of(ledger), _commit(ledger), ledger.name
    members: dict[str, list[Any]] = {}
    for member in ledger.members():
        members.setdefault(member["name"], []).append(member)
    seconds = {trial["trial"]: trial["seconds"] or 0.0 for trial in ledger.wanted_trials()}
    for arm in summaries(ledger):
        if arm.gap is None or not members.get(arm.name):
            continue
        yield Entry(
            workload=_workload(json.loads(members[arm.name][0]["spec"])),
            metric=metric.name,
            minimize=metric.direction == "minimize",
            arm=arm.name,
            against=arm.baseline,
            mean=_finite(arm.mean),
            gap=_finite(arm.gap.mean),
            low=_finite(arm.gap.low),
            high=_finite(arm.gap.high),
            verdict=arm.verdict,
            seeds=arm.gap.pairs,
            seconds=math.fsum(seconds[member["trial"]] for member in members[arm.name]),
            commit=commit,
            sweep=name,
            shown=interval(arm.gap),
        )


def _finite(value: float) -> float | None:
    """A number that JSON has."""
    return value if math.isfinite(value) else None


def _commit(ledger: Ledger) -> str:
    """The commit that the sweep last ran at; `+` where something was not committed."""
    commit = json.loads(ledger.fact("provenance.json") or "{}").get("commit") or ""
    return commit[:_DIGITS] + ("+" if commit and ledger.fact("uncommitted.diff") else "")


def _workload(spec: dict[str, Any]) -> str:
    """`gpt 4x128, 300 steps`: a workload's name, and its size where it has one."""
    ((name, config),) = spec["workload"].items()
    if not all(key in config for key in _SIZES):
        return name
    layers, width, steps = (config[key] for key in _SIZES)
    return f"{name} {layers}x{width}, {steps} steps"


def _nothing(found: list[Entry], workload: str | None, metric: str | None) -> str:
    if not found:
        return "no arm has been compared with a baseline yet"
    asked = " and ".join(f"{key} {value!r}" for key, value in (("workload", workload), ("metric", metric)) if value)
    there = sorted({f"{entry.workload} by {entry.metric}" for entry in found})
    return f"nothing was compared for {asked}; there is {'; '.join(there)}"


# Drawing

_COLUMNS = ("arm", "against", "mean", "gap", "seeds", "verdict", "cost", "commit", "sweep")
_RIGHT = ("mean", "gap", "seeds", "cost")


def _cells(entry: Entry) -> list[str]:
    from ablate.results import number

    mean = "-" if entry.mean is None else number(entry.mean)
    cost = duration(entry.seconds)
    return [entry.arm, entry.against, mean, entry.shown, str(entry.seeds), entry.verdict, cost, entry.commit or "-", entry.sweep]


def _groups(entries: list[Entry]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        better = "lower" if entry.minimize else "higher"
        groups.setdefault(f"{entry.workload}: {entry.metric} ({better} is better)", []).append(entry)
    return groups


def _print(entries: list[Entry]) -> None:
    screen = console()
    for title, group in _groups(entries).items():
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in _COLUMNS:
            table.add_column(name, justify="right" if name in _RIGHT else "left")
        for entry in group:
            table.add_row(*(Text(cell) for cell in _cells(entry)))
        screen.print(Text(title, "bold"), table, "")
    screen.print(Text("A gap is to its own baseline, on its own seeds: those of different sweeps were not measured side by side.", "dim"))


def _markdown(entries: list[Entry]) -> Iterator[str]:
    for title, group in _groups(entries).items():
        yield from (f"### {title}", "", f"| {' | '.join(_COLUMNS)} |")
        yield f"|{'|'.join('---:' if name in _RIGHT else '---' for name in _COLUMNS)}|"
        yield from (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(entry))} |" for entry in group)
        yield ""


if __name__ == "__main__":
    alone(leaderboard)
