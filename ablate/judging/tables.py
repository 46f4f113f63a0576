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
from dataclasses import dataclass, replace
from pathlib import PurePath
from shlex import quote

from ablate.errors import InputError, brief, by_key, nearest
from ablate.files import Json
from ablate.judging import cells
from ablate.judging.columns import USUAL, Columns, is_rate, like_metric, metric_columns, pick, plain
from ablate.judging.names import fields_of, is_misfit, read_name, seed_of, suggested
from ablate.judging.points import Points
from ablate.judging.run import ForeignRun
from ablate.judging.statuses import status_columns, with_status

_Key = tuple[str, int | None, str | None]
"""Arm, seed and name of a run."""
_IDENTITY = ("arm", "seed", "run")


@dataclass(frozen=True)
class Table:
    """Columns of one file, as they stand there."""

    where: str
    """Name of the file, for sentences."""
    columns: Mapping[str, Sequence[Json]]
    """Cells by the name of their column, in the order of the file."""
    lines: Sequence[int]
    """Line of the file of each row, from 1."""

    def at(self, row: int) -> str:
        """Return the position of a row, for a sentence."""
        return f"{self.where}: line {self.lines[row]}"


def runs_of(table: Table, columns: Columns, said: list[str]) -> list[ForeignRun]:
    """Return the runs of a table; sentences on what was guessed, merged or left out are added to `said`.

    InputError, in one sentence, for what cannot be read without doubt.
    """
    if not table.lines:
        raise InputError(f"{table.where}: there is a header and no row")
    if columns.arm and "," in columns.arm and columns.arm not in table.columns:
        table = _joined(table, [name.strip() for name in columns.arm.split(",")], columns.arm)
    return _Reading(table, columns, said).runs()


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


class _Reading:
    """Runs of one table while they are read: the column of each role, and the rows of each run."""

    def __init__(self, table: Table, columns: Columns, said: list[str]) -> None:
        self.table, self.columns, self.said, self.where = table, columns, said, table.where
        self.roles: dict[str, str] = {}
        self.groups: dict[_Key, list[int]] = {}
        """Rows of each run, in the order of the table."""
        self.misfits: dict[str, ForeignRun] = {}
        """Runs that are left out, since their names are not of the pattern."""
        self.empty: Counter[str] = Counter()
        """Number of empty cells of each metric."""

    def runs(self) -> list[ForeignRun]:
        table, columns, said = self.table, self.columns, self.said
        self._find_roles()
        self._group_rows()
        roles = self.roles
        free = table.columns.keys() - {*roles.values(), *(columns.metrics or {}).values()}
        states = status_columns([name for name in table.columns if name in free], table.columns)
        names = [name for name in table.columns if name not in {*roles.values(), *states} and name[:1] != "_"]
        metrics, settings = self._sorted_columns(names)
        if "step" not in roles:
            final = "each row is a run's final values, recorded at step 0"
            said.append(f"{self.where}: step: no column; {final}")
        elif roles["step"] in metrics.values():
            raise InputError(f"{self.where}: column {roles['step']!r} is both the step and a metric")
        elif not {"arm", "seed"}.isdisjoint(roles) and "run" not in roles:
            self._require_one_run_each(metrics)
        runs = [self._run(key, rows, metrics, settings, states) for key, rows in self.groups.items()]
        said += [
            f"{self.where}: {brief(metric)}: {count} of {len(table.lines)} cells are empty, taken as not"
            " recorded (some programs write NaN as an empty cell)"
            for metric, count in self.empty.items()
        ]
        return [*runs, *self.misfits.values()]

    def _find_roles(self) -> None:
        """Find the column of each role that has one. InputError if nothing is the arm."""
        table, roles = self.table, self.roles
        for role, text in self.columns.of_path.items():
            for twin in (name for name in table.columns if role in USUAL and plain(name) == role):
                if any(str(cell).strip() != text for cell in table.columns[twin]):
                    raise InputError(
                        f"{self.where}: column {brief(twin)!r} and the path differ in the {role}"
                    )
        elsewhere = {*self.columns.of_path, *fields_of(self.columns.name)}
        for role in USUAL:
            column = getattr(self.columns, role)
            if column is None and role in elsewhere:
                continue
            free = [name for name in table.columns if name not in roles.values()]
            if (found := pick(role, column, free, self.where, self.said)) is not None:
                roles[role] = found
        if "arm" not in {*roles, *elsewhere}:
            others = [name for name in table.columns if name not in roles.values()]
            by_columns = len(others) > 1 and not any(_counts(table.columns[name])[1] for name in others)
            file, column = PurePath(self.where), brief(str(others[0])) if others else ""
            numbered = suggested(file.stem)
            fitting = file.with_name(numbered + file.suffix)
            path = fitting if "{seed}" in numbered else f"runs/{{arm}}/{file.name}"
            way = f"give the file as a pattern of its path, such as {path}; {nearest('arm', table.columns)}"
            if "run" in roles:
                name = brief(str(table.columns[roles["run"]][0]))
                way = (
                    f'say how runs are named, such as --name "{suggested(name)}", where the first is {name!r}'
                )
            elif by_columns and "seed" in roles:
                way = (
                    "if each column is an arm, write a row a run, as pandas does:"
                    f" melt({brief(roles['seed'])!r}, var_name='arm', value_name='val/loss')"
                )
            elif by_columns:
                such = f'such as --name "{suggested(column)}", where the first is {column!r}'
                way = f"if each column is a run, say how they are named, {such}"
            raise InputError(f"{self.where}: no column is the arm; name one, --column arm=COLUMN, or {way}")
        if "seed" not in {*roles, *elsewhere}:
            self.said.append(f"{self.where}: seed: no column; runs have no seed")

    def _group_rows(self) -> None:
        """Find the rows of each run, and the runs that are not of the pattern."""
        keys: dict[tuple[str, ...], _Key | None] = {}
        identifying = [self.table.columns[self.roles[role]] for role in _IDENTITY if role in self.roles]
        for row, line in enumerate(self.table.lines):
            texts = tuple(repr(column[row]) for column in identifying)
            if texts not in keys:
                keys[texts] = self._identity(row)
            if (key := keys[texts]) is None:
                continue
            if key[1:] == (None, None) and "step" not in self.roles:
                key = key[0], None, f"line {line}"  # final values of a run of its own
            self.groups.setdefault(key, []).append(row)

    def _identity(self, row: int) -> _Key | None:
        """Return arm, seed and name of a row's run; None for one that is left out."""
        at, pattern = self.table.at(row), self.columns.name
        texts = dict(self.columns.of_path)
        given = {role: self.table.columns[name][row] for role, name in self.roles.items() if role != "step"}
        run = given.pop("run", None)
        name = None if cells.is_empty(run) else str(run).strip()
        if pattern:
            full = name or PurePath(self.where).stem
            if is_misfit(self.columns, full):
                self.misfits[full] = ForeignRun.misfit(f"{self.where}: {full}")
                return None
            texts |= read_name(pattern, full, at)
        for role, cell in given.items():
            if cells.is_empty(cell):
                raise InputError(f"{at}: the {role} ({brief(self.roles[role])}) is empty")
            texts[role] = str(cell).strip()
        return texts["arm"], seed_of(texts.get("seed"), at), name

    def _sorted_columns(self, names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
        """Return the column of each metric, by its name, and the columns of settings."""
        table, columns, said = self.table, self.columns, self.said
        long = "step" in self.roles and any(len(rows) > 1 for rows in self.groups.values())
        likely, settings, left_out, rates = [], [], [], {}
        for name in names:
            column = table.columns[name]
            constant = all(column[row] == column[rows[0]] for rows in self.groups.values() for row in rows)
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
            metrics = metric_columns(columns, names, self.where, said)
            others = {name: metric for name, metric in rates.items() if name not in metrics.values()}
            return others | metrics, [name for name in settings if name not in metrics.values()]
        if left_out:
            listed = ", ".join(repr(brief(name)) for name in left_out)
            said.append(f"{self.where}: left out: {listed}, which change within a run and are not numbers")
        if not likely:
            numeric = [name for name in settings if _counts(table.columns[name])[0]]
            listed = ", ".join(repr(brief(name)) for name in numeric[:8]) or "none is a number"
            why = "no column is known as a metric; name one, --metric COLUMN, of"
            raise InputError(f"{self.where}: {why}: {listed}")
        return metric_columns(columns, likely, self.where, said), settings

    def _require_one_run_each(self, metrics: Mapping[str, str]) -> None:
        """Raise InputError for rows of several runs at one step that other columns tell apart."""
        table, roles = self.table, self.roles
        steps = table.columns[roles["step"]]
        by_step = by_key(((key, str(steps[row])), row) for key, rows in self.groups.items() for row in rows)
        several = {at: rows for at, rows in by_step.items() if len(rows) > 1}

        def differing(name: str, rows: Sequence[int]) -> int:
            column = [table.columns[name][row] for row in rows]
            return len({repr(cells.setting(cell)) for cell in column if not cells.is_empty(cell)})

        def whole(name: str, rows: Sequence[int]) -> bool:
            with suppress(ValueError):
                return all(cells.whole(table.columns[name][row]) is not None for row in rows)
            return False

        mixed = (at for at in several if any(differing(name, several[at]) > 1 for name in metrics.values()))
        if (first := next(mixed, None)) is None:
            return
        ((arm, seed, _), step), rows = first, several[first]
        free = [name for name in table.columns if name not in roles.values() and not like_metric(name)]
        each_once = several.values()
        apart = [name for name in free if all(differing(name, each) == len(each) for each in each_once)]
        numbers = [name for name in free if differing(name, rows) > 1 and whole(name, rows)]
        names = [name for name in apart if name not in numbers and _counts(table.columns[name])[1]]
        ways = [f"name them, --column {quote(f'run={brief(names[0])}')}"] if names else []
        for name in [name for name in apart if name in numbers][:1]:
            ignored = "".join(f" --ignore {quote(brief(other))}" for other in numbers if other != name)
            if seed is None:
                ways.append(f"their pairing, --column {quote(f'seed={brief(name)}')}{ignored}")
            elif column := roles.get("arm"):
                ways.append(f"more arms, --column {quote(f'arm={column},{brief(name)}')}")
        if ways:
            raise InputError(
                f"{self.where}: {len(rows)} rows of {brief(_named(arm, seed))} at step {brief(step)}"
                f" look like {len(rows)} runs: {', or '.join(ways)}"
            )

    def _run(
        self,
        key: _Key,
        rows: Sequence[int],
        metrics: Mapping[str, str],
        settings: Sequence[str],
        states: Mapping[str, Mapping[str, bool]],
    ) -> ForeignRun:
        """Return the run of some rows."""
        table, steps = self.table, self.table.columns.get(self.roles.get("step", ""))
        arm, seed, own = key
        name = f"{self.where}: {_named(arm, seed)}" + f" ({own})" * bool(own)
        first = rows[0]
        single = rows if steps is None else ()
        entries = {row: [column[row] for column in table.columns.values()] for row in single}
        for row, entry in entries.items():
            if entry != entries[first]:  # as lists, in which one NaN equals itself
                raise InputError(
                    f"{name}: lines {table.lines[first]} and {table.lines[row]} are both of this run, and no"
                    f" column is the step; name one, --column step=COLUMN; {nearest('step', table.columns)}"
                )
        repeated = steps is not None and len({str(steps[row]) for row in rows}) < len(rows)
        in_time = repeated and self.roles.keys().isdisjoint(_IDENTITY)  # else in any order, and no restart
        points = Points(name, in_time)
        for row in rows:
            column = self.roles.get("step", "")
            try:
                step = 0 if steps is None else cells.step_of(steps[row])
                for metric, column in metrics.items():
                    if cells.is_empty(cell := table.columns[column][row]):
                        self.empty[metric] += 1
                    else:
                        points.add(table.lines[row], step, metric, cells.number(cell))
            except ValueError as error:
                raise InputError(f"{table.at(row)}: column {brief(column)!r}: {error}") from None
        records = points.records()
        cell_of = {key: table.columns[key][first] for key in settings}
        config: dict[str, Json] = {**self.columns.of_path}
        config |= {key: cells.setting(cell) for key, cell in cell_of.items() if not cells.is_empty(cell)}
        config = {key: value for key, value in config.items() if key not in ("arm", "seed")}
        run = ForeignRun(name, arm, seed, records, config)
        run = with_status(run, states, {key: [table.columns[key][row] for row in rows] for key in states})
        if not records and run.status == "done":
            raise InputError(f"{name}: all cells of its metrics are empty")
        self.said += points.sentences()
        return run


def _named(arm: str, seed: int | None) -> str:
    return ("" if seed is None else f"seed {seed} of ") + arm


def _counts(column: Sequence[Json]) -> tuple[int, int]:
    """Return how many cells of a column are numbers, and how many other text; empty ones are neither."""
    filled, numbers = [cell for cell in column if not cells.is_empty(cell)], 0
    for cell in filled:
        with suppress(ValueError):
            cells.number(cell)
            numbers += 1
    return numbers, len(filled) - numbers
