"""Runs of a table, whichever file it came from: one row a step ("long"), or one row a run ("wide").

    recipe,seed,step,val/loss            recipe,seed,lr,final_loss
    bf16,0,100,3.21                      bf16,0,0.001,3.05
    bf16,0,200,3.05                      nvfp4,0,0.001,3.11

Rows of one arm, seed and run belong together. A column that is a number and changes within a run is a metric;
one that is the same in each row of a run is a setting, unless its name is that of a result. In a wide table
only the name decides. Refused are cells of a metric that are not numbers, two values of one metric at one
step, several rows of a run without a step, and a table in which no column can be the arm.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import PurePath
from shlex import quote

from ablate.errors import InputError, brief, nearest
from ablate.files import Json
from ablate.judging import cells
from ablate.judging.columns import Columns, is_rate, like_metric, metric_columns, pick, plain
from ablate.judging.names import fields_of, is_misfit, read_name, seed_of
from ablate.judging.points import Points
from ablate.judging.run import ForeignRun
from ablate.judging.statuses import status_columns, with_status

Row = tuple[int, Mapping[str, Json]]
"""Line of the file, from 1, and cell by column."""


@dataclass(frozen=True)
class Table:
    """Rows of one file, as they stand there."""

    where: str
    """Name of the file, for sentences."""
    names: Sequence[str]
    """Names of the columns."""
    rows: Sequence[Row]
    """Rows in the order of the file."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Arm, seed and other settings that the file's path says."""


@dataclass
class _Group:
    """Rows of one run."""

    arm: str
    seed: int | None
    run: str | None
    rows: list[Row] = field(default_factory=list)


def runs_of(table: Table, columns: Columns, said: list[str]) -> list[ForeignRun]:
    """Return the runs of a table.

    Args:
        table: the rows.
        columns: columns that the user named.
        said: list to which sentences on what was guessed, merged or left out are added.

    Raises:
        InputError: in one sentence, for what cannot be read without doubt.
    """
    if not table.rows:
        raise InputError(f"{table.where}: there is a header and no row")
    if columns.arm and "," in columns.arm and columns.arm not in table.names:
        table = _joined(table, [name.strip() for name in columns.arm.split(",")], columns.arm)
    roles = _roles(table, columns, said)
    groups, misfits = _groups(table, columns, roles)
    free = {*table.names} - {*roles.values(), *(columns.metrics or {}).values()}
    states = status_columns(free, [row for _, row in table.rows])
    taken = {*roles.values(), *states}
    names = [name for name in table.names if name not in taken and not name.startswith("_")]
    long = "step" in roles
    metrics, settings = _sorted_columns(table.where, names, groups, long, columns, said)
    if not long:
        said.append(f"{table.where}: step: no column; each row is a run's final values, recorded at step 0")
    elif roles["step"] in metrics.values():
        raise InputError(f"{table.where}: column {roles['step']!r} is both the step and a metric")
    in_time = not {"arm", "seed", "run"} & roles.keys()
    if long and not in_time and "run" not in roles:
        _require_one_run_each(table, groups, roles, metrics)
    empty: Counter[str] = Counter()
    if long and "run" not in roles:
        _require_one_run_each(table, groups, roles, metrics)
    runs = [
        _run(table, group, roles.get("step"), metrics, settings, states, in_time, said, empty)
        for group in groups
    ]
    said += [
        f"{table.where}: {brief(metric)}: {count} of {len(table.rows)} cells are empty, taken as not"
        " recorded (some programs write NaN as an empty cell)"
        for metric, count in empty.items()
    ]
    return runs + misfits


def _joined(table: Table, parts: Sequence[str], joined: str) -> Table:
    """Return the table with one column in place of several: cells are like `lr=0.001 rounding=nearest`."""
    for part in parts:
        if part not in table.names:
            raise InputError(f"{table.where}: no column {brief(part)!r}; {nearest(part, table.names)}")
    rows: list[Row] = [
        (
            line,
            {name: cell for name, cell in row.items() if name not in parts}
            | {
                joined: " ".join(f"{part}={row[part]}" for part in parts if not cells.is_empty(row[part]))
                or "none"
            },
        )
        for line, row in table.rows
    ]
    return replace(table, names=[*(name for name in table.names if name not in parts), joined], rows=rows)


def _roles(table: Table, columns: Columns, said: list[str]) -> dict[str, str]:
    """Return the column of each role that has one."""
    given = {"arm": columns.arm, "seed": columns.seed, "step": columns.step, "run": columns.run}
    from_name = fields_of(columns.name) if columns.name else frozenset()
    roles: dict[str, str] = {}
    for role, said_by_path in table.fields.items():
        for twin in (name for name in table.names if role in given and plain(name) == role):
            if any(str(row[twin]).strip() != said_by_path for _, row in table.rows):
                raise InputError(f"{table.where}: column {brief(twin)!r} and the path differ in the {role}")
    for role, column in given.items():
        if column is None and (role in table.fields or role in from_name):
            continue
        found = pick(
            role, column, [name for name in table.names if name not in roles.values()], table.where, said
        )
        if found is not None:
            roles[role] = found
    if "arm" not in roles.keys() | table.fields.keys() | from_name:
        raise InputError(
            f"{table.where}: no column is the arm; name one, arm=COLUMN, or give the file as a pattern of"
            f" its path, such as runs/{{arm}}/{PurePath(table.where).name}; {nearest('arm', table.names)}"
        )
    if "seed" not in roles.keys() | table.fields.keys() | from_name:
        said.append(f"{table.where}: seed: no column; runs have no seed")
    return roles


def _groups(
    table: Table, columns: Columns, roles: Mapping[str, str]
) -> tuple[list[_Group], list[ForeignRun]]:
    """Return the rows of each run, in the order of the table, and the runs that are not of the pattern."""
    groups: dict[tuple[str, int | None, str | None], _Group] = {}
    identities: dict[tuple[Json, ...], tuple[str, int | None, str | None] | None] = {}
    misfits: dict[str, ForeignRun] = {}
    identifying = [roles[role] for role in ("arm", "seed", "run") if role in roles]
    for line, row in table.rows:
        said = tuple(row[name] for name in identifying)
        if said not in identities:
            identities[said] = _identity(table, columns, roles, line, row, misfits)
        key = identities[said]
        if key is None:
            continue
        if key[1:] == (None, None) and "step" not in roles:
            key = key[0], None, f"line {line}"  # final values of a run of its own
        groups.setdefault(key, _Group(*key)).rows.append((line, row))
    return [*groups.values()], [*misfits.values()]


def _identity(
    table: Table,
    columns: Columns,
    roles: Mapping[str, str],
    line: int,
    row: Mapping[str, Json],
    misfits: dict[str, ForeignRun],
) -> tuple[str, int | None, str | None] | None:
    """Return arm, seed and name of a row's run; None for one that is left out, and added to `misfits`."""
    texts, where = dict(table.fields), f"{table.where}: line {line}"
    run = row[roles["run"]] if "run" in roles else None
    name = None if cells.is_empty(run) else str(run).strip()
    if columns.name:
        full = name or PurePath(table.where).stem
        if is_misfit(columns, full):
            misfits[full] = ForeignRun.misfit(f"{table.where}: {full}")
            return None
        texts |= read_name(columns.name, full, where)
    for role in ("arm", "seed"):
        if role in roles:
            if cells.is_empty(row[roles[role]]):
                raise InputError(f"{where}: the {role} ({brief(roles[role])}) is empty")
            texts[role] = str(row[roles[role]]).strip()
    return texts["arm"], seed_of(texts.get("seed"), where), name


def _sorted_columns(
    where: str,
    names: Sequence[str],
    groups: Sequence[_Group],
    long: bool,
    columns: Columns,
    said: list[str],
) -> tuple[dict[str, str], list[str]]:
    """Return the column of each metric, by its name, and the columns of settings."""
    if columns.metrics is not None:
        metrics = metric_columns(columns, [*names], where, said)
        others = [name for name in names if name not in metrics.values()]
        changing = [name for name in others if not (_constant(name, groups) or _counts(name, groups)[1])]
        rates = {name: name for name in changing if is_rate(name)}
        return rates | metrics, [name for name in others if _constant(name, groups) and not like_metric(name)]
    long = long and any(len(group.rows) > 1 for group in groups)
    likely, settings, left_out = [], [], []
    for name in names:
        constant = _constant(name, groups)
        numbers, texts = _counts(name, groups)
        if (name == columns.asked or like_metric(name)) and (numbers or texts):
            likely.append(name)
        elif constant:
            settings.append(name)
        elif long and numbers and numbers >= texts:
            likely.append(name)
        elif numbers or texts:
            left_out.append(name)
    if left_out:
        listed = ", ".join(repr(brief(name)) for name in left_out)
        said.append(f"{where}: left out: {listed}, which change within a run and are not numbers")
    if not likely:
        numeric = [name for name in settings if _counts(name, groups)[0]]
        listed = ", ".join(repr(brief(name)) for name in numeric[:8]) or "none is a number"
        raise InputError(f"{where}: no column is known as a metric; name one, --metric COLUMN, of: {listed}")
    return metric_columns(columns, likely, where, said), settings


def _require_one_run_each(
    table: Table, groups: Sequence[_Group], roles: Mapping[str, str], metrics: Mapping[str, str]
) -> None:
    """Raise InputError for rows of several runs at one step, if there are columns that tell them apart."""
    at_steps = [
        (group, step, [row for _, row in rows])
        for group in groups
        for step, rows in groupby(
            sorted(group.rows, key=lambda each: str(each[1][roles["step"]])),
            lambda each: str(each[1][roles["step"]]),
        )
    ]

    def told(name: str, rows: Sequence[Mapping[str, Json]]) -> set[str]:
        return {repr(cells.setting(row[name])) for row in rows if not cells.is_empty(row[name])}

    several = [each for each in at_steps if len(each[2]) > 1]
    mixed = (each for each in several if any(len(told(name, each[2])) > 1 for name in metrics.values()))
    if (first := next(mixed, None)) is None:
        return
    group, step, rows = first
    free = [name for name in table.names if name not in roles.values() and not like_metric(name)]
    apart = [name for name in free if all(len(told(name, each[2])) == len(each[2]) for each in several)]
    numbers = [
        name for name in free if len(told(name, rows)) > 1 and all(map(_is_whole, (r[name] for r in rows)))
    ]
    names = [name for name in apart if name not in numbers]
    pairs = [name for name in apart if name in numbers and name != "seed"]
    ways = [f"name them, --column {quote(f'run={brief(names[0])}')}"] if names else []
    if pairs:
        ignored = "".join(f" --ignore {quote(brief(name))}" for name in numbers if name != pairs[0])
        if group.seed is None:
            ways.append(f"their pairing, --column {quote(f'seed={brief(pairs[0])}')}{ignored}")
        elif arm := roles.get("arm"):
            ways.append(f"more arms, --column {quote(f'arm={arm},{brief(pairs[0])}')}")
    if ways:
        run = brief(group.arm) if group.seed is None else f"seed {group.seed} of {brief(group.arm)}"
        raise InputError(
            f"{table.where}: {len(rows)} rows of {run} at step {brief(step)} look like {len(rows)} runs:"
            f" {', or '.join(ways)}"
        )


def _is_whole(cell: Json) -> bool:
    with suppress(ValueError):
        return cells.whole(cell) is not None
    return False


def _constant(name: str, groups: Sequence[_Group]) -> bool:
    """Return True if a column is the same in all rows of each run."""
    return all(all(row.get(name) == group.rows[0][1].get(name) for _, row in group.rows) for group in groups)


def _counts(name: str, groups: Sequence[_Group]) -> tuple[int, int]:
    """Return how many cells of a column are numbers, and how many other text; empty ones are neither."""
    numbers = texts = 0
    for group in groups:
        for _, row in group.rows:
            cell = row.get(name)
            if cells.is_empty(cell):
                continue
            try:
                cells.number(cell)
                numbers += 1
            except ValueError:
                texts += 1
    return numbers, texts


def _run(
    table: Table,
    group: _Group,
    step_column: str | None,
    metrics: Mapping[str, str],
    settings: Sequence[str],
    states: Mapping[str, Mapping[str, bool]],
    in_time: bool,
    said: list[str],
    empty: Counter[str],
) -> ForeignRun:
    """Return the run of a group of rows."""
    seed = "" if group.seed is None else f"seed {group.seed} of "
    name = f"{table.where}: {seed}{group.arm}" + (f" ({group.run})" if group.run else "")
    steps = [str(row[step_column]) for _, row in group.rows] if step_column else []
    points = Points(name, in_time and len({*steps}) < len(steps))  # else rows in any order, and no restart
    first: tuple[int, Mapping[str, Json]] | None = None
    for line, row in group.rows:
        if step_column is None:
            if first is not None and row != first[1]:
                raise InputError(
                    f"{name}: lines {first[0]} and {line} are both of this run, and no column is the"
                    f" step; name one, step=COLUMN; {nearest('step', table.names)}"
                )
            first = first or (line, row)
        try:
            step = 0 if step_column is None else cells.step_of(row[step_column])
        except ValueError as error:
            raise InputError(f"{table.where}: line {line}: column {step_column!r}: {error}") from None
        for metric, column in metrics.items():
            cell = row.get(column)
            if cells.is_empty(cell):
                empty[metric] += 1
                continue
            try:
                value = cells.number(cell)
            except ValueError as error:
                raise InputError(f"{table.where}: line {line}: column {brief(column)!r}: {error}") from None
            points.add(line, step, metric, value)
    records = points.records()
    config: dict[str, Json] = {**table.fields}
    row = group.rows[0][1]
    config |= {key: cells.setting(row[key]) for key in settings if not cells.is_empty(row.get(key))}
    config = {key: value for key, value in config.items() if key not in ("arm", "seed")}
    run = ForeignRun(name, group.arm, group.seed, records, config)
    run = with_status(run, states, [row for _, row in group.rows])
    if not records and run.status == "done":
        raise InputError(f"{name}: all cells of its metrics are empty")
    said += points.sentences()
    return run
