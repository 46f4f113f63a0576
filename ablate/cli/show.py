"""`ablate show`: results of sweeps that have run, as text, to paste, or for other programs.

    ablate show                  arms of all sweeps, by task and metric, best first
    ablate show X                claim, design, interval, checks, command and commit of one sweep
    ablate show A B              what differs in two sweeps or arms, and by how much they differ
    ablate show X --to csv       its tables as files

Read-only but for those files.
"""

import json
import sys
from contextlib import ExitStack, closing
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from ablate.cli.common import console
from ablate.cli.options import Flags, JsonOption, complete_sweeps
from ablate.errors import InputError, as_input_error, nearest, one_line
from ablate.store.checked_ledger import folders, open_ledger, state_option, unverified
from ablate.store.ledger import Ledger

if TYPE_CHECKING:
    from ablate.results.paired_stats import Difference

_Form = Literal["md", "html", "csv", "parquet"]
_FORMS: dict[int, tuple[str, ...]] = {0: ("md",), 1: ("md", "html", "csv", "parquet"), 2: ()}
"""Forms by the number of things shown."""


def show(
    flags: Flags,
    what: Annotated[
        list[str] | None, typer.Argument(metavar="[X [Y]]", autocompletion=complete_sweeps)
    ] = None,
    form: Annotated[_Form | None, typer.Option("--to")] = None,
    out: Path | None = None,
    records: bool = True,
    workload: str | None = None,
    metric: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Show all arms, best first; one sweep's claim with its design, to paste; or what differs in two.

    Args:
        what: A sweep, by name or YAML file; or two sweeps, or two arms as SWEEP:ARM, to compare.
        form: md: to paste; html: one sweep, intervals drawn; csv, parquet: its tables as files.
        out: Folder for the files; default: X_tables in this folder.
        records: Every recorded number among the files, too.
        workload: Of all arms, those on workloads whose name contains this: gpt, 4x128.
        metric: Of all arms, those compared by this metric.
    """
    words = what or []
    count = len(words)
    if count > 2:
        raise InputError(f"show takes two sweeps or arms at most, and there are {count}: {' '.join(words)}")
    shown = ("all sweeps", "one sweep", "two sweeps or arms")[count]
    if form and form not in _FORMS[count]:
        known = "; it takes " + " or ".join(_FORMS[count]) if _FORMS[count] else ""
        raise InputError(f"--to {form}: {shown} cannot be shown so{known}")
    if as_json and count == 1:
        raise InputError(
            "--json: of one sweep there are tables, `--to csv`, and `ablate.reports.open` in Python"
        )
    if out and form not in ("csv", "parquet"):
        raise InputError("--out: files are written with `--to csv` or `--to parquet`")
    if (workload or metric) and count:
        raise InputError(f"--workload and --metric choose among all arms, not within {shown}")
    folder = flags.settings().state
    if not words:
        _leaderboard(folder, workload, metric, as_json, form == "md")
    elif len(words) == 2:
        _compare(words[0], words[1], folder, as_json)
    elif form == "csv" or form == "parquet":
        from ablate.reports import frames

        with as_input_error(ValueError):
            found = frames.open(words[0], state=folder)
        screen, target = console(), out or Path(f"{Path(words[0]).stem}_tables")
        with found as results:
            for path, rows in results.write(target, form, records):
                screen.lines(f"{path}: {rows:,} rows")
            screen.lines(*filter(None, [results.unverified]))
    else:  # claim, design, interval, checks, command and commit
        from ablate.reports.evidence import markdown, page
        from ablate.results.comparisons import Comparisons

        with closing(open_ledger(folder, words[0])) as ledger:
            print((page if form == "html" else markdown)(Comparisons(ledger)), end="")


def _leaderboard(
    state: Path, workload: str | None, metric: str | None, as_json: bool, as_markdown: bool
) -> None:
    """Print all arms of all sweeps with the gap to their baselines, which are not listed themselves."""
    from ablate.reports.leaderboard import collect, document, markdown, nothing, tables, unsealed

    sweeps = folders(state, None)
    if not sweeps:
        option = state_option(state / "sweeps" / "X")
        raise InputError(f"{state}: no sweep has been run there yet; `ablate sweep X.yaml{option}` runs one")
    entries, unreadable = collect(sweeps)
    for line in unreadable:
        print(line, file=sys.stderr)
    chosen = [
        entry for entry in entries if (workload or "") in entry.workload and metric in (None, entry.metric)
    ]
    screen = console(as_json)
    if as_json:
        screen.document([document(entry) for entry in chosen])
    elif not chosen:
        raise InputError(nothing(entries, workload, metric))
    elif as_markdown:
        print("\n".join(markdown(chosen)))
    else:
        for title, table in tables(chosen).items():
            screen.print(Text(title, "bold"), table.terminal(screen.width), "", sep="\n")
        direct = "Each gap is to the baseline of its own sweep; sweeps are not compared directly."
        screen.print(Text(direct, "dim"), *unsealed(chosen), sep="\n")


def _compare(first: str, second: str, state: Path, as_json: bool) -> None:
    """Print what differs in two arms, or in all arms that two sweeps have by the same name: recipe, workload,
    data and versions; and the second minus the first, paired by seed."""
    from ablate.reports.table import Column, Table
    from ablate.results.compare_runs import arms_of, side
    from ablate.results.compare_runs import compare as compared

    with ExitStack() as stack:
        (one, arm), (other, other_arm) = (_opened(word, state, stack) for word in (first, second))
        if (arm is None) != (other_arm is None):
            raise InputError("name two sweeps, or two arms as SWEEP:ARM")
        common = [name for name in arms_of(one) if name in arms_of(other)] if arm is None else []
        if arm is None and not common:
            raise InputError(
                f"{one.name} and {other.name} have no arm of the same name; name two as SWEEP:ARM"
            )
        names = [(arm, other_arm)] if arm and other_arm else [(name, name) for name in common]
        pairs = [(side(one, name), side(other, other_name)) for name, other_name in names]
        found = [(a, b, compared(a, b)) for a, b in pairs]
        unsealed = [f"{each.name}: {text}" for each in (one, other) if (text := unverified(each))]
    screen = console(as_json)
    screen.document(
        [
            {
                "first": a.name,
                "second": b.name,
                "differs": result.parts,
                "origin": result.origin,
                "same_trials": result.same,
                "difference": result.difference
                and {name: getattr(result.difference, name) for name in ("mean", "low", "high", "pairs")},
                "why_none": result.why,
                "unverified": unsealed,
            }
            for a, b, result in found
        ]
    )
    for number, (a, b, result) in enumerate(found):
        screen.print(*([""] if number else []), Text(f"{b.name}, minus {a.name}", "bold"))
        lines = [(path, *map(json.dumps, values)) for path, values in (result.parts | result.origin).items()]
        heads = ("", one_line(a.name), one_line(b.name))
        columns = [Column[tuple[str, ...]](name, itemgetter(place)) for place, name in enumerate(heads)]
        same = "The same recipe, workload, data and versions."
        screen.print(Table("differences", lines, columns).terminal() if lines else same)
        screen.print(Text(_sentence(a.metric, len(a.values), result.same, result.difference, result.why)))
    for line in dict.fromkeys(unsealed):
        screen.print(Text(line))


def _opened(word: str, state: Path, stack: ExitStack) -> tuple[Ledger, str | None]:
    name, colon, arm = word.partition(":")
    ledger = stack.enter_context(closing(open_ledger(state, name)))
    arms = [row.name for row in ledger.arms()]
    if colon and arm not in arms:
        raise InputError(f"{word}: {ledger.name} has no such arm; {nearest(arm, arms)}")
    return ledger, arm if colon else None


def _sentence(metric: str, seeds: int, same: int, difference: "Difference | None", why: str) -> str:
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
