"""`ablate compare A B`: what differs in two sweeps or two arms, and by how much they differ."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from ablate.cli.common import JsonOption, Profile, State, complete_sweeps, console
from ablate.cli.settings import find_settings
from ablate.errors import InputError, nearest, one_line
from ablate.store.checked_ledger import open_checked, unverified
from ablate.store.ledger import Ledger

if TYPE_CHECKING:
    from ablate.results.paired_stats import Difference

_Which = Annotated[
    str,
    typer.Argument(
        help="A sweep, by name or YAML file; or one of its arms, as SWEEP:ARM.",
        autocompletion=complete_sweeps,
    ),
]


def compare(
    first: _Which, second: _Which, as_json: JsonOption = False, state: State = None, profile: Profile = None
) -> None:
    """Compare two arms, or all arms that two sweeps have by the same name: what differs in recipe, workload,
    data and versions, and the second minus the first, paired by seed.
    """
    from ablate.results.compare_runs import Side, arms_of, side
    from ablate.results.compare_runs import compare as compared

    settings = find_settings(profile, state=state)
    with ExitStack() as stack:
        (one, arm), (other, other_arm) = (_opened(word, settings.state, stack) for word in (first, second))
        pairs: list[tuple[Side, Side]]
        if arm is None and other_arm is None:
            common = [name for name in arms_of(one) if name in arms_of(other)]
            if not common:
                raise InputError(
                    [f"{one.name} and {other.name} have no arm of the same name; name two as SWEEP:ARM"]
                )
            pairs = [(side(one, name), side(other, name)) for name in common]
        elif arm is None or other_arm is None:
            raise InputError(["name two sweeps, or two arms as SWEEP:ARM"])
        else:
            pairs = [(side(one, arm), side(other, other_arm))]
        found = [(a, b, compared(a, b)) for a, b in pairs]
        unsealed = [f"{each.name}: {text}" for each in (one, other) if (text := unverified(each))]
    if as_json:
        rows = [
            {
                "first": a.name,
                "second": b.name,
                "differs": {path: list(values) for path, values in result.parts.items()},
                "origin": {path: list(values) for path, values in result.origin.items()},
                "same_trials": result.same,
                "difference": result.difference and _numbers(result.difference),
                "why_none": result.why,
                "unverified": unsealed,
            }
            for a, b, result in found
        ]
        print(json.dumps(rows, indent=1))
        return
    screen = console()
    for number, (a, b, result) in enumerate(found):
        screen.print(*([""] if number else []), Text(f"{b.name}, minus {a.name}", "bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in ("", one_line(a.name), one_line(b.name)):
            table.add_column(column, overflow="fold")
        for path, values in (result.parts | result.origin).items():
            table.add_row(path, *(one_line(json.dumps(value)) for value in values))
        if result.parts or result.origin:
            screen.print(table)
        else:
            screen.print("The same recipe, workload, data and versions.")
        screen.print(Text(_sentence(a.metric, len(a.values), result.same, result.difference, result.why)))
    for line in dict.fromkeys(unsealed):
        screen.print(Text(line))


def _opened(word: str, state: Path, stack: ExitStack) -> tuple[Ledger, str | None]:
    """Return the ledger of a sweep, and the arm that is named beside it."""
    name, colon, arm = word.partition(":")
    name = Path(name).stem if name.endswith((".yaml", ".yml")) else name
    known = sorted(path.name for path in state.glob("sweeps/*") if path.is_dir())
    if name not in known:
        hint = nearest(name, known) if known else f"no sweep has been run in {state} yet"
        raise InputError([f"{name}: no such sweep; {hint}"])
    ledger = open_checked(state / "sweeps" / name / "ledger.db")
    stack.callback(ledger.close)
    arms = [row.name for row in ledger.arms()]
    if colon and arm not in arms:
        raise InputError([f"{word}: {name} has no such arm; {nearest(arm, arms)}"])
    return ledger, arm if colon else None


def _numbers(difference: "Difference") -> dict[str, float | int | None]:
    interval = difference.has_interval
    return {
        "mean": difference.mean,
        "low": difference.low if interval else None,
        "high": difference.high if interval else None,
        "pairs": difference.pairs,
    }


def _sentence(metric: str, seeds: int, same: int, difference: "Difference | None", why: str) -> str:
    """Return the difference in words, or the reason why there is none."""
    from ablate.results.number_text import counted, interval
    from ablate.results.paired_stats import p_value

    if difference is None:
        return f"No difference by seed: {why}."
    if same == seeds:
        return f"{metric}: the same trials at {counted(seeds, 'seed')}, so nothing to compare."
    equal = f"; {same} of them are the same trial" if same else ""
    p = p_value(difference)
    alone = f", p {p:.3f} of this comparison alone" if p == p else ""
    return f"{metric}: {interval(difference)} over {counted(difference.pairs, 'seed')}{equal}{alone}."
