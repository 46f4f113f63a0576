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

_Key = tuple[str, int | None, str | None]
"""Arm, seed and name of a run."""


@dataclass(frozen=True)
class Table:
    """Columns of one file, as they stand there."""

    where: str
    """Name of the file, for sentences."""
    columns: Mapping[str, Sequence[Json]]
    """Cells by the name of their column, in the order of the file."""
    lines: Sequence[int]
    """Line of the file of each row, from 1."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Arm, seed and other settings that the file's path says."""

    def at(self, row: int) -> str:
        """Return the position of a row, for a sentence."""
        return f"{self.where}: line {self.lines[row]}"


@dataclass(frozen=True)
class _Group:
    """Rows of one run."""

    arm: str
    seed: int | None
    run: str | None
    rows: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return ("" if self.seed is None else f"seed {self.seed} of ") + self.arm


def runs_of(table: Table, columns: Columns, said: list[str]) -> list[ForeignRun]:
    """Return the runs of a table.

    Args:
        table: the rows.
        columns: columns that the user named.
        said: list to which sentences on what was guessed, merged or left out are added.

    Raises:
        InputError: in one sentence, for what cannot be read without doubt.
    """
    if not table.lines:
        raise InputError(f"{table.where}: there is a header and no row")
    if columns.arm and "," in columns.arm and columns.arm not in table.columns:
        table = _joined(table, [name.strip() for name in columns.arm.split(",")], columns.arm)
    roles = _roles(table, columns, said)
    groups, misfits = _groups(table, columns, roles)
    free = table.columns.keys() - {*roles.values(), *(columns.metrics or {}).values()}
    states = status_columns([name for name in table.columns if name in free], table.columns)
    names = [name for name in table.columns if name not in {*roles.values(), *states} and name[:1] != "_"]
    metrics, settings = _sorted_columns(table, names, groups, "step" in roles, columns, said)
    if "step" not in roles:
        said.append(f"{table.where}: step: no column; each row is a run's final values, recorded at step 0")
    elif roles["step"] in metrics.values():
        raise InputError(f"{table.where}: column {roles['step']!r} is both the step and a metric")
    in_time = not {"arm", "seed", "run"} & roles.keys()
    if "step" in roles and not in_time and "run" not in roles:
        _require_one_run_each(table, groups, roles, metrics)
    empty: Counter[str] = Counter()
    runs = [
        _run(table, group, roles.get("step"), metrics, settings, states, in_time, said, empty)
        for group in groups
    ]
    said += [
        f"{table.where}: {brief(metric)}: {count} of {len(table.lines)} cells are empty, taken as not"
        " recorded (some programs write NaN as an empty cell)"
        for metric, count in empty.items()
    ]
    return runs + misfits


def _joined(table: Table, parts: Sequence[str], joined: str) -> Table:
    """Return the table with one column in place of several: cells are like `lr=0.001 rounding=nearest`."""
    for part in parts:
        if part not in table.columns:
            raise InputError(f"{table.where}: no column {brief(part)!r}; {nearest(part, table.columns)}")
    columns = {name: column for name, column in table.columns.items() if name not in parts}
    columns[joined] = [
        " ".join(f"{part}={cell}" for part, cell in zip(parts, row, strict=True) if not cells.is_empty(cell))
        or "none"
        for row in zip(*(table.columns[part] for part in parts), strict=True)
    ]
    return replace(table, columns=columns)


def _roles(table: Table, columns: Columns, said: list[str]) -> dict[str, str]:
    """Return the column of each role that has one."""
    given = {"arm": columns.arm, "seed": columns.seed, "step": columns.step, "run": columns.run}
    from_name = fields_of(columns.name) if columns.name else frozenset()
    roles: dict[str, str] = {}
    for role, said_by_path in table.fields.items():
        for twin in (name for name in table.columns if role in given and plain(name) == role):
            if any(str(cell).strip() != said_by_path for cell in table.columns[twin]):
                raise InputError(f"{table.where}: column {brief(twin)!r} and the path differ in the {role}")
    for role, column in given.items():
        if column is None and (role in table.fields or role in from_name):
            continue
        free = [name for name in table.columns if name not in roles.values()]
        if (found := pick(role, column, free, table.where, said)) is not None:
            roles[role] = found
    if "arm" not in roles.keys() | table.fields.keys() | from_name:
        path = f"runs/{{arm}}/{PurePath(table.where).name}"
        way = f"give the file as a pattern of its path, such as {path}; {nearest('arm', table.columns)}"
        if "run" in roles:
            name = brief(str(table.columns[roles["run"]][0]))
            way = f'say how runs are named, such as --name "{{arm}}-s{{seed}}", where the first is {name!r}'
        elif _numbers_alone(table, roles) and "seed" in roles:
            way = (
                "if each column is an arm, write a row a run, as pandas does:"
                f" melt({brief(roles['seed'])!r}, var_name='arm', value_name='val/loss')"
            )
        elif _numbers_alone(table, roles):
            way = 'if each column is a run, say how they are named, such as --name "{arm}_s{seed}"'
        raise InputError(f"{table.where}: no column is the arm; name one, --column arm=COLUMN, or {way}")
    if "seed" not in roles.keys() | table.fields.keys() | from_name:
        said.append(f"{table.where}: seed: no column; runs have no seed")
    return roles


def _groups(
    table: Table, columns: Columns, roles: Mapping[str, str]
) -> tuple[list[_Group], list[ForeignRun]]:
    """Return the rows of each run, in the order of the table, and the runs that are not of the pattern."""
    groups: dict[_Key, _Group] = {}
    keys: dict[tuple[str, ...], _Key | None] = {}
    misfits: dict[str, ForeignRun] = {}
    identifying = [table.columns[roles[role]] for role in ("arm", "seed", "run") if role in roles]
    for row in range(len(table.lines)):
        texts = tuple(repr(column[row]) for column in identifying)
        if texts not in keys:
            keys[texts] = _identity(table, columns, roles, row, misfits)
        if (key := keys[texts]) is None:
            continue
        if key[1:] == (None, None) and "step" not in roles:
            key = key[0], None, f"line {table.lines[row]}"  # final values of a run of its own
        if key not in groups:
            groups[key] = _Group(*key)
        groups[key].rows.append(row)
    return [*groups.values()], [*misfits.values()]


def _identity(
    table: Table, columns: Columns, roles: Mapping[str, str], row: int, misfits: dict[str, ForeignRun]
) -> _Key | None:
    """Return arm, seed and name of a row's run; None for one that is left out, and added to `misfits`."""
    texts = dict(table.fields)
    given = {role: table.columns[roles[role]][row] for role in ("arm", "seed", "run") if role in roles}
    run = given.pop("run", None)
    name = None if cells.is_empty(run) else str(run).strip()
    if columns.name:
        full = name or PurePath(table.where).stem
        if is_misfit(columns, full):
            misfits[full] = ForeignRun.misfit(f"{table.where}: {full}")
            return None
        texts |= read_name(columns.name, full, table.at(row))
    for role, cell in given.items():
        if cells.is_empty(cell):
            raise InputError(f"{table.at(row)}: the {role} ({brief(roles[role])}) is empty")
        texts[role] = str(cell).strip()
    return texts["arm"], seed_of(texts.get("seed"), table.at(row)), name


def _sorted_columns(
    table: Table,
    names: Sequence[str],
    groups: Sequence[_Group],
    long: bool,
    columns: Columns,
    said: list[str],
) -> tuple[dict[str, str], list[str]]:
    """Return the column of each metric, by its name, and the columns of settings."""
    long = long and any(len(group.rows) > 1 for group in groups)
    likely, settings, left_out, rates = [], [], [], {}
    for name in names:
        column = table.columns[name]
        constant = all(column[row] == column[group.rows[0]] for group in groups for row in group.rows)
        numbers, texts = _counts(column)
        if (name == columns.asked or like_metric(name)) and (numbers or texts):
            likely.append(name)
        elif constant:
            settings.append(name)
        elif long and numbers and numbers >= texts:
            likely.append(name)
        elif numbers or texts:
            left_out.append(name)
        if is_rate(name) and not (constant or texts):
            rates[name] = name
    if columns.metrics is not None:
        metrics = metric_columns(columns, names, table.where, said)
        others = {name: metric for name, metric in rates.items() if name not in metrics.values()}
        return others | metrics, [name for name in settings if name not in metrics.values()]
    if left_out:
        listed = ", ".join(repr(brief(name)) for name in left_out)
        said.append(f"{table.where}: left out: {listed}, which change within a run and are not numbers")
    if not likely:
        numeric = [name for name in settings if _counts(table.columns[name])[0]]
        listed = ", ".join(repr(brief(name)) for name in numeric[:8]) or "none is a number"
        raise InputError(
            f"{table.where}: no column is known as a metric; name one, --metric COLUMN, of: {listed}"
        )
    return metric_columns(columns, likely, table.where, said), settings


def _numbers_alone(table: Table, roles: Mapping[str, str]) -> bool:
    """Return True if all columns but those of roles are numbers."""
    others = [name for name in table.columns if name not in roles.values()]
    return len(others) > 1 and not any(_counts(table.columns[name])[1] for name in others)


def _counts(column: Sequence[Json]) -> tuple[int, int]:
    """Return how many cells of a column are numbers, and how many other text; empty ones are neither."""
    numbers = texts = 0
    for cell in column:
        if not cells.is_empty(cell):
            try:
                cells.number(cell)
                numbers += 1
            except ValueError:
                texts += 1
    return numbers, texts


def _require_one_run_each(
    table: Table, groups: Sequence[_Group], roles: Mapping[str, str], metrics: Mapping[str, str]
) -> None:
    """Raise InputError for rows of several runs at one step, if there are columns that tell them apart."""
    steps = table.columns[roles["step"]]
    several: list[tuple[_Group, list[int]]] = []
    for group in groups:
        by_step: dict[str, list[int]] = {}
        if len({str(steps[row]) for row in group.rows}) < len(group.rows):
            for row in group.rows:
                by_step.setdefault(str(steps[row]), []).append(row)
        several += [(group, rows) for rows in by_step.values() if len(rows) > 1]

    def differing(name: str, rows: Sequence[int]) -> int:
        column = table.columns[name]
        return len({repr(cells.setting(column[row])) for row in rows if not cells.is_empty(column[row])})

    def whole(name: str, rows: Sequence[int]) -> bool:
        with suppress(ValueError):
            return all(cells.whole(table.columns[name][row]) is not None for row in rows)
        return False

    mixed = (each for each in several if any(differing(name, each[1]) > 1 for name in metrics.values()))
    if (first := next(mixed, None)) is None:
        return
    group, rows = first
    free = [name for name in table.columns if name not in roles.values() and not like_metric(name)]
    apart = [name for name in free if all(differing(name, rows) == len(rows) for _, rows in several)]
    numbers = [name for name in free if differing(name, rows) > 1 and whole(name, rows)]
    names = [name for name in apart if name not in numbers and _counts(table.columns[name])[1]]
    ways = [f"name them, --column {quote(f'run={brief(names[0])}')}"] if names else []
    for name in [name for name in apart if name in numbers][:1]:
        ignored = "".join(f" --ignore {quote(brief(other))}" for other in numbers if other != name)
        if group.seed is None:
            ways.append(f"their pairing, --column {quote(f'seed={brief(name)}')}{ignored}")
        elif arm := roles.get("arm"):
            ways.append(f"more arms, --column {quote(f'arm={arm},{brief(name)}')}")
    if ways:
        raise InputError(
            f"{table.where}: {len(rows)} rows of {brief(group.name)} at step {brief(str(steps[rows[0]]))}"
            f" look like {len(rows)} runs: {', or '.join(ways)}"
        )


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
    name = f"{table.where}: {group.name}" + (f" ({group.run})" if group.run else "")
    first = group.rows[0]
    steps: Sequence[Json] = [0] * len(table.lines) if step_column is None else table.columns[step_column]
    if step_column is None:
        rows = [[column[row] for column in table.columns.values()] for row in group.rows]
        other = next((row for row, each in zip(group.rows, rows, strict=True) if each != rows[0]), None)
        if other is not None:
            raise InputError(
                f"{name}: lines {table.lines[first]} and {table.lines[other]} are both of this run, and no"
                f" column is the step; name one, --column step=COLUMN; {nearest('step', table.columns)}"
            )
    repeated = step_column is not None and len({str(steps[row]) for row in group.rows}) < len(group.rows)
    points = Points(name, in_time and repeated)  # else rows in any order, and no restart
    for row in group.rows:
        column = step_column or ""
        try:
            step = cells.step_of(steps[row])
            for metric, column in metrics.items():
                if cells.is_empty(cell := table.columns[column][row]):
                    empty[metric] += 1
                else:
                    points.add(table.lines[row], step, metric, cells.number(cell))
        except ValueError as error:
            raise InputError(f"{table.at(row)}: column {brief(column)!r}: {error}") from None
    records = points.records()
    config: dict[str, Json] = {**table.fields}
    cell_of = {key: table.columns[key][first] for key in settings}
    config |= {key: cells.setting(cell) for key, cell in cell_of.items() if not cells.is_empty(cell)}
    config = {key: value for key, value in config.items() if key not in ("arm", "seed")}
    run = ForeignRun(name, group.arm, group.seed, records, config)
    run = with_status(run, states, {key: [table.columns[key][row] for row in group.rows] for key in states})
    if not records and run.status == "done":
        raise InputError(f"{name}: all cells of its metrics are empty")
    said += points.sentences()
    return run
